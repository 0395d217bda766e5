"""Dependencies of a query: for each reference to a table, the columns that it reads, and a condition on its rows.

A change is irrelevant to a reference if the condition is true of neither image, or if both images are identical in
the columns. A condition is necessary, never sufficient: a part that the analysis cannot interpret is dropped.
"""

from __future__ import annotations

import msgspec

from headwater.model.literal import Value


class Param(msgspec.Struct, frozen=True, tag="param"):
    """An argument of the query, by its name in `Analysis.parameters`."""

    name: str


class Const(msgspec.Struct, frozen=True, tag="const"):
    """A constant in the query."""

    value: Value


Operand = Param | Const


class Comparison(msgspec.Struct, frozen=True, tag="test"):
    """A comparison of one column with operands, as the database compares that column with a plain value."""

    column: str
    # One of eq, ne, lt, le, gt, ge, is, is_not, in, not_in, between, not_between. NULL makes all of them unknown except
    # `is` and `is_not`, for which NULL equals NULL.
    op: str
    operands: tuple[Operand, ...]

    __test__ = False  # pytest would collect it


class AllOf(msgspec.Struct, frozen=True, tag="all"):
    """The condition that every part is true; true without parts."""

    parts: tuple[Condition, ...] = ()


class AnyOf(msgspec.Struct, frozen=True, tag="any"):
    """The condition that at least one part is true; never true without parts."""

    parts: tuple[Condition, ...] = ()


Condition = Comparison | AllOf | AnyOf
ALWAYS = AllOf()


def columns_of(condition: Condition) -> set[str]:
    """Return the columns that a condition tests."""
    if isinstance(condition, Comparison):
        return {condition.column}
    return set[str]().union(*map(columns_of, condition.parts))


class Dependency(msgspec.Struct, frozen=True):
    """One reference to a table in a query: it reads only these columns, of the rows that fulfil `condition`."""

    table: str
    columns: frozenset[str] | None = None  # including those of `condition`; None: all, also columns added later
    condition: Condition = ALWAYS


MAX_KEYS = 10_000  # of one guard; with more keys no guard is recorded


class KeyGuard(msgspec.Struct, frozen=True):
    """Rows of the table reference `place` are relevant only if `column` has one of the keys that `sql` selects.

    The guard is valid until a change is relevant to the table references that `sql` reads (`sees`).
    """

    place: int  # index of a table reference in Analysis.dependencies
    column: str
    sql: str  # selects one column, with the parameters of the query
    sees: tuple[int, ...]


class TopGuard(msgspec.Struct, frozen=True):
    """If the answer fills its LIMIT, only rows of a reference that sort at or before its last row are relevant.

    `order` has columns of that table, True if they sort descending; `last` their indexes in the answer's columns.
    """

    place: int
    order: tuple[tuple[str, bool], ...]
    last: tuple[int, ...]
    rows: Operand  # the LIMIT


Guard = KeyGuard | TopGuard


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `Source.analyse` for one read-only statement that has not run; valid for one epoch."""

    sql: str  # the statement to run: the caller's, with its order made total if possible
    parameters: tuple[str, ...]  # "1", "2" … for positional ones, else their names without the mark, in order
    columns: tuple[str, ...]  # of the answer
    tables: tuple[str, ...]  # base tables, sorted; views and WITH names are resolved to their tables
    objects: tuple[str, ...]  # all tables and views in the statement, sorted
    dependencies: tuple[Dependency, ...]
    beyond: tuple[str, ...] = ()  # other stored objects that may be read; a table scope must name them, too
    calls: tuple[str, ...] = ()  # functions in the text itself that may have side effects
    epoch: str  # identifies the definitions of all objects: in another epoch it is another query
    volatile: tuple[str, ...] = ()  # reasons why answers are not cacheable; usually none
    unseen: tuple[str, ...] = ()  # the reasons in `volatile` that are data whose changes are not in the log
    doubts: tuple[str, ...] = ()  # reasons why the query depends on whole tables, if it does
    is_total: bool = False  # two executions over the same rows return the same bytes
    key: tuple[int, ...] | None = None  # indexes of the answer's columns that identify its rows; None if none do
    guards: tuple[Guard, ...] = ()

    @property
    def is_cacheable(self) -> bool:
        """Return whether answers may have an ETag: nothing makes them volatile."""
        return not self.volatile
