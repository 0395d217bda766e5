"""The kit has teeth: bugs put in on purpose are found by comparing answers alone, without the second matcher."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.soundness.kit import Case, Trial, Unsound, make_case
from tests.soundness.mutants import MUTANTS, Mutant


def fails(case: Case) -> bool:
    try:
        Trial(case, Counter(), agree=False).run()
    except Unsound:
        return True
    return False


def caught(mutant: Mutant, first: int = 0) -> int | None:
    """How many schemas the kit needs for it; a case that fails without the mutant is no proof."""
    for count in range(mutant.schemas):
        case = make_case(first + count)
        with pytest.MonkeyPatch.context() as monkeypatch:
            mutant.patch(monkeypatch)
            found = fails(case)
        if found and not fails(case):
            return count + 1
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_found(mutant: Mutant) -> None:
    needed = caught(mutant)
    print(f"\n{mutant.name}: {needed or 'not found in'} {'' if needed else mutant.schemas} schemas")
    if mutant.why_not:
        assert needed is None, f"it is unsound after all: {mutant.why_not}"
    else:
        assert needed is not None, f"not found in {mutant.schemas} schemas"
