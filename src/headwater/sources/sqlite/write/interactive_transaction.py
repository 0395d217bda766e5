"""Interactive transactions: each has its own connection and snapshot, and the writer's turn from its first write on.

A transaction holds that turn for a short time only. After that it is rolled back and reports `tx_expired`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import apsw

from headwater.errors import Busy, InvalidRequest
from headwater.sources.interactive_transaction import Interactive
from headwater.sources.sqlite.connection import to_error
from headwater.sources.sqlite.database_file import BUSY_SECONDS, GuardedConnection
from headwater.sources.sqlite.write.writer import Ledger, Writer
from headwater.sources.write import Session, Work, WriteResult

T = TypeVar("T")
READ_SECONDS = 30.0  # a snapshot older than this prevents reuse of the WAL
TURNS = 3  # a write waits as long as this many others may hold the turn, then fails with `busy`
_RETRY_SECONDS = 0.0005  # SQLite itself does not wait for a lock in a transaction that has already read


class _StaleSnapshot(Exception):
    """Signal that others wrote after the snapshot was taken, before any step had returned a result."""


class WriterTurn:
    """The writer's turn, lent to one transaction until the transaction returns it or its time is up."""

    def __init__(self, seconds: float, idle_seconds: float) -> None:
        self._seconds, self._idle = seconds, idle_seconds
        self.granted = threading.Event()  # also set once the transaction is over, to end its wait
        self.returned = threading.Event()
        self._until = math.inf  # set when the file's lock is taken: waiting for foreign writers does not count
        self._touched = 0.0
        self._working = True

    def hold(self, expire: Callable[[], None]) -> None:
        """Wait in the writer thread until the turn is returned; call `expire` once its time is up."""
        self._touched = time.monotonic()
        self.granted.set()
        while not self.returned.is_set():
            limit = self._until
            if not self._working:
                limit = min(limit, self._touched + self._idle)
            left = limit - time.monotonic()
            if left <= 0:
                expire()
                return
            self.returned.wait(min(left, self._idle, self._seconds))

    def start(self) -> None:
        """Start the time limit: the file's lock is taken, and other writers wait."""
        self._until = time.monotonic() + self._seconds

    def working(self, now: bool) -> None:
        """Set whether a step is queued or running: an idle transaction loses the turn sooner."""
        self._touched, self._working = time.monotonic(), now


class SqliteTx(Interactive):
    """Interactive transaction that reads from its own snapshot and writes in the writer's turn."""

    nudge_seconds = 0.01

    def __init__(
        self,
        connection: GuardedConnection,
        make_session: Callable[[Callable[[], None]], Session],
        writer: Writer,
        *,
        read_only: bool,
        seconds: float,
        idle_seconds: float,
        finished: Callable[[SqliteTx, int], None],
        lost: Callable[[], BaseException | None],
    ) -> None:
        super().__init__(read_only=read_only)
        self._db, self._guard, self._ledger = connection.db, connection.guard, Ledger(connection)
        self._session = make_session(self._take_turn)
        self._writer = writer
        self._seconds, self._idle_seconds = seconds, idle_seconds
        self._finished, self._lost = finished, lost
        self._turn: WriterTurn | None = None
        self._fresh = True  # no step has returned a result yet
        # Guards `_steps`; also held during an interrupt, so that nothing interrupts a connection being closed.
        self._side = threading.Lock()
        self._steps = 0  # queued or running
        connection.guard.run("BEGIN")
        self._timer = threading.Timer(READ_SECONDS, self.expire)
        self._timer.daemon = True
        self._timer.start()

    def end_snapshot(self) -> None:
        """Expire the transaction unless it writes: then its snapshot is the newest, and its turn ends soon."""
        if self._turn is None:
            self.expire()

    def _count(self, more: int) -> None:
        with self._side:
            self._steps += more
            if self._turn is not None:
                self._turn.working(self._steps > 0)

    def _step(self, work: Work[T]) -> T:
        try:
            self._guard.run("SAVEPOINT step")
            value = work(self._session)
        except _StaleSnapshot:
            self._begin_as_writer()
            value = work(self._session)
        self._guard.run("RELEASE step")
        self._fresh = False
        return value

    def _begin_as_writer(self) -> None:
        """Restart the transaction as a writer, which is safe while no step has returned a result."""
        self._guard.run("ROLLBACK")
        try:
            self._guard.run("BEGIN IMMEDIATE")
            self._ledger.open()
        except apsw.BusyError as error:  # the transaction remains open and fresh
            self._return_turn()
            self._guard.run("BEGIN")
            self._guard.run("SAVEPOINT step")
            raise _locked() from error
        self._guard.run("SAVEPOINT step")
        self._start_turn()

    def _failed(self, error: BaseException) -> BaseException:
        ours = to_error(error) if isinstance(error, apsw.Error) else error
        try:
            if not self._doomed and self._db.in_transaction:
                self._guard.run("ROLLBACK TO step")
                self._guard.run("RELEASE step")
                return ours
        except apsw.Error:  # interrupted or closed concurrently
            self._doomed = True
        # If nothing ended the transaction from outside, OR ROLLBACK or a full disk rolled all of it back.
        self._end("expired" if self._doomed else "lost")
        return self._over() if self._doomed else ours

    def _take_turn(self) -> None:
        """Wait for the writer's turn; called by the session before a write, inside a step."""
        if self.read_only:
            raise InvalidRequest("the transaction is read-only", hint='Begin one without "read_only".')
        if self._turn is not None:
            return
        turn = self._turn = WriterTurn(self._seconds, self._idle_seconds)
        try:
            self._writer.submit(lambda _: turn.hold(self.expire), alone=True)
            if not turn.granted.wait(TURNS * self._seconds):
                raise Busy("other transactions hold the write lock of the database")
            self._take_lock()
            self._ledger.open()
        except _StaleSnapshot:
            raise
        except BaseException:
            self._return_turn()
            raise
        self._start_turn()

    def _take_lock(self) -> None:
        """Take the file's write lock; Busy if others wrote after this transaction returned data of its snapshot."""
        deadline = time.monotonic() + BUSY_SECONDS
        while not self._doomed:
            try:
                self._guard.run("UPDATE _headwater_meta SET value = value WHERE 0")
                return
            except apsw.BusyError as error:
                if self._fresh:
                    raise _StaleSnapshot from error
                if getattr(error, "extendedresult", 0) == apsw.SQLITE_BUSY_SNAPSHOT:
                    raise Busy(
                        "the database changed since this transaction first read it",
                        hint="Roll back and begin again; write first, or keep the transaction short.",
                    ) from error
                if time.monotonic() > deadline:
                    raise _locked() from error
            time.sleep(_RETRY_SECONDS)
        raise self._over()

    def _start_turn(self) -> None:
        if self._turn is not None:
            self._turn.start()

    def _return_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.returned.set()

    def _commit(self) -> WriteResult[None]:
        with self._lock:
            self._check_open()
            try:
                written = self._ledger.record(None) if self._turn else WriteResult(None, 0)
                self._guard.run("COMMIT")
            except apsw.Error as error:
                doomed = self._doomed or isinstance(error, apsw.ConnectionClosedError)
                self._end("expired" if doomed else "rolled back")
                raise (self._over() if doomed else to_error(error)) from error
            fault = self._lost() if written.offset else None  # the file was replaced, so the commit is lost
            self._end("committed" if fault is None else "lost", written.offset)
            if fault is not None:
                raise fault
            return written

    def _interrupt(self) -> None:
        with self._side:
            if self.is_over:
                return
            if self._turn is not None:
                self._turn.granted.set()
            with contextlib.suppress(apsw.ConnectionClosedError):
                self._db.interrupt()

    def _end(self, state: str, offset: int = 0) -> None:
        with self._side:
            self._state = state
        self._timer.cancel()
        self._worker.shutdown(wait=False)  # queued steps still get a reply
        try:
            with contextlib.suppress(apsw.ConnectionClosedError):
                if self._db.in_transaction:
                    self._guard.run("ROLLBACK")
        finally:
            self._return_turn()
            self._finished(self, offset)


def _locked() -> Busy:
    return Busy(f"another process has held the database's write lock for {BUSY_SECONDS:g} seconds")
