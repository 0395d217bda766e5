"""Read-only SQL of callers on a source, and the dependencies of its results. Used by queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headwater.model.dependencies.dependency import Analysis
from headwater.model.literal import Value
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.model.table import Row
from headwater.sources.read import Readable

Args = Sequence[Value] | dict[str, Value]  # arguments of a statement, by position or by name


class ReadResult(msgspec.Struct, frozen=True):
    """Rows, and the log offset that was current in the read transaction that saw them."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    offset: int
    truncated: bool = False
    settled: bool = True  # rows cannot have changed without an offset
    keys: tuple[tuple[Row, ...] | None, ...] = ()  # rows of each guard of the analysis, if the caller requested them


class Queryable(Readable, Protocol):
    """A source that answers SQL. Every method is thread-safe."""

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden if callers in `role` may not send SQL here, or not this statement.

        Owners may send anything. Others send SELECT and DML: their SQL never changes the schema, and never runs with
        the rights of the source's own login.
        """

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Return whether the engine itself reports that `sql` writes nothing."""

    def stop_statements(self) -> None:
        """Cancel the running statements of callers, because the server stops; later statements may fail."""

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> ReadResult:
        """Run one read-only statement for a caller in this role."""

    def text(self, query: Query) -> str:
        """Return a query of the JSON form as SQL of this database; equal queries give equal texts."""

    def analyse(self, sql: str) -> Analysis:
        """Return the dependencies of one read-only statement.

        InvalidRequest for a statement that writes, cannot be prepared, or is several statements. A part that is not
        understood makes the dependencies wider (whole tables) or the result uncacheable, and is never an error.
        """

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> ReadResult | None:
        """Run `analysis.sql` with its parameters by name; return None if the epoch has changed since.

        With `guards`, also return the rows that each guard selects in the same transaction; None for a guard that has
        no statement, selects more than MAX_KEYS rows, fails, or takes too long.
        """
