"""Random expressions and predicates over the tables of FROM, correlated ones included."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.soundness.schemas import Named, World, literal

COMPARE = ["=", "=", "=", "=", "<", "<=", ">", ">=", "<>", "IS", "IS NOT", "=="]


class Scope(msgspec.Struct):
    """The tables whose columns may be named here; `outer` is that of the query around a correlated subquery."""

    sources: list[Named]
    outer: Scope | None = None


class Expressions:
    """A generator of expressions; the selects around and inside come from `grammar.Queries`."""

    def __init__(self, world: World) -> None:
        self.world, self.pick, self.chance, self.random = world, world.pick, world.chance, world.random
        self._args: list[Any] = []
        self._style = ""  # of arguments; none where it is empty

    def _from(self, depth: int, outer: Scope | None) -> tuple[str, list[Named]]:
        raise NotImplementedError

    def _aggregate(self, scope: Scope) -> str:
        raise NotImplementedError

    # --- expressions -----------------------------------------------------------------------------------------

    def _column(self, scope: Scope, local: bool = False) -> str:
        if scope.outer and not local and self.chance(0.3):
            return self._column(scope.outer)
        source = self.pick(scope.sources)
        if source.rowid and self.chance(0.015):
            return f"{source.name}.rowid"
        column = self.pick(source.columns)
        if len(scope.sources) == 1 and scope.outer is None and self.chance(0.2):
            return column
        return f"{source.name}.{column}"

    def _mark(self, value: Any) -> str:
        self._args.append(value)
        return f"\x01{len(self._args) - 1}\x02"

    def _value(self) -> str:
        value = self.world.value()
        if value is None and self.chance(0.5):
            value = self.world.value()
        return self._mark(value) if self._style and self.chance(0.5) else literal(value)

    def _item(self, scope: Scope, depth: int) -> str:
        roll, column = self.random.random(), self._column(scope, local=True)
        if roll < 0.75:
            return column
        if roll < 0.82:
            return self._expression(scope)
        if roll < 0.87:
            return self._scalar(scope, max(depth, 1))
        if roll < 0.91:
            return self._window(scope)
        if roll < 0.94:
            return f"({self._subquery(scope, depth)})"  # as a value: NULL and 0 are not the same here
        return self.pick([f"({self._simple(column)})", f"typeof({column})", f"length({column})", self._value()])

    def _expression(self, scope: Scope) -> str:
        column, other = self._column(scope), self._column(scope)
        return self.pick(
            [
                f"coalesce({column}, {self._value()})",
                f"CASE WHEN {self._simple(column)} THEN {other} ELSE {self._value()} END",
                f"CASE {column} WHEN {self._value()} THEN {self._value()} END",
                f"{column} + {self.random.randint(0, 2)}",
                f"{column} || {other}",
                f"CAST({column} AS {self.pick(['TEXT', 'INTEGER', 'REAL', 'NUMERIC', 'BLOB'])})",
                f"+{column}",
                f"-{column}",
                f"nullif({column}, {self._value()})",
                f"ifnull({column}, {other})",
                f"iif({self._simple(column)}, 1, 0)",
                f"lower({column})",
                f"abs({column})",
                f"max({column}, {other})",
                f"{column} COLLATE {self.pick(['NOCASE', 'RTRIM', 'BINARY'])}",
            ]
        )

    def _window(self, scope: Scope) -> str:
        column, by, order = (self._column(scope, local=True) for _ in range(3))
        part = f"PARTITION BY {by} " if self.chance(0.6) else ""
        call = self.pick(["row_number()", "rank()", f"sum({column})", "count(*)", f"lag({column})", f"max({column})"])
        return f"{call} OVER ({part}ORDER BY {order})"

    def _scalar(self, scope: Scope, depth: int) -> str:
        text, sources = self._from(depth - 1, scope)
        inner = Scope(sources, scope)
        if self.chance(0.7):
            return f"(SELECT {self._aggregate(inner)} FROM {text} WHERE {self._link(inner)})"
        order = self._column(inner, local=True)
        return (
            f"(SELECT {self._column(inner, local=True)} FROM {text} WHERE {self._link(inner)} ORDER BY {order} LIMIT 1)"
        )

    def _link(self, scope: Scope) -> str:
        """Return a condition that usually links a subquery to the query around it."""
        own = self._column(scope, local=True)
        if scope.outer and self.chance(0.8):
            linked = f"{own} = {self._column(scope.outer)}"
            return f"{linked} AND {self._pred(scope, 0)}" if self.chance(0.3) else linked
        return self._pred(scope, 0)

    # --- predicates ------------------------------------------------------------------------------------------

    def _pred(self, scope: Scope, depth: int) -> str:
        roll = self.random.random()
        if roll < 0.55:
            return self._simple(self._column(scope))
        if roll < 0.65:
            return f"{self._column(scope)} {self.pick(COMPARE)} {self._column(scope)}"
        if roll < 0.73:
            return f"({self._simple(self._column(scope))} OR {self._pred(scope, 0)})"
        if roll < 0.77:
            return f"NOT ({self._pred(scope, 0)}" + (
                f" AND {self._simple(self._column(scope))})" if self.chance(0.4) else ")"
            )
        if roll < 0.84:
            return self._simple(self._expression(scope))
        if roll < 0.86:
            return self._odd(scope)
        return self._subquery(scope, depth) if depth or self.chance(0.3) else self._simple(self._column(scope))

    def _simple(self, column: str) -> str:
        roll = self.random.random()
        if roll < 0.5:
            if self.chance(0.1):
                return f"{self._value()} {self.pick(COMPARE)} {column}"
            return f"{column} {self.pick(COMPARE)} {self._value()}"
        few = ", ".join(self._value() for _ in range(self.random.randint(1, 3)))
        if roll < 0.6:
            return f"{column} IN ({few})"
        if roll < 0.67:
            return f"{column} NOT IN ({few})"
        if roll < 0.75:
            return f"{column} {self.pick(['', '', 'NOT '])}BETWEEN {self._value()} AND {self._value()}"
        if roll < 0.84:
            return f"{column} {self.pick(['IS NULL', 'IS NOT NULL', 'NOTNULL', 'ISNULL'])}"
        if roll < 0.94:
            pattern = literal(self.pick(["a%", "%a", "A", "_", "1%", "%", "x!_", "é"]))
            return f"{column} {self.pick(['', 'NOT '])}LIKE {pattern}{self.pick(['', '', ' ESCAPE ' + literal('!')])}"
        if roll < 0.98:
            return f"{column} {self.pick(['', 'NOT '])}GLOB {literal(self.pick(['a*', '[aA]', '*', '?']))}"
        return f"{column} {self.pick(['IS TRUE', 'IS FALSE', 'IS NOT TRUE'])}"

    def _odd(self, scope: Scope) -> str:
        column, other = self._column(scope), self._column(scope)
        return self.pick(
            [
                f"({column}, {other}) = ({self._value()}, {self._value()})",
                f"({column}, {other}) < ({self._value()}, {self._value()})",
                f"({column}, {other}) IN (SELECT k, a FROM {self.world.tables[0].name})",
                f"{column} COLLATE {self.pick(['NOCASE', 'RTRIM', 'BINARY'])} = {self._value()}",
                f"{column}",
                f"NOT {column}",
                f"{column} IN ({self._value()}, {other})",
                f"{column} = {self._value()} = {self.pick([0, 1])}",
                f"{column} BETWEEN {other} AND {self._value()}",
                f"({self._simple(column)}) IS {self.pick(['TRUE', 'NOT TRUE', 'NULL', '1'])}",
                f"unlikely({self._simple(column)})",
            ]
        )

    def _subquery(self, scope: Scope, depth: int) -> str:
        text, sources = self._from(max(depth - 1, 0), scope)
        inner = Scope(sources, scope)
        roll = self.random.random()
        if roll < 0.4:
            return f"{self.pick(['', 'NOT '])}EXISTS (SELECT 1 FROM {text} WHERE {self._link(inner)})"
        column = self._column(scope)
        if roll < 0.8:
            where = (
                f" WHERE {self._link(inner) if self.chance(0.4) else self._pred(inner, 0)}" if self.chance(0.7) else ""
            )
            limit = " ORDER BY 1 LIMIT 2" if self.chance(0.08) else ""
            found = self._column(inner, local=True)
            return f"{column} {self.pick(['', 'NOT '])}IN (SELECT {found} FROM {text}{where}{limit})"
        return f"{column} {self.pick(['=', '=', '<', '>=', 'IS'])} {self._scalar(scope, max(depth, 1))}"
