"""Commits: callers that write to one SQLite file at the same time share one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import apsw

from headwater.log.sqlite_store import SqliteStore

T = TypeVar("T")
Apply = Callable[[], T]  # brings memory up to what was committed, and says what the caller gets
Work = Callable[[apsw.Connection], Apply[T]]  # writes inside the transaction; a raise undoes it


class _Job(Generic[T]):
    """One caller's work, and what became of it."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.apply: Apply[T] | None = None
        self.error: BaseException | None = None
        self.is_over = False
        self.value: T


class Commits:
    """The one writer of a file. `lock` is held while memory is brought up to what was committed."""

    def __init__(self, file: SqliteStore, lock: threading.Lock) -> None:
        self._file, self._lock = file, lock
        self._leading = threading.Lock()  # held by whoever commits, for all who wait; taken before the others
        self._queue = threading.Lock()  # guards what follows
        self._waiting: list[_Job[Any]] = []
        self.commits = 0

    def run(self, work: Work[T]) -> T:
        """Do `work`, commit, apply. It is durable on return; on a raise neither file nor memory has changed."""
        job = _Job(work)
        with self._queue:
            self._waiting.append(job)
        with self._leading:
            if not job.is_over:  # nobody did it for us while we waited
                with self._queue:
                    batch, self._waiting = self._waiting, []
                self._lead(batch)
        if job.error is not None:
            raise job.error
        return job.value

    def close(self) -> None:
        """Release the file."""
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
    """Do the work of one; what is wrong with it alone undoes it alone."""
    try:
        with connection:  # a savepoint
            job.apply = job.work(connection)
    except apsw.Error:
        raise  # the disk fails everybody
    except Exception as error:
        job.error = error
