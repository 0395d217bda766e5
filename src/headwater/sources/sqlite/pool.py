"""Read connections shared by threads: each caller has one to itself for one short read transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import apsw
import msgspec

from headwater.sources.sqlite.catalog import Catalog
from headwater.sources.sqlite.connection import sqlite_errors
from headwater.sources.sqlite.guard import Guard
from headwater.sources.sqlite.triggers import CAPTURE


class Reader(msgspec.Struct, frozen=True):
    """A connection that cannot write, and what belongs to it."""

    db: apsw.Connection
    guard: Guard
    catalog: Catalog

    def offset(self) -> int:
        """The newest offset in the current read transaction."""
        ((head,),) = self.guard.run(f"SELECT max(seq) FROM {CAPTURE}").fetchall()
        return int(str(head))


class Pool:
    """At most `size` connections, opened when needed."""

    def __init__(self, open_reader: Callable[[], apsw.Connection], size: int) -> None:
        self._open = open_reader
        self._places = threading.Semaphore(size)
        # Guards _idle.
        self._lock = threading.Lock()
        self._idle: list[Reader] = []

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """A reader inside a read transaction."""
        with self._places:
            reader = self._take()
            try:
                with sqlite_errors():
                    reader.guard.run("BEGIN")
                    try:
                        yield reader
                    finally:
                        if reader.db.in_transaction:
                            reader.guard.run("COMMIT")
            finally:
                with self._lock:
                    self._idle.append(reader)

    def _take(self) -> Reader:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        db = self._open()
        guard = Guard(db)
        guard.run("PRAGMA query_only = 1")
        return Reader(db, guard, Catalog(guard))

    def close(self) -> None:
        """Close what is idle; callers still reading close nothing of ours."""
        with self._lock:
            for reader in self._idle:
                reader.db.close()
            self._idle.clear()
