"""Precision: fewer invalidations than by whole tables, because invalidating everything is sound but useless."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.soundness.differential_checker import Case, Trial, make_case
from tests.soundness.grammar import Query
from tests.soundness.naive_matcher import Judge
from tests.soundness.schemas import Step
from tests.soundness.tpch_rows import Shop
from tests.sources.sqlite.query import tpch


def summary(counts: Counter[str]) -> str:
    """Return the counts and the false invalidations as a text for the log."""
    table, ours, guarded = (counts[name] for name in ("false at table level", "false", "false past guards"))
    return (
        f"\n{counts['pairs']} pairs of query and write, {counts['really changed']} changed; invalidated falsely:"
        f" table level {table}, ours {ours} ({ours / table - 1:+.0%}), guarded {guarded} ({guarded / table - 1:+.0%})"
    )


@pytest.mark.soak(seconds=35, every_time=True)
def test_random_queries_are_invalidated_less_than_at_table_level() -> None:
    invalidated_less(range(2_000_000, 2_000_025))


@pytest.mark.soak(seconds=45)
def test_fresh_random_queries_are_invalidated_less_than_at_table_level(fresh_number: int) -> None:
    invalidated_less(range(fresh_number, fresh_number + 100))


def invalidated_less(seeds: range) -> None:
    counts, judge = Counter[str](), Judge()
    for seed in seeds:
        Trial(make_case(seed), counts, judge=judge).run()
    print(summary(counts))
    assert counts["false"] < 0.9 * counts["false at table level"], counts
    assert counts["false past guards"] <= counts["false"]


@pytest.mark.slow
def test_tpch_is_invalidated_less_than_at_table_level() -> None:
    shop, counts = Shop(1), Counter[str]()
    setup = [*tpch.SCHEMA, *shop.rows()]
    queries = [Query(sql, {}) for sql in tpch.QUERIES.values()]
    Trial(Case(setup, queries, [Step(shop.write()) for _ in range(60)]), counts).run()
    print(summary(counts))
    assert counts["queries with rows"] >= 15, counts
    assert counts["false"] < 0.8 * counts["false at table level"], counts
    assert counts["refused by the engine"] == counts["volatile"] == 0
