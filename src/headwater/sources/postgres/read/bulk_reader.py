"""Bulk reads of a PostgreSQL database by a process that does not capture it."""

from __future__ import annotations

from typing import Any

from headwater.errors import NotFound
from headwater.model.table import Table
from headwater.sources.postgres.capture.slot.server_history import FIRST, first_shape
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.read.reads import PostgresReads
from headwater.sources.postgres.read.text_columns import TextColumns
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.read import BulkReader, PastShapes, ServerPositions

READERS = 4  # few, because PostgreSQL's connections are scarce
CHUNK_ROWS = 65_536  # finding the offset of a chunk takes as long as reading some thousand rows


class PostgresReader(PostgresReads, BulkReader):
    """The bulk reads of a database."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, name: str, url: str, server: ServerPositions, past: PastShapes, *, judge: str) -> None:
        """Create both pools; `judge` is the connection string for callers' conditions."""
        self._server, self._past = server, past
        pool, self._judges = Pool(Server(name, url).connect, READERS), Pool(Server(name, judge).connect, READERS)
        shapes = Shapes(lambda table: server.describe().get(table))
        super().__init__(pool, self._judges, shapes, _ServerOffsets(server), Columns(pool), take=TextColumns)

    def describe(self) -> dict[str, Table]:
        self._columns.renew()  # each job begins here, and its table may have a new collation
        return self._server.describe()

    def shape(self, name: str, version: int | None = None) -> Table:
        found = self.describe().get(name)
        if version is None or (found is not None and found.version == version):
            if found is None:
                raise NotFound(f"there is no table {name!r}")
            return found
        was = first_shape(self._past.note(FIRST), name, version) or self._past.shape(name, version)
        if was is None:
            raise NotFound(
                f"table {name!r} never had a version {version}", hint="Leave `version` out for the current one."
            )
        return was

    def head(self) -> int:
        return self._server.head()

    def status(self) -> dict[str, Any]:
        return {"tables": sorted(self._server.describe())}

    def wake(self) -> None:
        """Do nothing: no capture waits in this process."""

    def close(self) -> None:
        self._pool.close()
        self._judges.close()


class _ServerOffsets:
    """The offsets of snapshots, requested from the server. Fulfils `SnapshotOffsets`."""

    def __init__(self, server: ServerPositions) -> None:
        self.reading, self.exact = server.reading, server.exact

    def seen(self, snapshot: str) -> int:
        """Return the exact offset; 0 if it is not known."""
        return self.exact(snapshot) or 0
