"""Rendering queries into SQLite's SQL. The text says all: values stand in it as constants, arguments as ?1, ?2 …"""

from __future__ import annotations

import math

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import Value
from headwater.model.predicate import Col, Expr, Queried
from headwater.model.query import (
    Aggregate,
    Body,
    Derived,
    Exists,
    InQuery,
    Item,
    Join,
    Named,
    Order,
    Param,
    Query,
    Select,
    SetOp,
    Star,
    Subquery,
    TableRef,
)
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.sql import Expressions
from headwater.sources.sqlite.values import Stored, to_stored

_JOINS = {"inner": "JOIN", "left": "LEFT JOIN", "right": "RIGHT JOIN", "full": "FULL JOIN", "cross": "CROSS JOIN"}


def query_sql(query: Query) -> str:
    """The one text of `query`; its parameters are numbered as `query.parameters` names them."""
    return _QueryText().query(query)


def constant(value: Stored) -> str:
    """A stored value as SQL text: the very same value, and, like a bound one, without affinity or collation."""
    match value:
        case None:
            return "NULL"
        case int():
            return str(int(value))
        case float():
            return _real(value)
        case bytes():
            return f"X'{value.hex()}'"
        case str():
            return _text(value)


def _real(value: float) -> str:
    if math.isnan(value):
        return "NULL"  # as SQLite stores it
    if math.isinf(value):
        return "9e999" if value > 0 else "-9e999"
    return repr(value)  # the shortest digits that give it back


def _text(value: str) -> str:
    # SQL text ends at a NUL. Not by CAST, which would give the value an affinity.
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\0")]
    return parts[0] if len(parts) == 1 else f"({' || char(0) || '.join(parts)})"


class _QueryText(Expressions):
    """Everything it writes is closed in itself, so that parts never run into each other."""

    def query(self, query: Query) -> str:
        withs = ", ".join(f"{ident(each.name)} AS ({self.query(each.query)})" for each in query.with_)
        return (
            (f"WITH {withs} " if withs else "")
            + self.body(query.body)
            + _listed(" ORDER BY ", [self.order(order) for order in query.order_by])
            + self.window(query)
        )

    def order(self, order: Order) -> str:
        return self.expr(order.expr) + (" DESC" if order.descending else "")

    def window(self, query: Query) -> str:
        if query.limit is None and query.offset is None:
            return ""
        limit = "-1" if query.limit is None else self.expr(query.limit)
        return f" LIMIT {limit}" + ("" if query.offset is None else f" OFFSET {self.expr(query.offset)}")

    def body(self, body: Body) -> str:
        return self.select(body) if isinstance(body, Select) else self.set_op(body)

    def set_op(self, body: SetOp) -> str:
        if body.all and body.kind != "union":
            raise NotSupported(
                f"SQLite has no {body.kind.upper()} ALL", hint="Leave `all` out: equal rows then come once."
            )
        # SQLite reads A op B op C from the left and knows no brackets here: what stands right becomes a table.
        right = self.body(body.right)
        right = f"SELECT * FROM ({right})" if isinstance(body.right, SetOp) else right
        return f"{self.body(body.left)} {body.kind.upper()}{' ALL' if body.all else ''} {right}"

    def select(self, body: Select) -> str:
        return (
            ("SELECT DISTINCT " if body.distinct else "SELECT ")
            + ", ".join(map(self.item, body.items))
            # SQLite reads commas and joins from the left alike: a join that stands later is put in brackets.
            + _listed(" FROM ", [self.table(table, alone=not place) for place, table in enumerate(body.tables)])
            + self.clause(" WHERE ", body.where)
            + _listed(" GROUP BY ", [self.expr(expr) for expr in body.group_by])
            + self.clause(" HAVING ", body.having)
        )

    def clause(self, word: str, expr: Expr | None) -> str:
        return "" if expr is None else word + self.expr(expr)

    def item(self, item: Item) -> str:
        return self.expr(item.expr) + _as(item.alias)

    def table(self, table: TableRef, *, alone: bool) -> str:
        match table:
            case Named(name, alias):
                return ident(name) + _as(alias)
            case Derived(query, alias):
                return f"({self.query(query)}){_as(alias)}"
            case Join(kind, left, right, on, using):
                names = f" USING ({', '.join(map(ident, using))})" if using else ""
                sides = f"{self.table(left, alone=True)} {_JOINS[kind]} {self.table(right, alone=False)}"
                text = sides + self.clause(" ON ", on) + names
                return text if alone else f"({text})"

    def col(self, col: Col) -> str:
        """A column; of which table, the engine knows or asks."""
        return ident(col.name) if col.table is None else f"{ident(col.table)}.{ident(col.name)}"

    def value(self, value: Value) -> str:
        """A constant: what a column would hold of `value`."""
        return constant(to_stored(value))

    def queried(self, expr: Queried) -> str:
        """Parameters, aggregates and queries inside."""
        match expr:
            case Param(place):
                return f"?{place + 1}"
            case Star(table):
                return "*" if table is None else f"{ident(table)}.*"
            case Aggregate(name, (), _):
                return f"{name}(*)"
            case Aggregate(name, args, distinct):
                return f"{name}({'DISTINCT ' if distinct else ''}{', '.join(map(self.expr, args))})"
            case Subquery(query):
                return f"({self.query(query)})"
            case Exists(query, negated):
                return f"({'NOT ' if negated else ''}EXISTS ({self.query(query)}))"
            case InQuery(inner, query):
                return f"({self.expr(inner)} IN ({self.query(query)}))"
        raise InvalidRequest(f"{type(expr).__name__} is not known to SQLite")


def _as(alias: str | None) -> str:
    return "" if alias is None else f" AS {ident(alias)}"


def _listed(word: str, parts: list[str]) -> str:
    return word + ", ".join(parts) if parts else ""
