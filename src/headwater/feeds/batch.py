"""Batch: some transactions on their way to the groups of the hub; each change encoded and framed once per shape."""

from __future__ import annotations

import time

from headwater.errors import HeadwaterError
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.framing import Frame
from headwater.feeds.group import Group
from headwater.log.parts import estimated_bytes
from headwater.model.change import Change, Op, Transaction

SLICE = 64  # changes asked of a costly filter between two looks at the clock
PATIENCE_SECONDS = 0.05  # what one costly filter may take of a batch that all wait for

Found = list[tuple[int, Op]]  # places in the batch, and the op each is delivered as
Decided = Found | HeadwaterError | None  # None: it took too long


class Batch:
    """The changes of `parts`, by place."""

    def __init__(self, parts: list[Transaction]) -> None:
        self.placed = [
            (part, offset, change) for part in parts for offset, change in enumerate(part.changes, part.first)
        ]
        self.changes: list[Change] = [change for _, _, change in self.placed]
        last = parts[-1]
        self.unfinished = None if last.last else last.first - last.start  # the first offset of the one that goes on
        self._framed: dict[tuple[Encoder, Frame, int, Op], bytes] = {}

    def is_cheap(self, group: Group, places: list[int]) -> bool:
        """Whether the loop may decide for `group` itself."""
        is_cheap = group.view.filter.is_cheap
        tables = {id(self.changes[place].table): self.changes[place].table for place in places}
        try:
            return all(map(is_cheap, tables.values()))
        except HeadwaterError:
            return True  # it will say so when it is asked

    def decide(self, group: Group, places: list[int]) -> Found | HeadwaterError:
        """What of `places` goes to `group`."""
        try:
            ops = group.view.filter.decide([self.changes[place] for place in places])
        except HeadwaterError as error:
            return error
        return [(place, op) for place, op in zip(places, ops, strict=True) if op is not None]

    def decide_all(self, costly: list[tuple[Group, list[int]]]) -> dict[Group, Decided]:
        """In a thread: the same for groups whose filter takes a while, but none for longer than its share."""
        return {group: self._decide_slowly(group, places) for group, places in costly}

    def _decide_slowly(self, group: Group, places: list[int]) -> Decided:
        until = time.thread_time() + PATIENCE_SECONDS
        found: Found = []
        for low in range(0, len(places), SLICE):
            if time.thread_time() > until:
                return None
            some = self.decide(group, places[low : low + SLICE])
            if isinstance(some, HeadwaterError):
                return some
            found += some
        return found

    def frames(self, group: Group, found: Found) -> list[tuple[int, bytes]]:
        """The frames of `found`, each with its offset."""
        return [self._frame(group, place, op) for place, op in found]

    def _frame(self, group: Group, place: int, op: Op) -> tuple[int, bytes]:
        part, offset, change = self.placed[place]
        key = (group.view.encoder, group.frame, offset, op)
        frame = self._framed.get(key)
        if frame is None:
            data = group.view.encoder.change(part, offset, change, op)
            frame = self._framed[key] = group.frame(offset, op.word, data)
        return offset, frame


def bounded(parts: list[Transaction], most: int) -> list[Transaction]:
    """The first of `parts`, of about `most` bytes, and at least one change."""
    kept: list[Transaction] = []
    size = 0
    for part in parts:
        weight = estimated_bytes(part)
        if size + weight > most:
            if not kept:
                count = max(most * len(part.changes) // max(weight, 1), 1)
                kept.append(part.cut(part.first - 1, part.first - 1 + count))
            break
        kept.append(part)
        size += weight
    return kept
