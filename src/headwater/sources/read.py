"""Read access to a source: tables, rows in key order, samples and row conditions. Used by feeds, ranges and queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import msgspec

from headwater.errors import Forbidden, HeadwaterError
from headwater.model.keys.key import Span
from headwater.model.table import Key, Row, Table


class SourceHead(msgspec.Struct, frozen=True):
    """The head of a database: its newest offset and a number that changes with its schema, read at the same time."""

    head: int
    schema: int
    settled: bool = True  # rows cannot have changed without an offset


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive rows of a table from one short read. `next_key` is the key to read on after; None at the end."""

    table: Table
    rows: Sequence[Row]
    offset: int
    next_key: Key | None


class SamplePoint(msgspec.Struct, frozen=True):
    """One sampled row, and the part of its table that it represents."""

    place: bytes  # key of the row, encoded by `order`
    rows: float
    bytes: float


class Sample(msgspec.Struct, frozen=True):
    """Estimates of the size of a table and of the distribution of its keys.

    The points are in key order and represent the whole table; there are none if the order of keys is unknown here.
    """

    table: Table
    rows: int
    bytes: int
    points: tuple[SamplePoint, ...] = ()


class Pin(msgspec.Struct, frozen=True):
    """A necessary condition: `column` holds one of `values`, encoded by `order`."""

    column: str
    values: frozenset[bytes]


class Condition(Protocol):
    """A SQL predicate on one row of one table shape, true exactly where the database evaluates it to true."""

    @property
    def pin(self) -> Pin | None:
        """Return a necessary equality, by which many conditions can be indexed; None if there is none."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the functions in the condition that may read more than the row, even if declared otherwise."""

    @property
    def is_cheap(self) -> bool:
        """Return whether evaluation takes about a microsecond per row, so that it may run on the event loop."""

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether the condition is true (NULL is not true). Thread-safe."""


class CompiledFilter(Protocol):
    """A filter that is compiled for one table shape."""

    @property
    def calls(self) -> tuple[str, ...]:
        """Return the functions in the filter that may read more than the row."""


C = TypeVar("C", bound=CompiledFilter)


def permitted_filter(compile_filter: Callable[[], C], *, is_restricted: bool) -> C:
    """Return the filter that `compile_filter` makes; Forbidden if it may read more than its caller may see.

    Callers that are restricted to some tables may not call functions or operators of users. The error is the same if
    such a function does not exist: the caller must not learn which functions exist.
    """
    try:
        found = compile_filter()
    except HeadwaterError as error:
        if error.depends_on_functions and is_restricted:
            raise _calls_forbidden() from None
        raise
    if found.calls and is_restricted:
        raise _calls_forbidden()
    return found


def _calls_forbidden() -> Forbidden:
    return Forbidden(
        "a filter with a function or an operator that is not PostgreSQL's own, or not for these arguments, needs a "
        "credential for the whole database",
        hint="Filter by columns and PostgreSQL's own functions and operators; check the types of their arguments.",
    )


class Reader(Protocol):
    """Bulk read access to tables. Every method is thread-safe."""

    def describe(self) -> dict[str, Table]:
        """Return the tables as they are now."""

    def head(self) -> int:
        """Return the offset that the newest committed change has or will have; may wait a second for capture."""

    def wake(self) -> None:
        """End a `wait` of capture now; do nothing if capture is not waiting."""

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """Return at most `limit` rows in key order with keys after `after`, inside `span`."""

    def condition(self, table: Table, where: str) -> Condition:
        """Return the predicate `where` over rows of `table`, which may be a current or an earlier shape.

        InvalidRequest if it is not one predicate over these columns, NotSupported if it cannot be evaluated
        exactly (volatile functions, subqueries); both name the reason.
        """

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """Return an encoder for `columns`: equal values give equal bytes, and keys sort in the order of `chunk`."""

    def status(self) -> dict[str, Any]:
        """Return numbers for the status page and metrics; under "tables" the names of the captured tables."""


class BulkReader(Reader, Protocol):
    """A database as the separate bulk worker process reads it. `chunk_rows` is the best size of a chunk."""

    chunk_rows: int

    def shape(self, name: str, version: int | None = None) -> Table:
        """Return the table as it is now, or as it was at `version`; NotFound if there is none."""

    def close(self) -> None:
        """Close the connections to the database."""


class BulkAddress(msgspec.Struct, frozen=True):
    """Address at which the bulk worker finds a database."""

    kind: str  # name of its kind in the registry
    address: str  # the file or the connection string, which may contain a password and must never be shown
    inode: int = 0  # inode of the file
    reader: str = ""  # connection string for callers' conditions, if it differs from `address`


class SnapshotPositions(Protocol):
    """Log offsets of read snapshots that other processes took."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context around a read and its call of `exact`, in one thread, that keeps the state for `exact`."""

    def exact(self, snapshot: str) -> int | None:
        """Return the offset up to which `snapshot` sees all changes, and none after; None: the caller must retry."""


class ServerPositions(SnapshotPositions, Protocol):
    """Requests of a reader in another process to the server that captures the database."""

    def describe(self) -> dict[str, Table]:
        """Return the tables as they are now."""

    def head(self) -> int:
        """Return the newest offset."""


class PastShapes(Protocol):
    """Earlier shapes of tables, as stored in a log."""

    def note(self, name: str) -> str:
        """Return the text stored under `name`, or ""."""

    def shape(self, name: str, version: int) -> Table | None:
        """Return a table as it was at `version`; None if no change has that version."""


class HeadSource(Protocol):
    """A database whose head can be read. Every method is thread-safe."""

    def read_head(self) -> SourceHead:
        """Return the current head of the database; may wait a second for capture."""

    def peek_head(self) -> SourceHead | None:
        """Return the current head if that takes microseconds and needs no waiting, as on an event loop; else None."""


class Readable(Reader, HeadSource, Protocol):
    """A source as feeds, ranges and queries read it. Every method is thread-safe."""

    @property
    def snapshot_positions(self) -> SnapshotPositions | None:
        """Return the offsets of other processes' reads; None if each read carries its own offset."""

    def bulk_address(self) -> BulkAddress:
        """Return the address at which the bulk worker opens the database; NotSupported if it has no bulk reads."""

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """Return one row by its key, with the table's shape and the offset of the read."""

    def sample(self, table: str, size: int) -> Sample:
        """Return about `size` rows, spread evenly over `table`, or all if there are fewer; never scans by OFFSET."""

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as `columns` of `table` would hold them: as read back after an INSERT.

        InvalidRequest if a column cannot hold such a value.
        """

    def remedy(self, table: str) -> str:
        """Return the SQL after which changes of `table` carry whole rows; "" if they carry whole rows already."""

    def check_sql(self, role: str) -> None:
        """Raise Forbidden if callers in `role` may not send SQL text here."""
