"""Key order: a column's values as bytes that sort as its rows do, and the SQL that sorts rows in the order of bytes.

| column | bytes | SQL |
|---|---|---|
| integers, numeric, floats, boolean, uuid, bytea, date, timestamps, time | as PostgreSQL compares them | the column |
| text, varchar, char(n) with a bytewise collation | the text, char(n) without trailing spaces | the column |
| these with another deterministic collation | as above | `COLLATE "C"`: equality is kept, the order is ours |
| citext, and collations that treat different texts as equal | none: NotSupported | the column |
| everything else (enums, arrays, ranges, intervals …) | PostgreSQL's text | `format('%s', …) COLLATE "C"` |

The index of the key serves the first two; for the others an index on the same expression helps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal, InvalidOperation

from headwater.errors import NotSupported
from headwater.model.keys.key import encode_key
from headwater.model.literal import U64, Date, DateTime, Json, Value
from headwater.model.table import Column, Key, Table
from headwater.sources.key_span import key_encoder
from headwater.sources.postgres.schema.relations import BY_BYTES
from headwater.sources.postgres.schema.table_shapes import ident
from headwater.sources.request_checks import column_of

_TEXTS = re.compile(r"(text|character varying|character|bpchar|name|json)(\(\d+\))?\Z")
_PADDED = re.compile(r"(character|bpchar)(\(\d+\))?\Z")
_EXACT = frozenset({"bool", "i64", "u64", "f64", "dec", "bytes", "uuid", "date", "datetime"})
_BC = re.compile(r"(\d{4,})(-.*) BC\Z")
_LATE = re.compile(r"(\d{5,})(-.*)\Z")
_PLAIN = BY_BYTES | {"BINARY", "RTRIM"}
_SAME_ZONE = re.compile(r"(Z|\+00(:?00)?)\Z")


def order(table: Table, columns: Sequence[str], odd: Collection[str] = ()) -> Callable[[Key], bytes]:
    """Return a function from values to bytes in row order; NotSupported for a column with a collation of `odd`."""
    return key_encoder([_encoder(column_of(table, name), odd) for name in columns])


def is_own_order(column: Column) -> bool:
    """Return whether the bytes are in PostgreSQL's own order of the column, and so of its indexes."""
    if column.kind in _EXACT or column.declared.startswith("time") and "with time zone" not in column.declared:
        return True
    return bool(_TEXTS.match(column.declared)) and column.kind == "str" and column.collation in _PLAIN


def is_odd(column: Column, odd: Collection[str]) -> bool:
    """Return whether only PostgreSQL can decide which texts of the column are equal."""
    return column.collation == "citext" or column.collation in odd


def ordered_by(column: Column, odd: Collection[str]) -> str:
    """Return the SQL expression to sort and compare by."""
    name = ident(column.name)
    if is_own_order(column) or is_odd(column, odd):
        return name
    is_text = column.kind == "str" and _TEXTS.match(column.declared)
    return f'{name} COLLATE "C"' if is_text else f"format('%s', {name}) COLLATE \"C\""


# --- bytes -----------------------------------------------------------------------------------------------


def _encoder(column: Column, odd: Collection[str]) -> Callable[[Value], bytes]:
    if is_odd(column, odd):
        raise NotSupported(
            f"column {column.name!r} is compared by {column.collation}, which treats different texts as equal",
            hint="Use a column with a deterministic collation.",
        )
    match column.kind:
        case "dec":
            return lambda value: encode_key((_decimal(value),))
        case "date" | "datetime":
            return lambda value: encode_key((_moment(value),))
        case "str" if _PADDED.match(column.declared) or column.collation == "RTRIM":
            return lambda value: encode_key((value.rstrip(" ") if isinstance(value, str) else value,))
        case "i64" | "u64":
            return lambda value: encode_key((_whole(value),))
        case "f64":
            return lambda value: encode_key((_double(value),))
    return lambda value: encode_key((value.text if isinstance(value, Json) else value,))


def _decimal(value: Value) -> Value:
    if isinstance(value, (str, int)):  # more digits than our Decimal holds
        try:
            return Decimal(value)
        except InvalidOperation:
            return value
    return Decimal(value.v) if isinstance(value, U64) else value


def _whole(value: Value) -> Value:
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else value


def _double(value: Value) -> Value:
    if isinstance(value, (Decimal, U64)):
        value = float(value if isinstance(value, Decimal) else value.v)
    return 0.0 if isinstance(value, float) and value == 0 and not math.isnan(value) else value


def _moment(value: Value) -> Value:
    """Return a date as a text that sorts by time: `(`, `)` and `-` sort before the digits, `:` and `z` after them."""
    if isinstance(value, (Date, DateTime)):
        return _SAME_ZONE.sub("+00:00", value.iso.replace(" ", "T"))
    if not isinstance(value, str):
        return value
    if value in ("infinity", "-infinity"):
        return "z" if value == "infinity" else "("
    if found := _BC.match(value):
        return f"){9_999_999 - int(found[1]):07}{found[2].replace(' ', 'T')}"
    if found := _LATE.match(value):
        return f":{int(found[1]):07}{found[2].replace(' ', 'T')}"
    return value
