"""Guards in use: suppressed changes leave answers unchanged, and bugs in the use of guards are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.soundness.differential_checker import Trial, Unsound
from tests.soundness.guarded_cases import guarded_case
from tests.soundness.naive_matcher import Judge

from headwater.queries.dependencies.guarded_instances import GuardedInstances
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_versions import InstanceVersions, WatchedInstance

CASES = 40  # of one shard
SOAK_SHARDS = 20


def run(seeds: range) -> Counter[str]:
    counts, judge = Counter[str](), Judge()
    for seed in seeds:
        try:
            Trial(guarded_case(seed), counts, judge=judge).run()
        except Unsound as error:
            error.add_note(f"guarded_case({seed})")
            raise
    return counts


def has_teeth(counts: Counter[str]) -> None:
    told = dict(sorted(counts.items()))
    print(f"\n{told}")
    assert counts["really changed"] > 0.05 * counts["pairs"], told
    assert counts["held back by guards"] > 0.05 * counts["pairs"], told
    assert counts["current by guards"] > 0.1 * counts["pairs"], told
    assert counts["false past guards"] < 0.8 * counts["false"], told


def test_guards_withhold_only_harmless_changes_in_a_few_cases() -> None:
    has_teeth(run(range(1_000_000, 1_000_004)))


@pytest.mark.slow
def test_changes_withheld_by_guards_leave_the_answer_unchanged() -> None:
    has_teeth(run(range(CASES)))


@pytest.mark.soak(seconds=12)
@pytest.mark.parametrize("shard", range(SOAK_SHARDS))
def test_changes_withheld_by_guards_leave_the_answer_unchanged_for_fresh_seeds(shard: int, fresh_number: int) -> None:
    has_teeth(run(range(fresh_number, fresh_number + CASES)))


# --- mutants --------------------------------------------------------------------------------------------------


def _outlives_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GuardState.record.__func__  # type: ignore[attr-defined]

    def record(cls: type[GuardState], *given: Any) -> Any:
        state = real(cls, *given)
        for guard in state._guards:
            guard.sees = frozenset()
        return state

    monkeypatch.setattr(GuardState, "record", classmethod(record))


def _outlives_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GuardState.suppresses

    def suppresses(state: GuardState, *given: Any) -> bool:
        before = state._guards
        is_held_back = real(state, *given)
        state._guards = state._guards or before
        return is_held_back

    monkeypatch.setattr(GuardState, "suppresses", suppresses)
    monkeypatch.setattr(InstanceVersions, "wants_guards", lambda versions, key, bound: key not in versions.guarded)


def _reaches_behind_the_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tags current from before the last change that was not suppressed."""

    def matters(watched: WatchedInstance, offset: int) -> None:
        watched.steady, watched.last = min(watched.steady, watched.last), offset

    monkeypatch.setattr(WatchedInstance, "matters", matters)


def _keeps_guards_of_a_stale_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def guard(versions: InstanceVersions, key: Any, bound: Any, state: GuardState, offset: int) -> None:
        if state and key in versions._watched:
            versions.guarded.put(key, state, offset)

    monkeypatch.setattr(InstanceVersions, "guard", guard)


def _forgets_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suppress every other relevant change without asking the guards."""
    real, asked = GuardedInstances.suppresses, Counter[Any]()

    def suppresses(guarded: GuardedInstances, key: Any, *given: Any) -> bool:
        asked[key] += 1
        return asked[key] % 2 == 0 or real(guarded, key, *given)

    monkeypatch.setattr(GuardedInstances, "suppresses", suppresses)


MUTANTS = [
    _outlives_its_rows,
    _outlives_its_answer,
    _reaches_behind_the_stretch,
    _keeps_guards_of_a_stale_answer,
    _forgets_to_ask,
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_that_misuses_guards_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Unsound, match="the server passes over|is called current") as found:
        run(range(CASES))
    print(found.value.__notes__)
