"""Dependencies: what a query reads, as values. Per place where a table stands in it: columns, and a row condition.

A change matters to a place unless its condition is not true of both images, or both images hold the very same
in the columns. A condition is necessary, never sufficient: a part that is not understood is left out.
"""

from __future__ import annotations

import msgspec

from headwater.model.literal import Value


class Param(msgspec.Struct, frozen=True, tag="param"):
    """An argument of the query, by its name in `Analysis.parameters`."""

    name: str


class Const(msgspec.Struct, frozen=True, tag="const"):
    """A value that stands in the query."""

    value: Value


Operand = Param | Const

# What a test asks of a column. NULL makes all of them unknown, but `is` and `is_not`, which call NULL equal to NULL.
OPS = ("eq", "ne", "lt", "le", "gt", "ge", "is", "is_not", "in", "not_in", "between", "not_between")


class Test(msgspec.Struct, frozen=True, tag="test"):
    """One column against operands, compared as the database compares that column with a bare value."""

    column: str
    op: str  # of OPS
    operands: tuple[Operand, ...]

    __test__ = False  # pytest would collect it


class AllOf(msgspec.Struct, frozen=True, tag="all"):
    """Every part is true; true without parts."""

    parts: tuple[Condition, ...] = ()


class AnyOf(msgspec.Struct, frozen=True, tag="any"):
    """At least one part is true; never true without parts."""

    parts: tuple[Condition, ...] = ()


Condition = Test | AllOf | AnyOf
ALWAYS = AllOf()


class Dependency(msgspec.Struct, frozen=True):
    """One place of a table in a query: it sees the rows of which `condition` is true, in these columns alone."""

    table: str
    columns: frozenset[str] | None = None  # None: all of them, those of tomorrow too. Those of `condition` are inside.
    condition: Condition = ALWAYS


MAX_KEYS = 10_000  # of one guard; where there are more there is none


class KeyGuard(msgspec.Struct, frozen=True):
    """Rows of a place matter only where `column` holds one of the keys that `sql` selects.

    It holds for as long as nothing relevant to the places that `sql` reads (`sees`) was changed.
    """

    place: int  # in Analysis.dependencies
    column: str
    sql: str  # of one column, with the parameters of the query
    sees: tuple[int, ...]


class TopGuard(msgspec.Struct, frozen=True):
    """Of a full window, only rows that sort at or before its last row matter.

    `order` are columns of the one table, True where they descend; `last` are their places in the answer.
    """

    place: int
    order: tuple[tuple[str, bool], ...]
    last: tuple[int, ...]
    rows: Operand  # how many rows make the window full


Guard = KeyGuard | TopGuard


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one read-only statement, before it runs. Made by `Source.analyse`; holds for one epoch."""

    sql: str  # what is run: the caller's statement, its order made total where that can be done
    parameters: tuple[str, ...]  # "1", "2" … for positional ones, else their names without the mark, in order
    columns: tuple[str, ...]  # of the answer
    tables: tuple[str, ...]  # base tables, sorted; views and WITH names are seen through
    objects: tuple[str, ...]  # all that is named: tables and views, sorted
    dependencies: tuple[Dependency, ...]
    beyond: tuple[str, ...] = ()  # what else may be read of what is stored: no table scope holds it unless it names it
    calls: tuple[str, ...] = ()  # functions in the text itself that may do anything each time they are called
    epoch: str  # of the definitions of all that is named: another one is another query
    volatile: tuple[str, ...] = ()  # why no answer of it may be kept; usually none
    unseen: tuple[str, ...] = ()  # of these reasons those that name something whose changes no log has
    doubts: tuple[str, ...] = ()  # why whole tables are depended on where that is so
    is_total: bool = False  # two runs over the same rows give the same bytes
    key: tuple[int, ...] | None = None  # places in the answer that tell its rows apart, if there are such
    guards: tuple[Guard, ...] = ()

    @property
    def is_cacheable(self) -> bool:
        """Whether an answer may have a tag."""
        return not self.volatile
