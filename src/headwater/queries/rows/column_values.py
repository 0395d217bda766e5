"""Checks and conversions of values for the columns they are written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from uuid import UUID

from headwater.errors import InvalidRequest
from headwater.model.literal import (
    EXACT_JSON_INT,
    I64_MAX,
    U64,
    UNAVAILABLE,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Value,
    to_lit,
)
from headwater.model.suggestion import nearest
from headwater.model.table import Column, Key, Table

Fit = Callable[[Value], Value]  # returns the value as the column stores it, or UNAVAILABLE if it does not fit


def _exactly(*types: type) -> Fit:
    return lambda value: value if type(value) in types else UNAVAILABLE


def _i64(value: Value) -> Value:
    if isinstance(value, U64):
        return value.v if value.v <= I64_MAX else UNAVAILABLE
    return value if type(value) is int else UNAVAILABLE


def _u64(value: Value) -> Value:
    if type(value) is int:
        return U64(value) if value >= 0 else UNAVAILABLE
    return value if isinstance(value, U64) else UNAVAILABLE


def _f64(value: Value) -> Value:
    number = value.v if isinstance(value, U64) else value
    if type(number) is int:
        return float(number) if abs(number) <= EXACT_JSON_INT else UNAVAILABLE
    return number if type(number) is float else UNAVAILABLE


def _dec(value: Value) -> Value:
    number = value.v if isinstance(value, U64) else value
    if isinstance(number, Decimal):
        return number
    return Decimal(number) if type(number) is int else UNAVAILABLE


_FITS: dict[str, Fit] = {
    "any": lambda value: value,
    "bool": _exactly(bool),
    "i64": _i64,
    "u64": _u64,
    "f64": _f64,
    "dec": _dec,
    "str": _exactly(str),
    "bytes": _exactly(bytes),
    "json": _exactly(Json),
    "date": _exactly(Date),
    "time": _exactly(Time),
    "datetime": _exactly(DateTime),
    "uuid": _exactly(UUID),
    "embedding": _exactly(Embedding),
}


def fit(column: Column, value: Value) -> Value:
    """Return `value` as `column` stores it; InvalidRequest if the kinds differ. NULL is left to the database."""
    if value is None:
        return None
    found = _FITS[column.kind](value)
    if found is UNAVAILABLE:
        tag = to_lit(value)["t"]
        raise InvalidRequest(
            f"column {column.name!r} is of kind {column.kind}; this {tag} value does not fit it",
            hint=f'Send {{"t": "{column.kind}", …}}.' if column.kind != "any" else "",
        )
    return found


def column_of(table: Table, name: str) -> Column:
    """Return the visible column called `name`; InvalidRequest if there is none."""
    place = table.index.get(name)
    if place is None or table.columns[place].hidden:
        raise InvalidRequest(
            f"table {table.name!r} has no column {name!r}",
            hint=nearest(name, (column.name for column in table.visible)),
        )
    return table.columns[place]


def check_columns(table: Table, names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` if each is a visible column; else raise InvalidRequest."""
    return tuple(column_of(table, name).name for name in names)


def check_values(table: Table, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return `values` by column name, each as its column stores it."""
    return {name: fit(_writable(table, name), value) for name, value in values.items()}


def check_key(table: Table, key: Sequence[Value]) -> Key:
    """Return `key` as the primary key of `table`; InvalidRequest if number or kinds of its values are wrong."""
    if not table.primary_key:
        raise InvalidRequest(
            f"table {table.name!r} has no primary key", hint="Select its rows with `where` or with sql.exec."
        )
    if len(key) != len(table.primary_key):
        raise InvalidRequest(
            f"the key of {table.name!r} has {len(table.primary_key)} values, {len(key)} were given",
            hint=f"The key is ({', '.join(table.primary_key)}).",
        )
    return tuple(fit(column_of(table, name), value) for name, value in zip(table.primary_key, key, strict=True))


def _writable(table: Table, name: str) -> Column:
    column = column_of(table, name)
    if column.generated:
        raise InvalidRequest(
            f"column {name!r} of {table.name!r} is generated", hint="Leave it out: the database computes it."
        )
    return column
