"""Random queries in their JSON form over two small tables, all of which SQLite can run; and what breaks them."""

from __future__ import annotations

import copy
import random
from typing import Any

T, U = "t", "u"
TABLES = {T: ("id", "a", "b"), U: ("id", "k", "v")}
CREATE = """
CREATE TABLE t (id INTEGER PRIMARY KEY, a INTEGER, b TEXT COLLATE NOCASE);
CREATE TABLE u (id INTEGER PRIMARY KEY, k BLOB, v REAL);
"""
VALUES: list[Any] = [
    None,
    0,
    1,
    -2,
    3,
    True,
    "",
    "a",
    "A",
    "it's",
    "3",
    2.5,
    -0.0,
    {"t": "u64", "v": 3},
    {"t": "f64", "v": "NaN"},
    {"t": "f64", "v": "-Infinity"},
    {"t": "bytes", "b64": "YQA="},
    {"t": "dec", "v": "2.50"},
    {"t": "date", "iso": "2026-01-18"},
    {"t": "uuid", "v": "550e8400-e29b-41d4-a716-446655440000"},
    {"t": "json", "v": {"b": [1, "x"], "a": None}},
    {"t": "embedding", "dims": 2, "v": [0.5, -1.0]},
    {"t": "str", "v": "nul\0inside"},
]
JUNK: list[Any] = [None, 5, -1, True, "", "x", [], {}, [[]], {"x": 1}, 1e308, "\ud800", {"col": "*"}, 2**70]


def shuffled(body: Any, rng: random.Random) -> Any:
    """Return the same JSON with keys in another order, except inside values."""
    if isinstance(body, list):
        return [shuffled(item, rng) for item in body]
    if not isinstance(body, dict) or body.get("t") == "json":
        return body
    names = rng.sample(list(body), len(body))
    return {name: shuffled(body[name], rng) for name in names}


class Forms:
    """A generator of queries; names in scope are (alias, table)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.made = 0

    def alias(self) -> str:
        self.made += 1
        return f"{self.rng.choice('xyz')}{self.made}"

    def query(self, depth: int, width: int | None = None, *, outer: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
        rng = self.rng
        width = width or rng.randint(1, 3)
        made: dict[str, Any] = {"body": self.body(depth, width, outer)}
        names = [f"c{place}" for place in range(width)]
        if rng.random() < 0.5:  # by all columns: the order is then as good as total
            made["order_by"] = [{"expr": {"col": name}} | self.some(dir=rng.choice(["asc", "desc"])) for name in names]
            if rng.random() < 0.5:
                made["limit"] = self.some(limit=rng.randint(0, 4), offset=rng.randint(0, 2))
        return made | self.some(lock="none")

    def some(self, **fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self.rng.random() < 0.5}

    def body(self, depth: int, width: int, outer: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        if depth > 0 and self.rng.random() < 0.2:
            kind = self.rng.choice(["union", "intersect", "except"])
            sides = {side: self.body(depth - 1, width, outer) for side in ("left", "right")}
            return {"setop": {"kind": kind, **sides, **(self.some(all=True) if kind == "union" else {})}}
        tables, scope = self.tables(depth)
        grouped = self.rng.random() < 0.2
        inner = (*outer, *scope)
        if grouped:
            exprs = [self.aggregate(scope) for _ in range(width)]
        else:
            exprs = [self.expr(depth, inner) for _ in range(width)]
        made = {"projection": [{"expr": expr, "as": f"c{place}"} for place, expr in enumerate(exprs)], "from": tables}
        if grouped:
            made |= self.some(group_by=[self.column(scope)], having=self.aggregate(scope))
        made |= self.some(distinct=self.rng.random() < 0.5, where=self.condition(depth, inner))
        return {"select": made}

    def tables(self, depth: int) -> tuple[list[Any], tuple[tuple[str, str], ...]]:
        found = [self.table(depth) for _ in range(self.rng.choice([1, 1, 2]))]
        return [table for table, _ in found], tuple(name for _, scope in found for name in scope)

    def table(self, depth: int) -> tuple[Any, tuple[tuple[str, str], ...]]:
        rng = self.rng
        if depth > 0 and rng.random() < 0.3:
            (left, one), (right, two) = self.table(depth - 1), self.table(depth - 1)
            kind = rng.choice(["inner", "left", "right", "full", "cross"])
            on = {} if kind == "cross" else {"on": self.comparison(0, one + two)}
            return {"join": {"type": kind, "left": left, "right": right, **on}}, one + two
        name, alias = rng.choice([T, U]), self.alias()
        if depth > 0 and rng.random() < 0.2:
            items = [{"expr": {"col": column}} for column in TABLES[name]]
            body = {"select": {"projection": items, "from": [{"table": name}]}}
            return {"subquery": {"query": {"body": body}, "as": alias}}, ((alias, name),)
        return {"table": name, "as": alias} | self.some(db="main"), ((alias, name),)

    def column(self, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        alias, table = self.rng.choice(scope)
        return {"col": self.rng.choice(TABLES[table]), "table": alias}

    def aggregate(self, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            return {"fn": "count", "args": self.rng.choice([[], [{"col": "*"}]])}
        name = self.rng.choice(["count", "min", "max", "sum", "total"])
        return {"fn": name, "args": [self.column(scope)]} | self.some(distinct=True)

    def value(self) -> dict[str, Any]:
        return {"lit": self.rng.choice(VALUES)}

    def expr(self, depth: int, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.4:
            return self.column(scope) if rng.random() < 0.6 else self.value()
        match rng.randrange(6):
            case 0:
                return {"op": rng.choice(["add", "sub", "mul", "div", "mod"])} | self.pair(depth, scope)
            case 1:
                name, count = rng.choice([("lower", 1), ("coalesce", 2), ("typeof", 1), ("max", 2), ("hex", 1)])
                return {"fn": name, "args": [self.expr(depth - 1, scope) for _ in range(count)]}
            case 2:
                kind = rng.choice(["i64", "f64", "str", "varchar", "bytes"])
                return {"cast": {"expr": self.expr(depth - 1, scope), "to": {"kind": kind}}}
            case 3:
                when = [{"if": self.condition(depth - 1, scope), "then": self.expr(depth - 1, scope)}]
                return {"case": {"when": when} | self.some(**{"else": self.expr(depth - 1, scope)})}
            case 4:
                one_row = {"projection": [{"expr": self.aggregate(((T, T),))}], "from": [{"table": T}]}
                return {"subquery": {"query": {"body": {"select": one_row}}}}
            case _:
                return self.condition(depth - 1, scope)

    def pair(self, depth: int, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        return {"a": self.expr(depth - 1, scope), "b": self.expr(depth - 1, scope)}

    def comparison(self, depth: int, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        return {"op": self.rng.choice(["eq", "ne", "lt", "le", "gt", "ge"])} | self.pair(depth, scope)

    def condition(self, depth: int, scope: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        rng = self.rng
        match rng.randrange(9) if depth > 0 else 0:
            case 1:
                return {"op": "not", "a": self.condition(depth - 1, scope)}
            case 2:
                args = [self.condition(depth - 1, scope) for _ in range(rng.randint(1, 3))]
                return {"op": rng.choice(["and", "or"]), "args": args}
            case 3:
                return {"op": "is_null", "a": self.expr(depth - 1, scope)}
            case 4:
                values = [self.value() for _ in range(rng.randint(0, 3))]
                return {"op": "in", "a": self.expr(depth - 1, scope), "list": values}
            case 5:
                low, high = self.value(), self.value()
                return {"op": "between", "a": self.expr(depth - 1, scope), "lo": low, "hi": high}
            case 6:
                return {"exists": {"query": self.query(depth - 1, outer=scope)} | self.some(negated=True)}
            case 7:
                rows = {"subquery": {"query": self.query(depth - 1, 1, outer=scope)}}
                return {"op": "in", "a": self.expr(depth - 1, scope), "b": rows}
            case 8:
                return {"op": rng.choice(["like", "ilike"]), "a": self.column(scope), "b": {"lit": "%A_"}}
            case _:
                return self.comparison(depth, scope)

    def broken(self, body: dict[str, Any]) -> Any:
        """Return `body` with one foreign element, or with one missing."""
        body = copy.deepcopy(body)
        at: Any = body
        while True:
            place = self.rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if isinstance(at[place], dict | list) and at[place] and self.rng.random() < 0.8:
                at = at[place]
                continue
            kind = self.rng.randrange(3)
            if kind == 0 and isinstance(at, dict):
                del at[place]
            elif kind == 1 and isinstance(at, dict):
                at[self.rng.choice(["x", "op", "col", "select", "table"])] = self.rng.choice(JUNK)
            else:
                at[place] = self.rng.choice(JUNK)
            return body
