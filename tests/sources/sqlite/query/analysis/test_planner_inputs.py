"""Answers that depend on the query plan: a tag of one plan is not valid for another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.capture.captured_database import foreign
from tests.sources.sqlite.query.shop_analysis import opened, run
from tests.sources.sqlite_source import MemoryNotes

from headwater.model.dependencies.dependency import Analysis
from headwater.sources.sqlite.query.analysis import planner_inputs
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

TABLES = (
    "CREATE TABLE g(id INTEGER PRIMARY KEY, a INTEGER, b INTEGER, f REAL)",
    "INSERT INTO g VALUES (1, 3, 1, 1e16), (2, 1, 9, 1.0), (3, 1, 7, -1e16), (4, 2, 4, 1.0)",
    "CREATE TABLE other(id INTEGER PRIMARY KEY, x INTEGER)",
)
MOVED = {  # by an index on (a, b)
    "a scalar subquery": "SELECT (SELECT a FROM g)",
    "a bare column of a group": "SELECT a, b FROM g GROUP BY a",
    "a limit inside": "SELECT x FROM (SELECT b AS x FROM g WHERE a = 1 LIMIT 1)",
    "group_concat": "SELECT group_concat(b) FROM g WHERE a = 1",
    "a limit outside": "SELECT b + 0 FROM (SELECT b, a FROM g UNION ALL SELECT 5, 5 WHERE 0) WHERE a = 1 LIMIT 1",
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SqliteSource]:
    with opened(tmp_path, TABLES) as found:
        yield found


def rows(source: SqliteSource, found: Analysis) -> Any:
    read = source.answer(found, {})
    return None if read is None else read.rows


def by_us(source: SqliteSource, _: Path, sql: str) -> None:
    run(source, sql)


def by_others(_: SqliteSource, folder: Path, sql: str) -> None:
    foreign(folder / "app.db", sql)


@pytest.mark.parametrize("write", [by_us, by_others])
@pytest.mark.parametrize("name", MOVED)
def test_index_that_changes_the_plan_changes_the_epoch(
    source: SqliteSource, tmp_path: Path, name: str, write: Callable[[SqliteSource, Path, str], None]
) -> None:
    sql = MOVED[name]
    before, schema = source.analyse(sql), source.read_head().schema
    assert before.is_cacheable and not before.is_total
    was = rows(source, before)
    write(source, tmp_path, "CREATE INDEX gi ON g(a, b)")
    assert source.read_head().schema != schema
    assert rows(source, before) is None
    after = source.analyse(sql)
    assert after.epoch != before.epoch and rows(source, after) != was
    write(source, tmp_path, "DROP INDEX gi")
    again = source.analyse(sql)
    assert rows(source, after) is None
    assert again.epoch == before.epoch and rows(source, again) == was  # the old tag is good again


def test_query_with_a_total_order_keeps_its_epoch_under_new_indexes(source: SqliteSource, tmp_path: Path) -> None:
    before = source.analyse("SELECT a, b FROM g WHERE a = 1")
    assert before.is_total
    was = rows(source, before)
    for sql in ("CREATE INDEX gi ON g(a, b DESC)", "ANALYZE"):
        foreign(tmp_path / "app.db", sql)
        assert source.analyse(before.sql).epoch == before.epoch and rows(source, before) == was


def test_new_table_without_an_index_keeps_the_epoch(source: SqliteSource) -> None:
    before = source.analyse(MOVED["group_concat"])
    run(source, "CREATE TABLE staging(id INTEGER PRIMARY KEY)")
    run(source, "DROP TABLE staging")
    assert source.analyse(before.sql).epoch == before.epoch


# --- statistics, which do not move the version of the schema ---------------------------------------------------------

TWO_WAYS = "SELECT (SELECT id FROM p WHERE a = 1 AND b = 1)"


@pytest.fixture
def analysed(tmp_path: Path) -> Iterator[SqliteSource]:
    rows = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400)"
    tables = (
        "CREATE TABLE p(id INTEGER PRIMARY KEY, a INTEGER, b INTEGER, u INTEGER, w INTEGER)",
        # Both serve a = 1 and b = 1; they differ in the order of the rows they find.
        "CREATE INDEX pa ON p(a, u)",
        "CREATE INDEX pb ON p(b, w)",
        f"{rows} INSERT INTO p SELECT i, i % 100, 1, i, -i FROM n",
    )
    with opened(tmp_path, tables) as source:
        with another(tmp_path) as db:
            db.execute("ANALYZE")
        yield source


@contextlib.contextmanager
def another(folder: Path) -> Iterator[apsw.Connection]:
    """Yield a connection of another program, with samples among its statistics."""
    with contextlib.closing(apsw.Connection(str(folder / "app.db"))) as db:
        yield db


def turn(db: apsw.Connection) -> None:
    """Write rows and statistics that favour the other index, and keep the rows that the answer depends on."""
    with db:
        db.execute("UPDATE p SET a = 1, b = i FROM (SELECT id AS j, id + 1 AS i FROM p) WHERE id = j AND NOT (a = 1)")


def by_hand(db: apsw.Connection) -> None:
    with db:
        db.execute("UPDATE sqlite_stat1 SET stat = CASE idx WHEN 'pa' THEN '400 400 1' ELSE '400 1 1' END")
        db.execute("DELETE FROM sqlite_stat4")


def by_analyze(db: apsw.Connection) -> None:
    turn(db)
    db.execute("ANALYZE")


def by_optimize(db: apsw.Connection) -> None:
    with db:
        rows = "WITH n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 9000)"
        db.execute(f"{rows} INSERT INTO p SELECT i, 1, i, i, -i FROM n")
    db.execute("PRAGMA optimize = 0x10002")


def plan(reader: Any) -> str:
    return " ".join(row[3] for row in reader.guard.run(f"EXPLAIN QUERY PLAN {TWO_WAYS}").fetchall())


@pytest.mark.parametrize("move", [by_hand, by_analyze, by_optimize])
def test_new_statistics_change_the_epoch_and_the_plan_of_every_reader(
    analysed: SqliteSource, tmp_path: Path, move: Callable[[apsw.Connection], None]
) -> None:
    before, look = analysed.analyse(TWO_WAYS), analysed.read_head()
    was = rows(analysed, before)
    with analysed._pool.read() as reader:
        assert "INDEX pa" in plan(reader)
    with another(tmp_path) as db:
        move(db)
    assert analysed.read_head().schema >> 64 == look.schema >> 64  # that alone would not tell
    assert analysed.read_head().schema != look.schema
    assert rows(analysed, before) is None
    after = analysed.analyse(TWO_WAYS)
    now = rows(analysed, after)
    assert after.epoch != before.epoch and now != was
    # One that was opened long ago, one that is opened now: the same plan, the same answer.
    with analysed._pool.read() as old:
        assert "INDEX pb" in plan(old)
        assert rows(analysed, after) == now
        with analysed._pool.read() as new:
            assert "INDEX pb" in plan(new)


def test_idle_reader_loads_new_statistics_before_it_answers(analysed: SqliteSource, tmp_path: Path) -> None:
    found = analysed.analyse(TWO_WAYS)
    was = rows(analysed, found)
    with analysed._pool.read():
        assert rows(analysed, found) == was  # by a second reader
    with another(tmp_path) as db:
        by_hand(db)
    found = analysed.analyse(TWO_WAYS)
    first = rows(analysed, found)
    assert first != was
    with analysed._pool.read():  # the one that just answered
        assert rows(analysed, found) == first


def test_different_sqlite_library_changes_the_epoch_of_plan_dependent_queries(
    source: SqliteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, other = source.analyse("SELECT id FROM g"), source.analyse(MOVED["group_concat"])
    monkeypatch.setattr(planner_inputs, "_LIBRARY", ("a later one",))
    source._analyses._planning = planner_inputs.PlannerInputs()  # as after a restart
    assert source.analyse("SELECT id FROM g").epoch == total.epoch
    assert source.analyse(MOVED["group_concat"]).epoch != other.epoch


def test_epoch_of_plan_dependent_queries_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, TABLES) as source:
        before = [source.analyse(sql).epoch for sql in MOVED.values()]
    source = SqliteSource("app", str(tmp_path / "app.db"), notes=MemoryNotes(), config=SqliteConfig(wal=True))
    with contextlib.closing(source):
        assert [source.analyse(sql).epoch for sql in MOVED.values()] == before
