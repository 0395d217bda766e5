"""Interactive transactions: their own connection and snapshot, the writer's place from the first write on.

They hold that place for a short time only. Past it they are rolled back and say `tx_expired`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

import apsw

from headwater.errors import Busy, InvalidRequest, TxExpired
from headwater.sources.source import Session, Work, Written
from headwater.sources.sqlite.connection import to_error
from headwater.sources.sqlite.guard import Guard
from headwater.sources.sqlite.writer import Ledger, Writer

T = TypeVar("T")
READ_SECONDS = 30.0  # a snapshot older than this keeps the WAL from being reused


class _Stale(Exception):
    """Others wrote since the snapshot was taken, and nobody has seen anything of it."""


class Place:
    """The writer's place, lent to one transaction until it gives it back or its time is up."""

    def __init__(self, seconds: float, idle_seconds: float) -> None:
        self._seconds, self._idle = seconds, idle_seconds
        self._granted = threading.Event()
        self._returned = threading.Event()
        self._touched = 0.0
        self._working = False

    def hold(self, expire: Callable[[], None]) -> None:
        """Runs in the writer thread: wait until the place is returned, or take it back."""
        self._touched = started = time.monotonic()
        self._granted.set()
        while not self._returned.is_set():
            limit = started + self._seconds
            if not self._working:
                limit = min(limit, self._touched + self._idle)
            left = limit - time.monotonic()
            if left <= 0:
                expire()
                return
            self._returned.wait(min(left, self._idle))

    def wait(self, timeout: float) -> bool:
        """Wait for the place."""
        return self._granted.wait(timeout)

    def working(self, now: bool) -> None:
        """Whether a statement is running: an idle transaction loses the place sooner."""
        self._touched, self._working = time.monotonic(), now

    def give_back(self) -> None:
        """Let the writer go on."""
        self._returned.set()


class SqliteTx:
    """One interactive transaction. Its methods may be called from any thread; work runs on `executor`."""

    def __init__(
        self,
        db: apsw.Connection,
        guard: Guard,
        ledger: Ledger,
        make_session: Callable[[Callable[[], None]], Session],
        writer: Writer,
        executor: Executor,
        *,
        read_only: bool,
        seconds: float,
        idle_seconds: float,
        finished: Callable[[SqliteTx, int], None],
    ) -> None:
        self.id = "tx_" + secrets.token_hex(8)
        self.read_only = read_only
        self._db, self._guard, self._ledger = db, guard, ledger
        self._session = make_session(self._take_place)
        self._writer, self._executor = writer, executor
        self._seconds, self._idle_seconds = seconds, idle_seconds
        self._finished = finished
        self._place: Place | None = None
        self._fresh = True  # no step has been answered yet
        # Guards the connection and `_state`. The expiry takes it after interrupting what runs.
        self._lock = threading.Lock()
        self._state = "open"
        guard.run("BEGIN")
        self._timer = threading.Timer(READ_SECONDS, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def run(self, work: Work[T]) -> Future[T]:
        """Run `work` inside; its own failure undoes only itself."""
        return self._submit(lambda: self._run(work))

    def commit(self) -> Future[Written[None]]:
        """Make it durable."""
        return self._submit(self._commit)

    def rollback(self) -> Future[None]:
        """Forget it."""
        return self._submit(self._rollback)

    def _submit(self, step: Callable[[], T]) -> Future[T]:
        try:
            return self._executor.submit(step)
        except RuntimeError as error:  # the executor is shut down
            raise TxExpired("the transaction is over: the database is closing") from error

    def _run(self, work: Work[T]) -> T:
        with self._lock:
            self._check_open()
            self._working(True)
            try:
                value = self._step(work)
                self._fresh = False
                return value
            except BaseException as error:
                self._undo_step()
                if isinstance(error, apsw.Error):
                    raise to_error(error) from error
                raise
            finally:
                self._working(False)

    def _step(self, work: Work[T]) -> T:
        try:
            self._guard.run("SAVEPOINT step")
            value = work(self._session)
        except _Stale:
            # Nobody was told anything of this transaction yet: it may as well begin now, as the writer.
            self._guard.run("ROLLBACK")
            self._guard.run("BEGIN IMMEDIATE")
            self._ledger.open()
            self._guard.run("SAVEPOINT step")
            value = work(self._session)
        self._guard.run("RELEASE step")
        return value

    def _undo_step(self) -> None:
        if self._db.in_transaction:
            self._guard.run("ROLLBACK TO step")
            self._guard.run("RELEASE step")
        else:
            self._end("lost")  # OR ROLLBACK or a full disk took the whole transaction

    def _take_place(self) -> None:
        """Called by the session ahead of a write, inside `_run`."""
        if self.read_only:
            raise InvalidRequest("the transaction is read-only", hint='Begin one without "read_only".')
        if self._place is not None:
            return
        place = Place(self._seconds, self._idle_seconds)
        self._writer.submit(lambda _: place.hold(self._expire), alone=True)
        if not place.wait(self._seconds):
            place.give_back()
            raise Busy("another transaction holds the database")
        self._place = place
        place.working(True)
        self._start_ledger(place)

    def _start_ledger(self, place: Place) -> None:
        """Become the writer; refused if others wrote since this transaction showed its snapshot to anybody."""
        try:
            self._guard.run("UPDATE _headwater_meta SET value = value WHERE 0")
            self._ledger.open()
        except apsw.BusyError as error:
            if self._fresh:
                raise _Stale from error
            self._place = None
            place.give_back()
            raise Busy(
                "the database changed since this transaction first read it",
                hint="Roll back and begin again; write first, or keep it shorter.",
            ) from error

    def _commit(self) -> Written[None]:
        with self._lock:
            self._check_open()
            try:
                written = self._ledger.record(None) if self._place else Written(None, 0)
                self._guard.run("COMMIT")
            except apsw.Error as error:
                self._end("rolled back")
                raise to_error(error) from error
            self._end("committed", written.offset)
            return written

    def _rollback(self) -> None:
        with self._lock:
            self._check_open()
            self._end("rolled back")

    def _expire(self) -> None:
        with contextlib.suppress(apsw.ConnectionClosedError):  # it may have ended by itself meanwhile
            self._db.interrupt()
        with self._lock:
            if self._state == "open":
                self._end("expired")

    def _check_open(self) -> None:
        if self._state != "open":
            raise TxExpired(f"the transaction is over: {self._state}")

    def _working(self, now: bool) -> None:
        if self._place is not None:
            self._place.working(now)

    def _end(self, state: str, offset: int = 0) -> None:
        """Leave the database as it must be, give everything back. The lock is held."""
        self._state = state
        self._timer.cancel()
        try:
            if self._db.in_transaction:
                self._guard.run("ROLLBACK")
        finally:
            if self._place is not None:
                self._place.give_back()
            self._finished(self, offset)

    def abandon(self) -> None:
        """Roll back if still open: the server is going down."""
        with self._lock:
            if self._state == "open":
                self._end("expired")
