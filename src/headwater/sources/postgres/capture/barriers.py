"""Barriers: marks written into the WAL. The stream delivers each mark after everything committed before it.

A barrier is shared by all callers that asked before it began; a caller that asks during a barrier waits for the next.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import psycopg

from headwater.errors import HeadwaterError, SourceError, SourceUnfit
from headwater.sources.postgres.capture.stream.transaction_assembly import PREFIX
from headwater.sources.postgres.connection import Connection, Server
from headwater.sources.postgres.errors import unreachable
from headwater.sources.postgres.schema.catalog import schema_number
from headwater.sources.postgres.snapshot_visibility import Snapshot, snapshot_now

SECONDS = 1.0  # longest wait of a barrier for its mark
DOWN_SECONDS = 0.1  # longest wait while there is no stream
T = TypeVar("T")


class BarrierResult(msgspec.Struct, frozen=True):
    """The result of a barrier: the offset of the last change before the mark (None if the mark was not seen in time),
    and the schema number and a snapshot taken after the mark."""

    offset: int | None
    schema: int
    snapshot: Snapshot


class SideSession:
    """A session for short queries, kept open and reconnected when broken. Thread-safe: calls run in turn."""

    def __init__(self, server: Server, **settings: str) -> None:
        self._server, self._settings = server, settings
        self._lock = threading.Lock()  # guards the session
        self._connection: Connection | None = None

    def ask(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work` on the session; connect again and retry once if a kept session is broken."""
        with self._lock, self._server.errors():
            for again in (True, False):
                fresh = self._connection is None or self._connection.closed
                if self._connection is None or fresh:
                    self._connection = self._connected()
                try:
                    return work(self._connection)
                except psycopg.Error:
                    if not self._connection.broken:
                        raise
                    self._connection.close()
                    self._connection = None
                    if fresh or not again:
                        raise
            raise AssertionError

    def _connected(self) -> Connection:
        try:
            return self._server.connect(**self._settings)
        except SourceUnfit:
            raise
        except SourceError as error:
            raise unreachable(error) from error

    def close(self) -> None:
        """Close the connection; the next `ask` connects again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


class Barriers:
    """The barriers of a database, of which one runs at a time. Thread-safe."""

    def __init__(self, side: SideSession, is_up: Callable[[], bool]) -> None:
        self._side, self._is_up = side, is_up
        self._own = secrets.token_hex(6)  # distinguishes our marks from those of other servers and of earlier runs
        self._changed = threading.Condition()  # guards the fields below
        self._begun = self._ended = 0
        self._is_running = False
        self._seen: dict[str, int] = {}
        self._awaited = ""
        self._missed_at = -math.inf  # when the last barrier timed out; -inf if it did not
        self._found: BarrierResult | HeadwaterError = SourceError("no barrier was set")

    @property
    def is_behind(self) -> bool:
        """Return whether the latest barrier timed out within the last SECONDS."""
        return time.monotonic() - self._missed_at < SECONDS

    def passed(self, token: str, offset: int) -> None:
        """Record that the stream delivered the mark `token` after `offset`."""
        with self._changed:
            if token == self._awaited:
                self._seen[token] = offset
                self._changed.notify_all()

    def set(self) -> BarrierResult:
        """Run or share a barrier that begins after this call, and return its result.

        Its `offset` is None if the mark is not seen within SECONDS. A call during a barrier first waits for that one.
        """
        with self._changed:
            number = self._begun + 1
            while self._is_running and self._ended < number:
                self._changed.wait()
            if self._ended >= number:
                return _result_of(self._found)
            self._begun, self._is_running = number, True
        found: BarrierResult | HeadwaterError = SourceError("the barrier was interrupted")
        try:
            found = self._pass(f"{self._own}.{number}")
        except HeadwaterError as error:
            found = error
        finally:
            with self._changed:
                self._found, self._ended, self._is_running = found, number, False
                self._changed.notify_all()
        return _result_of(found)

    def _pass(self, token: str) -> BarrierResult:
        end = time.monotonic() + (SECONDS if self._is_up() else DOWN_SECONDS)
        with self._changed:
            self._awaited = token
            self._seen.clear()

        def work(connection: Connection) -> tuple[int, Snapshot]:
            connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [PREFIX, token])
            # A schema change after the mark gives another number, which is safe; a change before the mark is included.
            with connection.transaction():
                snapshot = snapshot_now(connection)
                return schema_number(connection), snapshot

        schema, snapshot = self._side.ask(work)
        with self._changed:
            self._changed.wait_for(lambda: token in self._seen, end - time.monotonic())
            self._missed_at = -math.inf if token in self._seen else time.monotonic()
            return BarrierResult(self._seen.get(token), schema, snapshot)


def _result_of(found: BarrierResult | HeadwaterError) -> BarrierResult:
    if isinstance(found, HeadwaterError):
        raise found
    return found
