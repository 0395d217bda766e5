"""Queries as values: the checked content of their JSON form, from which a source generates its own SQL."""

from __future__ import annotations

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.predicate import Expr, QueryExpression

MAX_TEXT = 100_000  # characters of the SQL of a query


def check_length(count: int) -> None:
    """Raise InvalidRequest if the SQL of a query has, or will have, `count` characters and these are too many."""
    if count > MAX_TEXT:
        raise InvalidRequest(f"the query exceeds {MAX_TEXT} characters", hint="Bind long values as arguments.")


class Param(QueryExpression, frozen=True):
    """The argument of the query at index `place`, counted from 0."""

    place: int


class Star(QueryExpression, frozen=True):
    """All columns, or all of one table of the query. Only in a projection."""

    table: str | None = None


class Aggregate(QueryExpression, frozen=True):
    """An aggregate function. Without arguments it counts rows."""

    name: str
    args: tuple[Expr, ...]
    distinct: bool = False


class Subquery(QueryExpression, frozen=True):
    """The single value of a query, NULL if it has no row."""

    query: Query


class Exists(QueryExpression, frozen=True):
    """The test that a query has a row, or if `negated` that it has none."""

    query: Query
    negated: bool = False


class InQuery(QueryExpression, frozen=True):
    """The test that `expr` is among the rows of a query of one column."""

    expr: Expr
    query: Query


class NamedTable(msgspec.Struct, frozen=True):
    """A table, a view or a WITH name, with an optional alias."""

    table: str
    alias: str | None = None


class Derived(msgspec.Struct, frozen=True):
    """The rows of a query as a table."""

    query: Query
    alias: str


class Join(msgspec.Struct, frozen=True):
    """A join of two tables: `on` a condition, by the columns `using`, or (cross) of all pairs of rows."""

    kind: str  # of JOINS
    left: TableRef
    right: TableRef
    on: Expr | None = None
    using: tuple[str, ...] = ()


TableRef = NamedTable | Derived | Join
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
    """A set operation on two bodies; `all` keeps duplicate rows."""

    kind: str  # of SET_OPS
    all: bool
    left: Body
    right: Body


Body = Select | SetOp
SET_OPS = ("union", "intersect", "except")


class Order(msgspec.Struct, frozen=True):
    """One expression of ORDER BY."""

    expr: Expr
    descending: bool = False


class With(msgspec.Struct, frozen=True):
    """A common table expression: a query with a name."""

    name: str
    query: Query


class Query(msgspec.Struct, frozen=True):
    """A complete query, or a subquery."""

    body: Body
    with_: tuple[With, ...] = ()
    order_by: tuple[Order, ...] = ()
    limit: Expr | None = None  # a Literal or a Param
    offset: Expr | None = None
    parameters: tuple[str, ...] = ()  # names of its arguments, "1" first; of the outermost query only


class AnswerHash(msgspec.Struct, frozen=True):
    """The hash of a query result, and the offset at which the result was read."""

    offset: int
    digest: bytes
