"""Guards against re-execution: a suppressed change leaves the answer unchanged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.capture.captured_database import Running, flat, running
from tests.queries.dependencies.bound_tables import TABLES, analysis
from tests.sources.memory_source import MemorySource
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import (
    ALWAYS,
    MAX_KEYS,
    Analysis,
    Comparison,
    Condition,
    Const,
    Dependency,
    KeyGuard,
    Operand,
    Param,
    TopGuard,
)
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Row
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.guards import GuardState
from headwater.sources.query import ReadResult

G = Comparison("region", "eq", (Param("g"),))


def on(table: str, *columns: str, condition: Condition = ALWAYS) -> Dependency:
    return Dependency(table, frozenset(columns), condition)


def query(sql: str, *dependencies: Dependency, guards: tuple[KeyGuard | TopGuard, ...]) -> Analysis:
    return analysis(*dependencies, sql=sql, guards=guards)


WANTED = "SELECT DISTINCT customer FROM orders WHERE region = :g"
ORDERS = on("orders", "id", "customer", "region", "total", condition=G)
CUSTOMERS = on("customers", "id", "name")
FAMILIES = {
    "inner": query(
        "SELECT o.id, o.total, c.name FROM orders o JOIN customers c ON c.id = o.customer"
        " WHERE o.region = :g ORDER BY 1",
        ORDERS,
        CUSTOMERS,
        guards=(KeyGuard(1, "id", WANTED, (0,)), KeyGuard(0, "customer", "SELECT id FROM customers", (1,))),
    ),
    "left": query(
        "SELECT o.id, o.total, c.name FROM orders o LEFT JOIN customers c ON c.id = o.customer"
        " WHERE o.region = :g ORDER BY 1",
        ORDERS,
        CUSTOMERS,
        guards=(KeyGuard(1, "id", WANTED, (0,)),),
    ),
    "in": query(
        f"SELECT id, name FROM customers WHERE id IN ({WANTED}) ORDER BY 1",
        on("orders", "customer", "region", condition=G),
        CUSTOMERS,
        guards=(KeyGuard(1, "id", WANTED, (0,)),),
    ),
    "self": query(
        "SELECT a.id, b.id, b.total FROM orders a JOIN orders b ON b.id = a.customer WHERE a.region = :g ORDER BY 1, 2",
        on("orders", "id", "customer", "region", condition=G),
        on("orders", "id", "total"),
        guards=(KeyGuard(1, "id", WANTED, (0,)), KeyGuard(0, "customer", "SELECT id FROM orders", (1,))),
    ),
    "top": query(
        "SELECT total, id FROM orders WHERE region = :g ORDER BY total DESC, id LIMIT :n",
        on("orders", "id", "region", "total", condition=G),
        guards=(TopGuard(0, (("total", True), ("id", False)), (0, 1), Param("n")),),
    ),
    "page": query(
        "SELECT total, id FROM orders WHERE region = :g ORDER BY total, id LIMIT 2 OFFSET :n",
        on("orders", "id", "region", "total", condition=G),
        guards=(TopGuard(0, (("total", False), ("id", False)), (0, 1), Const(2)),),
    ),
}


class Live:
    """An instance that caches its answer until a change makes it stale."""

    def __init__(self, app: Running, found: Analysis, args: dict[str, Any]) -> None:
        self.app, self.analysis, self.args = app, found, args
        self.tables = app.source.describe()
        self.bound: BoundDependencies = bind(app.source, self.tables, found, args)
        self.told = self.held_back = self.changed = 0
        self.execute()

    def read(self, sql: str) -> ReadResult:
        return self.app.source.read(sql, {name: self.args[name] for name in self.args if f":{name}" in sql})

    def execute(self) -> None:
        keys = [self.read(each.sql).rows if isinstance(each, KeyGuard) else None for each in self.analysis.guards]
        self.answer = msgspec.structs.replace(self.read(self.analysis.sql), keys=tuple(keys))
        self.guards = GuardState.record(self.app.source, self.tables, self.analysis, self.args, self.bound, self.answer)

    def hear(self, change: Change) -> None:
        place = self.bound.matters(change)
        is_stale = place is not None and not self.guards.suppresses(change, place)
        self.held_back += place is not None and not is_stale
        differs = repr(self.read(self.analysis.sql).rows) != repr(self.answer.rows)
        assert is_stale or not differs, (self.analysis.sql, self.args, change)
        self.told += is_stale
        self.changed += differs
        if is_stale:
            self.execute()


def write(app: Running, rng: random.Random) -> list[Change]:
    key, region, customer = rng.randrange(24), rng.choice("abc"), rng.choice([None, *range(1, 14)])
    total = rng.choice([None, 1, 2, 3, 1.5, 2.0, "x", "X"])
    sql, args = rng.choice(
        [
            ("INSERT INTO orders VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", (key, customer, region, total)),
            ("UPDATE orders SET total = ? WHERE id = ?", (total, key)),
            ("UPDATE orders SET customer = ?, region = ? WHERE id = ?", (customer, region, key)),
            ("UPDATE orders SET id = ? WHERE id = ? AND NOT EXISTS (SELECT 1 FROM orders WHERE id = ?1)", (key, 3)),
            ("DELETE FROM orders WHERE id = ?", (key,)),
            ("INSERT INTO customers VALUES (?, 'new') ON CONFLICT DO NOTHING", (key,)),
            ("UPDATE customers SET name = name || ? WHERE id = ?", (region, key)),
            ("UPDATE customers SET name = name || ? WHERE id = ?", (region, key)),
            ("DELETE FROM customers WHERE id = ?", (key,)),
        ]
    )
    before = app.source.head()
    app.source.write(lambda session: session.execute(sql, args)).result(PATIENCE)
    app.caught_up()
    return flat(app.log.scan(after=before)) if app.source.head() > before else []


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_suppressed_change_leaves_the_answer_unchanged(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with running(tmp_path) as app:
        app.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INT, region TEXT, total)")
        app.run("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
        app.caught_up()
        live = {
            name: [Live(app, found, {"g": region, "n": n}) for region, n in (("a", 3), ("b", 1), ("c", 2))]
            for name, found in FAMILIES.items()
        }
        for _ in range(700):
            for change in write(app, rng):
                for each in (one for some in live.values() for one in some):
                    each.hear(change)
        count = {name: [sum(getattr(o, what) for o in some) for what in WHAT] for name, some in live.items()}
    print(count)
    for name, (told, held_back, changed) in count.items():
        assert changed > 20 and held_back > 9 and told < 3 * changed, (name, count)
    assert count["top"][0] < 1.2 * count["top"][2], count


WHAT = ("told", "held_back", "changed")

# --- traps -----------------------------------------------------------------------------------------------

SOURCE = MemorySource("m")
T, U = TABLES["t"], TABLES["u"]


def recorded(found: Analysis, *keys: list[Row] | None, answer: tuple[Row, ...] = (), **args: Any) -> GuardState:
    read = ReadResult((), answer, 5, keys=tuple(None if rows is None else tuple(rows) for rows in keys))
    return GuardState.record(SOURCE, TABLES, found, args, bind(SOURCE, TABLES, found, args), read)


JOIN = query("", on("t", "a"), on("u", "a"), guards=(KeyGuard(0, "a", "", (1,)), KeyGuard(1, "a", "", (0,))))


def test_guards_suppress_no_change_that_matches_the_row_of_a_suppressed_change() -> None:
    state = recorded(JOIN, [(1,)], [(2,)])
    assert state.suppresses(Change(Op.INSERT, U, None, (9, 7, 0, 0)), 1)
    assert not state.suppresses(Change(Op.INSERT, T, None, (9, 7, 0, 0, 0)), 0)  # it meets the row that came before


def test_change_that_is_not_suppressed_ends_all_guards() -> None:
    state = recorded(JOIN, [(1,)], [(2,)])
    assert not state.suppresses(Change(Op.INSERT, U, None, (9, 2, 0, 0)), 1)
    assert not state and not state.suppresses(Change(Op.INSERT, U, None, (9, 7, 0, 0)), 1)


def test_self_join_row_that_matches_itself_is_not_suppressed() -> None:
    guards = (KeyGuard(0, "a", "", (1,)), KeyGuard(1, "d", "", (0,)))
    state = recorded(query("", on("t", "a", "d"), on("t", "a", "d"), guards=guards), [(1,)], [(2,)])
    assert not state.suppresses(Change(Op.INSERT, T, None, (9, 7, 0, 0, 7)), 0)


def test_change_is_suppressed_only_if_every_reference_to_its_table_excludes_it() -> None:
    state = recorded(query("", on("t", "a"), on("t", "a"), guards=(KeyGuard(0, "a", "", ()),)), [(1,)])
    assert not state.suppresses(Change(Op.INSERT, T, None, (9, 7, 0, 0, 0)), 0)


@pytest.mark.parametrize(
    "change",
    [
        Change(Op.TRUNCATE, T),
        Change(Op.UPDATE, T, None, (9, 7, 0, 0, 0)),
        Change(Op.INSERT, T, None, (9, UNAVAILABLE, 0, 0, 0)),
        Change(Op.INSERT, T, None, (9,)),
        Change(Op.UPDATE, T, (9, 1, 0, 0, 0), (9, 7, 0, 0, 0)),
        Change(Op.UPDATE, T, (9, 7, 0, 0, 0), (9, 1.0, 0, 0, 0)),
    ],
)
def test_change_with_unknown_values_is_not_suppressed(change: Change) -> None:
    found = query("", on("t", "a"), guards=(KeyGuard(0, "a", "", ()),))
    assert not recorded(found, [(1,)]).suppresses(change, 0)
    assert recorded(found, [(1,)]).suppresses(Change(Op.INSERT, T, None, (9, 7, 0, 0, 0)), 0)


def test_guard_with_too_many_keys_is_not_recorded() -> None:
    found = query("", on("t", "a"), guards=(KeyGuard(0, "a", "", ()),))
    assert recorded(found, [(number,) for number in range(MAX_KEYS)])
    assert not recorded(found, [(number,) for number in range(MAX_KEYS + 1)])
    assert not recorded(found, None)


@pytest.mark.parametrize("rows", [Param("n"), Const(2)])
def test_top_guard_is_recorded_only_if_the_answer_fills_its_limit(rows: Operand) -> None:
    found = query("", on("t", "a"), guards=(TopGuard(0, (("a", False),), (0,), rows),))
    assert recorded(found, None, answer=((1,), (2,)), n=2)
    assert not recorded(found, None, answer=((1,),), n=2)
    assert not recorded(query("", on("t", "a"), guards=(TopGuard(0, (("a", False),), (0,), Const(0)),)), None)
    assert not recorded(query("", on("t", "a"), guards=(TopGuard(0, (("a", False),), (0,), Const(-1)),)), None)
    state = recorded(found, None, answer=((1,), (2,)), n=2)
    assert state.suppresses(Change(Op.INSERT, T, None, (9, 3, 0, 0, 0)), 0)
    assert not state.suppresses(Change(Op.INSERT, T, None, (9, 2.0, 0, 0, 0)), 0)  # as far as is known, before it
