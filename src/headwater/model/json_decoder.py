"""JSON decoders for texts that callers or databases chose.

msgspec holds the interpreter lock while it decodes, and takes 3 to 17 µs for a number near the limits of a double, such
as 1e308. Python's own conversion takes a third of a microsecond for every number, and lets other threads run.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")


def _number(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError("Number out of range")
    return value


@overload
def decoder() -> msgspec.json.Decoder[Any]: ...
@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
def decoder(kind: Any = Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of JSON to `kind`, which takes about as long for any number as for another."""
    return msgspec.json.Decoder(kind, float_hook=_number)


decode = decoder().decode
