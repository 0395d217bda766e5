"""Group commit: callers that write to one SQLite file concurrently share one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import apsw

from headwater.log.sqlite_store import SqliteStore

T = TypeVar("T")
Apply = Callable[[], T]  # updates memory after the commit, and returns the result of the call
Work = Callable[[apsw.Connection], Apply[T]]  # writes inside the transaction; a raise undoes it


class _Job(Generic[T]):
    """One caller's work, and its result."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.apply: Apply[T] | None = None
        self.error: BaseException | None = None
        self.is_over = False
        self.value: T


class Commits:
    """The one writer of a file. `lock` is held while memory is updated after a commit."""

    def __init__(self, file: SqliteStore, lock: threading.Lock) -> None:
        self._file, self._lock = file, lock
        self._leading = threading.Lock()  # held by the thread that commits for all that wait; taken before the others
        self._queue = threading.Lock()  # guards the next field
        self._waiting: list[_Job[Any]] = []
        self.commits = 0

    def run(self, work: Work[T]) -> T:
        """Do `work`, commit and apply it: durable on return; after an exception neither file nor memory changed."""
        job = _Job(work)
        with self._queue:
            self._waiting.append(job)
        with self._leading:
            if not job.is_over:  # no other thread did it while this one waited
                with self._queue:
                    batch, self._waiting = self._waiting, []
                self._lead(batch)
        if job.error is not None:
            raise job.error
        return job.value

    def close(self) -> None:
        """Close the file, after the commit that is in progress."""
        with self._leading:
            self._file.close()

    def _lead(self, batch: list[_Job[Any]]) -> None:
        try:
            with self._file.transaction() as connection:
                for job in batch:
                    _try(job, connection)
        except BaseException as error:
            for job in batch:
                job.error = error
        else:
            self.commits += 1
            with self._lock:
                for job in batch:
                    if job.apply is not None:
                        job.value = job.apply()
        for job in batch:
            job.is_over = True


def _try(job: _Job[Any], connection: apsw.Connection) -> None:
    """Do the work of one caller; an error of its own undoes only that work."""
    try:
        with connection:  # a savepoint
            job.apply = job.work(connection)
    except apsw.Error:
        raise  # the disk fails every caller
    except Exception as error:
        job.error = error
