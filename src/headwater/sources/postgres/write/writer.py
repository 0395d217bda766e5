"""Writing threads: each write is a transaction of its own, answered when capture has received it.

PostgreSQL itself groups commits. Work that fails because of concurrent writes is retried from the start.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headwater.errors import Busy, DuplicateKey, HeadwaterError, InvalidRequest, SourceError, Unavailable
from headwater.model.principal import OWNER
from headwater.model.work.work_context import CALLER
from headwater.sources.fair_queue import FairQueue
from headwater.sources.postgres.abandoned_statements import AbandonedStatements
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.errors import RETRIED, state_of
from headwater.sources.postgres.protocol_session import Link, RunningLinks
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.postgres.write.session import PostgresSession
from headwater.sources.write import Session, WriteResult

T = TypeVar("T")
THREADS = 5  # a caller may use all but one of them
TRIES = 5  # attempts for work that conflicts with other transactions
MAX_QUEUE = 10_000  # writes in the queue; beyond that callers get `busy` at once
LOCK_SECONDS = 5.0  # longest wait of a write for the locks of others, then `busy`
NEAR_SECONDS = 0.05  # usual time until a commit is received from the stream
_XID = "SELECT pg_current_xact_id_if_assigned()::text"
_UNSURE = "The connection broke during the commit: check whether the write was applied before you retry."


def settle(positions: Positions, value: T, xid: int | None) -> WriteResult[T]:
    """Return `value` with the offsets of a transaction that was just committed; see `offsets_of`."""
    ((offset, tables),) = offsets_of(positions, [xid])
    return WriteResult(value, offset, tables)


def offsets_of(positions: Positions, xids: Sequence[int | None]) -> list[tuple[int, dict[str, int]]]:
    """Wait for transactions just committed; return offset and tables of each, the head if it changed nothing."""
    try:
        found = [None if xid is None else positions.wait_for(xid, NEAR_SECONDS) for xid in xids]
        head = 0
        if None in found:  # the transaction changed no captured table, or capture is behind
            head = positions.barrier()
            again = zip(found, xids, strict=True)
            found = [positions.wait_for(xid, 0) if at is None and xid is not None else at for at, xid in again]
        return [
            (head, {}) if at is None or xid is None else (at, positions.changes_of(xid))
            for at, xid in zip(found, xids, strict=True)
        ]
    except HeadwaterError as error:
        raise Unavailable(
            f"the transaction was committed, but capture has not received it: {error.message}",
            hint="The changes are stored: do not send them again.",
        ) from error


def finish(link: Link, positions: Positions) -> int | None:
    """Commit; return the transaction's number, None if it wrote nothing; InvalidRequest if it failed before."""
    ((text,),) = link.run(_XID).texts()
    xid = None if text is None else int(text)
    if xid is not None:
        positions.expect(xid)
    try:
        kept = link.commit()
    except SourceError as error:
        if xid is None or (state_of(error) and link.is_alive):  # PostgreSQL answered: the transaction is rolled back
            raise
        text = "PostgreSQL ended the connection" if error.names_tables else error.message
        raise Unavailable(text, hint=_UNSURE) from None
    if not kept:
        raise InvalidRequest("an earlier statement of the transaction failed", hint="Nothing was kept.")
    return xid


ConnectAs = Callable[[str], Connection]  # connects with the login for callers in a role


class _Job:
    __slots__ = ("caller", "future", "role", "work")

    def __init__(self, work: Callable[[Session], Any], role: str, caller: str) -> None:
        self.work, self.role, self.caller = work, role, caller
        self.future: Future[Any] = Future()


class _ThreadConnections:
    """The connections of a writing thread, by the role of the caller; opened when needed."""

    def __init__(self, connect: ConnectAs, abandoned: AbandonedStatements | None) -> None:
        self._connect, self._abandoned = connect, abandoned
        self._links: dict[str, Link] = {}

    def link(self, role: str) -> Link:
        """Return a connection that is alive, as far as is known."""
        found = self._links.get(role)
        if found is not None and not found.is_alive:
            found.close()
            found = None
        if found is None:
            found = self._links[role] = Link(lambda: self._connect(role), self._abandoned)
        return found

    def clean(self) -> None:
        """Remove everything a caller left in the sessions, before the next caller."""
        for role, link in list(self._links.items()):
            try:
                link.clean()
            except HeadwaterError:
                self._links.pop(role).close()

    def close(self) -> None:
        """Close all connections of the thread."""
        while self._links:
            self._links.popitem()[1].close()


class Writers:
    """The threads that write, each with a connection per role, and the thread that answers."""

    def __init__(
        self,
        connect: ConnectAs,
        shapes: Shapes,
        positions: Positions,
        *,
        statement_seconds: float = 30.0,
        abandoned: AbandonedStatements | None = None,
        threads: int = THREADS,
        grants: Callable[[str], Sequence[str]] = lambda table: (),
        publish: Callable[[Link], None] = lambda link: None,
    ) -> None:
        self._connect, self._shapes, self._positions, self._grants = connect, shapes, positions, grants
        self._publish, self._abandoned = publish, AbandonedStatements() if abandoned is None else abandoned
        self._seconds, self.running = statement_seconds, RunningLinks()
        # Guards _queue, _settling and _closing. Never held while work runs.
        self._ready = threading.Condition()
        self._queue: FairQueue[_Job] = FairQueue(max(threads - 1, 1))
        self._settling: deque[tuple[_Job, Any, int | None]] = deque()
        self._closing = False
        self._working = 0
        self.commits = 0  # approximate: threads may count at once
        names = [(f"headwater-pg-writer-{place}", self._loop) for place in range(threads)]
        names.append(("headwater-pg-settler", self._settle_loop))
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in names]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Session], T], role: str = OWNER, caller: str = "") -> Future[WriteResult[T]]:
        """Queue `work` of a caller in this role; the future is done when capture received it. Busy: too many wait."""
        job = _Job(work, role, caller)
        with self._ready:
            if self._closing:
                raise Busy("the database is closing")
            if len(self._queue) >= MAX_QUEUE:
                raise Busy(f"{MAX_QUEUE} writes are waiting already")
            self._queue.put(caller, job)
            self._ready.notify_all()
        return job.future

    @property
    def waiting(self) -> int:
        """Return the number of writes in the queue."""
        return len(self._queue)

    def close(self) -> None:
        """Accept no more writes; return when the queued writes are answered."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    # --- the writing threads -----------------------------------------------------------------------------

    def _loop(self) -> None:
        hand = _ThreadConnections(self._connect, self._abandoned)
        while (job := self._take()) is not None:
            done: tuple[_Job, Any, int | None] | None = None
            try:
                done = job, *self._attempts(hand, job)
            except BaseException as error:
                job.future.set_exception(error)
            with self._ready:
                if done is not None:
                    self._settling.append(done)
                self._working -= 1
                self._queue.done(job.caller)
                self._ready.notify_all()
            hand.clean()
            del job, done  # they hold the answer, and the next job may be far off
        hand.close()

    def _take(self) -> _Job | None:
        with self._ready:
            while True:
                job = self._queue.take()
                if job is None:
                    if self._closing and not self._queue:
                        return None
                    self._ready.wait()
                elif job.future.set_running_or_notify_cancel():
                    self._working += 1
                    return job
                else:
                    self._queue.done(job.caller)

    def _attempts(self, hand: _ThreadConnections, job: _Job) -> tuple[Any, int | None]:
        CALLER.set(job.caller)  # of this thread, until its next job
        for attempt in range(TRIES):
            link = hand.link(job.role)
            session = PostgresSession(link, self._shapes, grants=self._grants, publish=self._publish)
            begun = False
            try:
                with self.running.use(link):
                    link.begin(seconds=self._seconds, lock_seconds=LOCK_SECONDS, is_trusted=job.role == OWNER)
                    begun = True
                    value = job.work(session)
                    return value, finish(link, self._positions)
            except BaseException as error:
                with contextlib.suppress(HeadwaterError):
                    link.rollback()
                is_last = attempt == TRIES - 1
                if is_last or not self._may_repeat(error, session, attempt, begun, link):
                    raise
            time.sleep(random.uniform(0, 0.002 * 2**attempt))
        raise AssertionError("the last attempt returns or raises")

    def _may_repeat(
        self, error: BaseException, session: PostgresSession, attempt: int, begun: bool, link: Link
    ) -> bool:
        if state_of(error) in RETRIED:
            return True
        if isinstance(error, DuplicateKey):
            # The other row was not visible in the snapshot of the reads: a retry in a new one may decide otherwise.
            return session.has_read and attempt == 0
        return isinstance(error, SourceError) and not begun and not link.is_alive  # the idle connection had died

    # --- the answering thread ----------------------------------------------------------------------------

    def _settle_loop(self) -> None:
        while self._settle(self._done()):
            pass

    def _settle(self, some: list[tuple[_Job, Any, int | None]]) -> bool:
        """Answer `some`; return whether there are any. Separate: the loop would keep them until the next ones."""
        if not some:
            return False
        self.commits += len(some)
        try:
            found = offsets_of(self._positions, [xid for _, _, xid in some])
        except BaseException as error:
            for job, _, _ in some:
                job.future.set_exception(error)
            return True
        for (job, value, _), (offset, tables) in zip(some, found, strict=True):
            job.future.set_result(WriteResult(value, offset, tables))
        return True

    def _done(self) -> list[tuple[_Job, Any, int | None]]:
        with self._ready:
            while not self._settling:
                if self._closing and not self._queue and not self._working:
                    return []
                self._ready.wait()
            some = list(self._settling)
            self._settling.clear()
            return some
