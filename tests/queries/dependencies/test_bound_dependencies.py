"""Relevance of changes to bound dependencies, with SQLite as the oracle for each condition and row."""

from __future__ import annotations

import gc
import random
import weakref
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.capture.captured_database import Running, running
from tests.queries.dependencies.bound_tables import ONE, TABLES, TWO, VALUES, analysis, shape
from tests.sources.memory_source import MemorySource
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, AnyOf, Comparison, Condition, Const, Dependency, Param
from headwater.model.literal import U64, UNAVAILABLE, Date, Embedding, Json
from headwater.model.table import Row
from headwater.queries.dependencies import bound_dependencies
from headwater.queries.dependencies.bound_dependencies import MAX_TEMPLATE_LEAVES, BoundDependencies, bind
from headwater.queries.dependencies.template import leaves

NEAR = 2**53 + 1  # a REAL column would round it
DECLARED = {
    "i": "INTEGER", "r": "REAL", "n": "NUMERIC", "x": "TEXT", "xn": "TEXT COLLATE NOCASE", "xr": "TEXT COLLATE RTRIM",
    "b": "BLOB", "z": "", "zn": "COLLATE NOCASE", "bo": "BOOLEAN", "d": "DATE", "u": "UNSIGNED INTEGER",
    "de": "DECIMAL_TEXT", "uu": "UUID_TEXT", "j": "JSON_TEXT", "dt": "DATETIME_TEXT",
    "nn": "INTEGER NOT NULL DEFAULT 0",
}  # fmt: skip
DIRTY: list[Any] = [
    *VALUES, -1, NEAR, 2**53, float(2**53), 2**63 - 1, -(2**63), 1e300, -1e300, 9.3e18, "1", "01", "1.0", "A ", "B",
    "a\0x", "A\0y", "ä", "Ä", str(NEAR), " 1", "1 ", "1e3", 1000, "0x10", "2020-01-01", Date("2020-01-01"), b"1",
    Decimal("1.50"), "1.5", 1.5, "[1]", Json("[1]"), "00000000-0000-0000-0000-000000000001", U64(3), "inf", "nan",
]  # fmt: skip
SQL = {"eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "is": "IS", "is_not": "IS NOT"}


def written(test: Comparison) -> str:
    marks = [f":p{number}" for number in range(len(test.operands))]
    match test.op:
        case "in" | "not_in":
            return f'"{test.column}" {"NOT " * (test.op == "not_in")}IN ({", ".join(marks)})'
        case "between" | "not_between":
            return f'"{test.column}" {"NOT " * (test.op == "not_between")}BETWEEN {marks[0]} AND {marks[1]}'
        case op:
            return f'"{test.column}" {SQL[op]} {marks[0]}'


def fill(app: Running, rng: random.Random, rows: int) -> dict[int, Change]:
    app.run(f"CREATE TABLE t (id INTEGER PRIMARY KEY, {', '.join(f'{n} {d}' for n, d in DECLARED.items())})")
    names = list(DECLARED)
    sql = f"INSERT INTO t ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    for _ in range(rows):
        row = [rng.choice(DIRTY) for _ in names[:-1]] + [rng.choice([0, 1, "a", 1.5])]
        app.source.write(lambda session, row=row: session.execute(sql, row)).result(PATIENCE)
    return {change.after[0]: change for change in app.changes() if change.op is Op.INSERT and change.after}


@pytest.mark.slow
def test_bound_conditions_agree_with_sqlite(tmp_path: Path) -> None:
    rng = random.Random(5)
    exact = dropped = 0
    with running(tmp_path) as app:
        rows = fill(app, rng, 150)
        tables = app.source.describe()
        for column in ("id", *DECLARED):
            for op in (*ONE, *TWO, "in", "not_in") * 4:
                many = 1 if op in ONE else 2 if op in TWO else rng.randrange(5)
                given = {f"p{number}": rng.choice(DIRTY) for number in range(many)}
                test = Comparison(column, op, tuple(map(Param, given)))
                bound = bind(app.source, tables, analysis(Dependency("t", frozenset({column}), test)), given)
                said = app.source.read(f"SELECT id FROM t WHERE {written(test)}", given)
                true = {key for (key,) in said.rows}
                ours = {key for key, change in rows.items() if bound.matters(change) is not None}
                if not bound.references[0].values and bound.references[0].template.tree is True:
                    dropped += 1
                    assert ours == set(rows)
                else:
                    exact += 1
                    assert ours == true, (column, op, given)
    assert exact > 4 * dropped, (exact, dropped)


@pytest.mark.slow
def test_bound_condition_trees_agree_with_sqlite(tmp_path: Path) -> None:
    rng = random.Random(6)
    with running(tmp_path) as app:
        rows = fill(app, rng, 100)
        tables = app.source.describe()
        for _ in range(400):
            given: dict[str, Any] = {}
            condition, sql = tree(rng, given, 2)
            bound = bind(app.source, tables, analysis(Dependency("t", None, condition)), given)
            true = {key for (key,) in app.source.read(f"SELECT id FROM t WHERE {sql}", given).rows}
            ours = {key for key, change in rows.items() if bound.matters(change) is not None}
            assert ours == true, (sql, given)


def tree(rng: random.Random, given: dict[str, Any], depth: int) -> tuple[Condition, str]:
    if depth and rng.random() < 0.7:
        parts = [tree(rng, given, depth - 1) for _ in range(rng.randrange(1, 4))]
        kind, word = rng.choice([(AllOf, " AND "), (AnyOf, " OR ")])
        return kind(tuple(part for part, _ in parts)), f"({word.join(sql for _, sql in parts)})"
    name, column = f"v{len(given)}", rng.choice(["i", "x", "xn", "z"])
    given[name] = rng.choice([0, 1, 2, 0.5, "a", "A", "b", "", b"a", None])
    op = rng.choice(ONE)
    return Comparison(column, op, (Param(name),)), f"{column} {SQL[op]} :{name}"


# --- which changes ---------------------------------------------------------------------------------------

SOURCE = MemorySource("m")
T = TABLES["t"]


def bound(*dependencies: Dependency, **args: Any) -> BoundDependencies:
    return bind(SOURCE, TABLES, analysis(*dependencies), args)


def update(before: Row, after: Row) -> Change:
    return Change(Op.UPDATE, T, before, after)


@pytest.mark.parametrize(
    "old, new",
    [
        (1, 1.0), (1, True), (0, False), (0.0, -0.0), (Decimal("1.0"), Decimal("1.00")), (b"a", "a"), (None, 0),
        (1, U64(1)), ("[1]", Json("[1]")), ("2020-01-01", Date("2020-01-01")), (Embedding((0.0,)), Embedding((-0.0,))),
        (UNAVAILABLE, UNAVAILABLE), (UNAVAILABLE, 1), (float("nan"), -float("nan")),
    ],
)  # fmt: skip
def test_change_of_a_value_or_its_type_is_relevant(old: Any, new: Any) -> None:
    asked = bound(Dependency("t", frozenset({"a"})))
    assert asked.matters(update((1, old, 0, 0, 0), (1, new, 0, 0, 0))) == 0
    assert asked.matters(update((1, 5, old, 0, 0), (1, 5, new, 0, 0))) is None


@pytest.mark.parametrize("value", [1, 0.5, float("nan"), Decimal("1.0"), Embedding((float("nan"),)), "a", None])
def test_update_with_identical_values_is_irrelevant(value: Any) -> None:
    again = eval(repr(value), {"nan": float("nan"), "Decimal": Decimal, "Embedding": Embedding})
    assert bound(Dependency("t")).matters(update((1, value, 0, 0, 0), (1, again, 0, 0, 0))) is None


def test_condition_is_checked_on_the_old_and_the_new_row() -> None:
    asked = bound(Dependency("t", frozenset({"a", "d"}), Comparison("a", "eq", (Param("p"),))), p=1)
    assert asked.matters(update((1, 1, 0, 0, 0), (1, 2, 0, 0, 0))) == 0
    assert asked.matters(update((1, 2, 0, 0, 0), (1, 1, 0, 0, 0))) == 0
    assert asked.matters(update((1, 2, 0, 0, 0), (1, 3, 0, 0, 0))) is None
    assert asked.matters(update((1, 1, 0, 0, 0), (1, 1, 9, 9, 0))) is None
    assert asked.matters(Change(Op.DELETE, T, (1, 1, 0, 0, 0))) == 0
    assert asked.matters(Change(Op.INSERT, T, None, (1, 2, 0, 0, 0))) is None


def test_change_with_unknown_rows_is_relevant() -> None:
    asked = bound(Dependency("u"), Dependency("t", frozenset({"a", "c"}), Comparison("a", "eq", (Const(1),))))
    row = (1, 2, 0, 0, 0)
    for op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
        assert asked.matters(Change(op, T)) == 1
    assert asked.matters(Change(Op.UPDATE, T, None, row)) == 1  # its before image was not sent
    assert asked.matters(Change(Op.DELETE, T)) == 1
    assert asked.matters(Change(Op.INSERT, T, None, (1, UNAVAILABLE, 0, 0, 0))) == 1
    assert asked.matters(Change(Op.INSERT, T, None, (1,))) == 1  # not a row of that shape
    assert asked.matters(Change(Op.INSERT, T, None, (1, object(), 0, 0, 0))) == 1  # type: ignore[arg-type]
    assert asked.matters(Change(Op.INSERT, T, None, row)) is None


def test_rows_of_another_table_version_are_read_by_column_name() -> None:
    asked = bound(Dependency("t", frozenset({"a"}), Comparison("a", "eq", (Const(1),))))
    moved = shape("t", "id", "new", "a", version=2)
    assert asked.matters(Change(Op.INSERT, moved, None, (1, 1, 2))) is None
    assert asked.matters(Change(Op.INSERT, moved, None, (1, 2, 1))) == 0
    without = shape("t", "id", "b", version=3)
    assert asked.matters(Change(Op.INSERT, without, None, (1, 2))) == 0
    folded = shape("t", "id", "a:NOCASE", version=4)  # compares in another way than the operands were written for
    assert asked.matters(Change(Op.INSERT, folded, None, (1, 2))) == 0


def test_query_without_columns_depends_on_inserts_and_deletes() -> None:
    asked = bound(Dependency("t", frozenset()))
    assert asked.matters(Change(Op.INSERT, T, None, (1, 1, 0, 0, 0))) == 0
    assert asked.matters(update((1, 1, 0, 0, 0), (2, 2, 1, 1, 1))) is None


def test_condition_that_cannot_be_encoded_is_dropped() -> None:
    strange = {"t": shape("t", "id", "a:UNICODE_CI")}
    asked = bind(SOURCE, strange, analysis(Dependency("t", None, Comparison("a", "eq", (Const("x"),)))), {})
    assert asked.matters(Change(Op.INSERT, strange["t"], None, (1, "y"))) == 0
    for condition in (
        Comparison("a", "eq", (Param("not given"),)),
        Comparison("nowhere", "eq", (Const(1),)),
        Comparison("a", "like", (Const(1),)),
        Comparison("a", "eq", (Const(2**70),)),
        Comparison("a", "in", (Const(1), Const(2**70))),
        Comparison("a", "not_in", (Const(1), Const(2**70))),
    ):
        assert bound(Dependency("t", None, condition)).matters(Change(Op.INSERT, T, None, (1, 7, 0, 0, 0))) == 0


def test_deep_and_wide_conditions_are_dropped() -> None:
    deep: Condition = Comparison("a", "eq", (Const(1),))
    for turn in range(300):
        deep = (
            AllOf((deep, Comparison("b", "ne", (Const(turn),))))
            if turn % 2
            else AnyOf((deep, Comparison("d", "eq", (Const(turn),))))
        )
    change = Change(Op.INSERT, T, None, (1, 1, "b", 0, 1))
    assert bound(Dependency("t", None, deep)).matters(change) == 0
    pairs = [AllOf((Comparison("a", "eq", (Const(n),)), Comparison("d", "eq", (Const(n),)))) for n in range(3_000)]
    assert bound(Dependency("t", None, AnyOf(tuple(pairs)))).matters(change) == 0


def test_comparisons_of_one_column_are_merged_to_one_interval() -> None:
    both = AllOf(
        (
            Comparison("a", "gt", (Const(1),)),
            Comparison("a", "lt", (Const(3),)),
            Comparison("a", "is_not", (Const(None),)),
        )
    )
    found = bound(Dependency("t", None, both))
    assert len(found.references[0].values) == 1
    assert [found.matters(Change(Op.INSERT, T, None, (1, n, 0, 0, 0))) for n in (1, 2, 3)] == [None, 0, None]
    never = bound(
        Dependency("t", None, AllOf((Comparison("a", "eq", (Const(1),)), Comparison("a", "eq", (Const(2),)))))
    )
    assert never.matters(Change(Op.INSERT, T, None, (1, 1, 0, 0, 0))) is None
    assert never.matters(Change(Op.TRUNCATE, T)) == 0


def test_cached_templates_are_limited_by_their_number_of_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = MAX_TEMPLATE_LEAVES // 10
    monkeypatch.setattr(bound_dependencies, "MAX_TEMPLATE_LEAVES", most)
    source = MemorySource("wide")
    for turn in range(most // 800 + 20):
        pairs = [
            AllOf((Comparison("a", "eq", (Const(n),)), Comparison("d", "eq", (Const(n),))))
            for n in range(450 - turn % 2)
        ]
        columns = frozenset({"a", "d", f"x{turn}"})
        bind(source, TABLES, analysis(Dependency("t", columns, AnyOf(tuple(pairs)))), {})
    templates = bound_dependencies._BINDERS[source]._templates
    assert most // 2 < templates.weight <= most
    kept = [template for template, _ in templates._known.values()]
    assert sum(len(list(leaves(template.tree))) for template in kept) <= most


def test_instances_with_the_same_condition_share_a_template() -> None:
    source = MemorySource("shared")
    asked = analysis(Dependency("t", None, Comparison("a", "eq", (Param("p"),))))
    first, other = (bind(source, TABLES, asked, {"p": value}).references[0] for value in (1, 2))
    assert first.template is other.template and first.values != other.values


def test_closed_source_is_garbage_collected() -> None:
    source = MemorySource("gone")
    bind(source, TABLES, analysis(Dependency("t", None, Comparison("a", "eq", (Const(1),)))), {})
    seen = weakref.ref(source)
    del source
    gc.collect()
    assert seen() is None
