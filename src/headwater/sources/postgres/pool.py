"""Read connections: each reads in a transaction that writes nothing and sees one moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import psycopg

from headwater.errors import Busy, Unavailable
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.visibility import Snapshot

READERS = 8
WAIT_SECONDS = 10.0
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class Reading(msgspec.Struct, frozen=True):
    """A read transaction that is open, and what it sees."""

    connection: Connection
    snapshot: Snapshot


class Pool:
    """From any thread; at most READERS at a time."""

    def __init__(self, server: Server, *, statement_seconds: float, readers: int = READERS) -> None:
        self._server = server
        self._settings = {"statement_timeout": str(max(int(statement_seconds * 1000), 1))}
        self._places = threading.Semaphore(readers)
        self._lock = threading.Lock()  # guards what follows
        self._free: list[Connection] = []
        self._is_closed = False

    @contextmanager
    def read(self) -> Iterator[Reading]:
        """A transaction of one moment; ended in any case, and nothing of it stays in the session."""
        if not self._places.acquire(timeout=WAIT_SECONDS):
            raise Busy(f"too many statements run on {self._server.name!r}")
        try:
            with self._server.errors():
                reading = self._begin()
                try:
                    yield reading
                finally:
                    self._end(reading.connection)
        finally:
            self._places.release()

    def _begin(self) -> Reading:
        """On a session that was open and may have died meanwhile, or else on a new one."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise Unavailable(f"{self._server.name!r} is closed")
                connection = self._free.pop() if self._free else None
            if connection is None:
                return self._transaction(self._server.connect(**self._settings))
            with suppress(psycopg.OperationalError):
                return self._transaction(connection)
            connection.close()

    def _transaction(self, connection: Connection) -> Reading:
        try:
            connection.execute(_BEGIN)
            row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
        except BaseException:
            connection.close()
            raise
        assert row is not None
        return Reading(connection, Snapshot.of(row[0]))

    def _end(self, connection: Connection) -> None:
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")
            with self._lock:
                if not self._is_closed:
                    self._free.append(connection)
                    return
        connection.close()

    def close(self) -> None:
        """End the sessions; those in use end with their statements."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.close()
