"""Ranges: numbered spans of a table's keys, the unit of parallel reading."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.keys.key import Span


class Range(msgspec.Struct, frozen=True):
    """A numbered span of a table's keys. Splits and merges raise its epoch; `rows` and `bytes` are estimates."""

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
