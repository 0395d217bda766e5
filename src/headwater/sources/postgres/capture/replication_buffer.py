"""Held: what came from the stream and is not durable in the log yet, under its offsets.

The server keeps everything that was not confirmed and sends it again, so this is bounded: past the bound the reader
waits. Transactions are handed on whole and as often as asked, until they are acknowledged. One that is larger than the
bound is handed on part by part while it comes, and let go as it is taken; if it is asked for again after all, the
reader goes back to the point before it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from headwater.errors import SourceError
from headwater.model.change import Transaction
from headwater.model.table import Table
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of
from headwater.sources.postgres.capture.decode.truncations import Truncated

MOST_CHANGES = 32_768
MOST_BYTES = 64 << 20


class Shapes(msgspec.Struct, frozen=True):
    """The tables at one place of the log: their shapes, whose they are, and the last version of every name.

    `displaced`: those whose name another table took, and of which nothing was told since. `secret`: by which our own
    announcements about them are known, of this log from its beginning on.
    """

    tables: Mapping[str, Table] = {}
    oids: Mapping[str, int] = {}
    versions: Mapping[str, int] = {}
    displaced: tuple[int, ...] = ()
    secret: str = ""


class Point(msgspec.Struct, frozen=True):
    """The end of a transaction: its last offset, where the server's log goes on, and the shapes from there on.

    `xid` is its number, "" where the log begins: there it is the end of none. `truncated`: so that an announcement is
    understood alike whenever it is read.
    """

    offset: int
    position: int
    shapes: Shapes
    xid: str = ""
    truncated: Truncated = ()


class Held:
    """The reader puts, capture follows and acknowledges."""

    def __init__(self, point: Point) -> None:
        self._most_changes, self._most_bytes = MOST_CHANGES, MOST_BYTES
        self._changed = threading.Condition()  # guards what follows
        self._parts: list[tuple[Transaction, int]] = []  # with its weight
        self._ends: deque[Point] = deque()  # of whole transactions that are not acknowledged
        self._durable = self._whole = point  # acknowledged; the newest whole transaction
        self._before: Point | None = None  # a large one of which parts were let go
        self._next = point.offset + 1
        self._changes = self._bytes = 0
        self._session = 0
        self.wants_back = False  # a new session is wanted, such as where something is asked for that was let go

    # --- the reader's side -----------------------------------------------------------------------------------

    def rewind(self) -> Point:
        """A new session begins: forget what came of an unfinished transaction; gives where to go on."""
        with self._changed:
            if self.wants_back and self._before is not None:
                self._whole = self._before
                while self._ends and self._ends[-1].offset > self._whole.offset:
                    self._ends.pop()
            self.wants_back = False  # and `_before` stays: what was let go may still be asked for
            self._session += 1
            self._next = self._whole.offset + 1
            while self._parts and self._parts[-1][0].upto > self._whole.offset:
                self._let_go(len(self._parts) - 1)
            self._changed.notify_all()
            return self._whole

    def put(self, part: Transaction, weight: int, shapes: Shapes | None, truncated: Truncated | None = None) -> int:
        """Take the next part, whatever it weighs; gives its last offset. `shapes`, `truncated`: where they are new."""
        with self._changed:
            part = msgspec.structs.replace(part, first=self._next)
            self._parts.append((part, weight))
            self._next += len(part.changes)
            self._changes += len(part.changes)
            self._bytes += weight
            if part.last:
                was = self._whole
                emptied = was.truncated if truncated is None else truncated
                self._whole = Point(part.upto, lsn_of(part.position), shapes or was.shapes, part.id, emptied)
                self._ends.append(self._whole)
            self._changed.notify_all()
            return part.upto

    def go_back(self) -> None:
        """Let the reader begin a new session."""
        with self._changed:
            self.wants_back = True
            self._changed.notify_all()

    def wait_for_room(self, timeout: float) -> bool:
        """Whether the reader may go on."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room or self.wants_back, timeout)

    @property
    def has_room(self) -> bool:
        """Whether more fits in."""
        return self._changes < self._most_changes and self._bytes < self._most_bytes

    # --- capture's side --------------------------------------------------------------------------------------

    @property
    def large(self) -> str:
        """The number of a transaction that is too large to be held, where it is the next to be followed; else ""."""
        with self._changed:
            is_next = self._parts and self._parts[0][0].first > self._whole.offset
            return self._parts[0][0].id if is_next and not self.has_room else ""

    def follow(self, after: int, visible: int, large: str) -> Iterator[Transaction]:
        """What is here after `after`, whole transactions up to `visible`; or, as it comes, the one that is too large to
        be held, if it is `large`, of which the caller knows that it is visible."""
        with self._changed:
            first = self._parts[0][0].first if self._parts else self._next
            if after + 1 < first and after >= self._durable.offset:
                self.go_back()
                return iter(())
            start = self._place(after)
            parts = [part for part, _ in self._parts[start : self._place(min(self._whole.offset, visible))]]
            if not parts and not start and large and large == self.large:
                self._before = self._whole
                return self._large(self._session)
        if parts and parts[0].first <= after:
            parts[0] = parts[0].cut(after, parts[0].upto)
        return iter(parts)

    def _large(self, session: int) -> Iterator[Transaction]:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or self._session != session)
                if self._session != session:
                    raise SourceError("the stream was cut off inside a large transaction", hint="It comes again.")
                part = self._let_go(0)
                self._changed.notify_all()
            is_last = part.last
            yield part

    def acknowledge(self, upto: int) -> Point:
        """Everything up to `upto` is durable; gives the newest such end of a transaction."""
        with self._changed:
            while self._ends and self._ends[0].offset <= upto:
                self._durable = self._ends.popleft()
            self._drop(self._place(self._durable.offset))
            if self._before is not None and self._before.offset < self._durable.offset:
                self._before = None
            self._changed.notify_all()
            return self._durable

    def end(self) -> None:
        """A session is over: nobody waits for the rest of a transaction, which comes again, if at all, as a whole."""
        with self._changed:
            self._session += 1
            self._next = self._whole.offset + 1
            while self._parts and self._parts[-1][0].upto > self._whole.offset:
                self._let_go(len(self._parts) - 1)
            self._changed.notify_all()

    @property
    def latest(self) -> int:
        """The last offset that was given out."""
        return self._next - 1

    @property
    def durable(self) -> int:
        """The last offset that was acknowledged."""
        return self._durable.offset

    @property
    def durable_position(self) -> int:
        """Where that ends in the server's log."""
        return self._durable.position

    @property
    def whole(self) -> Point:
        """The newest end of a transaction."""
        return self._whole

    @property
    def changes(self) -> int:
        """How many changes wait here."""
        return self._changes

    def _place(self, after: int) -> int:
        """How many parts end at or before `after`."""
        return bisect_right(self._parts, after, key=lambda each: each[0].upto)

    def _let_go(self, place: int) -> Transaction:
        part, weight = self._parts.pop(place)
        self._changes -= len(part.changes)
        self._bytes -= weight
        return part

    def _drop(self, count: int) -> None:
        for part, weight in self._parts[:count]:
            self._changes -= len(part.changes)
            self._bytes -= weight
        del self._parts[:count]
