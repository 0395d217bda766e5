"""Classes of the reasons why answers are not cacheable or queries depend on whole tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sources.sqlite.query.shop_analysis import SHOP, opened

from headwater.model.dependencies.dependency import Analysis
from headwater.queries.uncacheable_reasons import FALLBACK, UNCACHEABLE, Reasons, fallback, uncacheable
from headwater.sources.sqlite.source import SqliteSource


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    extra = "CREATE VIRTUAL TABLE words USING fts5(body)"
    with opened(tmp_path_factory.mktemp("reasons"), (*SHOP, extra)) as source:
        yield source


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT random() FROM c", "volatile_function"),
        ("SELECT datetime('now'), sqlite_version() FROM c", "volatile_function"),
        ("SELECT sqlite_version() FROM c", "unknown_function"),
        ("SELECT v FROM named WHERE rowid = 3", "rowid"),
        ("SELECT body FROM words", "virtual_table"),
        ("SELECT name FROM sqlite_schema", "schema_table"),
    ],
)
def test_uncacheable_query_is_given_its_reason(shop: SqliteSource, sql: str, reason: str) -> None:
    assert uncacheable(shop.analyse(sql)) == reason


def test_unknown_reason_is_class_other() -> None:
    made = Analysis(
        sql="", parameters=(), columns=(), tables=(), objects=(), dependencies=(), epoch="", volatile=("the moon",)
    )
    assert uncacheable(made) == "other"


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT count(*) FROM (SELECT region FROM c LIMIT 1)", "order_open"),
        ("SELECT id FROM c", None),
        ("SELECT id FROM c WHERE " + "(" * 300 + "1" + ")" * 300, "too_large"),
    ],
)
def test_query_that_depends_on_whole_tables_is_given_its_reason(
    shop: SqliteSource, sql: str, reason: str | None
) -> None:
    doubts = shop.analyse(sql).doubts
    assert (fallback(doubts[0]) if doubts else None) == reason, doubts


@pytest.mark.parametrize(
    ("doubt", "reason"),
    [
        ("SQLite compiles our reading of the statement to another program", "engine_disagrees"),
        ("SQLite reads c.name, which was not found in the statement", "engine_disagrees"),
        ("the rowid of 'named' is not captured", "rowid"),
        ("the statement was not understood (KeyError)", "not_understood"),
        ("unknown text at 'x'", "not_understood"),
        ("tables are used in more than 1000 places", "too_large"),
        ("queries are nested deeper than 50", "too_large"),
        ("every column counts: its rows cannot be distinguished, so their order is undetermined", "order_open"),
    ],
)
def test_analysis_doubt_text_maps_to_its_uncacheable_reason(doubt: str, reason: str) -> None:
    assert fallback(doubt) == reason


def test_reasons_are_counted_under_a_fixed_set_of_names(shop: SqliteSource) -> None:
    reasons = Reasons()
    reasons.answered(shop.analyse("SELECT random()"))
    reasons.analysed(shop.analyse("SELECT random()"))
    reasons.analysed(shop.analyse("SELECT id FROM c"))
    assert sum(reasons.fallback.values()) == 0 and reasons.uncacheable["volatile_function"] == 1
    assert (tuple(reasons.uncacheable), tuple(reasons.fallback)) == (UNCACHEABLE, FALLBACK)
