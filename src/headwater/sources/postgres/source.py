"""PostgreSQL as a source: one database, captured by a replication slot, read by a pool of connections."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headwater.model.principal import VIEWER
from headwater.sources.capture_stream import LogNotes
from headwater.sources.postgres.capture.capture import PostgresCapture
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.analysis.analysis import Analyses
from headwater.sources.postgres.query.caller_connections import Callers
from headwater.sources.postgres.query.queries import PostgresQueries
from headwater.sources.postgres.read.reads import PostgresReads
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.write.writes import PostgresWrites
from headwater.sources.read import BulkAddress

STOP_SECONDS = 2.0  # for which running statements are cancelled


class PostgresSource(PostgresCapture, PostgresReads, PostgresQueries, PostgresWrites):
    """A PostgreSQL database. Fulfils `Source`: each base class fulfils one protocol, and uses only its arguments here.

    Usable once `prove` has returned "" or `restart` was called.
    """

    def __init__(
        self, name: str, url: str, *, notes: LogNotes, config: PostgresConfig, folder: Path | None = None
    ) -> None:
        """Start the writing threads, and connect later. Transactions too large for memory use `folder`."""
        self.address = url
        server, seconds = Server(name, url), config.statement_seconds
        logins = Logins(server, config)
        # Without logins for callers, their queries use this pool as well.
        pool = Pool(server.connect, is_trusted=bool(logins.roles))
        columns, callers = Columns(pool, seconds=seconds), Callers(logins, pool, seconds=seconds)
        queries = callers.pool(VIEWER)

        def reconnect() -> None:
            pool.renew()
            callers.renew()
            columns.renew()

        def schema_changed() -> None:
            columns.renew()
            callers.forget()

        PostgresCapture.__init__(
            self,
            server,
            logins,
            notes=notes,
            config=config,
            folder=folder,
            reconnect=reconnect,
            schema_changed=schema_changed,
        )
        shapes, offsets, attachment = self._shapes, self.snapshot_positions, self._attachment
        PostgresReads.__init__(self, pool, queries, shapes, offsets, columns, seconds=seconds)
        analyses = Analyses(queries, offsets, attachment.publication, statement_seconds=seconds)
        PostgresQueries.__init__(self, callers, analyses, offsets, seconds=seconds)
        PostgresWrites.__init__(
            self, logins, shapes, offsets, attachment.publish, config=config, abandoned=pool.abandoned
        )

    def bulk_address(self) -> BulkAddress:
        """Return the connection strings for the bulk worker."""
        return BulkAddress("postgres", self.address, reader=self._callers.logins.server(VIEWER).address)

    def status(self) -> dict[str, Any]:
        """Return the numbers of capture and of writes."""
        return {
            **super().status(),
            "writes": self._writers.commits,
            "writes_waiting": self._writers.waiting,
            "open_transactions": len(self._transactions),
        }

    def stop_statements(self) -> None:
        """Cancel the statements of callers, repeatedly for up to STOP_SECONDS: some may not have begun yet."""
        until = time.monotonic() + STOP_SECONDS
        while any([self._callers.cancel_running(), self._writers.running.cancel()]) and time.monotonic() < until:
            time.sleep(0.02)

    def close(self) -> None:
        """Expire transactions, finish queued writes, save the stream's position and close the connections."""
        self.finish_writes()
        super().close()
        self._callers.close()
        self._pool.close()
