"""What a snapshot of PostgreSQL sees of the log. Pure but for one lock.

The order in which commits lie in the server's log, ours too, is not the order in which they become visible: a commit
is written, and streamed, before others see it; where a standby must confirm it, much later. So where a read stands in
the log is told by its snapshot and by the numbers of the logged transactions, never by a position in the server's log.

Those numbers have 32 bits in the stream and 64 in a snapshot: they are compared modulo 2^32.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

_ROUND = 1 << 32
_HALF = 1 << 31
KEEP = 64  # transactions that are not worth the work of forgetting them


class Snapshot(msgspec.Struct, frozen=True):
    """`pg_current_snapshot()`: below `low` all have ended, from `high` on none; `open` are those between that run."""

    low: int
    high: int
    open: frozenset[int] = frozenset()

    @classmethod
    def of(cls, text: str) -> Snapshot:
        """From PostgreSQL's text, `xmin:xmax:xip,…`."""
        low, high, running = text.split(":")
        return cls(int(low), int(high), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Whether it sees what transaction `xid` (of 32 bits) did, given that it was committed."""
        whole = self.high + (xid - self.high + _HALF) % _ROUND - _HALF  # the one of that number nearest to `high`
        return whole < self.high and whole not in self.open


class Visibility:
    """The logged transactions that somebody may not see yet, in the order of the log. From any thread."""

    def __init__(self, offset: int = 0) -> None:
        self._lock = threading.RLock()  # guards what follows
        self._forgotten = offset  # everything up to here is seen by everybody
        self._logged: deque[tuple[int, int]] = deque()  # number, last offset
        self._tickets = itertools.count(1)
        self._readers: set[int] = set()
        self._waiting: tuple[int, Snapshot] | None = None  # to forget by it once the readers before it have left

    def start(self, offset: int) -> None:
        """Begin anew: the log ends at `offset`, and everybody sees all of it."""
        with self._lock:
            self._forgotten = offset
            self._logged.clear()
            self._waiting = None

    def log(self, xid: int, upto: int) -> None:
        """Transaction `xid` is the next in the log, and ends at offset `upto`."""
        with self._lock:
            self._logged.append((xid, upto))

    def cut(self, offset: int) -> None:
        """What is logged after `offset` comes again."""
        with self._lock:
            while self._logged and self._logged[-1][1] > offset:
                self._logged.pop()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around taking a snapshot and asking about it: nothing is forgotten that it may not see."""
        with self._lock:
            ticket = next(self._tickets)
            self._readers.add(ticket)
        try:
            yield
        finally:
            with self._lock:
                self._readers.discard(ticket)
                self._forget()

    def offset_seen(self, snapshot: Snapshot) -> int:
        """The offset just before the first logged transaction that `snapshot` does not see.

        It may see more than that: later ones, and some that are not logged yet.
        """
        with self._lock:
            self._offer(snapshot)
            seen = self._forgotten
            for xid, upto in self._logged:
                if not snapshot.sees(xid):
                    break
                seen = upto
            return seen

    def is_prefix(self, snapshot: Snapshot) -> bool:
        """Whether what it sees of the log is exactly the beginning of it, up to `offset_seen`.

        Only of what is logged: to know it of everything, ask when the stream has passed the snapshot.
        """
        with self._lock:
            rest = itertools.dropwhile(lambda each: snapshot.sees(each[0]), self._logged)
            return not any(snapshot.sees(xid) for xid, _ in rest)

    def exact(self, snapshot: Snapshot, passed: int) -> int | None:
        """The offset up to which it sees everything, and nothing after; None if there is none, or not known.

        `passed` is the offset of a barrier that was set after the snapshot was taken.
        """
        with self._lock:
            latest = self._logged[-1][1] if self._logged else self._forgotten
            if latest < passed or not self.is_prefix(snapshot):
                return None
            return self.offset_seen(snapshot)

    def notice(self, snapshot: Snapshot) -> None:
        """A snapshot that was just taken: what it sees, all later ones see."""
        with self._lock:
            self._offer(snapshot)
            self._forget()

    def __len__(self) -> int:
        return len(self._logged)

    def _offer(self, snapshot: Snapshot) -> None:
        if self._waiting is None and len(self._logged) > KEEP:
            self._waiting = next(self._tickets), snapshot

    def _forget(self) -> None:
        """By the snapshot that waits, once whoever began before it is done: theirs may be older."""
        if self._waiting is None:
            return
        ticket, snapshot = self._waiting
        if self._readers and min(self._readers) < ticket:
            return
        self._waiting = None
        while self._logged and snapshot.sees(self._logged[0][0]):
            _, self._forgotten = self._logged.popleft()
