"""Columns reported to SQLite's authorizer equal those found in the text, on fixed and on random queries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.soundness.differential_checker import make_case
from tests.sources.sqlite.query import chinook, tpch
from tests.sources.sqlite.query.analysis.test_constructs import CASES
from tests.sources.sqlite.query.shop_analysis import opened
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.query.analysis.authorizer_reads import facts_of
from headwater.sources.sqlite.query.analysis.parser_check import verify
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed
from headwater.sources.sqlite.query.syntax.name_resolution import Names
from headwater.sources.sqlite.query.syntax.parser import parse
from headwater.sources.sqlite.source import SqliteSource

Columns = set[tuple[str, str]]


def both(source: SqliteSource, sql: str) -> tuple[Columns, Columns]:
    """Return the columns found in the text, and those that SQLite reads; raise NotAnalysed if some cannot be seen."""
    with source._pool.read() as reader:
        facts = facts_of(reader, sql)
        names = Names(reader.catalog.tables(), reader.guard.views())
        query = parse(sql)
        names.query(query)
        verify(reader, query, names, facts)
        real = {(table, column) for table, column in facts.columns if column not in ("", "ROWID")}
        return {read for read in names.read if read[1] not in ("", "ROWID", "rowid")}, real


def test_authorizer_reads_equal_the_analysed_columns_of_fixed_queries(tmp_path: Path) -> None:
    for place, (schema, queries) in enumerate(
        [
            (tpch.SCHEMA, list(tpch.QUERIES.values())),
            (chinook.SCHEMA, [sql for sql, _ in chinook.QUERIES]),
        ]
    ):
        (tmp_path / str(place)).mkdir()
        with opened(tmp_path / str(place), schema) as source:
            for sql in queries:
                mine, theirs = both(source, sql)
                if "USING" not in sql:  # of a column that only USING names SQLite says nothing
                    assert mine == theirs, sql


def test_authorizer_reads_equal_the_analysed_columns_of_each_construct(tmp_path: Path) -> None:
    with opened(tmp_path) as source:
        for sql, _ in CASES:
            mine, theirs = both(source, sql)
            assert mine >= theirs, sql


@pytest.mark.parametrize("seed", range(20))
def test_authorizer_reads_equal_the_analysed_columns_of_random_queries(tmp_path: Path, seed: int) -> None:
    case = make_case(seed)
    understood = 0
    with opened(tmp_path, ()) as source:
        for sql in case.setup:
            try:
                source.write(lambda session, sql=sql: session.execute(sql)).result(PATIENCE)  # type: ignore[misc]
            except HeadwaterError:
                continue
        for query in case.queries:
            try:
                mine, theirs = both(source, query.sql)
            except (HeadwaterError, NotAnalysed):
                continue
            assert mine >= theirs - {read for read in theirs if read[1] == "rowid"}, query.sql
            understood += 1
    assert understood >= len(case.queries) // 3


def test_views_that_read_no_table_are_listed_as_objects(tmp_path: Path) -> None:
    with opened(tmp_path) as source:
        source.write(lambda session: session.execute("CREATE VIEW five AS SELECT 5 AS x")).result(PATIENCE)
        assert source.analyse("SELECT x FROM five").objects == ("five",)
        assert source.analyse("SELECT count(*) FROM five").objects == ("five",)
        assert source.analyse("SELECT count(*) FROM bigger").objects == ("big", "bigger", "o")
