"""Read-only SQL of callers on a source, and what its answers depend on. Used by queries."""

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

Args = Sequence[Value] | dict[str, Value]  # of a statement, by place or by name


class Read(msgspec.Struct, frozen=True):
    """Rows and the log offset that was current in the very read transaction that saw them."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    offset: int
    truncated: bool = False
    settled: bool = True  # rows cannot have changed without an offset
    keys: tuple[tuple[Row, ...] | None, ...] = ()  # by guard of the analysis, if the caller asked for them


class Queryable(Readable, Protocol):
    """A source that answers SQL. Every method is thread-safe."""

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden if callers in `role` may not send SQL here, or not this statement.

        Owners may send anything. Others send SELECT and DML: their SQL never changes the schema, and never runs with
        the rights of the source's own login.
        """
        ...

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Return whether the engine itself says that `sql` writes nothing."""
        ...

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> Read:
        """Run one read-only statement for a caller in this role."""
        ...

    def text(self, query: Query) -> str:
        """Return a query of the JSON form as SQL of this database; the same for the same query."""
        ...

    def analyse(self, sql: str) -> Analysis:
        """Return what one read-only statement depends on.

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
