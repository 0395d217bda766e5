"""Queries that are not supported, or meant to harm: they depend on whole tables or are refused, and never take long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.sources.sqlite.query.shop_analysis import dependency_texts, opened

from headwater.errors import InvalidRequest
from headwater.sources.sqlite.query.analysis import parser_check, select_analysis
from headwater.sources.sqlite.query.facts import facts
from headwater.sources.sqlite.query.syntax import tree
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed
from headwater.sources.sqlite.source import SqliteSource


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(tmp_path_factory.mktemp("hostile")) as source:
        yield source


@pytest.mark.parametrize(
    "sql",
    [
        "",
        ";",
        "-- nothing",
        "SELECT 1; DROP TABLE c",
        "DROP TABLE c",
        "DELETE FROM c RETURNING id",
        "WITH x AS (SELECT 1) INSERT INTO c(name) SELECT 'x' FROM x",
        "PRAGMA table_info(c)",
        "ATTACH ':memory:' AS other",
        "BEGIN",
        "SELECT",
        "SELECT nowhere FROM c",
        "SELECT * FROM _headwater_capture",
        "SELECT load_extension('x')",
        "VACUUM",
    ],
)
def test_hostile_query_is_refused(shop: SqliteSource, sql: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        shop.analyse(sql)
    assert error.value.message


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT c.id FROM c FULL JOIN made USING (id)",
        "SELECT count(*) FROM c GROUP BY (SELECT 1 UNION SELECT 2 ORDER BY 1 + 0)",
        "SELECT (SELECT count(c.id)) FROM c",
        f"SELECT {'(' * 90}id{')' * 90} FROM c",
        f"SELECT id FROM c WHERE id = {'+'.join(['1'] * 900)}",
        "SELECT id FROM c WHERE id IN (" + ", ".join(["12345"] * 40_000) + ")",
        "SELECT id FROM c WHERE " + " AND ".join(f"id <> {n}" for n in range(10_000)),
        "SELECT id FROM c WHERE name = '" + "x" * 1_000_000 + "'",
        "SELECT " + ", ".join(f"(SELECT {n} FROM c LIMIT 1)" for n in range(300)),
    ],
    ids=range(9),
)
def test_large_or_unusual_query_is_analysed_in_time_or_refused(shop: SqliteSource, sql: str) -> None:
    start = time.process_time()
    try:
        found = shop.analyse(sql)
    except InvalidRequest:
        return  # past a limit of SQLite's own
    assert time.process_time() - start < 5
    assert {one.table for one in found.dependencies} == set(found.tables) != set()


@pytest.mark.parametrize("character", ["\0", "\ud800"])
def test_query_with_a_nul_or_a_lone_surrogate_is_refused(shop: SqliteSource, character: str) -> None:
    with pytest.raises(InvalidRequest):
        shop.analyse(f"SELECT id FROM c WHERE id = 1{character} OR 1")


@pytest.mark.parametrize("error", [RecursionError(), KeyError("x"), TypeError("x"), NotAnalysed("a whim")])
def test_failed_parse_depends_on_all_columns(
    shop: SqliteSource, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(sql: str) -> None:
        raise error

    monkeypatch.setattr(select_analysis, "parse", fail)
    found = shop.analyse("SELECT id FROM c WHERE id = 1")
    assert dependency_texts(found) == ["c: all columns"]
    assert found.doubts and not found.is_total


def test_misparsed_query_depends_on_all_columns(shop: SqliteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known misparse: BETWEEN ?1 AND 5 read as BETWEEN ? AND 1 AND 5."""
    monkeypatch.setattr(parser_check, "render", lambda query: "SELECT id FROM c WHERE id BETWEEN ? AND 1 AND 5")
    found = shop.analyse("SELECT id FROM c WHERE id BETWEEN ?1 AND 5")
    assert dependency_texts(found) == ["c: all columns"]
    assert found.doubts == ("SQLite compiles our reading of the statement to another program",)


def test_column_missed_by_the_analysis_is_reported_as_doubt(
    shop: SqliteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(select_analysis.Names):
        def query(self, *args: object) -> None:
            super().query(*args)  # type: ignore[arg-type]
            self.read.discard(("c", "name"))

    monkeypatch.setattr(select_analysis, "Names", Forgetful)
    found = shop.analyse("SELECT id FROM c WHERE name = 'x'")
    assert found.doubts == ("SQLite reads c.name, which was not found in the statement",)


def test_table_named_only_by_using_is_a_dependency(shop: SqliteSource) -> None:
    """SQLite's authorizer is not asked for it; the opened cursors show it."""
    found = shop.analyse("SELECT made.a FROM c LEFT JOIN made USING (id)")
    assert found.tables == ("c", "made")
    found = shop.analyse("SELECT made.a FROM c FULL JOIN made USING (id)")
    assert dependency_texts(found) == ["c: all columns", "made: all columns"]


def test_preparing_a_query_takes_little_time(shop: SqliteSource) -> None:
    sql = """SELECT c.name, o.day, count(*) FROM c JOIN o ON o.cid = c.id LEFT JOIN i ON i.oid = o.id
        WHERE c.id = :c AND o.total BETWEEN 1 AND :t GROUP BY c.name, o.day ORDER BY 3 DESC LIMIT 10"""
    shop.analyse(sql)
    start = time.process_time()
    for _ in range(20):
        shop.analyse(sql)
    assert (time.process_time() - start) / 20 < 0.02  # about 2 ms


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT (0 AND EXISTS (SELECT 1 FROM c WHERE name >= '5'))",
        "SELECT id FROM o WHERE 0 AND EXISTS (SELECT 1 FROM c WHERE name >= '5')",
        "SELECT id FROM o WHERE (SELECT max(name) FROM c) IN ()",
        "SELECT id FROM o WHERE 0 AND EXISTS (SELECT 1 FROM bigger)",
        "WITH x AS (SELECT name FROM c) SELECT id FROM o",
    ],
)
def test_table_that_the_engine_does_not_read_is_no_dependency(shop: SqliteSource, sql: str) -> None:
    found = shop.analyse(sql)
    assert "c" not in found.tables
    assert {dependency.table for dependency in found.dependencies} <= set(found.tables)


def _doubled(levels: int, conditions: int) -> str:
    named = ["c0 AS (SELECT id AS x FROM c)"]
    named += [f"c{k} AS (SELECT x FROM c{k - 1} UNION ALL SELECT x FROM c{k - 1})" for k in range(1, levels)]
    where = " AND ".join(f"x <> {k}" for k in range(conditions))
    return f"WITH {', '.join(named)} SELECT x FROM c{levels - 1} WHERE {where}"


def test_query_read_twice_at_every_level_is_examined_once(shop: SqliteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    original, asked = facts.rule_of, []

    def counted(ref: tree.Ref) -> facts.ComparisonRule | None:
        asked.append(ref)
        return original(ref)

    monkeypatch.setattr(facts, "rule_of", counted)  # as queries inside call it
    analysis = shop.analyse(_doubled(6, 20))
    assert (len(analysis.dependencies), analysis.doubts) == (32, ())
    assert len(asked) == 2 * 5 + 1  # each name of a UNION ALL, and the one of the table


def test_facts_of_many_conditions_are_not_compared_pairwise(
    shop: SqliteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    equals = facts.Fact.__eq__
    compared = 0

    def counted(one: facts.Fact, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equals(one, other)

    monkeypatch.setattr(facts.Fact, "__eq__", counted)
    conditions = 100
    outer = " AND ".join(f"o.id <> {k}" for k in range(conditions))
    inner = " AND ".join(f"a.id <> -{k}" for k in range(conditions))
    sql = f"SELECT tag FROM o WHERE {outer} AND EXISTS (SELECT 1 FROM c a JOIN c b ON a.id = b.id WHERE {inner})"
    assert shop.analyse(sql).doubts == ()
    assert compared < 10 * conditions


def test_query_with_too_many_conditions_depends_on_all_columns(
    shop: SqliteSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = _doubled(4, 20)
    assert len(shop.analyse(sql).dependencies) == 8
    monkeypatch.setattr(facts, "MAX_WORK", 500)
    analysis = shop.analyse(sql)
    assert dependency_texts(analysis) == ["c: all columns"]
    assert analysis.doubts == ("the query has too many conditions for its joins and subqueries",)
