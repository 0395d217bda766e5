"""What a source promises: a database we can describe, follow, read, and, by request, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from headwater.model.change import Transaction
from headwater.model.dependencies.dependency import Analysis
from headwater.model.keys.key import Span
from headwater.model.literal import Value
from headwater.model.predicate import Expr
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.model.table import Key, Row, Table

T = TypeVar("T")
Args = Sequence[Value] | dict[str, Value]  # of a statement, by place or by name
STOPPED = "stopped"  # a note: in order, and everything that was told is in the log


class Result(msgspec.Struct, frozen=True):
    """Rows of a statement, or how many it touched."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    affected: int = 0
    last_insert_id: int = 0
    truncated: bool = False  # there were more rows than one answer holds


class Read(msgspec.Struct, frozen=True):
    """Rows and the log offset that was current in the very read transaction that saw them."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    offset: int
    truncated: bool = False
    settled: bool = True  # rows cannot have changed without an offset
    keys: tuple[tuple[Row, ...] | None, ...] = ()  # by guard of the analysis, where they were asked for


class Look(msgspec.Struct, frozen=True):
    """Where a database stands: the newest offset, and a number that moves with its schema, both of one moment."""

    head: int
    schema: int
    settled: bool = True  # as in Read


class Chunk(msgspec.Struct, frozen=True):
    """One stretch of a table read in one short read transaction. `next_key` is None at the end."""

    table: Table
    rows: Sequence[Row]
    offset: int
    next_key: Key | None


class Point(msgspec.Struct, frozen=True):
    """A row that was looked at, and how much of its table it stands for."""

    place: bytes  # its key, written by `Source.order`
    rows: float
    bytes: float


class Sample(msgspec.Struct, frozen=True):
    """How much a table holds, and where. Estimates, all of them.

    The points are in order and stand for the whole table; there are none where keys have no order here.
    """

    table: Table
    rows: int
    bytes: int
    points: tuple[Point, ...] = ()


class Written(msgspec.Struct, Generic[T], frozen=True):
    """What a write returned, and where it stands in the log."""

    value: T
    offset: int  # of its last change; the head if it changed nothing
    tables: dict[str, int] = {}  # table name to the offset of its last change by this write


class Session(Protocol):
    """The database inside one write transaction. Raises our errors only; a raise rolls the work back."""

    def describe(self, table: str) -> Table:
        """The table's shape; NotFound if there is none."""
        ...

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        """Whole rows matching `where`, in key order."""
        ...

    def insert(
        self, table: str, rows: Sequence[dict[str, Value]], *, returning: bool = True
    ) -> tuple[Result, list[Row]]:
        """Insert all or none; the second value holds the stored rows, if asked for."""
        ...

    def update(self, table: str, where: Expr | None, values: dict[str, Value], limit: int | None) -> Result:
        """Set `values` on matching rows, all or none."""
        ...

    def delete(self, table: str, where: Expr | None, limit: int | None) -> Result:
        """Delete matching rows, all or none."""
        ...

    def execute(self, sql: str, args: Args = ()) -> Result:
        """One statement, data or schema; transaction control and our own tables are refused."""
        ...

    def is_read_only(self, sql: str) -> bool:
        """Whether the engine itself says that `sql` writes nothing."""
        ...

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        """Create `table` by kinds; False if it was there."""
        ...

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        """Drop `table`; False if it was not there."""
        ...


class Pin(msgspec.Struct, frozen=True):
    """A row can satisfy the condition only if `column` holds one of `values`, written by `Source.order`."""

    column: str
    values: frozenset[bytes]


class Condition(Protocol):
    """A SQL predicate on one row of one table shape, true exactly where the database itself says true."""

    @property
    def pin(self) -> Pin | None:
        """A necessary equality, by which many conditions are indexed; None when there is none."""
        ...

    @property
    def calls(self) -> tuple[str, ...]:
        """Functions in it that may read more than the row, whatever they claim."""
        ...

    @property
    def is_cheap(self) -> bool:
        """Whether asking costs about a microsecond a row, so that whoever serves others may do it."""
        ...

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Whether it is true for each of `rows` (NULL is not true). From any thread."""
        ...


Work = Callable[[Session], T]  # may be run again from the start: it must not touch anything outside


class Tx(Protocol):
    """An interactive transaction. Expires by itself (`tx_expired`)."""

    id: str
    read_only: bool

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by whatever cause."""
        ...

    def run(self, work: Work[T]) -> Future[T]:
        """Run `work` inside; its own failure undoes only itself."""
        ...

    def commit(self) -> Future[Written[None]]:
        """Make it durable."""
        ...

    def rollback(self) -> Future[None]:
        """Forget it."""
        ...


class Notes(Protocol):
    """Small durable texts kept with the log, by which a source recognises its own history."""

    def note(self, name: str) -> str:
        """The text kept under `name`, or ""."""
        ...

    def set_notes(self, **notes: str) -> None:
        """Keep these durably, in one step."""
        ...


class Reader(Protocol):
    """What reading a table in bulk needs of a database. From any thread."""

    def describe(self) -> dict[str, Table]:
        """See Source."""
        ...

    def head(self) -> int:
        """See Source."""
        ...

    def wake(self) -> None:
        """See Source; nothing happens where nobody waits."""
        ...

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """See Source."""
        ...

    def condition(self, table: Table, where: str) -> Condition:
        """See Source."""
        ...

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """See Source."""
        ...

    def status(self) -> dict[str, Any]:
        """See Source; under "tables" the names of those that are captured."""
        ...


class SideReader(Reader, Protocol):
    """A database read by a process beside the one that captures it. Its chunks best have `chunk_rows`."""

    chunk_rows: int

    def shape(self, name: str, version: int | None = None) -> Table:
        """The table as it is now, or as it was at `version`; NotFound."""
        ...

    def close(self) -> None:
        """Release the database."""
        ...


@runtime_checkable
class Placing(Protocol):
    """A source that tells of reads, made by anybody, where they stand in the log."""

    address: str  # where others connect to; it may hold a password
    reader_address: str  # connection string for evaluating callers' conditions

    def reading(self) -> AbstractContextManager[None]:
        """Around a read and the question about it, in one thread."""
        ...

    def exact(self, snapshot: str) -> int | None:
        """The offset up to which it sees everything, and nothing after; None where there is none: read again."""
        ...


@runtime_checkable
class Sparing(Protocol):
    """A source that may leave values out of the rows it tells: `UNAVAILABLE` stands there."""

    def remedy(self, table: str) -> str:
        """The SQL after which whole rows of `table` are told as they are after each change; "" where they are now."""
        ...


class Source(Protocol):
    """One database. Every method may be called from any thread unless it says otherwise."""

    name: str
    beginning: int  # once `prove` said "": the offset after which a new log begins, above what a lost one had

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Why the log (its generation, its newest offset) is not this database's history; "" if it is.

        `read(after)` gives the log's own transactions, for comparing what both sides still hold.
        """
        ...

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation at offset `first`, or above all it gave out; the offset its next change takes."""
        ...

    def reopen(self) -> None:
        """Connect anew: what stands behind the name is not what it was."""
        ...

    def describe(self) -> dict[str, Table]:
        """The tables as they are now."""
        ...

    def head(self) -> int:
        """The offset the newest committed change has or will have. Cheap: one small read."""
        ...

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Committed transactions after offset `after`, in order, up to the head of the call; then stops.

        Large ones come in parts. `ts` is 0: capture stamps it. Called from the capture thread only.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Sleep until something may have been committed, `wake` is called, or `timeout` passes."""
        ...

    def wake(self) -> None:
        """End a `wait` now."""
        ...

    def acknowledge(self, upto: int) -> None:
        """Everything at or below `upto` is durable in the log: the source may forget it, when it suits it."""
        ...

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden if callers in `role` may not send SQL here, or not this statement.

        Owners may send anything. Others send SELECT and DML: their SQL never changes the schema, and never runs with
        the rights of the source's own login.
        """
        ...

    def release(self, reason: str) -> None:
        """Stop following because the log is lost, and acknowledge no more writes that nobody could follow."""
        ...

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> Read:
        """Run one read-only statement for a caller in this role."""
        ...

    def look(self) -> Look:
        """Where the database stands now. Cheap: one small read."""
        ...

    def glance(self) -> Look | None:
        """The same, if it takes microseconds and waits for nobody, so that an event loop may ask; else None."""
        ...

    def text(self, query: Query) -> str:
        """A query of the JSON form as SQL of this database; the same for the same query."""
        ...

    def analyse(self, sql: str) -> Analysis:
        """What one read-only statement depends on.

        InvalidRequest for what writes, is several statements, or cannot be prepared. Whatever is not understood
        makes the answer wider (whole tables) or uncacheable, never an error.
        """
        ...

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> Read | None:
        """Run `analysis.sql` with its parameters by name; None where the epoch is another by now.

        With `guards` also what each of them selects, of the same moment and at most MAX_KEYS rows; None for one that
        has no statement, selects more, fails, or takes too long.
        """
        ...

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Whether the engine itself says that `sql` writes nothing."""
        ...

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """One row by its key, with the table's shape and the offset of the read."""
        ...

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """At most `limit` rows in key order with keys after `after`, inside `span`."""
        ...

    def sample(self, table: str, size: int) -> Sample:
        """About `size` rows, spread evenly over `table`, or all if it has fewer. Never a scan by OFFSET."""
        ...

    def condition(self, table: Table, where: str) -> Condition:
        """The predicate `where` over rows of `table`, a shape of now or of any earlier version.

        InvalidRequest when it is not one predicate over these columns, NotSupported when it cannot be
        evaluated exactly (volatile functions, subqueries); both say why.
        """
        ...

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """How it compares `columns`: equal values give equal bytes, those of the key in the order of `chunk`."""
        ...

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """`values` as `columns` of `table` would hold them: what an INSERT of them would read back.

        InvalidRequest where a column cannot hold such a value.
        """
        ...

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[Written[T]]:
        """Run `work` of a caller in this role in a transaction of its own; done when durable. Many are committed
        together, and callers take turns."""
        ...

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> Tx:
        """Open an interactive transaction for a caller in this role."""
        ...

    def status(self) -> dict[str, Any]:
        """Numbers for the status page and metrics."""
        ...

    def finish_writes(self) -> None:
        """Take no more writes; return when the queued ones are durable."""
        ...

    def close(self) -> None:
        """Finish queued writes and release the database."""
        ...
