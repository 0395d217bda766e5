"""Arrow: rows and changes of one table as record batches, and those as the bytes of an IPC stream.

Columns are typed by their kind. SQLite lets a column hold what its type does not say, and a source may not
know a value: there the typed column is null and `_misfit` holds a JSON object, column name to `Lit`; it is
null for all other rows. An embedding comes without the name of its model. Our own columns begin with `_`,
with one more where the table has that name itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.literal import (
    U64,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Value,
    decimal_text,
    is_broken_text,
    to_lit,
    to_plain,
)
from headwater.model.table import Column, Row, Table

if TYPE_CHECKING:
    import pyarrow as pa

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # a message of length 0, as the IPC format says

Delivered = tuple[Transaction, int, Change, Op]  # a change, its part and offset, and the op it is delivered as

_MISFIT = object()
_json = msgspec.json.Encoder().encode


def schema(table: Table) -> pa.Schema:
    """The columns of rows of `table`; each field's metadata names its kind and declared type."""
    return _schema(table, _fields(table))


def changes_schema(table: Table) -> pa.Schema:
    """The columns of its changes: those of rows, and what happened, when, and at which offset."""
    import pyarrow as pa

    about = {
        "_change_type": pa.string(),  # insert, update_preimage, update_postimage, delete
        "_commit_version": pa.int64(),
        "_commit_timestamp": pa.timestamp("ms", tz="UTC"),
        "_offset": pa.int64(),
        "_txn": pa.string(),
    }
    return _schema(table, [*_fields(table), *(pa.field(_free(table, name), kind) for name, kind in about.items())])


def rows_batch(table: Table, rows: Sequence[Row]) -> pa.RecordBatch:
    """`rows` as one batch of `schema(table)`."""
    import pyarrow as pa

    return pa.record_batch(_columns(table, rows), schema=schema(table))


def changes_batch(table: Table, changes: Iterable[Delivered]) -> pa.RecordBatch:
    """Row changes, all in the shape of `table`, as one batch of `changes_schema(table)`; an update is two rows.

    `_commit_version` is the last offset of the transaction, or the change's own where the part does not
    reach the end of its transaction.
    """
    import pyarrow as pa

    shown = [(part, offset, *image) for part, offset, change, op in changes for image in _images(change, op)]
    about = (
        [word for _, _, word, _ in shown],
        [part.upto if part.last else offset for part, offset, _, _ in shown],
        [part.commit_ts_ms or ts_ms(part.ts) for part, _, _, _ in shown],
        [offset for _, offset, _, _ in shown],
        [part.id for part, _, _, _ in shown],
    )
    wanted = changes_schema(table)
    columns = _columns(table, [row for _, _, _, row in shown])
    typed = [pa.array(values, wanted.field(len(columns) + place).type) for place, values in enumerate(about)]
    return pa.record_batch([*columns, *typed], schema=wanted)


class ArrowStream:
    """The bytes of an IPC stream, piece by piece: `start`, any number of `batch`, `end`."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def start(self) -> bytes:
        """What comes first: the schema."""
        return _bytes(self.schema)

    def batch(self, batch: pa.RecordBatch) -> bytes:
        """One batch of that schema."""
        return _bytes(batch)

    def end(self) -> bytes:
        """What says that nothing is missing."""
        return END_OF_STREAM


def _bytes(message: pa.Schema | pa.RecordBatch) -> bytes:
    written: bytes = message.serialize().to_pybytes()
    return written


def _images(change: Change, op: Op) -> list[tuple[str, Row]]:
    words = {
        Op.INSERT: (("insert", change.after),),
        Op.UPDATE: (("update_preimage", change.before), ("update_postimage", change.after)),
        Op.DELETE: (("delete", change.before),),
    }
    return [(word, row) for word, row in words.get(op, ()) if row is not None]


# Columns


def _schema(table: Table, fields: list[pa.Field]) -> pa.Schema:
    import pyarrow as pa

    about = {
        "table": table.name,
        "version": str(table.version),
        "key": _json([*map(_clean, table.primary_key)]).decode(),
    }
    return pa.schema(fields, metadata={name: _clean(text) for name, text in about.items()})


def _fields(table: Table) -> list[pa.Field]:
    import pyarrow as pa

    names = [_name(table, column) for column in table.columns]
    fields = [_field(name, column) for name, column in zip(names, table.columns, strict=True)]
    return [*fields, pa.field(_free(table, "_misfit"), pa.string())]


def _field(name: str, column: Column) -> pa.Field:
    import pyarrow as pa

    metadata = {"kind": column.kind, "declared": _clean(column.declared)}
    return pa.field(name, _TYPES[column.kind](pa), metadata=metadata | ({"hidden": "true"} if column.hidden else {}))


def _name(table: Table, column: Column) -> str:
    """A row identity the user did not declare goes by a name of ours, such as `_rowid`."""
    return _free(table, "_" + column.name.strip("_")) if column.hidden else _clean(column.name)


def _free(table: Table, name: str) -> str:
    taken = {column.name.lower() for column in table.visible}
    while name.lower() in taken:
        name = "_" + name
    return name


def _clean(text: str) -> str:
    """A name in the database need not be valid Unicode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _columns(table: Table, rows: Sequence[Row]) -> list[pa.Array]:
    import pyarrow as pa

    misfits: dict[int, dict[str, Any]] = {}
    arrays = []
    for place, column in enumerate(table.columns):
        fitted = list(map(_FITS[column.kind], (row[place] for row in rows)))
        for at, value in enumerate(fitted):
            if value is _MISFIT:
                fitted[at] = None
                misfits.setdefault(at, {})[_name(table, column)] = to_lit(rows[at][place])
        arrays.append(pa.array(fitted, _TYPES[column.kind](pa)))
    told = [_json(misfits[at]).decode() if at in misfits else None for at in range(len(rows))]
    return [*arrays, pa.array(told, pa.string())]


# Kinds

Fit = Callable[[Value], Any]  # the value for Arrow, None for None, or _MISFIT


def _only(wanted: type, write: Callable[[Any], Any], value: Value) -> Any:
    if type(value) is wanted:
        return write(value)
    return None if value is None else _MISFIT


def _text(value: str) -> Any:
    return _MISFIT if is_broken_text(value) else value


def _any(value: Value) -> Any:
    if value is None:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return _MISFIT  # its plain form is null
    try:
        return _json(to_plain(value)).decode()
    except KeyError:
        return _MISFIT  # a value that is not known has no plain form


def _itself(value: Any) -> Any:
    return value


def _iso(value: Any) -> str:
    text: str = value.iso
    return text


_FITS: dict[str, Fit] = {
    "bool": partial(_only, bool, _itself),
    "i64": partial(_only, int, _itself),
    "u64": partial(_only, U64, lambda value: value.v),
    "f64": partial(_only, float, _itself),
    "str": partial(_only, str, _text),
    "bytes": partial(_only, bytes, _itself),
    "dec": partial(_only, Decimal, decimal_text),
    "json": partial(_only, Json, lambda value: value.text),
    "date": partial(_only, Date, _iso),
    "time": partial(_only, Time, _iso),
    "datetime": partial(_only, DateTime, _iso),
    "uuid": partial(_only, UUID, str),
    "embedding": partial(_only, Embedding, lambda value: list(value.values)),
    "any": _any,
}
# Decimals, dates and times are text: SQLite fixes no scale and knows no calendar, and text is exact.
_TYPES: dict[str, Callable[[Any], Any]] = dict.fromkeys(_FITS, lambda pa: pa.string()) | {
    "bool": lambda pa: pa.bool_(),
    "i64": lambda pa: pa.int64(),
    "u64": lambda pa: pa.uint64(),
    "f64": lambda pa: pa.float64(),
    "bytes": lambda pa: pa.binary(),
    "embedding": lambda pa: pa.list_(pa.float32()),
}
