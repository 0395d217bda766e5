"""PostgreSQL read in bulk by a process beside the one that follows it, which tells where each chunk stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headwater.errors import NotFound
from headwater.model.keys.key import Span
from headwater.model.table import Key, Table
from headwater.sources.postgres.capture.slot.server_history import FIRST, first_shape
from headwater.sources.postgres.connection import Server
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.query.where import Predicates
from headwater.sources.postgres.read.row_reads import Reading
from headwater.sources.postgres.read.text_columns import Packed
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.schema.table_shapes import Shapes
from headwater.sources.read import Chunk, Condition, PastShapes, ServerPositions

READERS = 4  # PostgreSQL has few connections to give
CHUNK_ROWS = 65_536  # each has to find its place in the log, which takes as long as some thousand rows


class PostgresReader:
    """Fulfils `BulkReader`."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, name: str, url: str, server: ServerPositions, past: PastShapes, *, judge: str) -> None:
        """Open both pools; `judge` is the connection string for callers' conditions."""
        self._server, self._past = server, past
        self._pool, self._judges = Pool(Server(name, url).connect, READERS), Pool(Server(name, judge).connect, READERS)
        self._columns = Columns(self._pool)
        self._reading = Reading(self._pool, Shapes(self._known), _Unseen(server), self._columns.odd, take=Packed)
        self._predicates = Predicates(self._judges, self._columns.odd)

    def _known(self, table: str) -> Table | None:
        return self._server.describe().get(table)

    def describe(self) -> dict[str, Table]:
        """The tables as they are now."""
        self._columns.renew()  # a job begins with this: it may be about a table of a new collation
        return self._server.describe()

    def shape(self, name: str, version: int | None = None) -> Table:
        """The table as it is now, or as it was at `version`."""
        found = self.describe().get(name)
        if version is None or (found is not None and found.version == version):
            if found is None:
                raise NotFound(f"there is no table {name!r}")
            return found
        was = first_shape(self._past.note(FIRST), name, version) or self._past.shape(name, version)
        if was is None:
            raise NotFound(f"table {name!r} never had a version {version}", hint="Leave it out for the present one.")
        return was

    def head(self) -> int:
        """The newest offset."""
        return self._server.head()

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """At most `limit` rows in key order with keys after `after`, inside `span`."""
        return self._reading.chunk(table, after=after, span=span, limit=limit)

    def condition(self, table: Table, where: str) -> Condition:
        """The predicate `where` over rows of `table`."""
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """How PostgreSQL compares values of `columns`."""
        return order(table, columns, self._columns.odd())

    def status(self) -> dict[str, Any]:
        """The captured tables."""
        return {"tables": sorted(self._server.describe())}

    def wake(self) -> None:
        """Nobody waits here."""

    def close(self) -> None:
        """End the sessions."""
        self._pool.close()
        self._judges.close()


class _Unseen:
    """Fulfils `reading.Visibility` by asking the server; only chunks are read here, and those are exact."""

    def __init__(self, server: ServerPositions) -> None:
        self.reading, self.exact = server.reading, server.exact

    def seen(self, snapshot: str) -> int:
        """Never less exact than that."""
        return self.exact(snapshot) or 0
