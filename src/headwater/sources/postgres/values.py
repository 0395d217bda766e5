"""Values to and from PostgreSQL, always as PostgreSQL's own text: no number passes through a Python float.

A value is sent as text with a cast to its target type, so that PostgreSQL itself parses it, and refuses values that
the type cannot hold. A received cell is read by its type's converter (see `types`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import U64, Date, DateTime, Embedding, Json, Time, Value, is_broken_text
from headwater.sources.postgres import types

Bound = bytes | None  # a parameter in text format

# The type of an argument if nothing else in the statement determines it.
_OWN_TYPES: dict[type, int] = {
    bool: types.BOOL,
    int: types.INT8,
    U64: types.NUMERIC,
    float: types.FLOAT8,
    Decimal: types.NUMERIC,
    bytes: types.BYTEA,
    Json: types.JSONB,
    UUID: types.UUID_,
}


def own_type(value: Value) -> int:
    """Return the type of `value` for a parameter whose type the statement does not determine."""
    return _OWN_TYPES.get(type(value), types.TEXT)


# --- into PostgreSQL -------------------------------------------------------------------------------------


def _text(value: str) -> str:
    if "\0" in value:
        raise InvalidRequest("PostgreSQL's text cannot hold a NUL character", hint="Send it as bytes, for a bytea.")
    if is_broken_text(value):
        raise NotSupported("text that is not UTF-8 cannot be bound", hint="Send the text as bytes, for a bytea.")
    return value


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        if value.is_snan():
            raise InvalidRequest("PostgreSQL has no signaling NaN")
        return "NaN" if value.is_nan() else "Infinity" if value > 0 else "-Infinity"
    # 1E999999999 is a gigabyte of zeros.
    if max(abs(value.adjusted()), len(value.as_tuple().digits)) > types.MAX_DIGITS:
        raise InvalidRequest(f"a decimal has at most {types.MAX_DIGITS} digits before or after its point")
    return format(value, "f")


def _embedding(value: Embedding) -> str:
    try:
        struct.pack(f"<{len(value.values)}f", *value.values)
    except (struct.error, OverflowError):
        raise InvalidRequest("an embedding holds 32-bit floats only") from None
    return ",".join(map(_float, value.values))


_TO_TEXT: dict[type, Callable[[Any], str]] = {
    bool: lambda v: "true" if v else "false",
    int: str,
    U64: lambda v: str(v.v),
    float: _float,
    Decimal: _decimal,
    str: _text,
    bytes: lambda v: "\\x" + v.hex(),
    Json: lambda v: _text(v.text),
    Embedding: lambda v: f"[{_embedding(v)}]",  # as pgvector and json read it
    Date: lambda v: v.iso,
    Time: lambda v: v.iso,
    DateTime: lambda v: v.iso,
    UUID: str,
}


def to_text(value: Value, declared: str = "") -> str | None:
    """Return `value` as text for a column of type `declared`, None for NULL; InvalidRequest for an invalid value."""
    if value is None:
        return None
    write = _TO_TEXT.get(type(value))
    if write is None:
        raise InvalidRequest("a value that is unavailable cannot be written")
    text = write(value)
    if isinstance(value, Embedding) and declared.endswith("[]"):
        return "{" + text[1:-1] + "}"
    if isinstance(value, bytes) and declared and declared != "bytea":
        raise InvalidRequest(f"bytes cannot be stored in a column of type {declared}", hint="Send text, or a number.")
    return text


def to_bound(value: Value, declared: str = "") -> Bound:
    """Return the result of `to_text` as bytes; None for NULL."""
    text = to_text(value, declared)
    return None if text is None else text.encode()


def array_text(cells: Sequence[str | None]) -> bytes:
    """Return `cells` as the text of a PostgreSQL array; None gives NULL."""
    quoted = ["NULL" if cell is None else '"' + cell.replace("\\", "\\\\").replace('"', '\\"') + '"' for cell in cells]
    return ("{" + ",".join(quoted) + "}").encode()


# --- out of PostgreSQL -----------------------------------------------------------------------------------

Cell = Callable[[bytes | None], Value]


def cell_reader(oid: int) -> Cell:
    """Return the reader of cells in text format of type `oid`; a domain is sent as its base type."""
    return reader_of(types.converter(oid, {}))


def reader_of(convert: types.Convert) -> Cell:
    """Return the reader that converts cells by `convert`, and keeps the text of those that it cannot convert."""

    def read(cell: bytes | None) -> Value:
        if cell is None:
            return None
        text = cell.decode()
        try:
            return convert(text)
        except (ValueError, LookupError, ArithmeticError):
            return text  # a value that its kind cannot hold stays its exact text

    return read
