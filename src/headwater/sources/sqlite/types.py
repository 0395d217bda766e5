"""Conversion of declared SQLite types to kinds, and of values to and from SQLite's five storage classes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import (
    I64_MAX,
    U64,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Value,
    is_broken_text,
    is_date,
    is_datetime,
    is_json,
    is_time,
)
from headwater.sources.column_types import COLUMN_TYPES

Stored = None | int | float | str | bytes

DECLARED = {kind: row.sqlite for kind, row in COLUMN_TYPES.items()}
_EXACT = {name: kind for kind, row in COLUMN_TYPES.items() for name in row.sqlite_reads}


def kind_of(declared: str) -> str:
    """Return the kind of a column declared as `declared`: its row of COLUMN_TYPES, or SQLite's rules of affinity."""
    name = " ".join(declared.upper().split("(")[0].split())
    if name in _EXACT:
        return _EXACT[name]
    if "INT" in name:
        return "i64"
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return "str"
    if "BLOB" in name:
        return "bytes"
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return "f64"
    return "any"  # NUMERIC and DECIMAL store integers and floats: each value has its own type


# Matches only the spelling that `to_stored` writes: any other text would change in a round trip.
_PLAIN_DECIMAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?\Z|NaN\Z|-?Infinity\Z", re.ASCII)
MAX_DIGITS = 10_000


def _dec(value: Stored) -> Value:
    fits = isinstance(value, str) and len(value) <= MAX_DIGITS and _PLAIN_DECIMAL.match(value)
    return Decimal(str(value)) if fits else value


def _uuid(value: Stored) -> Value:
    try:
        # Only the canonical spelling is converted: any other text would change in a round trip.
        return found if isinstance(value, str) and str(found := UUID(value)) == value else value
    except ValueError:
        return value


def _text(fits: Callable[[str], bool], make: Callable[[str], Value]) -> Callable[[Stored], Value]:
    return lambda value: make(value) if isinstance(value, str) and fits(value) else value


def _embedding(value: Stored) -> Value:
    if not isinstance(value, bytes) or len(value) < 4:
        return value
    (count,) = struct.unpack_from("<I", value)
    if len(value) < 4 + 4 * count:
        return value
    try:
        model = value[4 + 4 * count :].decode()
    except UnicodeDecodeError:
        return value
    return Embedding(struct.unpack_from(f"<{count}f", value, 4), model or None)


# Kinds whose stored value differs from the value. A value that does not fit its column's kind (SQLite
# allows this) keeps its storage class, so that the image is exact.
FROM_STORED: dict[str, Callable[[Stored], Value]] = {
    "bool": lambda value: bool(value) if value in (0, 1) and isinstance(value, int) else value,
    "u64": lambda value: U64(value) if isinstance(value, int) and value >= 0 else value,
    "dec": _dec,
    "json": _text(is_json, Json),
    "uuid": _uuid,
    "date": _text(is_date, Date),
    "time": _text(is_time, Time),
    "datetime": _text(is_datetime, DateTime),
    "embedding": _embedding,
}


def _embedding_out(value: Embedding) -> bytes:
    count = len(value.values)
    try:
        return struct.pack(f"<I{count}f", count, *value.values) + (value.model or "").encode()
    except (struct.error, OverflowError):
        raise InvalidRequest("an embedding holds 32-bit floats only") from None


def _decimal_out(value: Decimal) -> str:
    if not value.is_finite():
        return str(value)
    if max(abs(value.adjusted()), len(value.as_tuple().digits)) > MAX_DIGITS:  # 1E999999999 is a gigabyte of zeros
        raise InvalidRequest(f"a decimal has at most {MAX_DIGITS} digits before or after its point")
    return format(value, "f")


def _u64_out(value: U64) -> int:
    if value.v > I64_MAX:
        raise InvalidRequest(f"{value.v} does not fit: SQLite integers end at {I64_MAX}")
    return value.v


def _str_out(value: str) -> str:
    if not value.isascii() and is_broken_text(value):
        raise NotSupported("text that is not UTF-8 cannot be bound; send it as bytes and CAST it")
    return value


_TO_STORED: dict[type, Callable[[Any], Stored]] = {
    type(None): lambda v: None,
    bool: int,
    int: lambda v: v,
    float: lambda v: v,
    bytes: lambda v: v,
    str: _str_out,
    U64: _u64_out,
    Decimal: _decimal_out,
    Json: lambda v: v.text,
    Date: lambda v: v.iso,
    Time: lambda v: v.iso,
    DateTime: lambda v: v.iso,
    UUID: str,
    Embedding: _embedding_out,
}


def to_stored(value: Value) -> Stored:
    """Return the stored form of `value`, for binding."""
    write = _TO_STORED.get(type(value))
    if write is None:
        raise InvalidRequest("a value that is unavailable cannot be written")
    return write(value)
