"""Reading rows with the exact offset of the read: one by its key, or a bounded stretch of a table in key order.

A read sees the transactions of its snapshot. When all that were committed before it are on our stream, it is known
whether these are exactly the first so many of the log; if not (a commit was seen in another order than it is logged),
the read is made again. Chunks need that, and answers that have a tag; other reads are told an offset up to which they
surely saw everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import msgspec

from headwater.errors import Busy
from headwater.model.keys.key import Span
from headwater.model.predicate import key_is
from headwater.model.table import Key, Row, Table
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.query.statement_rules import Args, check_ours, examine
from headwater.sources.postgres.read.key_order_page import Decoded, Take, stretch
from headwater.sources.postgres.schema.table_shapes import Shapes, hold
from headwater.sources.postgres.write.session import PostgresSession, run_statement
from headwater.sources.query import Read
from headwater.sources.read import Chunk
from headwater.sources.write import Result

T = TypeVar("T")
TRIES = 10  # of a read whose snapshot is no beginning of the log
ALL_ROWS = "SET LOCAL row_security = off"  # where a policy would hide some, PostgreSQL refuses


class Visibility(Protocol):
    """Which offset a snapshot stands for. `snapshot` is the text of pg_current_snapshot()."""

    def reading(self) -> AbstractContextManager[None]:
        """Around a read and the question where it stands."""
        ...

    def seen(self, snapshot: str) -> int:
        """The offset up to which it surely sees everything; it may see more."""
        ...

    def exact(self, snapshot: str) -> int | None:
        """The offset up to which it sees everything, and nothing after; None where there is none: read again."""
        ...


class Place(msgspec.Struct, frozen=True):
    """Where a snapshot stands: it sees everything up to `offset`."""

    offset: int
    is_exact: bool = False  # and nothing after it
    is_behind: bool = True  # the stream has not told all that it may see
    schema: int | None = None  # the number of the schema at a moment after the snapshot, where that was asked


class Places(Visibility, Protocol):
    """The same, for who does with less when the stream is behind."""

    def place(self, snapshot: str) -> Place:
        """The best that is known of it, after a short wait for the stream."""
        ...


class Reading:
    """Reads of one database. From any thread. `take`: how the rows of a chunk are kept."""

    def __init__(
        self,
        pool: Pool,
        shapes: Shapes,
        visibility: Visibility,
        odd: Callable[[], Collection[str]] = lambda: (),
        *,
        statement_seconds: float = 30.0,
        take: Take = Decoded,
    ) -> None:
        self._pool, self._shapes, self._visibility, self._odd = pool, shapes, visibility, odd
        self._seconds, self._take = statement_seconds, take

    def exact(self, work: Callable[[Link], T], seconds: float | None = None) -> tuple[T, int]:
        """What `work` reads in one snapshot, and its offset."""

        for _ in range(TRIES):
            with self._visibility.reading():
                value, snapshot = self._pool.read(lambda link: (work(link), snapshot_of(link)), seconds)
                offset = self._visibility.exact(snapshot)
            if offset is not None:
                return value, offset
        raise Busy("commits come faster than a read finds its place among them", hint="Try again in a moment.")

    def seen(self, work: Callable[[Link], T], seconds: float | None = None, pool: Pool | None = None) -> tuple[T, int]:
        """The same with an offset up to which it surely saw everything: no barrier, and never again."""
        with self._visibility.reading():
            value, snapshot = (pool or self._pool).read(lambda link: (work(link), snapshot_of(link)), seconds)
            return value, self._visibility.seen(snapshot)

    def read(self, sql: str, args: Args = (), pool: Pool | None = None) -> Read:
        """See Source. It runs in a transaction that only reads: PostgreSQL refuses what writes."""

        def read(link: Link) -> Result:
            statement, bound = examine(link, sql, args)
            result = run_statement(link, statement, bound)
            check_ours(link)
            return result

        result, offset = self.seen(read, self._seconds, pool)
        return Read(result.columns, result.rows, offset, result.truncated)

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """See Source."""

        def read(link: Link) -> tuple[Table, Row | None]:
            hold(link, table, self._seconds)
            session = PostgresSession(link, self._shapes)
            found = session.describe(table)
            rows = session.select(table, key_is(found, key), 1)
            return found, rows[0] if rows else None

        (shape, row), offset = self.seen(read)
        return shape, row, offset

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """See Source."""
        odd = self._odd()

        def read(link: Link) -> tuple[Table, Sequence[Row], Key | None]:
            link.script(ALL_ROWS)
            hold(link, table, self._seconds)
            shape = self._shapes.shape(link, table)
            shape.need_key()
            return (shape.table, *stretch(link, shape, odd, after, span, max(limit, 1), self._take(shape)))

        (shape, rows, next_key), offset = self.exact(read)
        return Chunk(shape, rows, offset, next_key)


def snapshot_of(link: Link) -> str:
    """What the transaction sees: one snapshot from its first statement to its last."""
    ((snapshot, is_standby),) = link.run("SELECT pg_current_snapshot()::text, pg_is_in_recovery()").texts()
    link.refuse_standby(is_standby)
    return str(snapshot)
