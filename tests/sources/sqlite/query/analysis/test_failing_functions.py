"""Functions that fail on rows outside the answer: no answer stays current over such a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sources.sqlite.query.shop_analysis import dependency_texts, opened

from headwater.sources.sqlite.source import SqliteSource

TABLES = (
    "CREATE TABLE er(id INTEGER PRIMARY KEY, a TEXT, b INTEGER)",
    "CREATE TABLE two(id INTEGER PRIMARY KEY, er INTEGER, z INTEGER)",
    "CREATE VIEW parts AS SELECT id, a ->> '$.x' AS x, b FROM er",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(Path(tmp_path_factory.mktemp("failing")), TABLES) as found:
        yield found


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM er WHERE json_extract(a, '$[0]') = 1 AND b = 1",
        "SELECT id FROM er WHERE b = 1 AND a ->> 'x' = 1",
        "SELECT id FROM er WHERE b = 1 AND EXISTS (SELECT 1 FROM json_each(er.a) WHERE value = 2)",
        "SELECT two.id FROM two JOIN er ON two.er = er.id AND json_type(er.a) = 'array' WHERE two.z = 3",
        "SELECT x FROM parts WHERE b = 1",
        "SELECT b, max(json_extract(a, '$')) FROM er GROUP BY b HAVING b = 1",
        "SELECT er.id FROM two, er, json_each(er.a) WHERE two.er = er.id AND two.z = 3",
        "SELECT id, (SELECT json_array_length(a) FROM er WHERE er.id = two.er) FROM two WHERE z = 3",
    ],
)
def test_query_with_a_function_that_may_fail_depends_on_every_row(source: SqliteSource, sql: str) -> None:
    found = source.analyse(sql)
    assert not any("where" in place for place in dependency_texts(found)) and found.guards == ()
    assert "may fail on any row" in found.doubts[-1]


@pytest.mark.parametrize(
    "sql, expected",
    [
        ("SELECT json_extract(a, '$.x') FROM er WHERE b = 1", "er: columns a, b, id; rows where b = 1"),
        ("SELECT id FROM er WHERE b = 1 ORDER BY a -> 'x'", "er: columns a, b, id; rows where b = 1"),
        ("SELECT id FROM er WHERE json_valid(a) AND b = 1", "er: columns a, b, id; rows where b = 1"),
        ("SELECT e.id FROM er e, json_each(e.a) WHERE e.b = 1", "er: columns a, b, id; rows where b = 1"),
        ("SELECT b FROM er WHERE b = 1 AND b IN (SELECT 1 FROM json_each(?))", "er: columns b, id; rows where b = 1"),
        ("SELECT id FROM er WHERE b = json_extract(:doc, '$.b') AND id = 1", "er: columns b, id; rows where id = 1"),
    ],
)  # fmt: skip
def test_row_condition_is_kept_where_excluded_rows_cannot_fail(source: SqliteSource, sql: str, expected: str) -> None:
    found = source.analyse(sql)
    assert dependency_texts(found) == [expected] and found.doubts == ()


def test_columns_are_reported_where_a_query_has_no_subquery(source: SqliteSource) -> None:
    assert dependency_texts(source.analyse("SELECT id FROM er WHERE json_extract(a, '$') = 1")) == ["er: columns a, id"]
    assert dependency_texts(source.analyse("SELECT id FROM parts WHERE x = 1 AND b = 2")) == ["er: all columns"]


def test_query_with_a_function_that_may_fail_has_no_guard(source: SqliteSource) -> None:
    assert source.analyse("SELECT id FROM er ORDER BY id LIMIT 2").guards
    assert source.analyse("SELECT id, json(a) FROM er ORDER BY id LIMIT 2").guards == ()
