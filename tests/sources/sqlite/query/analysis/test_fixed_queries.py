"""TPC-H and the queries of an ordinary application: all are analysed, most with conditions on their rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sources.sqlite.query import chinook, tpch
from tests.sources.sqlite.query.shop_analysis import opened

from headwater.model.dependencies.dependency import ALWAYS, Analysis
from headwater.sources.sqlite.source import SqliteSource

# Per query of TPC-H: the places with a condition, by table.
WITH_CONDITION = {
    1: ["lineitem"],
    2: ["part", "region", "region"],
    3: ["customer", "lineitem", "orders"],
    4: ["orders"],
    5: ["orders", "region"],
    6: ["lineitem"],
    7: ["lineitem", "nation", "nation"],
    8: ["orders", "part", "region"],
    9: [],
    10: ["lineitem", "orders"],
    11: ["nation", "nation"],
    12: ["lineitem"],
    13: [],
    14: ["lineitem"],
    15: ["lineitem", "lineitem"],
    16: ["part"],
    17: ["part"],
    18: [],
    19: ["lineitem", "part"],
    20: ["lineitem", "nation"],
    21: ["nation", "orders"],
    22: ["customer"],
}
SUMS_OF_FLOATS = {1, 3, 5, 6, 7, 8, 9, 10, 11, 14, 15, 17, 18, 19, 20, 22}


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(tmp_path_factory.mktemp("tpch"), tpch.SCHEMA) as source:
        yield source


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(tmp_path_factory.mktemp("chinook"), chinook.SCHEMA) as source:
        yield source


def tables_with_conditions(analysis: Analysis) -> list[str]:
    """Return the tables of which the analysis depends on some rows only."""
    return sorted(one.table for one in analysis.dependencies if one.condition != ALWAYS)


@pytest.mark.parametrize("number", tpch.QUERIES)
def test_tpch_query_is_analysed_without_doubts(orders: SqliteSource, number: int) -> None:
    found = orders.analyse(tpch.QUERIES[number])
    assert tables_with_conditions(found) == WITH_CONDITION[number]
    assert found.is_total == (number not in SUMS_OF_FLOATS)
    assert not found.volatile
    reasons = [doubt for doubt in found.doubts if not doubt.startswith("every column counts")]
    assert reasons == []


@pytest.mark.parametrize("place", range(len(chinook.QUERIES)))
def test_chinook_query_is_analysed_without_doubts(music: SqliteSource, place: int) -> None:
    sql, tables = chinook.QUERIES[place]
    found = music.analyse(sql)
    assert tables_with_conditions(found) == tables
    assert not found.volatile
    assert not [doubt for doubt in found.doubts if not doubt.startswith("every column counts")]
