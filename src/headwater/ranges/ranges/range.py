"""Ranges: numbered spans of a table's keys, the unit of parallel reading; the epoch increases when the span changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headwater.model.keys.key import Span


class Range(msgspec.Struct, frozen=True):
    """One range. `rows` and `bytes` are estimates."""

    id: int
    epoch: int
    span: Span
    rows: int = 0
    bytes: int = 0

    def wire(self) -> dict[str, Any]:
        """Return the range in wire format: keys in hex, an open end omitted."""
        found: dict[str, Any] = {"id": self.id, "epoch": self.epoch, "start": self.span.start.hex()}
        if self.span.end is not None:
            found["end"] = self.span.end.hex()
        return found | {"rows": self.rows, "bytes": self.bytes}


def divided(one: Range, bounds: Sequence[bytes], new_id: Callable[[], int]) -> list[Range]:
    """Split `one` at `bounds`: the first part keeps its id, and all parts have the next epoch."""
    edges = [one.span.start, *bounds]
    spans = [Span(low, high) for low, high in zip(edges, [*bounds, one.span.end], strict=True)]
    first, *rest = [Range(one.id, one.epoch + 1, span) for span in spans]
    return [first, *(replace(part, id=new_id()) for part in rest)]


def united(ranges: Sequence[Range]) -> Range:
    """Merge neighbours: the result has the id of the first and an epoch above those of all."""
    first, last = ranges[0], ranges[-1]
    epoch = max(one.epoch for one in ranges) + 1
    return Range(first.id, epoch, Span(first.span.start, last.span.end))
