"""Interactive transactions: their own connection and snapshot, the writer's place from the first write on.

They hold that place for a short time only. Past it they are rolled back and say `tx_expired`.
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
from headwater.sources.sqlite.database_file import BUSY_SECONDS
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.write.writer import Ledger, Writer
from headwater.sources.write import Session, Work, Written

T = TypeVar("T")
READ_SECONDS = 30.0  # a snapshot older than this keeps the WAL from being reused
TURNS = 3  # a write waits for its place as long as this many others may hold it, then it is told `busy`
_RETRY_SECONDS = 0.0005  # SQLite itself does not wait for a lock on behalf of a transaction that has read


class _Stale(Exception):
    """Others wrote since the snapshot was taken, and nobody has seen anything of it."""


class Place:
    """The writer's place, lent to one transaction until it gives it back or its time is up."""

    def __init__(self, seconds: float, idle_seconds: float) -> None:
        self._seconds, self._idle = seconds, idle_seconds
        self._granted = threading.Event()
        self._returned = threading.Event()
        self._until = math.inf  # its time begins when the file's lock is taken: foreign writers do not use it up
        self._touched = 0.0
        self._working = True

    def hold(self, expire: Callable[[], None]) -> None:
        """Runs in the writer thread: wait until the place is returned, or take it back."""
        self._touched = time.monotonic()
        self._granted.set()
        while not self._returned.is_set():
            limit = self._until
            if not self._working:
                limit = min(limit, self._touched + self._idle)
            left = limit - time.monotonic()
            if left <= 0:
                expire()
                return
            self._returned.wait(min(left, self._idle, self._seconds))

    def wait(self, timeout: float) -> bool:
        """Wait for the place, or for `wake`."""
        return self._granted.wait(timeout)

    def wake(self) -> None:
        """End a wait: the transaction is over."""
        self._granted.set()

    def start(self) -> None:
        """The file's lock is taken: from now on others wait."""
        self._until = time.monotonic() + self._seconds

    def working(self, now: bool) -> None:
        """Whether a step is queued or running: an idle transaction loses the place sooner."""
        self._touched, self._working = time.monotonic(), now

    def give_back(self) -> None:
        """Let the writer go on."""
        self._returned.set()


class SqliteTx(Interactive):
    """It reads by a snapshot of its own, and writes in the writer's place."""

    nudge_seconds = 0.01

    def __init__(
        self,
        db: apsw.Connection,
        guard: Guard,
        ledger: Ledger,
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
        self._db, self._guard, self._ledger = db, guard, ledger
        self._session = make_session(self._take_place)
        self._writer = writer
        self._seconds, self._idle_seconds = seconds, idle_seconds
        self._finished, self._lost = finished, lost
        self._place: Place | None = None
        self._fresh = True  # no step has been answered yet
        # Guards `_steps`; also held to interrupt, so that nothing interrupts a connection being closed.
        self._side = threading.Lock()
        self._steps = 0  # queued or running
        guard.run("BEGIN")
        self._timer = threading.Timer(READ_SECONDS, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _count(self, more: int) -> None:
        with self._side:
            self._steps += more
            if self._place is not None:
                self._place.working(self._steps > 0)

    def _step(self, work: Work[T]) -> T:
        try:
            self._guard.run("SAVEPOINT step")
            value = work(self._session)
        except _Stale:
            self._begin_as_writer()
            value = work(self._session)
        self._guard.run("RELEASE step")
        self._fresh = False
        return value

    def _begin_as_writer(self) -> None:
        """Nobody was told anything of this transaction yet: it may as well begin now."""
        self._guard.run("ROLLBACK")
        try:
            self._guard.run("BEGIN IMMEDIATE")
            self._ledger.open()
        except apsw.BusyError as error:  # it stays open, as fresh as it was
            self._leave_place()
            self._guard.run("BEGIN")
            self._guard.run("SAVEPOINT step")
            raise _locked() from error
        self._guard.run("SAVEPOINT step")
        self._start_place()

    def _failed(self, error: BaseException) -> BaseException:
        try:
            if not self._doomed and self._db.in_transaction:
                self._guard.run("ROLLBACK TO step")
                self._guard.run("RELEASE step")
                return to_error(error) if isinstance(error, apsw.Error) else error
        except apsw.Error:  # interrupted or closed meanwhile
            self._doomed = True
        # If nobody ended it, OR ROLLBACK or a full disk took the whole transaction.
        self._end("expired" if self._doomed else "lost")
        if self._doomed:
            return self._over()
        return to_error(error) if isinstance(error, apsw.Error) else error

    def _take_place(self) -> None:
        """Called by the session ahead of a write, inside a step."""
        if self.read_only:
            raise InvalidRequest("the transaction is read-only", hint='Begin one without "read_only".')
        if self._place is not None:
            return
        place = self._place = Place(self._seconds, self._idle_seconds)
        try:
            self._writer.submit(lambda _: place.hold(self._expire), alone=True)
            if not place.wait(TURNS * self._seconds):
                raise Busy("other transactions hold the database")
            self._take_lock()
            self._ledger.open()
        except _Stale:
            raise
        except BaseException:
            self._leave_place()
            raise
        self._start_place()

    def _take_lock(self) -> None:
        """Become the file's writer; refused if others wrote since this transaction showed its snapshot to anybody."""
        deadline = time.monotonic() + BUSY_SECONDS
        while not self._doomed:
            try:
                self._guard.run("UPDATE _headwater_meta SET value = value WHERE 0")
                return
            except apsw.BusyError as error:
                if self._fresh:
                    raise _Stale from error
                if getattr(error, "extendedresult", 0) == apsw.SQLITE_BUSY_SNAPSHOT:
                    raise Busy(
                        "the database changed since this transaction first read it",
                        hint="Roll back and begin again; write first, or keep it shorter.",
                    ) from error
                if time.monotonic() > deadline:
                    raise _locked() from error
            time.sleep(_RETRY_SECONDS)
        raise self._over()

    def _start_place(self) -> None:
        if self._place is not None:
            self._place.start()

    def _leave_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.give_back()

    def _commit(self) -> Written[None]:
        with self._lock:
            self._check_open()
            try:
                written = self._ledger.record(None) if self._place else Written(None, 0)
                self._guard.run("COMMIT")
            except apsw.Error as error:
                doomed = self._doomed or isinstance(error, apsw.ConnectionClosedError)
                self._end("expired" if doomed else "rolled back")
                raise (self._over() if doomed else to_error(error)) from error
            fault = self._lost() if written.offset else None  # the file was replaced: it went nowhere
            self._end("committed" if fault is None else "lost", written.offset)
            if fault is not None:
                raise fault
            return written

    def _interrupt(self) -> None:
        with self._side:
            if self.is_over:
                return
            if self._place is not None:
                self._place.wake()
            with contextlib.suppress(apsw.ConnectionClosedError):
                self._db.interrupt()

    def _end(self, state: str, offset: int = 0) -> None:
        with self._side:
            self._state = state
        self._timer.cancel()
        self._worker.shutdown(wait=False)  # what is queued is still answered
        try:
            with contextlib.suppress(apsw.ConnectionClosedError):
                if self._db.in_transaction:
                    self._guard.run("ROLLBACK")
        finally:
            self._leave_place()
            self._finished(self, offset)


def _locked() -> Busy:
    return Busy(f"another process has held the database's write lock for {BUSY_SECONDS:g} seconds")
