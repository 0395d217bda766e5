"""Random dependencies, instances and changes over small tables, for the tests of matching."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import (
    ALWAYS,
    AllOf,
    Analysis,
    AnyOf,
    Comparison,
    Condition,
    Const,
    Dependency,
    Param,
)
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Table

VALUES: list[Any] = [None, 0, 1, 2, 3, 1.0, -0.0, 0.0, 0.5, True, "", "a", "A", "a ", "b", b"a", b"", float("inf")]
ODD = [*VALUES, UNAVAILABLE, float("nan"), Decimal("1.0"), Decimal("1.00"), 2**63 - 1]
ONE, TWO = ("eq", "ne", "lt", "le", "gt", "ge", "is", "is_not"), ("between", "not_between")


def shape(name: str, *columns: str, version: int = 1) -> Table:
    """A table; a column may be written `x:NOCASE`."""
    made = [Column(*each.split(":")[:1], collation=(each.split(":") + ["BINARY"])[1]) for each in columns]
    return Table(name, tuple(made), (made[0].name,), version)


TABLES = {
    "t": shape("t", "id", "a", "b:NOCASE", "c:RTRIM", "d"),
    "u": shape("u", "id", "a", "b", "c"),
}
OTHERS = {  # shapes of other times: a column more, a column less, another collation
    "t": [
        shape("t", "id", "a", "b:NOCASE", "c:RTRIM", "d", "e", version=2),
        shape("t", "id", "b:NOCASE", "a", "d", version=3),
        shape("t", "id", "a", "b", "c:RTRIM", "d", version=4),
    ],
    "u": [shape("u", "id", "a", "b", version=2)],
}


def operands(rng: random.Random, op: str) -> tuple[Any, ...]:
    many = 1 if op in ONE else 2 if op in TWO else rng.randrange(4)
    return tuple(Param(rng.choice("pqr")) if rng.random() < 0.6 else Const(rng.choice(VALUES)) for _ in range(many))


def condition(rng: random.Random, table: Table, depth: int = 2) -> Condition:
    roll = rng.random()
    if roll < 0.1:
        return ALWAYS
    if depth and roll < 0.5:
        parts = tuple(condition(rng, table, depth - 1) for _ in range(rng.randrange(4)))
        return AllOf(parts) if rng.random() < 0.65 else AnyOf(parts)
    op = rng.choice([*ONE, *TWO, "in", "not_in", *["eq"] * 6, *["in"] * 3])
    return Comparison(rng.choice(table.names), op, operands(rng, op))


def names_in(condition: Condition) -> set[str]:
    if isinstance(condition, Comparison):
        return {condition.column}
    return {name for part in condition.parts for name in names_in(part)}


def dependency(rng: random.Random) -> Dependency:
    table = rng.choice(list(TABLES.values()))
    found = condition(rng, table)
    columns = {*names_in(found), *rng.sample(table.names, rng.randrange(3))}
    return Dependency(table.name, None if rng.random() < 0.2 else frozenset(columns), found)


def analysis(*dependencies: Dependency, **more: Any) -> Analysis:
    tables = tuple(sorted({each.table for each in dependencies}))
    given = {"sql": "", "parameters": (), "columns": (), "tables": tables, "objects": tables, "epoch": ""}
    return Analysis(**{**given, "dependencies": dependencies, **more})


def query(rng: random.Random) -> Analysis:
    return analysis(*(dependency(rng) for _ in range(rng.randrange(1, 4))))


def args(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(VALUES) for name in "pqr"}


def change(rng: random.Random, *, odd: float = 0.1) -> Change:
    """Return a random change: mostly valid and of the current table version, sometimes malformed in any way."""
    table = rng.choice(list(TABLES.values()))
    if rng.random() < odd:
        table = rng.choice(OTHERS[table.name])
    values = ODD if rng.random() < odd else VALUES
    before = tuple(rng.choice(values) for _ in table.columns)
    after = tuple(old if rng.random() < 0.6 else rng.choice(values) for old in before)
    if rng.random() < odd / 4:
        return Change(rng.choice([Op.SCHEMA_CHANGE, Op.TRUNCATE]), table)
    if rng.random() < odd / 4:
        after = after[:-1]  # a row that is not of its shape
    op = rng.choice([Op.INSERT, Op.UPDATE, Op.UPDATE, Op.DELETE])
    missing = rng.random() < odd / 4
    return Change(
        op,
        table,
        None if op is Op.INSERT or (missing and op is Op.UPDATE) else before,
        None if op is Op.DELETE or (missing and op is Op.INSERT) else after,
    )
