"""Writes to a source: transactions of one call, and interactive ones. Used by queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import msgspec

from headwater.model.literal import Value
from headwater.model.predicate import Expr
from headwater.model.principal import OWNER
from headwater.model.table import Row, Table
from headwater.sources.query import Args

T = TypeVar("T")


class Result(msgspec.Struct, frozen=True):
    """Rows of a statement, or how many it touched."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    affected: int = 0
    last_insert_id: int = 0
    truncated: bool = False  # there were more rows than one answer holds


class Written(msgspec.Struct, Generic[T], frozen=True):
    """The value a write returned, and its offsets in the log."""

    value: T
    offset: int  # of its last change; the head if it changed nothing
    tables: dict[str, int] = {}  # table name to the offset of its last change by this write


class Session(Protocol):
    """The database inside one write transaction. Raises our errors only; a raise rolls the work back."""

    def describe(self, table: str) -> Table:
        """Return the table's shape; NotFound if there is none."""
        ...

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        """Return whole rows matching `where`, in key order."""
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
        """Run one statement, data or schema; transaction control and our own tables are refused."""
        ...

    def is_read_only(self, sql: str) -> bool:
        """Return whether the engine itself says that `sql` writes nothing."""
        ...

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        """Create `table` by kinds; False if it was there."""
        ...

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        """Drop `table`; False if it was not there."""
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
        """Roll it back."""
        ...


class Writable(Protocol):
    """A source that takes writes. Every method is thread-safe."""

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[Written[T]]:
        """Run `work` of a caller in this role in a transaction of its own; done when durable. Many are committed
        together, and callers take turns."""
        ...

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> Tx:
        """Open an interactive transaction for a caller in this role."""
        ...

    def finish_writes(self) -> None:
        """Take no more writes; return when the queued ones are durable."""
        ...
