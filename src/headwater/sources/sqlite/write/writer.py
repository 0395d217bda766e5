"""Single writer thread with group commit: many callers' transactions share one fsync, and fail independently.

Each member runs in a SAVEPOINT. A member that ends the whole transaction (OR ROLLBACK, a full disk) gets
its error, and the members before it run again without it. A member that leaves a deferred foreign key open
is undone before the COMMIT could fail.

Callers take turns, and a group ends early once its members have run for a while: a caller with many slow writes
delays another caller's write by two of these writes, not by all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeVar, cast

import apsw

from headwater.errors import Busy, InvalidRequest, Unavailable
from headwater.sources.fair_queue import FairQueue
from headwater.sources.sqlite.capture.triggers import CAPTURE, TXN
from headwater.sources.sqlite.connection import OURS, to_error
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.write import Session, WriteResult

T = TypeVar("T")
MAX_GROUP = 256  # members of one commit: enough to amortize the fsync, few enough to reply soon
GROUP_SECONDS = 0.05  # after this time a group is committed, and the remaining jobs form the next group
GATHER_SECONDS = 0.0003  # maximum wait for a group, used only if the last commit had several members
MAX_QUEUE = 10_000  # writes in the queue, above which callers get `busy` at once

_RECORD = f"INSERT INTO {TXN}(upto, first, ms, us) VALUES (?, ?, ?, ?)"
_TOUCHED = f"SELECT t, max(seq) FROM {CAPTURE} WHERE seq >= ? GROUP BY t"
_NEWEST = f"SELECT seq, t FROM {CAPTURE} ORDER BY seq DESC LIMIT 1"


_TAMPERED = "Other programs must not change Headwater's tables. Capture restarts in a moment; try again then."


class Job:
    """A job for the writer thread.

    `alone`: the job takes a turn in the queue, not the connection. `ours`: no caller waits for the result.
    """

    __slots__ = ("alone", "caller", "future", "ours", "work")

    def __init__(self, work: Callable[[Session], Any], alone: bool, ours: bool, caller: str) -> None:
        self.work, self.alone, self.ours, self.caller = work, alone, ours, caller
        self.future: Future[Any] = Future()


Outcome = tuple[Job, WriteResult[Any] | BaseException]


class Ledger:
    """Record of the offsets that each transaction on one connection took."""

    def __init__(self, connection: GuardedConnection) -> None:
        self._guard, self._catalog = connection.guard, connection.catalog
        self.head = 0

    def open(self) -> None:
        """Note the newest captured offset when a group's transaction begins; `record` counts from it."""
        self.head, _ = self._newest()

    def record(self, value: T) -> WriteResult[T]:
        """Record one caller's transaction: its offsets are all those after the previous transaction."""
        first = self.head + 1
        upto, t = self._newest()
        if upto < first:
            return WriteResult(value, self.head)
        self._guard.run(_RECORD, (upto, first, *divmod(time.time_ns() // 1_000, 1_000)))
        self.head = upto
        touched: list[Any] = [(t, upto)] if upto == first else self._guard.run(_TOUCHED, (first,)).fetchall()
        return WriteResult(value, upto, self._by_name(touched))

    def _newest(self) -> tuple[int, int]:
        found = self._guard.run(_NEWEST).fetchall()
        if not found:
            raise Unavailable("another program emptied the capture table", hint=_TAMPERED)
        return cast(tuple[int, int], found[0])

    def _by_name(self, touched: list[tuple[int, int]]) -> dict[str, int]:
        if any(t not in self._catalog.layouts for t, _ in touched):
            self._catalog.refresh()
        found: dict[str, int] = {}
        for t, seq in touched:
            name = self._catalog.layouts[t].table.name
            found[name] = max(seq, found.get(name, 0))
        return found


class Writer:
    """Owner of the write connection. `committed` is called after every commit, from the writer thread.

    `lost` returns an error if the last commit is lost because the file was replaced.
    """

    def __init__(
        self,
        connection: GuardedConnection,
        session: Session,
        committed: Callable[[], None],
        lost: Callable[[], BaseException | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._guard, self._catalog = connection.db, connection.guard, connection.catalog
        self._session, self._ledger = session, Ledger(connection)
        self._committed, self._lost, self._clock = committed, lost, clock
        # Guards _queue, _aside and _closing. Never held while work runs.
        self._ready = threading.Condition()
        self._queue: FairQueue[Job] = FairQueue()  # only one thread writes, so no share is needed
        self._aside: Job | None = None  # taken from the queue, but must not run in the current group
        self._closing = False
        self._wanted = 1  # number of queued jobs at which the waiting writer is notified
        self._last_group = 1
        self.groups = self.members = 0  # only the writer thread writes these
        self._thread = threading.Thread(target=self._loop, name="headwater-writer", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[Session], T], *, alone: bool = False, ours: bool = False, caller: str = ""
    ) -> Future[WriteResult[T]]:
        """Queue `work` behind other work of `caller`; the future is done when it is durable. Busy if too many wait."""
        job = Job(work, alone, ours, caller)
        with self._ready:
            if self._closing:
                raise Busy("the database is closing")
            if len(self._queue) >= MAX_QUEUE:
                raise Busy(f"{MAX_QUEUE} writes are waiting already")
            self._queue.put(caller, job)
            if len(self._queue) >= self._wanted:
                self._ready.notify()
        return job.future

    @property
    def waiting(self) -> int:
        """Return the number of writes in the queue."""
        return len(self._queue) + (self._aside is not None)

    def close(self) -> None:
        """Accept no more jobs; return when the queued jobs have run."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    def _loop(self) -> None:
        while self._run(self._take()):
            pass

    def _run(self, jobs: list[Job]) -> bool:
        """Run a group; return False if it is empty. Called per group, so that its results are freed before the next."""
        if jobs and not jobs[0].alone:
            taken: list[Job] = []
            self._settle(self._attempt(self._members(jobs, taken), taken))
        elif jobs and jobs[0].future.set_running_or_notify_cancel():
            self._lend(jobs[0])
        return bool(jobs)

    def _take(self) -> list[Job]:
        """Wait for jobs and take a group of them; return [] once the writer is closing and the queue is empty."""
        jobs: list[Job] = []
        with self._ready:
            while not self.waiting and not self._closing:
                self._ready.wait()
            self._gather()
            while len(jobs) < MAX_GROUP:
                job, self._aside = self._aside or self._queue.take(), None
                if job is None:
                    break
                if job.alone and jobs:
                    self._aside = job
                    break
                jobs.append(job)
                if job.alone:
                    break
        return jobs

    def _gather(self) -> None:
        """Wait briefly for the callers of the last commit, which are likely to write again, to form one group."""
        self._wanted = self._last_group
        if self.waiting < self._wanted and not self._closing:
            self._ready.wait_for(lambda: self.waiting >= self._wanted or self._closing, GATHER_SECONDS)
        self._wanted = 1

    def _members(self, jobs: list[Job], taken: list[Job]) -> Iterator[Job]:
        """Yield the `jobs` that were not cancelled and add them to `taken`; requeue the rest after GROUP_SECONDS."""
        until = self._clock() + GROUP_SECONDS
        for place, job in enumerate(jobs):
            if taken and self._clock() > until:
                self._put_back(jobs[place:])
                break
            if job.future.set_running_or_notify_cancel():
                taken.append(job)
                yield job
        self._last_group = len(taken)

    def _put_back(self, jobs: list[Job]) -> None:
        """Requeue `jobs` before all other jobs of their callers; other callers keep their turns."""
        with self._ready:
            while (job := self._queue.take()) is not None:
                jobs.append(job)
            for job in jobs:
                self._queue.put(job.caller, job)

    def _lend(self, job: Job) -> None:
        """Wait while an interactive transaction holds the writer's turn."""
        try:
            job.future.set_result(WriteResult(job.work(self._session), 0))
        except BaseException as error:
            job.future.set_exception(error)

    def _attempt(self, jobs: Iterator[Job], taken: list[Job]) -> list[Outcome]:
        """Run a group so that every caller gets a reply and the thread survives any error."""
        try:
            return self._group(jobs)
        except BaseException as error:
            self._abandon()
            for _ in jobs:  # jobs that did not run yet get the error, too
                pass
            return [(job, to_error(error) if isinstance(error, apsw.Error) else error) for job in taken]

    def _group(self, jobs: Iterator[Job]) -> list[Outcome]:
        """Run `jobs` in one transaction; jobs that another job rolled back run again without it."""
        try:
            self._guard.run("BEGIN IMMEDIATE")
            self._ledger.open()
            self._catalog.hold()
        except apsw.Error as error:
            self._abandon()
            fault = to_error(error)
            if OURS in fault.message:
                fault = Unavailable(fault.message, hint=_TAMPERED)
            return [(job, fault) for job in jobs]
        done: list[Outcome] = []
        for job in jobs:
            outcome = self._member(job)
            if not self._db.in_transaction:
                return self._without_killer(job, outcome, done, jobs)
            done.append((job, outcome))
        return self._commit(done)

    def _without_killer(
        self, killer: Job, outcome: WriteResult[Any] | BaseException, done: list[Outcome], rest: Iterator[Job]
    ) -> list[Outcome]:
        """Give `killer`, which rolled back the whole transaction, its error, and run all other jobs again."""
        fault = outcome if isinstance(outcome, BaseException) else InvalidRequest("the transaction was lost")
        failed = [pair for pair in done if isinstance(pair[1], BaseException)]
        again = [job for job, result in done if not isinstance(result, BaseException)]
        replayed = self._group(iter(again)) if again else []
        if (job := next(rest, None)) is not None:
            replayed += self._group(chain((job,), rest))
        return [*failed, (killer, fault), *replayed]

    def _commit(self, done: list[Outcome]) -> list[Outcome]:
        try:
            self._guard.run("COMMIT")
        except apsw.Error as error:
            self._abandon()
            if len(done) == 1:
                return [(done[0][0], to_error(error))]
            return [pair for job, _ in done for pair in self._group(iter((job,)))]
        if (fault := self._lost()) is not None:
            return [(job, outcome if isinstance(outcome, BaseException) else fault) for job, outcome in done]
        self.groups += 1
        self.members += sum(not isinstance(outcome, BaseException) and not job.ours for job, outcome in done)
        return done

    def _member(self, job: Job) -> WriteResult[Any] | BaseException:
        head = self._ledger.head
        try:
            self._guard.run("SAVEPOINT member")
            value = job.work(self._session)
            self._check_committable()
            written = self._ledger.record(value)
            self._guard.run("RELEASE member")
            return written
        except BaseException as error:
            self._ledger.head = head
            if self._db.in_transaction:
                self._guard.run("ROLLBACK TO member")
                self._guard.run("RELEASE member")
                self._catalog.hold()  # the rollback may have undone DDL
            return to_error(error) if isinstance(error, apsw.Error) else error

    def _check_committable(self) -> None:
        if not self._db.in_transaction:
            raise InvalidRequest("the statement rolled back the whole transaction", hint="Nothing was kept.")
        if self._db.status(apsw.SQLITE_DBSTATUS_DEFERRED_FKS)[0]:
            raise InvalidRequest("FOREIGN KEY constraint failed", hint="A deferred foreign key has no parent row.")

    def _abandon(self) -> None:
        if self._db.in_transaction:
            try:
                self._guard.run("ROLLBACK")
            except apsw.Error:  # a broken disk may even refuse the rollback; the next BEGIN will report that
                return

    def _settle(self, outcomes: list[Outcome]) -> None:
        if any(not isinstance(outcome, BaseException) for _, outcome in outcomes):
            self._committed()
        for job, outcome in outcomes:
            if isinstance(outcome, BaseException):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
