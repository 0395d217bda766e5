"""The replication buffer: changes received from the stream that are not durable in the log yet, with their offsets.

The buffer is bounded, because the server keeps unconfirmed changes and sends them again: past the bound the reader
waits. Whole transactions can be followed repeatedly until they are acknowledged. A transaction larger than the bound
is passed on part by part as it arrives, and each part is released once taken; if a released part is asked for again,
the reader restarts at the point before the transaction.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

import msgspec

from headwater.errors import SourceError
from headwater.model.change import Transaction
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of
from headwater.sources.postgres.capture.decode.truncations import Truncated
from headwater.sources.postgres.schema.shape_changes import Shapes

MOST_CHANGES = 32_768
MOST_BYTES = 64 << 20


class TransactionEnd(msgspec.Struct, frozen=True):
    """The end of a transaction: its last offset, the LSN where the server's WAL continues, and the shapes after it.

    `xid` is the number of the transaction, "" at the beginning of the log. `truncated` makes an announcement mean the
    same whenever it is read.
    """

    offset: int
    position: int
    shapes: Shapes
    xid: str = ""
    truncated: Truncated = ()


class ReplicationBuffer:
    """Bounded buffer of transactions: the stream reader adds their parts, capture reads and acknowledges them."""

    def __init__(self, point: TransactionEnd) -> None:
        self._most_changes, self._most_bytes = MOST_CHANGES, MOST_BYTES
        self._changed = threading.Condition()  # guards the fields below
        self._parts: list[tuple[Transaction, int]] = []  # each with its weight
        self._ends: deque[TransactionEnd] = deque()  # of whole transactions that are not acknowledged
        self._durable = point  # the newest acknowledged end of a transaction
        self.whole = point  # the newest end of a transaction
        self._before: TransactionEnd | None = None  # the point before a large transaction of which parts were released
        self._next = point.offset + 1
        self.changes = self._bytes = 0  # in the buffer
        self._session = 0
        self.wants_back = False  # a new session is wanted, for example because a released part is asked for again

    # --- the reader's side -----------------------------------------------------------------------------------

    def rewind(self) -> TransactionEnd:
        """Start a new session: discard the parts of an unfinished transaction; return the point to continue at."""
        with self._changed:
            if self.wants_back and self._before is not None:
                self.whole = self._before
                while self._ends and self._ends[-1].offset > self.whole.offset:
                    self._ends.pop()
            self.wants_back = False  # `_before` stays: released parts may still be asked for
            self.end()
            return self.whole

    def put(self, part: Transaction, weight: int, shapes: Shapes | None, truncated: Truncated | None = None) -> int:
        """Append a part of any weight; return its last offset. `shapes`, `truncated`: only if they changed."""
        with self._changed:
            part = msgspec.structs.replace(part, first=self._next)
            self._parts.append((part, weight))
            self._next += len(part.changes)
            self.changes += len(part.changes)
            self._bytes += weight
            if part.last:
                was = self.whole
                emptied = was.truncated if truncated is None else truncated
                self.whole = TransactionEnd(part.upto, lsn_of(part.position), shapes or was.shapes, part.id, emptied)
                self._ends.append(self.whole)
            self._changed.notify_all()
            return part.upto

    def go_back(self) -> None:
        """Ask the reader to begin a new session."""
        with self._changed:
            self.wants_back = True
            self._changed.notify_all()

    def wait_for_room(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for room or a request for a new session; return whether one was found."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room or self.wants_back, timeout)

    @property
    def has_room(self) -> bool:
        """Return whether the buffer is below its bounds."""
        return self.changes < self._most_changes and self._bytes < self._most_bytes

    # --- capture's side --------------------------------------------------------------------------------------

    @property
    def large(self) -> str:
        """Return the id of a transaction too large for the buffer, if it is the next to follow; else ""."""
        with self._changed:
            is_next = self._parts and self._parts[0][0].first > self.whole.offset
            return self._parts[0][0].id if is_next and not self.has_room else ""

    def follow(self, after: int, visible: int, large: str) -> Iterator[Transaction]:
        """Return the whole transactions after `after` up to `visible`; or, part by part as it arrives, the transaction
        too large for the buffer, if its number is `large`, which the caller knows to be visible."""
        with self._changed:
            first = self._parts[0][0].first if self._parts else self._next
            if after + 1 < first and after >= self._durable.offset:
                self.go_back()
                return iter(())
            start = self._count_upto(after)
            parts = [part for part, _ in self._parts[start : self._count_upto(min(self.whole.offset, visible))]]
            if not parts and not start and large and large == self.large:
                self._before = self.whole
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
                    raise SourceError(
                        "the stream was interrupted inside a large transaction", hint="The server sends it again."
                    )
                part = self._let_go(0)
                self._changed.notify_all()
            is_last = part.last
            yield part

    def acknowledge(self, upto: int) -> TransactionEnd:
        """Record that everything up to `upto` is durable; return the newest durable end of a transaction."""
        with self._changed:
            while self._ends and self._ends[0].offset <= upto:
                self._durable = self._ends.popleft()
            self._drop(self._count_upto(self._durable.offset))
            if self._before is not None and self._before.offset < self._durable.offset:
                self._before = None
            self._changed.notify_all()
            return self._durable

    def end(self) -> None:
        """End a session: stop waiting for the rest of a transaction, which the server sends again whole, if at all."""
        with self._changed:
            self._session += 1
            self._next = self.whole.offset + 1
            while self._parts and self._parts[-1][0].upto > self.whole.offset:
                self._let_go(len(self._parts) - 1)
            self._changed.notify_all()

    @property
    def latest(self) -> int:
        """Return the last offset that was assigned."""
        return self._next - 1

    @property
    def durable(self) -> int:
        """Return the last offset that was acknowledged."""
        return self._durable.offset

    @property
    def durable_position(self) -> int:
        """Return the LSN of the last acknowledged transaction's end."""
        return self._durable.position

    def _count_upto(self, after: int) -> int:
        """Return how many parts end at or before `after`."""
        return bisect_right(self._parts, after, key=lambda each: each[0].upto)

    def _let_go(self, place: int) -> Transaction:
        part, weight = self._parts.pop(place)
        self.changes -= len(part.changes)
        self._bytes -= weight
        return part

    def _drop(self, count: int) -> None:
        for part, weight in self._parts[:count]:
            self.changes -= len(part.changes)
            self._bytes -= weight
        del self._parts[:count]
