"""Commits: callers that write to one SQLite file at the same time share one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import apsw

from headwater.errors import Unavailable
from headwater.feeds.subscriptions.store import FILE

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

    def __init__(self, path: Path, connection: apsw.Connection, lock: threading.Lock) -> None:
        self._path, self._lock = path, lock
        self._leading = threading.Lock()  # held by whoever commits, for all who wait; taken before the others
        self._connection: apsw.Connection | None = connection
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
        with self._leading, FILE.errors(self._path):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _lead(self, batch: list[_Job[Any]]) -> None:
        try:
            self._commit(batch)
        except apsw.Error as error:
            for job in batch:
                job.error = FILE.error(self._path, error)
        except BaseException as error:
            for job in batch:
                job.error = error
        else:
            with self._lock:
                for job in batch:
                    if job.apply is not None:
                        job.value = job.apply()
        for job in batch:
            job.is_over = True

    def _commit(self, batch: list[_Job[Any]]) -> None:
        connection = self._connection
        if connection is None:
            raise Unavailable(f"{self._path} is closed", hint="The server is stopping. Try again when it is back.")
        connection.execute("BEGIN IMMEDIATE")
        try:
            for job in batch:
                _try(job, connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                with suppress(apsw.Error):  # the first error tells
                    connection.execute("ROLLBACK")
            raise
        self.commits += 1


def _try(job: _Job[Any], connection: apsw.Connection) -> None:
    """Do the work of one; what is wrong with it alone undoes it alone."""
    try:
        with connection:  # a savepoint
            job.apply = job.work(connection)
    except apsw.Error:
        raise  # the disk fails everybody
    except Exception as error:
        job.error = error
