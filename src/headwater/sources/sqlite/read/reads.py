"""Reads of the tables of a SQLite file, each with the offset of its read transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from headwater.model.keys.key import Span
from headwater.model.predicate import key_is
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Chunk, Sample
from headwater.sources.sqlite.connection_pool import Pool
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.query.where import Predicates, SqliteCondition
from headwater.sources.sqlite.read.key_order_page import read_chunk
from headwater.sources.sqlite.read.sample import read_sample
from headwater.sources.sqlite.write.session import SqliteSession


class SqliteReads:
    """Implementation of the part of `Readable` that reads tables. Thread-safe.

    `check_history` raises while rows of the file must not be combined with changes of the log.
    """

    def __init__(self, pool: Pool, predicates: Predicates, check_history: Callable[[], None] = lambda: None) -> None:
        self._pool, self._predicates, self._check = pool, predicates, check_history

    def _read(self) -> AbstractContextManager[GuardedConnection]:
        return self._pool.read()

    def describe(self) -> dict[str, Table]:
        with self._read() as reader:
            return reader.catalog.tables()

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        with self._read() as reader:
            session = SqliteSession(reader)
            shape = session.describe(table)
            rows = session.select(table, key_is(shape, key), 1)
            return shape, rows[0] if rows else None, reader.offset()

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        self._check()
        with self._read() as reader:
            return read_chunk(reader, table, after=after, span=span, limit=limit)

    def sample(self, table: str, size: int) -> Sample:
        with self._read() as reader:
            return read_sample(reader, table, size)

    def condition(self, table: Table, where: str) -> SqliteCondition:
        return self._predicates.condition(table, where)

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """Return an encoder of `columns` to bytes in SQLite's order; NotSupported if it is unknown."""
        return order(table, columns)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        return self._predicates.stored(table, columns, values)
