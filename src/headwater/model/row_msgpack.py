"""The msgpack encoding of rows, used in log blocks and in content hashes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from msgspec.msgpack import Ext

from headwater.model.literal import (
    U64,
    UNAVAILABLE,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Unavailable,
    is_broken_text,
)

# Ext codes are on disk: never renumber.
_U64, _DEC, _JSON, _EMBEDDING, _DATE, _TIME, _DATETIME, _UUID, _UNAVAILABLE, _BROKEN = range(1, 11)


def _embedding_bytes(value: Embedding) -> bytes:
    count = len(value.values)
    model = b"" if value.model is None else b"\x01" + value.model.encode()
    return struct.pack(f"<I{count}d", count, *value.values) + model


def _embedding(data: bytes) -> Embedding:
    (count,) = struct.unpack_from("<I", data)
    values = struct.unpack_from(f"<{count}d", data, 4)
    model = data[4 + 8 * count :]
    return Embedding(values, model[1:].decode() if model else None)


_ENCODE: dict[type, Callable[[Any], Ext]] = {
    U64: lambda v: Ext(_U64, struct.pack(">Q", v.v)),
    Decimal: lambda v: Ext(_DEC, str(v).encode()),
    Json: lambda v: Ext(_JSON, v.text.encode()),
    Embedding: lambda v: Ext(_EMBEDDING, _embedding_bytes(v)),
    Date: lambda v: Ext(_DATE, v.iso.encode()),
    Time: lambda v: Ext(_TIME, v.iso.encode()),
    DateTime: lambda v: Ext(_DATETIME, v.iso.encode()),
    UUID: lambda v: Ext(_UUID, v.bytes),
    Unavailable: lambda v: Ext(_UNAVAILABLE, b""),
}
_NATIVE = frozenset({type(None), bool, int, float, str, bytes})

_DECODE: dict[int, Callable[[bytes], Any]] = {
    _U64: lambda d: U64(*struct.unpack(">Q", d)),
    _DEC: lambda d: Decimal(d.decode()),
    _JSON: lambda d: Json(d.decode()),
    _EMBEDDING: _embedding,
    _DATE: lambda d: Date(d.decode()),
    _TIME: lambda d: Time(d.decode()),
    _DATETIME: lambda d: DateTime(d.decode()),
    _UUID: lambda d: UUID(bytes=d),
    _UNAVAILABLE: lambda d: UNAVAILABLE,
    _BROKEN: lambda d: d.decode("utf-8", "surrogateescape"),
}


def pack_value(value: Any) -> Any:
    """Return `value` in the form that msgspec can encode: itself, or an extension."""
    if type(value) in _NATIVE:
        if type(value) is str and is_broken_text(value):
            return Ext(_BROKEN, value.encode("utf-8", "surrogateescape"))
        return value
    return _ENCODE[type(value)](value)


def pack_row(row: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return `row` with every value in the form that msgspec can encode."""
    return None if row is None else tuple(map(pack_value, row))


def ext_hook(code: int, data: memoryview) -> Any:
    """Return the value of an extension, for msgspec.msgpack.Decoder."""
    return _DECODE[code](bytes(data))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Any, ...], ext_hook=ext_hook)


def encode_row(row: tuple[Any, ...]) -> bytes:
    """Return the bytes of a row; 1.0 and 1.00 differ, as do 0.0 and -0.0, and values of different types."""
    return _encoder.encode(pack_row(row))


def decode_row(data: bytes) -> tuple[Any, ...]:
    """Return the row that `encode_row` encoded."""
    return _decoder.decode(data)
