"""Interactive transactions: each has its own connection and snapshot, for a short time.

From their first write on they hold locks, so they must end soon: past their time limit, or idle for too long, they are
rolled back and report `tx_expired`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from headwater.errors import Busy, HeadwaterError, InvalidRequest, SourceError
from headwater.sources.interactive_transaction import Interactive
from headwater.sources.postgres.abandoned_statements import AbandonedStatements
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.errors import SERIALIZATION, state_of
from headwater.sources.postgres.protocol_session import Connect, Link
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.write.session import PostgresSession
from headwater.sources.postgres.write.writer import LOCK_SECONDS, finish, settle
from headwater.sources.write import Work, WriteResult

T = TypeVar("T")
CANCEL_SECONDS = 2.0  # for PostgreSQL to end a statement that was cancelled
READ_SECONDS = 30.0  # an older snapshot keeps PostgreSQL from vacuuming


class PostgresTx(Interactive):
    """An interactive transaction whose time limits are enforced by a thread of its own."""

    def __init__(
        self,
        connect: Connect,
        shapes: Shapes,
        positions: Positions,
        *,
        read_only: bool,
        seconds: float,
        idle_seconds: float,
        statement_seconds: float = 30.0,
        finished: Callable[[PostgresTx], None] = lambda tx: None,
        abandoned: AbandonedStatements | None = None,
        is_trusted: bool = False,
        grants: Callable[[str], Sequence[str]] = lambda table: (),
    ) -> None:
        super().__init__(read_only=read_only)
        self._positions, self._finished = positions, finished
        self._seconds, self._idle_seconds = seconds, idle_seconds
        self._interrupted_at = math.inf  # when the transaction was first interrupted
        self._link = Link(connect, abandoned)
        try:
            self._link.begin(
                read_only=read_only, seconds=statement_seconds, lock_seconds=LOCK_SECONDS, is_trusted=is_trusted
            )
        except HeadwaterError:
            self._link.close()
            raise
        self._session = PostgresSession(self._link, shapes, self._before_write, grants)
        # Guards the fields that the clock thread reads.
        self._side = threading.Condition()
        self._steps = 0  # queued or running
        self._touched = time.monotonic()
        self._until = self._touched + READ_SECONDS
        self._writing = self._holding = False
        threading.Thread(target=self._clock, name="headwater-pg-tx-clock", daemon=True).start()

    def _count(self, more: int) -> None:
        with self._side:
            self._steps += more
            self._touched = time.monotonic()
            self._side.notify()

    # --- steps -------------------------------------------------------------------------------------------

    def _before_write(self) -> None:
        if self.read_only:
            raise InvalidRequest("the transaction is read-only", hint='Begin one without "read_only".')
        self._writing = True

    def _step(self, work: Work[T]) -> T:
        self._link.script("SAVEPOINT step")
        value = work(self._session)
        self._link.script("RELEASE step")
        if self._writing and not self._holding:
            self._hold()
        return value

    def _hold(self) -> None:
        """Start the time limit once the transaction holds locks: waits for the locks of others do not count."""
        with self._side:
            self._holding = True
            self._until = min(self._until, time.monotonic() + self._seconds)
            self._side.notify()

    def _failed(self, error: BaseException) -> BaseException:
        try:
            if not self._doomed and self._link.in_transaction:
                self._link.script("ROLLBACK TO step; RELEASE step")
                return _advised(error)
        except HeadwaterError:  # cancelled or lost by now
            pass
        self._end("expired" if self._doomed else "lost")
        return self._over() if self._doomed else error

    def _commit(self) -> WriteResult[None]:
        with self._lock:
            self._check_open()
            try:
                xid = finish(self._link, self._positions)
            except HeadwaterError as error:
                doomed = self._doomed and not isinstance(error, SourceError)
                self._end("expired" if doomed else "rolled back")
                raise (self._over() if doomed else _advised(error)) from error
            self._end("committed")
        if xid is None:
            return WriteResult(None, 0)
        return settle(self._positions, None, xid)

    # --- its end -----------------------------------------------------------------------------------------

    def _clock(self) -> None:
        while not self.is_over:
            with self._side:
                idle = self._touched + self._idle_seconds if self._writing and not self._steps else math.inf
                left = min(self._until, idle) - time.monotonic()
                if left > 0:
                    self._side.wait(left)
                    continue
            self.expire()

    def _interrupt(self) -> None:
        self._interrupted_at = min(self._interrupted_at, time.monotonic())
        if time.monotonic() > self._interrupted_at + CANCEL_SECONDS:
            self._link.sever()  # PostgreSQL does not interrupt every function
        else:
            self._link.cancel()

    def _end(self, state: str) -> None:
        self._state = state
        with self._side:
            self._side.notify()
        self._worker.shutdown(wait=False)  # queued steps still get an answer
        try:
            with contextlib.suppress(HeadwaterError):
                self._link.rollback()
        finally:
            self._link.close()
            self._finished(self)


def _advised(error: BaseException) -> BaseException:
    if state_of(error) == SERIALIZATION and isinstance(error, Busy):
        error.hint = "Roll back and begin again: rows that the transaction read have changed."
    return error
