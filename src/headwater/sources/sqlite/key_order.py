"""Encoding of key values as bytes that sort as SQLite compares them. It runs for every change: common keys are fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.errors import NotSupported
from headwater.model.keys.key import encode_key
from headwater.model.literal import Value
from headwater.model.table import Column, Key, Table
from headwater.sources.key_span import key_encoder
from headwater.sources.request_checks import column_of
from headwater.sources.sqlite.schema.table_shapes import PLAIN_COLLATIONS
from headwater.sources.sqlite.types import Stored, to_stored

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

# The constants of `encode_key` are derived from its output, because only that function defines the format.
_ZERO, _ONE = encode_key((0,)), encode_key((1,))
_ABOVE, _BELOW, _TEXT, _END = _ONE[:1], encode_key((-1,))[:1], encode_key(("",))[:1], encode_key(("",))[1:]
_BIAS = int.from_bytes(_ONE[1:3])
_FLIP = bytes(range(255, -1, -1))
_FRACTION = 2**63 - 1
_FEW = 2**22  # smaller integers have at most three groups of seven bits below the leading bit
_HEADS = [_ABOVE + (exponent + _BIAS).to_bytes(2) for exponent in range(22)]


def as_stored(value: Value) -> Stored:
    """Return the value that SQLite stores for `value`; text that is not UTF-8 keeps its escapes."""
    return value if type(value) in _PLAIN else to_stored(value)  # type: ignore[return-value]


def order(table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
    """Return a function that encodes values of `columns` as bytes in SQLite's order, or raise NotSupported."""
    return key_encoder([_encoder(column_of(table, name)) for name in columns])


def _encoder(column: Column) -> Callable[[Value], bytes]:
    collation = column.collation
    if collation not in PLAIN_COLLATIONS:
        raise NotSupported(
            f"column {column.name!r} is compared by {collation}, which only the application defines",
            hint="Use a column with collation BINARY, NOCASE or RTRIM.",
        )
    is_binary = collation == "BINARY"

    def encode(value: Value) -> bytes:
        if type(value) is int:
            return _integer(value)
        if is_binary and type(value) is str and value.isascii() and "\0" not in value:
            return _TEXT + value.encode() + _END
        return encode_key((as_stored(value),), (collation,))

    return encode


def _integer(value: int) -> bytes:
    """Encode as `encode_key` does: the exponent, then the bits below the leading bit, seven per byte; the last bit of a
    byte is set if more bytes follow."""
    if 0 < value < _FEW:  # at most three bytes; most keys are this small
        exponent = value.bit_length() - 1
        bits = value << (21 - exponent)
        if bits & 0x7F:
            return _HEADS[exponent] + bytes((bits >> 13 & 0xFE | 1, bits >> 6 & 0xFE | 1, bits << 1 & 0xFE))
        if bits & 0x3F80:
            return _HEADS[exponent] + bytes((bits >> 13 & 0xFE | 1, bits >> 6 & 0xFE))
        return _HEADS[exponent] + bytes((bits >> 13 & 0xFE,))
    if not value:
        return _ZERO
    size = abs(value)
    exponent = size.bit_length() - 1
    fraction = size << (63 - exponent) & _FRACTION
    body = bytearray((exponent + _BIAS).to_bytes(2))
    while True:
        group, fraction = fraction >> 56, fraction << 7 & _FRACTION
        body.append(group << 1 | (fraction != 0))
        if not fraction:
            return _ABOVE + body if value > 0 else _BELOW + body.translate(_FLIP)
