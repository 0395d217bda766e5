"""Frames: the occurrence of a source that a name refers to, where a query is used more than once."""

from __future__ import annotations

import msgspec

from headwater.sources.sqlite.query.facts.facts import Instance
from headwater.sources.sqlite.query.syntax import tree


class Frame(msgspec.Struct, eq=False):
    """The instances of one block, and the frame of the enclosing block."""

    instances: dict[int, Instance]
    outer: Frame | None

    def own(self, ref: tree.Ref) -> Instance | None:
        """Return the instance of this block that a name belongs to."""
        return self.instances.get(id(ref.source))

    def find(self, ref: tree.Ref) -> Instance | None:
        """Return the instance of this block or of an enclosing block that a name belongs to."""
        frame: Frame | None = self
        while frame is not None:
            if (found := frame.own(ref)) is not None:
                return found
            frame = frame.outer
        return None
