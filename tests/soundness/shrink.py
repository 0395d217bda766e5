"""Makes a failing case small: leaves out every part without which it still fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
from tests.soundness.differential_checker import Case, Trial, Unsound
from tests.soundness.schemas import Step

MAX_TRIES = 400


def failure(case: Case, *, agree: bool = True) -> str:
    """Return why a case fails; "" if it does not."""
    try:
        Trial(case, Counter(), agree=agree).run()
    except Unsound as found:
        return str(found)
    return ""


def shrink(case: Case, fails: Callable[[Case], str]) -> tuple[Case, str]:
    """Return the smallest failing case found, and why it fails."""
    why, tries, smaller = fails(case), 0, True
    while smaller and tries < MAX_TRIES:
        smaller = False
        for candidate in _candidates(case):
            tries += 1
            if tries > MAX_TRIES:
                break
            if found := fails(candidate):
                case, why, smaller = candidate, found, True
                break
    return case, why


def _candidates(case: Case) -> list[Case]:
    """Return the case with one part less, large parts first."""
    found = [msgspec.structs.replace(case, queries=part) for part in _halves(case.queries)]
    found += [msgspec.structs.replace(case, steps=part) for part in _halves(case.steps)]
    found += [msgspec.structs.replace(case, queries=part) for part in _without_one(case.queries)]
    found += [msgspec.structs.replace(case, steps=part) for part in _without_one(case.steps)]
    found += [msgspec.structs.replace(case, setup=part) for part in _without_one(case.setup)]
    for place, step in enumerate(case.steps):
        for statements in _without_one(step.statements):
            steps = [*case.steps[:place], Step(statements, step.foreign, step.moves_schema), *case.steps[place + 1 :]]
            found.append(msgspec.structs.replace(case, steps=steps))
    return found


def _halves(parts: list) -> list[list]:  # type: ignore[type-arg]
    middle = len(parts) // 2
    return [parts[:middle], parts[middle:]] if len(parts) > 3 else []


def _without_one(parts: list) -> list[list]:  # type: ignore[type-arg]
    return [parts[:place] + parts[place + 1 :] for place in range(len(parts))] if len(parts) > 1 else []
