"""Rendering of queries of the JSON form into SQL text: the part common to all databases. Subclasses add the rest."""

from __future__ import annotations

from headwater.errors import InvalidRequest
from headwater.model.predicate import Expr, QueryExpression
from headwater.model.query.query import (
    Aggregate,
    Body,
    Derived,
    Exists,
    InQuery,
    Item,
    Join,
    NamedTable,
    Order,
    Param,
    Query,
    Select,
    SetOp,
    Star,
    Subquery,
    TableRef,
)

_JOINS = {"inner": "JOIN", "left": "LEFT JOIN", "right": "RIGHT JOIN", "full": "FULL JOIN", "cross": "CROSS JOIN"}


OPERATORS = {
    "eq": "=",
    "ne": "<>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "mod": "%",
    "like": "LIKE",
}


def operator_sql(op: str, args: list[str], operators: dict[str, str], database: str) -> str:
    """Return an operator applied to operands that are SQL text; `operators` are this database's binary operators."""
    match op, args:
        case (("and" | "or"), _):
            return "(" + f" {op.upper()} ".join(args) + ")"
        case "not", [a]:
            return f"(NOT {a})"
        case "is_null", [a]:
            return f"({a} IS NULL)"
        case "in", [a, *options]:
            return f"({a} IN ({', '.join(options)}))"
        case "between", [a, low, high]:
            return f"({a} BETWEEN {low} AND {high})"
        case _, [a, b] if op in operators:
            return f"({a} {operators[op]} {b})"
    raise InvalidRequest(f"operator {op!r} is not known to {database}", hint="Write the condition in another way.")


class QueryText:
    """Renderer of queries. Every part it returns is self-contained, so that parts can be combined safely."""

    database = ""  # name of the database in errors
    parameter = ""  # prefix of an argument's number
    with_word = "WITH"
    no_limit = ""  # LIMIT to use with an OFFSET alone

    def ident(self, name: str) -> str:
        """Return a quoted name."""
        raise NotImplementedError

    def expr(self, expr: Expr) -> str:
        """Return an expression as SQL."""
        raise NotImplementedError

    def set_op(self, body: SetOp) -> str:
        """Return a set operation of two bodies as SQL."""
        raise NotImplementedError

    def named(self, name: str) -> str:
        """Return the name of a table, a view or a WITH query as SQL."""
        return self.ident(name)

    def query(self, query: Query) -> str:
        """Return a whole query or a subquery as SQL."""
        withs = [f"{self.ident(each.name)} AS ({self.query(each.query)})" for each in query.with_]
        return (
            (f"{self.with_word} {', '.join(withs)} " if withs else "")
            + self.body(query.body)
            + _listed(" ORDER BY ", [self.order(order) for order in query.order_by])
            + self.window(query)
        )

    def order(self, order: Order) -> str:
        """Return one term of ORDER BY as SQL."""
        return self.expr(order.expr) + (" DESC" if order.descending else "")

    def window(self, query: Query) -> str:
        """Return LIMIT and OFFSET as SQL."""
        if query.limit is None and query.offset is None:
            return ""
        limit = self.no_limit if query.limit is None else self.expr(query.limit)
        return f" LIMIT {limit}" + ("" if query.offset is None else f" OFFSET {self.expr(query.offset)}")

    def body(self, body: Body) -> str:
        """Return the SELECT or UNION of a query as SQL: without WITH, ORDER BY and LIMIT."""
        return self.select(body) if isinstance(body, Select) else self.set_op(body)

    def select(self, body: Select) -> str:
        """Return one SELECT as SQL."""
        return (
            ("SELECT DISTINCT " if body.distinct else "SELECT ")
            + ", ".join(map(self.item, body.items))
            # Some databases give commas and joins the same precedence: a join after a comma is put in brackets.
            + _listed(" FROM ", [self.table(table, alone=not place) for place, table in enumerate(body.tables)])
            + self._clause(" WHERE ", body.where)
            + _listed(" GROUP BY ", [self.expr(expr) for expr in body.group_by])
            + self._clause(" HAVING ", body.having)
        )

    def _clause(self, word: str, expr: Expr | None) -> str:
        return "" if expr is None else word + self.expr(expr)

    def _as(self, alias: str | None) -> str:
        return "" if alias is None else f" AS {self.ident(alias)}"

    def item(self, item: Item) -> str:
        """Return one result column as SQL."""
        return self.expr(item.expr) + self._as(item.alias)

    def table(self, table: TableRef, *, alone: bool) -> str:
        """Return one table of FROM as SQL."""
        match table:
            case NamedTable(name, alias):
                return self.named(name) + self._as(alias)
            case Derived(query, alias):
                return f"({self.query(query)}){self._as(alias)}"
            case Join(kind, left, right, on, using):
                names = f" USING ({', '.join(map(self.ident, using))})" if using else ""
                sides = f"{self.table(left, alone=True)} {_JOINS[kind]} {self.table(right, alone=False)}"
                text = sides + self._clause(" ON ", on) + names
                return text if alone else f"({text})"

    def queried(self, expr: QueryExpression) -> str:
        """Return a parameter, an aggregate or a subquery as SQL."""
        match expr:
            case Param(place):
                return f"{self.parameter}{place + 1}"
            case Star(table):
                return "*" if table is None else f"{self.ident(table)}.*"
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
        raise InvalidRequest(f"{type(expr).__name__} is not known to {self.database}")


def _listed(word: str, parts: list[str]) -> str:
    return word + ", ".join(parts) if parts else ""
