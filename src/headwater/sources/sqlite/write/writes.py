"""Writes to a SQLite file: queued single-call transactions, and interactive transactions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import apsw

from headwater.errors import Unavailable
from headwater.model.principal import OWNER
from headwater.sources.sqlite.connection import sqlite_errors
from headwater.sources.sqlite.connection_pool import limit_temporary
from headwater.sources.sqlite.database_file import File, GuardedConnection
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.wal_size import OpenReads
from headwater.sources.sqlite.write.interactive_transaction import SqliteTx
from headwater.sources.sqlite.write.session import SqliteSession
from headwater.sources.sqlite.write.writer import Writer
from headwater.sources.write import Work, Writable, WriteResult

T = TypeVar("T")


class SqliteWrites(Writable):
    """The writes of a file. `committed` is called after every commit; `known_good` is that of SqliteSession.

    Snapshots of interactive transactions are registered in `reads`.
    """

    def __init__(
        self,
        file: File,
        config: SqliteConfig,
        committed: Callable[[], None],
        known_good: Callable[[], int],
        reads: OpenReads,
    ) -> None:
        self._file, self._config, self._committed, self._known_good = file, config, committed, known_good
        self._reads = reads
        self._transactions: set[SqliteTx] = set()
        connection = file.connect()
        self._guard = connection.guard
        self._writer = Writer(connection, self._session(connection), committed, self._lost)

    def _session(self, connection: GuardedConnection, before_write: Callable[[], None] = lambda: None) -> SqliteSession:
        return SqliteSession(connection, self._config.tables, known_good=self._known_good, before_write=before_write)

    def _lost(self) -> Unavailable | None:
        if self._file.is_there():
            return None
        return Unavailable(
            f"{self._file.name} was replaced during the write", hint="Retry only if the write was not applied."
        )

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[WriteResult[T]]:
        return self._writer.submit(work, caller=caller)

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> SqliteTx:
        self._reads.wait()
        connection = self._file.connect()
        with sqlite_errors(self._file.path):
            if read_only:
                limit_temporary(connection)
            tx = SqliteTx(
                connection,
                lambda hook: self._session(connection, hook),
                self._writer,
                read_only=read_only,
                seconds=self._config.tx_seconds,
                idle_seconds=self._config.tx_idle_seconds,
                finished=lambda tx, offset: self._finished(tx, connection.db, offset),
                lost=self._lost,
            )
        self._transactions.add(tx)
        self._reads.add(tx, tx.end_snapshot)
        return tx

    def _finished(self, tx: SqliteTx, db: apsw.Connection, offset: int) -> None:
        self._transactions.discard(tx)
        self._reads.discard(tx)
        self._file.disconnect(db)
        if offset:
            self._committed()

    def finish_writes(self) -> None:
        for tx in list(self._transactions):
            tx.expire()
        self._writer.close()
