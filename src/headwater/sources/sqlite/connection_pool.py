"""Pool of read connections shared by threads: each caller has one to itself for one short read transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.sources.sqlite.connection import READ_HEAP, sqlite_errors
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.wal_size import OpenReads


def limit_temporary(reader: GuardedConnection) -> None:
    """Keep sorts and temporary tables of a read-only connection in memory, where the heap limit applies.

    Temporary files have no limit. Connections that write still use them: for the undo of a large UPDATE and the sort of
    a new index, and a caller who writes can fill the disk in any case.
    """
    reader.guard.run("PRAGMA temp_store = MEMORY")
    reader.guard.limit_heap(READ_HEAP)


class Pool:
    """Pool of at most `size` connections, opened when needed. Its reads are registered in `reads`."""

    def __init__(
        self,
        open_reader: Callable[[], GuardedConnection],
        size: int,
        close_reader: Callable[[GuardedConnection], None] = lambda reader: reader.db.close(),
        reads: OpenReads | None = None,
    ) -> None:
        self._open, self._close, self._reads = open_reader, close_reader, reads or OpenReads()
        self._slots = threading.Semaphore(size)
        # Guards _idle.
        self._lock = threading.Lock()
        self._idle: list[GuardedConnection] = []

    @contextmanager
    def read(self) -> Iterator[GuardedConnection]:
        """Yield a connection inside a read transaction, after waiting for a free one."""
        with self._slots:
            self._reads.wait()
            reader = self._take()
            try:
                with sqlite_errors():
                    reader.guard.is_ended = False
                    self._reads.add(reader.guard, reader.guard.end)
                    reader.guard.run("BEGIN")
                    try:
                        yield reader
                    finally:
                        if reader.db.in_transaction:
                            reader.guard.run("COMMIT")
            finally:
                self._reads.discard(reader.guard)
                self._give_back(reader)

    def _give_back(self, reader: GuardedConnection) -> None:
        if reader.guard.is_linear:  # linear functions are slower for short values
            self._close(reader)
            return
        with self._lock:
            self._idle.append(reader)

    def _take(self) -> GuardedConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        reader = self._open()
        reader.guard.run("PRAGMA query_only = 1")
        limit_temporary(reader)
        return reader

    def close(self) -> None:
        """Close the idle connections; those in use are not closed."""
        with self._lock:
            for reader in self._idle:
                reader.db.close()
            self._idle.clear()
