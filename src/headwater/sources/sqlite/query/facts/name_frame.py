"""Frames: the occurrence of a source that a name refers to, where a query is used more than once."""

from __future__ import annotations

import msgspec

from headwater.sources.sqlite.query.facts.facts import Occurrence
from headwater.sources.sqlite.query.syntax import tree


class Frame(msgspec.Struct, eq=False):
    """The occurrences of one block, and the frame of the enclosing block."""

    occurrences: dict[int, Occurrence]
    outer: Frame | None

    def own(self, ref: tree.Ref) -> Occurrence | None:
        """Return the occurrence of this block that a name belongs to."""
        return self.occurrences.get(id(ref.source))

    def find(self, ref: tree.Ref) -> Occurrence | None:
        """Return the occurrence of this block or of an enclosing block that a name belongs to."""
        frame: Frame | None = self
        while frame is not None:
            if (found := frame.own(ref)) is not None:
                return found
            frame = frame.outer
        return None
