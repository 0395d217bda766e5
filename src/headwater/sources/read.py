"""Read access to a source: tables, rows in key order, samples and row conditions. Used by feeds, ranges and queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from headwater.model.keys.key import Span
from headwater.model.table import Key, Row, Table


class Look(msgspec.Struct, frozen=True):
    """The head of a database: its newest offset and a number that moves with its schema, both of one moment."""

    head: int
    schema: int
    settled: bool = True  # rows cannot have changed without an offset


class Chunk(msgspec.Struct, frozen=True):
    """One stretch of a table read in one short read transaction. `next_key` is None at the end."""

    table: Table
    rows: Sequence[Row]
    offset: int
    next_key: Key | None


class Point(msgspec.Struct, frozen=True):
    """One sampled row, and the part of its table that it represents."""

    place: bytes  # its key, written by `order`
    rows: float
    bytes: float


class Sample(msgspec.Struct, frozen=True):
    """Estimates of the size of a table and of the distribution of its keys.

    The points are in key order and represent the whole table; there are none where keys have no order here.
    """

    table: Table
    rows: int
    bytes: int
    points: tuple[Point, ...] = ()


class Pin(msgspec.Struct, frozen=True):
    """A row can satisfy the condition only if `column` holds one of `values`, written by `order`."""

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
        """Whether evaluating it costs about a microsecond a row, so that the event loop may do it."""
        ...

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether it is true (NULL is not true). Thread-safe."""
        ...


class Reader(Protocol):
    """Read tables in bulk. Every method is thread-safe."""

    def describe(self) -> dict[str, Table]:
        """Return the tables as they are now."""
        ...

    def head(self) -> int:
        """Return the offset the newest committed change has or will have. Cheap: one small read."""
        ...

    def wake(self) -> None:
        """End a `wait` of capture now; do nothing where nobody waits."""
        ...

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """Return at most `limit` rows in key order with keys after `after`, inside `span`."""
        ...

    def condition(self, table: Table, where: str) -> Condition:
        """Return the predicate `where` over rows of `table`, a shape of now or of any earlier version.

        InvalidRequest when it is not one predicate over these columns, NotSupported when it cannot be
        evaluated exactly (volatile functions, subqueries); both say why.
        """
        ...

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """Return how `columns` compare: equal values give equal bytes, those of the key in the order of `chunk`."""
        ...

    def status(self) -> dict[str, Any]:
        """Return numbers for the status page and metrics; under "tables" the names of the captured tables."""
        ...


class BulkReader(Reader, Protocol):
    """A database read by the bulk worker, a process of its own. Its chunks best have `chunk_rows`."""

    chunk_rows: int

    def shape(self, name: str, version: int | None = None) -> Table:
        """Return the table as it is now, or as it was at `version`; NotFound."""
        ...

    def close(self) -> None:
        """Release the database."""
        ...


class BulkAddress(msgspec.Struct, frozen=True):
    """Where the bulk worker finds a database."""

    kind: str  # its name in the registry
    address: str  # the file, or the connection string: it may contain a password, and is shown to nobody
    inode: int = 0  # of the file
    reader: str = ""  # connection string for callers' conditions, if it differs from `address`


class SnapshotPositions(Protocol):
    """The log offsets of read snapshots that other processes took."""

    def reading(self) -> AbstractContextManager[None]:
        """Hold what `exact` needs, around a read and the question about it, in one thread."""
        ...

    def exact(self, snapshot: str) -> int | None:
        """Return the offset up to which `snapshot` sees everything, and nothing after; None: read again."""
        ...


class ServerPositions(SnapshotPositions, Protocol):
    """What a reader in another process asks the server that captures the database."""

    def describe(self) -> dict[str, Table]:
        """Return the tables as they are now."""
        ...

    def head(self) -> int:
        """Return the newest offset."""
        ...


class PastShapes(Protocol):
    """The earlier shapes of tables, as a log keeps them."""

    def note(self, name: str) -> str:
        """Return the text kept under `name`, or ""."""
        ...

    def shape(self, name: str, version: int) -> Table | None:
        """Return a table as it was at `version`; None if no change has it."""
        ...


class Readable(Reader, Protocol):
    """A source as feeds, ranges and queries read it. Every method is thread-safe."""

    @property
    def snapshot_positions(self) -> SnapshotPositions | None:
        """The offsets of other processes' reads; None where each read carries its own offset."""
        ...

    def bulk_address(self) -> BulkAddress:
        """Return where the bulk worker finds the database; NotSupported where it cannot be read in bulk."""
        ...

    def look(self) -> Look:
        """Return the head of the database now. Cheap: one small read."""
        ...

    def glance(self) -> Look | None:
        """Return the same if it takes microseconds and waits for nobody, so that an event loop may ask; else None."""
        ...

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """Return one row by its key, with the table's shape and the offset of the read."""
        ...

    def sample(self, table: str, size: int) -> Sample:
        """Return about `size` rows, spread evenly over `table`, or all if it has fewer. Never a scan by OFFSET."""
        ...

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as `columns` of `table` would hold them: what an INSERT of them would read back.

        InvalidRequest where a column cannot hold such a value.
        """
        ...

    def remedy(self, table: str) -> str:
        """Return the SQL after which changes of `table` carry whole rows; "" where they do already."""
        ...

    def check_sql(self, role: str) -> None:
        """Raise Forbidden if callers in `role` may not send SQL text here."""
        ...
