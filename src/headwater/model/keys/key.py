"""Encoding of keys as bytes that sort like the database's keys, and spans, half-open intervals of them.

A key is the sequence of its values, each a tag and a self-delimiting body, so that a shorter key sorts before every
longer key that starts with it. Values that a database treats as equal have equal bytes: 1, 1.0, True and U64(1) are
one number, and dates are their ISO text. Decimal and UUID have their own tags, because a column of them has no other
values. Clients receive these bytes (cursors, gRPC): never change the encoding.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from itertools import chain, repeat
from typing import Any
from uuid import UUID

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import I64_MAX, I64_MIN, U64, U64_MAX, Date, DateTime, Time, Value
from headwater.model.table import Key

_NULL, _TEXT, _UUID, _BLOB = 0x05, 0x30, 0x38, 0x40
# Tags of binary numbers and of decimals, each in this order: -Infinity, below zero, zero, above zero, Infinity, NaN.
_NUMBER, _DECIMAL = 0x10, 0x20
_LOWEST, _BELOW, _ZERO, _ABOVE, _HIGHEST, _NAN = range(6)

_BINARY_BIAS = 1075  # the smallest double is 2 ** -1074
_DECIMAL_BIAS = 2**31
_FLIP = bytes(255 - byte for byte in range(256))
_FOLD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")


# --- writing ---------------------------------------------------------------------------------------------


def _groups(groups: Sequence[int]) -> bytes:
    """Return seven bits per byte; the lowest bit is set if more bytes follow, so that a longer fraction is larger."""
    last = len(groups) - 1
    return bytes(group << 1 | (place < last) for place, group in enumerate(groups))


def _signed(ladder: int, negative: bool, body: bytes) -> bytes:
    if negative:
        return bytes([ladder + _BELOW]) + body.translate(_FLIP)
    return bytes([ladder + _ABOVE]) + body


def _number(value: int | float) -> bytes:
    if value == 0:
        return bytes([_NUMBER + _ZERO])
    if isinstance(value, float) and not math.isfinite(value):
        return bytes([_NUMBER + (_NAN if math.isnan(value) else _HIGHEST if value > 0 else _LOWEST)])
    if isinstance(value, int) and not I64_MIN <= value <= U64_MAX:
        raise InvalidRequest(f"{value} does not fit into 64 bits")
    top, bottom = abs(value).as_integer_ratio()  # exact: the denominator is a power of two
    exponent = top.bit_length() - bottom.bit_length()
    top >>= (top & -top).bit_length() - 1
    width = top.bit_length() - 1
    fraction = (top - (1 << width)) << (-width % 7)
    groups = [fraction >> shift & 0x7F for shift in range(width + -width % 7 - 7, -1, -7)] or [0]
    return _signed(_NUMBER, value < 0, struct.pack(">H", exponent + _BINARY_BIAS) + _groups(groups))


def _decimal(value: Decimal) -> bytes:
    if not value.is_finite():
        return bytes([_DECIMAL + (_NAN if value.is_nan() else _HIGHEST if value > 0 else _LOWEST)])
    if not value:
        return bytes([_DECIMAL + _ZERO])
    if abs(value.adjusted()) >= _DECIMAL_BIAS:
        raise InvalidRequest("the exponent of a decimal key is too large")
    digits = "".join(map(str, value.as_tuple().digits)).rstrip("0")
    groups = [int(digits[place : place + 2].ljust(2, "0")) for place in range(0, len(digits), 2)]
    body = struct.pack(">I", value.adjusted() + _DECIMAL_BIAS) + _groups(groups)
    return _signed(_DECIMAL, value < 0, body)


def _string(tag: int, data: bytes) -> bytes:
    # The end mark is two bytes so that "a" is not a byte prefix of "a\0b": spans of prefixes rely on it.
    return bytes([tag]) + data.replace(b"\0", b"\0\xff") + b"\0\x01"


def _text_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("lone surrogates are not text") from None


def _nocase(data: bytes) -> bytes:
    # SQLite's NOCASE compares up to the first NUL; after it only the length counts.
    seen, _, _ = data.partition(b"\0")
    return seen.translate(_FOLD).ljust(len(data), b"\0")


_COLLATE: dict[str, Callable[[bytes], bytes]] = {
    "BINARY": lambda data: data,
    "NOCASE": _nocase,
    "RTRIM": lambda data: data.rstrip(b" "),
}


def _collation(name: str) -> Callable[[bytes], bytes]:
    found = _COLLATE.get(name.upper())
    if found is None:
        raise NotSupported(
            f"keys with collation {name!r} have no byte order here",
            hint="Use a key column with collation BINARY, NOCASE or RTRIM.",
        )
    return found


_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda v: bytes([_NULL]),
    bool: lambda v: _number(int(v)),
    int: _number,
    float: _number,
    U64: lambda v: _number(v.v),
    Decimal: _decimal,
    UUID: lambda v: bytes([_UUID]) + v.bytes,
    bytes: lambda v: _string(_BLOB, v),
}
_TEXTUAL: dict[type, Callable[[Any], str]] = {
    str: lambda v: v,
    Date: lambda v: v.iso,
    Time: lambda v: v.iso,
    DateTime: lambda v: v.iso,
}


def _encode(value: Value, collate: Callable[[bytes], bytes]) -> bytes:
    kind = type(value)
    if kind in _TEXTUAL:
        return _string(_TEXT, collate(_text_bytes(_TEXTUAL[kind](value))))
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    raise NotSupported(
        f"a value of type {kind.__name__.lower()} has no place in a key",
        hint="Keys hold null, numbers, text, bytes, dates, times and UUIDs.",
    )


def encode_key(values: Key, collations: Sequence[str] = ()) -> bytes:
    """Return the key as bytes that sort like the database's keys; a missing collation is BINARY."""
    names = chain(collations, repeat("BINARY"))
    return b"".join([_encode(value, _collation(name)) for value, name in zip(values, names, strict=False)])


# --- reading ---------------------------------------------------------------------------------------------

Taken = tuple[Value, int]  # a value, and the position of the next
_MOST_GROUPS = 10  # of a number: enough for every double and every 64-bit integer


def _take_groups(data: bytes, at: int, sign: int, most: int) -> tuple[list[int], int]:
    """Return the groups from `at` on and their end, for the sign of the number; ValueError if more than `most`."""
    end, more = at + 1, sign > 0
    while bool(data[end - 1] & 1) is more:
        end += 1
        if end - at > most:
            raise ValueError
    return [byte >> 1 for byte in _upright(data[at:end], sign)], end


def _upright(body: bytes, sign: int) -> bytes:
    return body if sign > 0 else body.translate(_FLIP)


def _whole(number: int) -> Value:
    """Return `number` as an int of 64 bits, else as a float if that is exact, else as U64."""
    if I64_MIN <= number <= I64_MAX:
        return number
    return float(number) if int(float(number)) == number else U64(number)


def _finite_number(data: bytes, at: int, sign: int) -> Taken:
    (exponent,) = struct.unpack(">H", _upright(data[at : at + 2], sign))
    groups, end = _take_groups(data, at + 2, sign, _MOST_GROUPS)
    top = 1
    for group in groups:
        top = top << 7 | group
    zeros = (top & -top).bit_length() - 1
    odd, power = top >> zeros, exponent - _BINARY_BIAS - 7 * len(groups) + zeros
    return _whole(sign * odd << power) if power >= 0 else sign * math.ldexp(odd, power), end


def _finite_decimal(data: bytes, at: int, sign: int) -> Taken:
    (exponent,) = struct.unpack(">I", _upright(data[at : at + 4], sign))
    groups, end = _take_groups(data, at + 4, sign, len(data))
    digits = "".join(f"{group:02}" for group in groups).rstrip("0")
    scale = exponent - _DECIMAL_BIAS - len(digits) + 1
    return Decimal((int(sign < 0), tuple(map(int, digits)), scale)), end


def _ladder(tag: int, make: Callable[[str], Any], read: Callable[[bytes, int, int], Taken]) -> dict[int, Any]:
    constants = {_LOWEST: make("-inf"), _ZERO: make("0"), _HIGHEST: make("inf"), _NAN: make("nan")}
    steps: dict[int, Any] = {tag + step: _constant(value) for step, value in constants.items()}
    signed = {_ABOVE: lambda data, at: read(data, at, 1), _BELOW: lambda data, at: read(data, at, -1)}
    return steps | {tag + step: take for step, take in signed.items()}


def _constant(value: Value) -> Callable[[bytes, int], Taken]:
    return lambda data, at: (value, at)


def _take_string(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.index(b"\0\x01", at)
    return data[at:end].replace(b"\0\xff", b"\0"), end + 2


def _take_text(data: bytes, at: int) -> Taken:
    found, end = _take_string(data, at)
    return found.decode("utf-8", "surrogateescape"), end


_READ: dict[int, Callable[[bytes, int], Taken]] = {
    _NULL: _constant(None),
    **_ladder(_NUMBER, float, _finite_number),
    _NUMBER + _ZERO: _constant(0),
    **_ladder(_DECIMAL, Decimal, _finite_decimal),
    _TEXT: _take_text,
    _UUID: lambda data, at: (UUID(bytes=data[at : at + 16]), at + 16),
    _BLOB: _take_string,
}


def decode_key(data: bytes) -> Key:
    """Return values that the database treats as equal to those encoded; InvalidRequest if `data` is not a key.

    Untrusted clients send such bytes: the time is linear in their length.
    """
    values: list[Value] = []
    at = 0
    try:
        while at < len(data):
            value, at = _READ[data[at]](data, at + 1)
            values.append(value)
        written = encode_key(tuple(values))
    except (LookupError, ValueError, ArithmeticError, struct.error, InvalidRequest):
        written = None
    if written != data:
        raise InvalidRequest("these bytes are not a key", hint="Send back key bytes as they were received.")
    return tuple(values)


# --- intervals -------------------------------------------------------------------------------------------


def prefix_end(data: bytes) -> bytes | None:
    """Return the smallest bytes after all bytes that start with `data`; None if no bytes are."""
    kept = data.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None


class Span(msgspec.Struct, frozen=True):
    """The encoded keys in [start, end); without `end`, every key from `start` on."""

    start: bytes = b""
    end: bytes | None = None

    @classmethod
    def all(cls) -> Span:
        """Return the span of every key."""
        return cls()

    @classmethod
    def between(cls, low: bytes | None, high: bytes | None) -> Span:
        """Return the keys from `low` to all that start with `high`; None is open; InvalidRequest if there are none."""
        start, end = low or b"", None if high is None else prefix_end(high)
        if end is not None and start >= end:
            hint = "Swap the bounds; they compare in the key order of the database."
            raise InvalidRequest("the lower bound is above the upper bound", hint=hint)
        return cls(start, end)

    def contains(self, key: bytes) -> bool:
        """Return whether the encoded `key` is in the span."""
        return self.start <= key and (self.end is None or key < self.end)

    def intersect(self, other: Span) -> Span | None:
        """Return the intersection with `other`; None if it is empty."""
        start = max(self.start, other.start)
        ends = [end for end in (self.end, other.end) if end is not None]
        end = min(ends, default=None)
        return Span(start, end) if end is None or start < end else None

    def overlaps(self, other: Span) -> bool:
        """Return whether any key is in both spans."""
        return self.intersect(other) is not None


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join spans that touch or overlap; return the same keys as sorted spans."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = found[-1] if found else None
        if last is None or (last.end is not None and last.end < span.start):
            found.append(span)
        elif last.end is not None and (span.end is None or last.end < span.end):
            found[-1] = Span(last.start, span.end)
    return tuple(found)
