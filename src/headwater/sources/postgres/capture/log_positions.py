"""The log offsets of our reads and writes.

A write is registered before its commit, so that nothing is kept for transactions of other clients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec

from headwater.errors import Unavailable
from headwater.model.change import Transaction
from headwater.sources.postgres.capture.barriers import BarrierResult, Barriers
from headwater.sources.postgres.snapshot_visibility import Snapshot, SnapshotOffsets, Visibility, VisibleOffset

MOST = 100_000  # registered transactions; those whose commit failed are never asked for
_ROUND = 1 << 32  # the stream carries only the lower 32 bits of a transaction number


class _TransactionOffset(msgspec.Struct):
    """The offset of a transaction; `upto` is 0 until the transaction was received."""

    upto: int
    tables: dict[str, int]


class Positions(SnapshotOffsets):
    """Log offsets of one database. Thread-safe. `xid` is the 64-bit number of pg_current_xact_id()."""

    def __init__(self, barriers: Barriers, visibility: Visibility, passed: Callable[[BarrierResult], None]) -> None:
        self._barriers, self._visibility, self._passed = barriers, visibility, passed
        self.failure = ""  # why the log can take no more changes
        self._changed = threading.Condition()  # guards the fields below
        self._expected: dict[int, _TransactionOffset] = {}

    def check(self) -> None:
        """Raise Unavailable if capture has failed for good."""
        if self.failure:
            raise Unavailable(
                f"capture has failed: {self.failure}", hint="Nothing was written. The operator must restart the server."
            )

    # --- writes ------------------------------------------------------------------------------------------

    def expect(self, xid: int) -> None:
        """Register a transaction before its commit, to keep its offset; Unavailable if capture has failed."""
        self.check()  # the last moment before the commit
        with self._changed:
            if len(self._expected) >= MOST:
                del self._expected[next(iter(self._expected))]
            self._expected[xid % _ROUND] = _TransactionOffset(0, {})

    def came(self, part: Transaction, upto: int) -> None:
        """Record the offsets of a received part of a registered transaction, the last of them `upto`."""
        xid = int(part.id)
        with self._changed:
            entry = self._expected.get(xid)
            if entry is None:
                return
            first = upto - len(part.changes) + 1
            entry.tables.update({change.table.name: offset for offset, change in enumerate(part.changes, first)})
            if part.last:
                entry.upto = upto
                self._changed.notify_all()

    def wait_for(self, xid: int, timeout: float) -> int | None:
        """Return the last offset of a registered transaction, once received; None if `timeout` seconds pass first."""
        with self._changed:
            entry = self._expected.get(xid % _ROUND)
            if entry is None:
                return None
            self._changed.wait_for(lambda: entry.upto, timeout)
            return entry.upto or None

    def changes_of(self, xid: int) -> dict[str, int]:
        """Return a transaction's tables, each with its last change's offset. Call it once, after `wait_for`."""
        with self._changed:
            entry = self._expected.pop(xid % _ROUND, None)
            return {} if entry is None else entry.tables

    def barrier(self) -> int:
        """Wait until all earlier commits were received; return the newest offset. Unavailable after a second."""
        found = self._barriers.set()
        self._passed(found)
        if found.offset is None:
            raise Unavailable("the stream is behind", hint="Try again in a moment.")
        return found.offset

    # --- reads -------------------------------------------------------------------------------------------

    def reading(self) -> AbstractContextManager[None]:
        return self._visibility.reading()

    def seen(self, snapshot: str) -> int:
        return self._visibility.offset_seen(Snapshot.of(snapshot))

    def exact(self, snapshot: str) -> int | None:
        return self._visibility.exact(Snapshot.of(snapshot), self.barrier())

    def place(self, snapshot: str) -> VisibleOffset:
        """Return the best offset known for `snapshot`; wait up to a second for the stream, unless a wait timed out."""
        shot = Snapshot.of(snapshot)
        if self._barriers.is_behind:
            return VisibleOffset(self._visibility.offset_seen(shot))
        found = self._barriers.set()
        self._passed(found)
        exact = None if found.offset is None else self._visibility.exact(shot, found.offset)
        if exact is not None:
            return VisibleOffset(exact, is_exact=True, is_behind=False, schema=found.schema)
        return VisibleOffset(self._visibility.offset_seen(shot), is_behind=found.offset is None, schema=found.schema)
