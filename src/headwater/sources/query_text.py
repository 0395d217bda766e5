"""Rendering queries of the JSON form into SQL text: what all databases write alike. The rest is for subclasses."""

from __future__ import annotations

from headwater.errors import InvalidRequest
from headwater.model.predicate import Expr, Queried
from headwater.model.query.query import (
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
    """Return an operator on operands that are SQL text; `operators` are the binary ones of this database."""
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
    """Everything it writes is closed in itself, so that parts never run into each other."""

    database = ""  # as it is called in errors
    parameter = ""  # the mark before the number of an argument
    with_word = "WITH"
    no_limit = ""  # LIMIT where there is only an OFFSET

    def ident(self, name: str) -> str:
        """A name, quoted."""
        raise NotImplementedError

    def expr(self, expr: Expr) -> str:
        """An expression."""
        raise NotImplementedError

    def set_op(self, body: SetOp) -> str:
        """Two bodies as one."""
        raise NotImplementedError

    def named(self, name: str) -> str:
        """A table, a view or a WITH name."""
        return self.ident(name)

    def query(self, query: Query) -> str:
        """A whole query, or one inside another."""
        withs = [f"{self.ident(each.name)} AS ({self.query(each.query)})" for each in query.with_]
        return (
            (f"{self.with_word} {', '.join(withs)} " if withs else "")
            + self.body(query.body)
            + _listed(" ORDER BY ", [self.order(order) for order in query.order_by])
            + self.window(query)
        )

    def order(self, order: Order) -> str:
        """One thing to sort by."""
        return self.expr(order.expr) + (" DESC" if order.descending else "")

    def window(self, query: Query) -> str:
        """LIMIT and OFFSET."""
        if query.limit is None and query.offset is None:
            return ""
        limit = self.no_limit if query.limit is None else self.expr(query.limit)
        return f" LIMIT {limit}" + ("" if query.offset is None else f" OFFSET {self.expr(query.offset)}")

    def body(self, body: Body) -> str:
        """What stands before ORDER BY."""
        return self.select(body) if isinstance(body, Select) else self.set_op(body)

    def select(self, body: Select) -> str:
        """One SELECT."""
        return (
            ("SELECT DISTINCT " if body.distinct else "SELECT ")
            + ", ".join(map(self.item, body.items))
            # Some read commas and joins from the left alike: a join that stands later is put in brackets.
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
        """One column of the answer."""
        return self.expr(item.expr) + self._as(item.alias)

    def table(self, table: TableRef, *, alone: bool) -> str:
        """What stands in FROM."""
        match table:
            case Named(name, alias):
                return self.named(name) + self._as(alias)
            case Derived(query, alias):
                return f"({self.query(query)}){self._as(alias)}"
            case Join(kind, left, right, on, using):
                names = f" USING ({', '.join(map(self.ident, using))})" if using else ""
                sides = f"{self.table(left, alone=True)} {_JOINS[kind]} {self.table(right, alone=False)}"
                text = sides + self._clause(" ON ", on) + names
                return text if alone else f"({text})"

    def queried(self, expr: Queried) -> str:
        """Parameters, aggregates and queries inside."""
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
