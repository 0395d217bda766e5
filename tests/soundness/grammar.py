"""Random queries over a world: the whole grammar, biased to few conditions and small domains, so that answers have
rows.

Arguments are marked while a text is built and numbered from left to right at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from tests.soundness.predicates import Expressions, Scope
from tests.soundness.schemas import Named, World

STYLES = ["?", "?N", ":", "@", "$"]
_MARK = re.compile("\x01(\\d+)\x02")
VOLATILE = [
    "random()",
    "date('now')",
    "current_timestamp",
    "strftime('%s', {column})",
    "datetime({column})",
    "changes()",
]


class Query(msgspec.Struct):
    """A statement and its arguments by name."""

    sql: str
    args: dict[str, Any]
    volatile: bool = False


class Queries(Expressions):
    """A generator of queries over one world."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._aliases = 0
        self._with: list[Named] = []

    # --- whole statements ------------------------------------------------------------------------------------

    def query(self) -> Query:
        """Return a random query."""
        self._begin(self.pick(["", "", "", *STYLES]))
        sql, columns = self._filtered() if self.chance(0.15) else self._body(2)
        sql = self._with_clause(sql)
        if self.chance(0.03):
            call = self.pick(VOLATILE).format(column=f"v.{columns[0]}")
            return self._finish(f"SELECT {call} AS x, * FROM ({sql}) AS v", True)
        return self._finish(sql)

    def _filtered(self) -> tuple[str, list[str]]:
        """Return a condition on a query into which it must not be pushed: a window, an aggregate, a LIMIT, a UNION."""
        sql, columns = self._body(1)
        if " LIMIT " not in sql and self.chance(0.35):
            sql += f"{'' if ' ORDER BY ' in sql else ' ORDER BY 1'} LIMIT {self.random.randint(1, 4)}"
        return f"SELECT * FROM ({sql}) AS v WHERE {self._simple(f'v.{self.pick(columns)}')}", columns

    def view(self) -> tuple[str, list[str]]:
        """Return the text of a view, without arguments, and its columns."""
        self._begin("")
        sql, columns = self._body(1)
        return self._with_clause(sql), columns

    def _begin(self, style: str) -> None:
        self._aliases, self._args, self._style, self._with = 0, [], style, []
        self._clauses: list[str] = []
        if self.chance(0.15):
            self._clauses = [self._clause() for _ in range(self.random.randint(1, 2))]

    def _finish(self, marked: str, volatile: bool = False) -> Query:
        args: dict[str, Any] = {}

        def place(found: re.Match[str]) -> str:
            number = int(found[1])
            if self._style == "?":
                args[str(len(args) + 1)] = self._args[number]
                return "?"
            name = str(number + 1) if self._style == "?N" else f"p{number}"
            args[name] = self._args[number]
            return f"?{name}" if self._style == "?N" else self._style + name

        return Query(_MARK.sub(place, marked), args, volatile)

    def _with_clause(self, sql: str) -> str:
        if not self._clauses:
            return sql
        word = "WITH RECURSIVE" if any("UNION" in one and one.startswith("r") for one in self._clauses) else "WITH"
        return f"{word} {', '.join(self._clauses)} {sql}"

    def _clause(self) -> str:
        name = f"w{len(self._with)}"
        if self.chance(0.3):
            return self._recursive(f"r{len(self._with)}")
        sql, columns = self._body(1)
        self._with.append(Named(name, columns))
        how = self.pick(["", "", "MATERIALIZED ", "NOT MATERIALIZED "])
        return f"{name}({', '.join(columns)}) AS {how}({sql})"

    def _recursive(self, name: str) -> str:
        table = self.pick(self.world.tables)
        one, two = self.pick(table.columns), self.pick(table.columns)
        self._with.append(Named(name, ["n", "x"]))
        start = f"SELECT 0, {one} FROM {table.name} WHERE {self._simple(f'{table.name}.{two}')}"
        if self.chance(0.3):
            start = f"SELECT 0, {self._value()}"
        other = self.pick(self.world.tables)
        step = f"SELECT n + 1, z.{self.pick(other.columns)} FROM {name} JOIN {other.name} AS z"
        step += f" ON z.{self.pick(other.columns)} = {name}.x WHERE n < {self.random.randint(1, 2)}"
        return f"{name}(n, x) AS ({start} UNION {step})"

    def _body(self, depth: int, outer: Scope | None = None, width: int | None = None) -> tuple[str, list[str]]:
        """Return a select or a compound of selects, and its output columns."""
        if depth and self.chance(0.12):
            count = width or self.random.randint(1, 2)
            sql, columns = self._select(depth - 1, outer, count, plain=True)
            for _ in range(self.pick([1, 1, 2])):
                other, _ = self._select(depth - 1, outer, count, plain=True)
                sql += f" {self.pick(['UNION', 'UNION ALL', 'UNION ALL', 'INTERSECT', 'EXCEPT'])} {other}"
            if self.chance(0.4):
                order = ", ".join(str(n + 1) for n in range(count) if self.chance(0.8)) or "1"
                sql += f" ORDER BY {order}" + (f" LIMIT {self.random.randint(1, 4)}" if self.chance(0.4) else "")
            return sql, columns
        return self._select(depth, outer, width)

    # --- select ----------------------------------------------------------------------------------------------

    def _select(
        self, depth: int, outer: Scope | None = None, width: int | None = None, plain: bool = False
    ) -> tuple[str, list[str]]:
        text, sources = self._from(depth, outer)
        scope = Scope(sources, outer)
        where = ""
        if self.chance(0.65):
            where = " WHERE " + " AND ".join(self._pred(scope, depth) for _ in range(self.pick([1, 1, 1, 1, 2])))
        if self.chance(0.2):
            return self._grouped(scope, text + where, depth, width, plain)
        count = width or self.random.randint(1, 3)
        distinct = "DISTINCT " if self.chance(0.12) else ""
        if width is None and self.chance(0.12) and len(sources) == 1:
            star = self.pick(["*", f"{sources[0].name}.*"])
            return f"SELECT {distinct}{star} FROM {text}{where}{self._tail(scope, depth, plain)}", sources[0].columns
        items = [self._item(scope, depth) for _ in range(count)]
        names = [f"c{place}" for place in range(count)]
        listed = ", ".join(f"{item} AS {name}" for item, name in zip(items, names, strict=True))
        return f"SELECT {distinct}{listed} FROM {text}{where}{self._tail(scope, depth, plain)}", names

    def _grouped(self, scope: Scope, rest: str, depth: int, width: int | None, plain: bool) -> tuple[str, list[str]]:
        keys = [self._column(scope, local=True) for _ in range(self.pick([0, 1, 1, 1, 2]))]
        count = width or self.random.randint(1, 3)
        options: list[Callable[[], str]] = [lambda: self._aggregate(scope)] * 2
        if keys:
            options += [lambda: self.pick(keys)] * 2
        if self.chance(0.08):
            options.append(lambda: self._column(scope, local=True))  # a bare column
        items = [self.pick(options)() for _ in range(count)]
        if not keys and not any("(" in item for item in items):
            items[0] = self._aggregate(scope)
        names = [f"c{place}" for place in range(count)]
        sql = "SELECT " + ", ".join(f"{item} AS {name}" for item, name in zip(items, names, strict=True))
        sql += f" FROM {rest}"
        if keys:
            sql += f" GROUP BY {', '.join(keys)}"
        if self.chance(0.3):
            what = self.pick(keys) if keys and self.chance(0.6) else self._aggregate(scope)
            sql += f" HAVING {self._simple(what)}"
        if not plain and self.chance(0.3):
            sql += f" ORDER BY {self.pick(names)}" + (" LIMIT 2" if self.chance(0.3) else "")
        return sql, names

    def _aggregate(self, scope: Scope) -> str:
        column = self._column(scope, local=True)
        how = self.random.random()
        if how < 0.3:
            return "count(*)"
        filtered = f" FILTER (WHERE {self._simple(self._column(scope, local=True))})" if self.chance(0.1) else ""
        if how < 0.85:
            return f"{self.pick(['count', 'min', 'max', 'sum', 'total', 'avg', 'count', 'max'])}({column}){filtered}"
        if how < 0.95:
            return f"count(DISTINCT {column})"
        return self.pick([f"group_concat({column}, ',')", f"group_concat({column}, ',' ORDER BY {column})"])

    def _tail(self, scope: Scope, depth: int, plain: bool) -> str:
        if plain or not self.chance(0.45):
            return ""
        some = [self._column(scope, local=True) for _ in range(self.pick([1, 1, 2]))]
        terms = [
            one
            + (f" COLLATE {self.pick(['NOCASE', 'BINARY', 'RTRIM'])}" if self.chance(0.05) else "")
            + self.pick(["", "", " DESC"])
            + self.pick(["", "", "", "", "", " NULLS FIRST", " NULLS LAST"])
            for one in some
        ]
        text = f" ORDER BY {', '.join(terms)}"
        if self.chance(0.05):
            text = ""
        if self.chance(0.4):
            text += f" LIMIT {self._integer(self.random.randint(1, 4))}"
            text += f" OFFSET {self._integer(self.random.randint(0, 2))}" if self.chance(0.3) else ""
        return text

    def _integer(self, value: int) -> str:
        return self._mark(value) if self._style and self.chance(0.3) else str(value)

    # --- from ------------------------------------------------------------------------------------------------

    def _from(self, depth: int, outer: Scope | None) -> tuple[str, list[Named]]:
        text, first = self._source(depth, outer)
        sources = [first]
        for _ in range(self.pick([0, 0, 0, 0, 0, 1, 1, 1, 1, 2])):
            other, named = self._source(depth, outer)
            if self.chance(0.05):
                more, inner = self._source(depth, outer)
                words = self.pick(["JOIN", "LEFT JOIN", "FULL JOIN", "JOIN", "RIGHT JOIN"])
                other = f"({other}{self._on(words, [named], more, inner, outer)})"
                text += self._on(
                    self.pick(["JOIN", "LEFT JOIN", "LEFT JOIN", "FULL JOIN"]), sources, other, named, outer
                )
                sources += [named, inner]
                continue
            text += self._join(sources, other, named, outer)
            sources.append(named)
        return text, sources

    def _join(self, sources: list[Named], other: str, named: Named, outer: Scope | None) -> str:
        shared = [name for name in named.columns if len([1 for source in sources if name in source.columns]) == 1]
        how = self.pick(
            ["JOIN", "JOIN", "INNER JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "CROSS JOIN", ","]
        )
        if how == ",":
            return f", {other}"
        if how == "CROSS JOIN":
            return f" CROSS JOIN {other}"
        roll = self.random.random()
        if roll < 0.08 and len(sources) == 1 and shared:
            return f" NATURAL {how} {other}"
        if roll < 0.2 and shared:
            return f" {how} {other} USING ({', '.join(self.random.sample(shared, 1))})"
        return self._on(how, sources, other, named, outer)

    def _on(self, how: str, sources: list[Named], other: str, named: Named, outer: Scope | None) -> str:
        scope = Scope([*sources, named], outer)
        left, right = self.pick(sources), self.pick(named.columns)
        name = right if right in left.columns and self.chance(0.5) else self.pick(left.columns)
        on = f"{left.name}.{name} {self.pick(['='] * 8 + ['<', 'IS'])} {named.name}.{right}"
        roll = self.random.random()
        if roll < 0.06:
            on = self._subquery(scope, 0)  # who has a partner hangs on other tables
        elif roll < 0.1:
            on += f" AND {self._subquery(scope, 0)}"
        elif roll < 0.35:
            on += f" AND {self._pred(scope, 0)}"
        elif roll < 0.42:
            on = self._pred(scope, 0)
        return f" {how} {other} ON {on}"

    def _source(self, depth: int, outer: Scope | None) -> tuple[str, Named]:
        alias = f"x{self._aliases}"
        self._aliases += 1
        if depth and self.chance(0.15):
            inner = outer if self.chance(0.3) else None
            sql, columns = self._body(depth - 1, inner)
            return f"({sql}) AS {alias}", Named(alias, columns)
        found = self.pick(self._with) if self._with and self.chance(0.5) else self.pick(self.world.sources)
        if self.chance(0.06):
            return f"main.{found.name} AS {alias}" if found not in self._with else f"{found.name} AS {alias}", Named(
                alias, found.columns, found.rowid
            )
        return f"{found.name} AS {alias}", Named(alias, found.columns, found.rowid)
