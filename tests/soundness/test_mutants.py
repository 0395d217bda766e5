"""The kit finds bugs put in on purpose by comparing answers alone, without the second matcher."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.soundness.differential_checker import Case, Trial, Unsound, make_case
from tests.soundness.mutants import MUTANTS, Mutant

KNOWN = [mutant for mutant in MUTANTS if mutant.found is not None]
BY_HAND = [mutant for mutant in MUTANTS if mutant.case is not None]


def fails(case: Case) -> bool:
    try:
        Trial(case, Counter(), agree=False).run()
    except Unsound:
        return True
    return False


def finds(mutant: Mutant, case: Case) -> bool:
    """Return whether a case fails with the mutant and passes without it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutant.patch(monkeypatch)
        found = fails(case)
    return found and not fails(case)


def caught(mutant: Mutant, first: int = 0) -> int | None:
    """Return how many schemas the kit needs to find the mutant; None if it finds it in none."""
    return next((count + 1 for count in range(mutant.schemas) if finds(mutant, make_case(first + count))), None)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", KNOWN, ids=[mutant.name for mutant in KNOWN])
def test_known_case_finds_its_mutant(mutant: Mutant) -> None:
    assert mutant.found is not None
    assert finds(mutant, make_case(mutant.found)), "the grammar moved: `make soak` tells which case finds it now"


@pytest.mark.parametrize("mutant", BY_HAND, ids=[mutant.name for mutant in BY_HAND])
def test_mutant_is_found_by_a_handwritten_case(mutant: Mutant) -> None:
    assert mutant.case is not None
    assert finds(mutant, mutant.case)


def test_every_mutant_has_a_finding_case_or_a_reason() -> None:
    assert [mutant.name for mutant in MUTANTS if not (mutant in KNOWN or mutant in BY_HAND or mutant.why_not)] == []


@pytest.mark.soak(seconds=120)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_unexcused_mutant_is_found_by_a_search(mutant: Mutant) -> None:
    needed = caught(mutant)
    print(f"\n{mutant.name}: {f'found={needed - 1}' if needed else f'not found in {mutant.schemas} schemas'}")
    if mutant.why_not:
        assert needed is None, f"it is unsound after all: {mutant.why_not}"
    elif mutant.case is None:
        assert needed is not None, f"not found in {mutant.schemas} schemas"
