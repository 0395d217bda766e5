"""Rendering of expressions and queries of the JSON form into SQL: the part common to all databases."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import InvalidRequest
from headwater.model.literal import Value
from headwater.model.predicate import Call, Case, Cast, Col, Expr, Function, Literal, QueryExpression
from headwater.model.query import query as tree

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


class Expressions:
    """Renderer of expressions; no text it returns needs further brackets. Subclasses render columns and values."""

    database = ""  # name of the database in errors
    operators: Mapping[str, str] = OPERATORS  # binary operators
    declared: Mapping[str, str] = {}  # type of each kind

    def col(self, col: Col) -> str:
        """Return a column as SQL; implemented by the subclass."""
        raise NotImplementedError

    def value(self, value: Value) -> str:
        """Return a value of the expression as SQL."""
        raise NotImplementedError

    def queried(self, expr: QueryExpression) -> str:
        """Return as SQL an expression that only queries may contain; a condition raises InvalidRequest."""
        raise InvalidRequest("a condition cannot contain a parameter, an aggregate or a subquery")

    def expr(self, expr: Expr) -> str:
        """Return an expression of any type as SQL."""
        match expr:
            case Col():
                return self.col(expr)
            case Literal(value):
                return self.value(value)
            case Call(op, args):
                return self.operator(op, self.operands(op, args))
            case Function(name, args):
                return self.function(name, args)
            case Cast(inner, kind):
                return f"CAST({self.expr(inner)} AS {self.declared[kind]})"
            case Case(branches, otherwise):
                whens = "".join(f" WHEN {self.expr(a)} THEN {self.expr(b)}" for a, b in branches)
                return f"(CASE{whens} ELSE {self.expr(otherwise)} END)"
            case QueryExpression():
                return self.queried(expr)

    def where(self, expr: Expr | None) -> str:
        """Return ` WHERE …`; "" without a condition."""
        return "" if expr is None else f" WHERE {self.expr(expr)}"

    def function(self, name: str, args: tuple[Expr, ...]) -> str:
        """Return a function of the JSON form as SQL."""
        return f"{name}({', '.join(map(self.expr, args))})"

    def operands(self, op: str, args: tuple[Expr, ...]) -> list[str]:
        """Return the operands of an operator as SQL."""
        return [self.expr(arg) for arg in args]

    def operator(self, op: str, args: list[str]) -> str:
        """Return an operator applied to operands that are SQL text; InvalidRequest if the database lacks it."""
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
            case _, [a, b] if op in self.operators:
                return f"({a} {self.operators[op]} {b})"
        problem = f"operator {op!r} is not known to {self.database}"
        raise InvalidRequest(problem, hint="Write the condition in another way.")


class QueryText(Expressions):
    """Renderer of queries. Every part it returns is self-contained, so that parts can be combined safely."""

    parameter = ""  # prefix of an argument's number
    with_word = "WITH"
    no_limit = ""  # LIMIT to use with an OFFSET alone

    def __init__(self) -> None:
        self._constants = 0  # characters

    def expr(self, expr: Expr) -> str:
        """Return an expression as SQL; InvalidRequest if the constants alone make the query too long."""
        text = super().expr(expr)
        if isinstance(expr, Literal):
            self._constants += len(text)
            tree.check_length(self._constants)
        return text

    def ident(self, name: str) -> str:
        """Return `name` quoted for SQL; implemented by the subclass."""
        raise NotImplementedError

    def set_op(self, body: tree.SetOp) -> str:
        """Return a set operation of two bodies as SQL."""
        raise NotImplementedError

    def named(self, name: str) -> str:
        """Return the name of a table, a view or a WITH query as SQL."""
        return self.ident(name)

    def query(self, query: tree.Query) -> str:
        """Return a whole query or a subquery as SQL."""
        withs = [f"{self.ident(each.name)} AS ({self.query(each.query)})" for each in query.with_]
        return (
            (f"{self.with_word} {', '.join(withs)} " if withs else "")
            + self.body(query.body)
            + _listed(" ORDER BY ", [self.order(order) for order in query.order_by])
            + self.window(query)
        )

    def order(self, order: tree.Order) -> str:
        """Return one term of ORDER BY as SQL."""
        return self.expr(order.expr) + (" DESC" if order.descending else "")

    def window(self, query: tree.Query) -> str:
        """Return ` LIMIT … OFFSET …` of a query as SQL; "" without both."""
        if query.limit is None and query.offset is None:
            return ""
        limit = self.no_limit if query.limit is None else self.expr(query.limit)
        return f" LIMIT {limit}" + ("" if query.offset is None else f" OFFSET {self.expr(query.offset)}")

    def body(self, body: tree.Body) -> str:
        """Return the SELECT or UNION of a query as SQL: without WITH, ORDER BY and LIMIT."""
        return self.select(body) if isinstance(body, tree.Select) else self.set_op(body)

    def select(self, body: tree.Select) -> str:
        """Return one SELECT, from its result columns to HAVING, as SQL."""
        return (
            ("SELECT DISTINCT " if body.distinct else "SELECT ")
            + ", ".join(map(self.item, body.items))
            # Some databases give commas and joins the same precedence: a join after a comma is put in brackets.
            + _listed(" FROM ", [self.table(table, alone=not place) for place, table in enumerate(body.tables)])
            + self.where(body.where)
            + _listed(" GROUP BY ", [self.expr(expr) for expr in body.group_by])
            + self._clause(" HAVING ", body.having)
        )

    def _clause(self, word: str, expr: Expr | None) -> str:
        return "" if expr is None else word + self.expr(expr)

    def _as(self, alias: str | None) -> str:
        return "" if alias is None else f" AS {self.ident(alias)}"

    def item(self, item: tree.Item) -> str:
        """Return one result column with its alias as SQL."""
        return self.expr(item.expr) + self._as(item.alias)

    def table(self, table: tree.TableRef, *, alone: bool) -> str:
        """Return one table of FROM as SQL."""
        match table:
            case tree.NamedTable(name, alias):
                return self.named(name) + self._as(alias)
            case tree.Derived(query, alias):
                return f"({self.query(query)}){self._as(alias)}"
            case tree.Join(kind, left, right, on, using):
                names = f" USING ({', '.join(map(self.ident, using))})" if using else ""
                sides = f"{self.table(left, alone=True)} {_JOINS[kind]} {self.table(right, alone=False)}"
                text = sides + self._clause(" ON ", on) + names
                return text if alone else f"({text})"

    def queried(self, expr: QueryExpression) -> str:
        """Return a parameter, an aggregate or a subquery as SQL."""
        match expr:
            case tree.Param(place):
                return f"{self.parameter}{place + 1}"
            case tree.Star(table):
                return "*" if table is None else f"{self.ident(table)}.*"
            case tree.Aggregate(name, (), _):
                return f"{name}(*)"
            case tree.Aggregate(name, args, distinct):
                return f"{name}({'DISTINCT ' if distinct else ''}{', '.join(map(self.expr, args))})"
            case tree.Subquery(query):
                return f"({self.query(query)})"
            case tree.Exists(query, negated):
                return f"({'NOT ' if negated else ''}EXISTS ({self.query(query)}))"
            case tree.InQuery(inner, query):
                return f"({self.expr(inner)} IN ({self.query(query)}))"
        raise InvalidRequest(f"{type(expr).__name__} is not known to {self.database}")


def _listed(word: str, parts: list[str]) -> str:
    return word + ", ".join(parts) if parts else ""
