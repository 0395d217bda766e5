"""Writes to a source: single-call transactions, and interactive transactions. Used by queries."""

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
    """Rows of a statement, or the number of rows it affected."""

    columns: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    affected: int = 0
    last_insert_id: int = 0
    truncated: bool = False  # there were more rows than one answer may hold


class WriteResult(msgspec.Struct, Generic[T], frozen=True):
    """The value that a write returned, and its offsets in the log."""

    value: T
    offset: int  # offset of its last change; the head if it changed nothing
    tables: dict[str, int] = {}  # table name to the offset of its last change by this write


class Session(Protocol):
    """The database inside one write transaction. Raises only our errors; an exception rolls the work back."""

    def describe(self, table: str) -> Table:
        """Return the table's shape; NotFound if there is none."""

    def select(self, table: str, where: Expr | None, limit: int | None = None) -> list[Row]:
        """Return whole rows matching `where`, in key order."""

    def insert(
        self, table: str, rows: Sequence[dict[str, Value]], *, returning: bool = True
    ) -> tuple[Result, list[Row]]:
        """Insert all rows or none; the second value holds the stored rows, if `returning`."""

    def update(self, table: str, where: Expr | None, values: dict[str, Value], limit: int | None) -> Result:
        """Set `values` on matching rows, at most `limit`, the first in key order; all or none."""

    def delete(self, table: str, where: Expr | None, limit: int | None) -> Result:
        """Delete matching rows, at most `limit`, the first in key order; all or none."""

    def execute(self, sql: str, args: Args = ()) -> Result:
        """Run one statement, data or schema; transaction control and our own tables are refused."""

    def is_read_only(self, sql: str) -> bool:
        """Return whether the engine itself reports that `sql` writes nothing."""

    def create_table(self, table: Table, *, if_not_exists: bool = False) -> bool:
        """Create `table` and return True. If it exists: return False with `if_not_exists`, else raise Conflict."""

    def drop_table(self, table: str, *, if_exists: bool = False) -> bool:
        """Drop `table` and return True. If it does not exist: return False with `if_exists`, else raise NotFound."""


Work = Callable[[Session], T]  # may run again from the start, so it must have no other effects


class Tx(Protocol):
    """An interactive transaction, which expires after a time limit (`tx_expired`)."""

    id: str
    read_only: bool

    @property
    def is_over(self) -> bool:
        """Return whether the transaction has ended, for any reason."""

    def run(self, work: Work[T]) -> Future[T]:
        """Queue `work` as the next step of the transaction; its failure undoes only this step."""

    def commit(self) -> Future[WriteResult[None]]:
        """Commit the transaction after the queued steps."""

    def rollback(self) -> Future[None]:
        """Roll back the transaction after the queued steps."""


class Writable(Protocol):
    """A source that accepts writes. Every method is thread-safe."""

    def write(self, work: Work[T], *, role: str = OWNER, caller: str = "") -> Future[WriteResult[T]]:
        """Run `work` of a caller in this role in its own transaction; the future is done when the write is durable.

        Many transactions are committed together, and callers take turns."""

    def begin(self, *, read_only: bool = False, role: str = OWNER) -> Tx:
        """Open an interactive transaction for a caller in this role."""

    def finish_writes(self) -> None:
        """Expire open transactions, accept no more writes; return when the queued writes are durable or have failed."""
