"""Interactive transactions: a connection and a snapshot of their own, for a short time.

From their first write on they hold locks, so they end soon: past their time, or idle for too long, they are rolled
back and say `tx_expired`.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from headwater.errors import Busy, HeadwaterError, InvalidRequest, SourceError, TxExpired
from headwater.sources.postgres.faults import SERIALIZATION, state_of
from headwater.sources.postgres.link import Connect, Link
from headwater.sources.postgres.session import PostgresSession
from headwater.sources.postgres.shapes import Shapes
from headwater.sources.postgres.writing import LOCK_SECONDS, Positions, finish, settle
from headwater.sources.source import Work, Written

T = TypeVar("T")
READ_SECONDS = 30.0  # a snapshot older than this keeps PostgreSQL from cleaning up
_NUDGE_SECONDS = 0.05  # a cancel between two statements of a step is lost: it is repeated


class PostgresTx:
    """Fulfils `Tx`. Its steps run one by one on a thread of its own."""

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
    ) -> None:
        self.id = "tx_" + secrets.token_hex(8)
        self.read_only = read_only
        self._positions, self._finished = positions, finished
        self._seconds, self._idle_seconds = seconds, idle_seconds
        self._link = Link(connect)
        try:
            self._link.begin(read_only=read_only, seconds=statement_seconds, lock_seconds=LOCK_SECONDS)
        except HeadwaterError:
            self._link.close()
            raise
        self._session = PostgresSession(self._link, shapes, self._before_write)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headwater-pg-tx")
        # Guards the connection and changes of `_state`. The expiry takes it after cancelling what runs.
        self._lock = threading.Lock()
        # Guards what the clock looks at.
        self._side = threading.Condition()
        self._steps = 0  # queued or running
        self._touched = time.monotonic()
        self._until = self._touched + READ_SECONDS
        self._writing = self._holding = False
        self._doomed = False  # it is being ended from outside: what runs now fails for that reason
        self._state = "open"
        threading.Thread(target=self._clock, name="headwater-pg-tx-clock", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by whatever cause."""
        return self._state != "open"

    def run(self, work: Work[T]) -> Future[T]:
        """Run `work` inside; its own failure undoes only itself."""
        return self._submit(lambda: self._run(work))

    def commit(self) -> Future[Written[None]]:
        """Make it durable."""
        return self._submit(self._commit)

    def rollback(self) -> Future[None]:
        """Forget it."""
        return self._submit(self._rollback)

    def abandon(self) -> None:
        """Roll back if still open: the server is going down."""
        self._expire()

    def _submit(self, step: Callable[[], T]) -> Future[T]:
        self._count(1)
        try:
            future = self._worker.submit(step)
        except RuntimeError:  # the worker was sent home when the transaction ended
            future = Future()
            future.set_exception(self._over())
        future.add_done_callback(lambda _: self._count(-1))
        return future

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

    def _run(self, work: Work[T]) -> T:
        with self._lock:
            self._check_open()
            try:
                self._link.script("SAVEPOINT step")
                value = work(self._session)
                self._link.script("RELEASE step")
            except BaseException as error:
                ours = self._failed(error)
                if ours is error:
                    raise
                raise ours from error
            if self._writing and not self._holding:
                self._hold()
            return value

    def _hold(self) -> None:
        """Its time begins when it holds what it wrote: what it waited for others does not use it up."""
        with self._side:
            self._holding = True
            self._until = min(self._until, time.monotonic() + self._seconds)
            self._side.notify()

    def _failed(self, error: BaseException) -> BaseException:
        """Undo the step that failed so, and say what the caller is told."""
        try:
            if not self._doomed and self._link.in_transaction:
                self._link.script("ROLLBACK TO step; RELEASE step")
                return _advised(error)
        except HeadwaterError:  # cancelled or lost meanwhile
            pass
        self._end("expired" if self._doomed else "lost")
        return self._over() if self._doomed else error

    def _commit(self) -> Written[None]:
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
            return Written(None, 0)
        return settle(self._positions, None, xid)

    def _rollback(self) -> None:
        with self._lock:
            self._check_open()
            self._end("rolled back")

    # --- its end -----------------------------------------------------------------------------------------

    def _clock(self) -> None:
        while self._state == "open":
            with self._side:
                idle = self._touched + self._idle_seconds if self._writing and not self._steps else math.inf
                left = min(self._until, idle) - time.monotonic()
                if left > 0:
                    self._side.wait(left)
                    continue
            self._expire()

    def _expire(self) -> None:
        """End it from outside, whatever it is doing."""
        self._doomed = True
        while not self._lock.acquire(timeout=_NUDGE_SECONDS):
            if self._state != "open":
                return
            self._link.cancel()
        try:
            if self._state == "open":
                self._end("expired")
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._state != "open":
            raise self._over()

    def _over(self) -> TxExpired:
        if self._state == "committed":
            return TxExpired("the transaction is over: committed", hint="It was kept. Begin another one.")
        return TxExpired(f"the transaction is over: {'expired' if self._state == 'open' else self._state}")

    def _end(self, state: str) -> None:
        """Leave the database as it must be, give everything back. The lock is held."""
        self._state = state
        with self._side:
            self._side.notify()
        self._worker.shutdown(wait=False)  # what is queued is still answered
        try:
            with contextlib.suppress(HeadwaterError):
                self._link.rollback()
        finally:
            self._link.close()
            self._finished(self)


def _advised(error: BaseException) -> BaseException:
    if state_of(error) == SERIALIZATION and isinstance(error, Busy):
        return Busy(error.message, hint="Roll back and begin again: what it read has changed since.")
    return error
