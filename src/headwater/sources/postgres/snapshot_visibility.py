"""Log offsets of PostgreSQL's snapshots: which received transactions a snapshot sees. Pure but for a lock.

The order of commits in the server's WAL, and in our log, is not the order in which they become visible: a commit is
written, and streamed, before others see it; much earlier if a standby must confirm it. So the offset of a read
follows from its snapshot and from the numbers of the received transactions, never from a position in the WAL.
And the log takes in no commit before it is visible: every later read sees everything in the log.

Transaction numbers have 32 bits in the stream and 64 in a snapshot: they are compared modulo 2^32.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from headwater.errors import SourceError, Unavailable
from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.read import SnapshotPositions

T = TypeVar("T")

_ROUND = 1 << 32
_HALF = 1 << 31


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot: all transactions below `low` have ended, none from `high` on; `open` are the running ones between."""

    low: int
    high: int
    open: frozenset[int] = frozenset()

    @classmethod
    def of(cls, text: str) -> Snapshot:
        """Return the snapshot that PostgreSQL wrote as `xmin:xmax:xip,…`."""
        low, high, running = text.split(":")
        return cls(int(low), int(high), frozenset(map(int, filter(None, running.split(",")))))

    def sees(self, xid: int) -> bool:
        """Return whether the snapshot sees the committed transaction `xid` (of 32 bits)."""
        whole = self.high + (xid - self.high + _HALF) % _ROUND - _HALF  # number with these 32 bits nearest to `high`
        return whole < self.high and whole not in self.open


def snapshot_now(connection: Connection) -> Snapshot:
    """Return the session's snapshot; SourceError on a standby, whose snapshot does not list open transactions."""
    row = connection.execute("SELECT pg_current_snapshot()::text, pg_is_in_recovery()").fetchone()
    assert row is not None
    if row[1]:
        raise SourceError("a session was opened on a standby", hint="Name the primary in the address.")
    return Snapshot.of(str(row[0]))


def snapshot_of(link: Link) -> str:
    """Return the snapshot of the open transaction as text; all its statements share it."""
    ((snapshot, is_standby),) = link.run("SELECT pg_current_snapshot()::text, pg_is_in_recovery()").texts()
    link.refuse_standby(is_standby)
    return str(snapshot)


class SnapshotOffsets(SnapshotPositions, Protocol):
    """The log offsets of read snapshots, each the text of pg_current_snapshot()."""

    def seen(self, snapshot: str) -> int:
        """Return an offset up to which `snapshot` certainly sees everything; it may see more."""


def read_with_offset(
    pool: Pool, offsets: SnapshotOffsets, work: Callable[[Link], T], seconds: float | None = None
) -> tuple[T, int]:
    """Return the result of `work` in one snapshot, and an offset up to which it saw all; never waits for capture."""
    with offsets.reading():
        value, snapshot = pool.read(lambda link: (work(link), snapshot_of(link)), seconds)
        return value, offsets.seen(snapshot)


class VisibleOffset(msgspec.Struct, frozen=True):
    """The offset up to which a snapshot sees everything."""

    offset: int
    is_exact: bool = False  # and the snapshot sees nothing after it
    is_behind: bool = True  # the stream has not delivered all that the snapshot may see
    schema: int | None = None  # the schema number at a moment after the snapshot, if it was read


class _ReceivedTransaction(msgspec.Struct, frozen=True):
    """A received transaction; readers with `ticket` or a later one see it."""

    xid: int
    upto: int
    ticket: int = 0


class Visibility:
    """The received transactions that some reader may not see yet, in order. Thread-safe."""

    def __init__(self, offset: int = 0) -> None:
        self._lock = threading.RLock()  # guards the fields below
        self._forgotten = offset  # every reader sees everything up to here
        self._kept: deque[_ReceivedTransaction] = deque()  # visible, but perhaps not to earlier readers
        self.visible = offset  # every read that begins now sees everything up to here
        self._coming: deque[_ReceivedTransaction] = deque()  # not known to be visible
        self._tickets = itertools.count(1)
        self._readers: set[int] = set()
        self._beginnings = 0

    def start(self, offset: int) -> None:
        """Restart at `offset`: every reader sees everything up to there."""
        with self._lock:
            self._forgotten = self.visible = offset
            self._kept.clear()
            self._coming.clear()
            self._beginnings += 1

    def log(self, xid: int, upto: int) -> None:
        """Append the received transaction `xid`, which ends at offset `upto`."""
        with self._lock:
            self._coming.append(_ReceivedTransaction(xid, upto))

    def cut(self, offset: int) -> None:
        """Drop everything after `offset`: the stream sends it again."""
        with self._lock:
            for each in (self._coming, self._kept):
                while each and each[-1].upto > offset:
                    each.pop()
            self.visible = min(self.visible, max(offset, self._forgotten))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the transactions that a snapshot taken inside may not see, until its offset is known.

        Unavailable if capture restarted in between: the snapshot has no offset in the new stream."""
        with self._lock:
            ticket, beginnings = next(self._tickets), self._beginnings
            self._readers.add(ticket)
        try:
            yield
        finally:
            with self._lock:
                self._readers.discard(ticket)
                self._forget()
        if beginnings != self._beginnings:
            raise Unavailable("the log began a new generation during the read", hint="Try again in a moment.")

    def offset_seen(self, snapshot: Snapshot) -> int:
        """Return the offset just before the first transaction that `snapshot` does not see.

        It may see more: later transactions, and some that were not received yet.
        """
        with self._lock:
            seen = self._forgotten
            for each in itertools.chain(self._kept, self._coming):
                if not snapshot.sees(each.xid):
                    break
                seen = each.upto
            return seen

    def is_prefix(self, snapshot: Snapshot) -> bool:
        """Return whether the received transactions that `snapshot` sees are exactly a prefix, up to `offset_seen`.

        Transactions not received yet do not count: ask when the stream has passed the snapshot.
        """
        with self._lock:
            every = itertools.chain(self._kept, self._coming)
            rest = itertools.dropwhile(lambda each: snapshot.sees(each.xid), every)
            return not any(snapshot.sees(each.xid) for each in rest)

    def exact(self, snapshot: Snapshot, passed: int) -> int | None:
        """Return the offset up to which `snapshot` sees everything, and nothing after; None if there is none yet.

        `passed` is the offset of a barrier that was set after the snapshot was taken.
        """
        with self._lock:
            newest = self._coming or self._kept
            latest = newest[-1].upto if newest else self._forgotten
            if latest < passed or not self.is_prefix(snapshot):
                return None
            return self.offset_seen(snapshot)

    def notice(self, snapshot: Snapshot) -> None:
        """Advance `visible` by a snapshot that was just taken: all later snapshots see at least as much."""
        with self._lock:
            ticket = next(self._tickets)
            while self._coming and snapshot.sees(self._coming[0].xid):
                each = self._coming.popleft()
                self.visible = each.upto
                self._kept.append(_ReceivedTransaction(each.xid, each.upto, ticket))
            self._forget()

    def __len__(self) -> int:
        return len(self._kept) + len(self._coming)

    def _forget(self) -> None:
        """Drop transactions that every current reader sees."""
        oldest = min(self._readers, default=math.inf)
        while self._kept and self._kept[0].ticket < oldest:
            self._forgotten = self._kept.popleft().upto
