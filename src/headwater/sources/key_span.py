"""Rows in key order, and the spans of encoded keys over them: the part common to all databases."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.keys.key import Span, decode_key
from headwater.model.literal import Value
from headwater.model.table import Key, Row, Table


def key_encoder(encoders: Sequence[Callable[[Value], bytes]]) -> Callable[[Key], bytes]:
    """Return a function that encodes a key: each value by its own of `encoders`, joined."""
    if len(encoders) == 1:
        (encode,) = encoders
        return lambda values: encode(values[0])
    return lambda values: b"".join([encode(value) for encode, value in zip(encoders, values, strict=True)])


class SpanRows:
    """A span over rows in key order; `encode` encodes their keys."""

    def __init__(self, table: Table, span: Span, encode: Callable[[Key], bytes]) -> None:
        self._span, key_of = span, table.key_of
        self._encoded: Callable[[Any], bytes] = lambda row: encode(key_of(row))

    def is_past(self, row: Row) -> bool:
        """Return whether `row` is at or after the end of the span."""
        return self._span.end is not None and self._encoded(row) >= self._span.end

    def inside(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the part of `rows`, which are in key order, that is inside the span."""
        low = bisect_left(rows, self._span.start, key=self._encoded)
        end = self._span.end
        return rows[low:] if end is None else rows[low : bisect_left(rows, end, low, key=self._encoded)]


def key_at(data: bytes) -> tuple[Key, bool] | None:
    """Return the key at a span's bound, and whether the bound is after all keys with that prefix (`prefix_end`)."""
    candidates = [(data, False)]
    if data[-1:] > b"\0":
        candidates.append((data[:-1] + bytes([data[-1] - 1]), True))
    for found, is_behind in candidates:
        with contextlib.suppress(InvalidRequest, NotSupported):
            if key := decode_key(found):
                return key, is_behind
    return None
