"""Frames: which occurrence of a source a name means, where the same text is read more than once."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.sources.sqlite.query.facts.facts import Instance
from headwater.sources.sqlite.query.syntax import tree


@dataclass(eq=False, slots=True)
class Frame:
    """The instances of one block, and of those it stands in."""

    instances: dict[int, Instance]
    outer: Frame | None

    def own(self, ref: tree.Ref) -> Instance | None:
        """The instance of this block that a name belongs to."""
        return self.instances.get(id(ref.source))

    def find(self, ref: tree.Ref) -> Instance | None:
        """The same, of this block or one around it."""
        frame: Frame | None = self
        while frame is not None:
            if (found := frame.own(ref)) is not None:
                return found
            frame = frame.outer
        return None
