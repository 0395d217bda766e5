"""Random schemas, queries and writes: an answer without an invalidation is unchanged."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.soundness.differential_checker import Case, Trial, Unsound, make_case
from tests.soundness.naive_matcher import Judge
from tests.soundness.schemas import Step
from tests.soundness.shrink import failure, shrink

SCHEMAS = 50  # of one shard
SHARDS = 3  # of fixed seeds; one more is fresh
SOAK_SCHEMAS = 250  # of one shard
SOAK_SHARDS = 10 * int(os.environ.get("SOAK_SEEDS", "20"))


def run(first: int, count: int, counts: Counter[str]) -> None:
    """Try `count` seeds from `first` on, or only SOUNDNESS_SEED; fail at the first unsound one with a small case."""
    judge = Judge()
    only = os.environ.get("SOUNDNESS_SEED")
    for seed in [int(only)] if only else range(first, first + count):
        case = make_case(seed)
        counts["schemas"] += 1
        try:
            Trial(case, counts, judge=judge).run()
        except Unsound:
            small, why = shrink(case, failure)
            pytest.fail(f"SOUNDNESS_SEED={seed}\n{why}\n\n{small.script()}", pytrace=False)
        except Exception as error:
            error.add_note(f"SOUNDNESS_SEED={seed}")
            raise
    # The estimate of a statement's size may be too high. Steps that change the schema count one query again.
    assert counts["refused as too large"] <= 20 + 0.002 * counts["queries"], f"seeds from {first} on: {dict(counts)}"


def has_teeth(counts: Counter[str]) -> None:
    """Check that answers had rows, and that some changed and some did not: random runs prove something only then."""
    told = dict(sorted(counts.items()))
    assert counts["queries with rows"] > 0.45 * counts["queries"], told
    assert counts["queries with rows that changed"] > 0.28 * counts["queries"], told
    assert counts["refused by the engine"] < 0.15 * counts["queries"], told  # counted again after each schema change
    assert counts["failed at run time"] < 0.1 * counts["queries"], told
    assert counts["wider than the judge"] <= 0.03 * counts["matched"], told
    assert counts["sketch says valid"] > 0.2 * counts["pairs"], told
    assert counts["guarded answers"] and counts["held back by guards"] and counts["current by guards"], told
    assert counts["shaken"] and counts["volatile"], told
    assert counts["left out as slow"] <= 0.02 * counts["queries"], told


def print_counts(counts: Counter[str]) -> None:
    share = {name: f"{counts[name] / counts['queries']:.0%}" for name in counts if name.startswith("queries with")}
    print(f"\n{counts['schemas']} schemas, {counts['queries']} queries, {counts['pairs']} pairs, {share}")
    print(dict(sorted(counts.items())))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_answer_without_an_invalidation_is_unchanged(shard: int) -> None:
    counts: Counter[str] = Counter()
    run(shard * SCHEMAS, SCHEMAS, counts)
    print_counts(counts)
    has_teeth(counts)


def test_answer_without_an_invalidation_is_unchanged_in_a_few_schemas() -> None:
    run(1_000_000, 8, Counter())


@pytest.mark.slow
def test_answer_without_an_invalidation_is_unchanged_for_a_fresh_seed(fresh_number: int) -> None:
    run(fresh_number, SCHEMAS, Counter())


@pytest.mark.soak(seconds=45)
@pytest.mark.parametrize("shard", range(SOAK_SHARDS))
def test_answer_without_an_invalidation_is_unchanged_in_many_fresh_schemas(shard: int, fresh_number: int) -> None:
    counts: Counter[str] = Counter()
    run(fresh_number, SOAK_SCHEMAS, counts)
    print_counts(counts)
    has_teeth(counts)


# --- the kit itself --------------------------------------------------------------------------------------------


def test_same_seed_makes_the_same_case() -> None:
    assert make_case(7).script() == make_case(7).script()


def test_failing_case_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soundness.differential_checker.Trial._check", _blames_deletes)
    case = next(case for case in map(make_case, range(99)) if failure(case))
    small, why = shrink(case, failure)
    assert "a delete" in why
    assert (len(small.queries), len(small.steps)) == (1, 1)
    assert len(small.setup) < len(case.setup) and len(small.steps[0].statements) == 1
    assert small.steps[0].statements[0] in small.script()


def _blames_deletes(trial: Trial, instance: object, changes: list, *_: object) -> None:  # type: ignore[type-arg]
    if any(change.op.word == "delete" for _, change in changes):
        raise Unsound("a delete")


def test_query_refused_by_analysis_but_accepted_by_the_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not understood")

    monkeypatch.setattr("headwater.sources.sqlite.source.SqliteSource.analyse", refuse)
    case = Case(["CREATE TABLE t0(k INTEGER PRIMARY KEY)"], make_case(0).queries[:1], [Step(["DELETE FROM t0"])])
    assert "analyse raises" in failure(case)
