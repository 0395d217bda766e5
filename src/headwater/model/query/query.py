"""A query as values: what its JSON form says, checked, without any SQL text. A source writes it in its own SQL."""

from __future__ import annotations

import msgspec

from headwater.model.predicate import Expr, Queried


class Param(Queried, frozen=True):
    """The argument in this place, counted from 0."""

    place: int


class Star(Queried, frozen=True):
    """All columns, or all of one table of the query. Only in a projection."""

    table: str | None = None


class Aggregate(Queried, frozen=True):
    """One value of many rows. Without arguments it counts rows."""

    name: str
    args: tuple[Expr, ...]
    distinct: bool = False


class Subquery(Queried, frozen=True):
    """The one value of a query, NULL where it has no row."""

    query: Query


class Exists(Queried, frozen=True):
    """Whether a query has a row, or has none."""

    query: Query
    negated: bool = False


class InQuery(Queried, frozen=True):
    """Whether `expr` is among the rows of a query of one column."""

    expr: Expr
    query: Query


class Named(msgspec.Struct, frozen=True):
    """A table, a view or a WITH name, under a name of its own if it has one."""

    table: str
    alias: str | None = None


class Derived(msgspec.Struct, frozen=True):
    """The rows of a query as a table."""

    query: Query
    alias: str


class Join(msgspec.Struct, frozen=True):
    """Two tables joined: `on` a condition, by the columns `using`, or (cross) each row with each."""

    kind: str  # of JOINS
    left: TableRef
    right: TableRef
    on: Expr | None = None
    using: tuple[str, ...] = ()


TableRef = Named | Derived | Join
JOINS = ("inner", "left", "right", "full", "cross")


class Item(msgspec.Struct, frozen=True):
    """One column of an answer."""

    expr: Expr
    alias: str | None = None


class Select(msgspec.Struct, frozen=True):
    """Rows of tables: filtered, grouped, projected."""

    items: tuple[Item, ...]
    tables: tuple[TableRef, ...] = ()
    where: Expr | None = None
    group_by: tuple[Expr, ...] = ()
    having: Expr | None = None
    distinct: bool = False


class SetOp(msgspec.Struct, frozen=True):
    """Two bodies as one; `all` keeps equal rows."""

    kind: str  # of SET_OPS
    all: bool
    left: Body
    right: Body


Body = Select | SetOp
SET_OPS = ("union", "intersect", "except")


class Order(msgspec.Struct, frozen=True):
    """One thing to sort by."""

    expr: Expr
    descending: bool = False


class With(msgspec.Struct, frozen=True):
    """A query that the rest calls by a name."""

    name: str
    query: Query


class Query(msgspec.Struct, frozen=True):
    """A whole query, or one inside another."""

    body: Body
    with_: tuple[With, ...] = ()
    order_by: tuple[Order, ...] = ()
    limit: Expr | None = None  # a Literal or a Param
    offset: Expr | None = None
    parameters: tuple[str, ...] = ()  # names of its arguments, "1" first; of the outermost query only
