"""Reads of a PostgreSQL database's tables, each with the offset of its snapshot.

A read sees the transactions of its snapshot. Once the stream has delivered all transactions committed before it, the
snapshot either is a prefix of the log or is not (commits became visible in another order than they were logged);
then the read is repeated. Chunks need a prefix, and so do answers with an ETag; other reads get an offset up to which
they certainly saw everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.errors import Busy
from headwater.model.keys.key import Span
from headwater.model.predicate import key_is
from headwater.model.table import Key, Row, Table
from headwater.sources.postgres.key_order import order
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.query.where import Predicates
from headwater.sources.postgres.read.key_order_page import Decoded, Take, read_page
from headwater.sources.postgres.read.sample import ALL_ROWS, read_sample
from headwater.sources.postgres.schema.column_probe import Columns
from headwater.sources.postgres.schema.table_shapes import Shapes, hold
from headwater.sources.postgres.snapshot_visibility import SnapshotOffsets, read_with_offset, snapshot_of
from headwater.sources.postgres.write.session import PostgresSession
from headwater.sources.read import Chunk, Condition, Sample

TRIES = 10  # attempts of a read whose snapshot is not a prefix of the log


class PostgresReads:
    """The table reads of a source. Fulfils the part of `Readable` that reads tables. Thread-safe.

    `queries` evaluates conditions of callers; `take` is the form in which the rows of a chunk are kept.
    """

    def __init__(
        self,
        pool: Pool,
        queries: Pool,
        shapes: Shapes,
        offsets: SnapshotOffsets,
        columns: Columns,
        *,
        seconds: float = 30.0,
        take: Take = Decoded,
    ) -> None:
        self._pool, self._shapes, self._offsets, self._columns = pool, shapes, offsets, columns
        self._seconds, self._take = seconds, take
        self._predicates = Predicates(queries, columns.odd)

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        def read(link: Link) -> tuple[Table, Row | None]:
            hold(link, table, self._seconds)
            session = PostgresSession(link, self._shapes)
            found = session.describe(table)
            rows = session.select(table, key_is(found, key), 1)
            return found, rows[0] if rows else None

        (shape, row), offset = read_with_offset(self._pool, self._offsets, read)
        return shape, row, offset

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """Return at most `limit` rows in key order, with keys after `after`, inside `span`. Busy: commits interfere."""
        odd = self._columns.odd()

        def read(link: Link) -> tuple[Table, Sequence[Row], Key | None, str]:
            link.script(ALL_ROWS)
            hold(link, table, self._seconds)
            shape = self._shapes.shape(link, table)
            shape.need_key()
            found = read_page(link, shape, odd, after, span, max(limit, 1), self._take(shape))
            return (shape.table, *found, snapshot_of(link))

        for _ in range(TRIES):
            with self._offsets.reading():
                shape, rows, next_key, snapshot = self._pool.read(read)
                offset = self._offsets.exact(snapshot)
            if offset is not None:
                return Chunk(shape, rows, offset, next_key)
        raise Busy("commits arrive faster than the offset of a read can be determined", hint="Try again in a moment.")

    def sample(self, table: str, size: int) -> Sample:
        return read_sample(self._pool, self._shapes, table, size, self._columns.odd)

    def condition(self, table: Table, where: str) -> Condition:
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """Return a function from values of `columns` to bytes in row order; NotSupported if their order is unknown."""
        return order(table, columns, self._columns.odd())

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as `columns` would store them; InvalidRequest if a column cannot hold its value."""
        return self._columns.stored(table, columns, values)
