"""A batch of transactions that the hub publishes to its groups; each change is encoded and framed once per shape."""

from __future__ import annotations

import math
import threading
import time
from functools import cached_property

from headwater.errors import HeadwaterError
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.group import Group
from headwater.log.transaction_parts import estimated_bytes
from headwater.model.change import Change, Op, Transaction, image_bytes

SLICE = 64  # changes that a costly filter evaluates between two checks of the clock
PATIENCE_SECONDS = 0.05  # CPU time that one costly filter may use per batch, because all readers wait for the batch
LONGEST_SECONDS = 0.5  # wall-clock limit: a filter that a database server evaluates uses no CPU time of this process
MOST_WORK = 2_000_000  # characters of `where` times rows that the loop evaluates at once: about 5 ms
MOST_ENCODED = 512 << 10  # bytes of changes that the loop encodes at once for one group: about 2 ms
TEXT_OF_ROW = 20  # characters of text that take as long to compare as a row without text

Found = list[tuple[int, Op]]  # positions in the batch, and the op that each change is delivered as
Decided = Found | HeadwaterError | None  # None: the filter took too long


class Batch:
    """The changes of `parts`, by position."""

    def __init__(self, parts: list[Transaction]) -> None:
        self.placed = [
            (part, offset, change) for part in parts for offset, change in enumerate(part.changes, part.first)
        ]
        self.changes: list[Change] = [change for _, _, change in self.placed]
        last = parts[-1]
        # The first offset of the transaction that continues after this batch.
        self.unfinished = None if last.last else last.first - last.start
        self._is_large = image_bytes(self.changes) > MOST_ENCODED
        self._framed: dict[tuple[Encoder, Frame, int, Op], bytes] = {}

    def is_cheap(self, group: Group, positions: list[int]) -> bool:
        """Return whether the filter of `group` is cheap enough to be evaluated in the loop."""
        view = group.view
        where = view.options.where
        if view.is_costly or (where and len(where) * self._weight > MOST_WORK and self._is_heavy(where, positions)):
            return False
        is_cheap = view.filter.is_cheap
        try:
            if len(positions) == 1:
                return is_cheap(self.changes[positions[0]].table)
            tables = {id(self.changes[position].table): self.changes[position].table for position in positions}
            return all(map(is_cheap, tables.values()))
        except HeadwaterError:
            return True  # `decide` reports the error

    def _is_heavy(self, where: str, positions: list[int]) -> bool:
        """Return whether `where` may take long, by its length and the size of the rows at `positions`."""
        return len(where) * sum([self._weights[position] for position in positions]) > MOST_WORK

    @cached_property
    def _weights(self) -> list[int]:
        """Return for each change the number of rows without text that take as long to compare."""
        return [
            (change.before is not None) + (change.after is not None) + image_bytes([change]) // TEXT_OF_ROW
            for change in self.changes
        ]

    @cached_property
    def _weight(self) -> int:
        return sum(self._weights)

    def decide(self, group: Group, positions: list[int]) -> Found | HeadwaterError:
        """Return which of `positions` pass the filter of `group`, each with the op it is delivered as; or the error."""
        try:
            ops = group.view.filter.decide([self.changes[position] for position in positions])
        except HeadwaterError as error:
            return error
        return [(position, op) for position, op in zip(positions, ops, strict=True) if op is not None]

    def decide_slowly(self, group: Group, positions: list[int]) -> Decided:
        """Do the same as `decide`, slice by slice, in a thread; return None if it takes more than PATIENCE_SECONDS."""
        until = time.thread_time() + PATIENCE_SECONDS
        found: Found = []
        for low in range(0, len(positions), SLICE):
            some = self.decide(group, positions[low : low + SLICE])
            if isinstance(some, HeadwaterError):
                return some
            if time.thread_time() > until:
                return None
            found += some
        return found

    def is_large(self, group: Group, found: Found) -> bool:
        """Return whether `frames` encodes too much for the event loop and must be called in a thread."""
        if not self._is_large:
            return False
        encoder, frame = group.view.encoder, group.frame
        new = [position for position, op in found if (encoder, frame, self.placed[position][1], op) not in self._framed]
        return image_bytes([self.changes[position] for position in new]) > MOST_ENCODED

    def frames(self, group: Group, found: Found) -> list[tuple[int, bytes]]:
        """Return the frames of `found`, each with its offset."""
        return [self._frame(group, position, op) for position, op in found]

    def _frame(self, group: Group, position: int, op: Op) -> tuple[int, bytes]:
        part, offset, change = self.placed[position]
        key = (group.view.encoder, group.frame, offset, op)
        frame = self._framed.get(key)
        if frame is None:
            data = group.view.encoder.change(part, offset, change, op)
            frame = self._framed[key] = group.frame(offset, op.word, data)
        return offset, frame


class SlowFilters:
    """Groups with slow filters, evaluated one after the other in a thread. Thread-safe."""

    def __init__(self, batch: Batch, groups: list[tuple[Group, list[int]]]) -> None:
        self._batch, self._groups = batch, groups
        self._lock = threading.Lock()  # guards the fields below
        self._decided: dict[Group, Decided] = {}
        self._began = math.inf  # when the current filter began
        self._is_over = False

    def run(self) -> None:
        """Evaluate the filter of every group until `stop` is called."""
        for group, positions in self._groups:
            with self._lock:
                if self._is_over:
                    return
                self._began = time.monotonic()
            found = self._batch.decide_slowly(group, positions)
            with self._lock:
                self._decided.setdefault(group, found)
                self._began = math.inf

    @property
    def is_late(self) -> bool:
        """Return whether the current filter has run for more than LONGEST_SECONDS."""
        return time.monotonic() - self._began > LONGEST_SECONDS

    def stop(self) -> tuple[dict[Group, Decided], list[tuple[Group, list[int]]]]:
        """Return the decisions, with None for the filter that still runs, and the groups that are left."""
        with self._lock:
            self._is_over = True
            left = [each for each in self._groups if each[0] not in self._decided]
            if left and self._began < math.inf:
                self._decided[left.pop(0)[0]] = None
            return dict(self._decided), left


def bounded(parts: list[Transaction], most: int) -> list[Transaction]:
    """Return the first of `parts`: about `most` bytes, at least one change."""
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


def first_changes(parts: list[Transaction], count: int) -> list[Transaction]:
    """Return the first `count` changes of `parts`, which have more."""
    kept: list[Transaction] = []
    for part in parts:
        if count < len(part.changes):
            return [*kept, part.cut(part.first - 1, part.first - 1 + count)] if count else kept
        kept.append(part)
        count -= len(part.changes)
    return kept
