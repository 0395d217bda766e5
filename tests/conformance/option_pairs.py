"""Combinations of options such that every pair of values occurs in at least one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Combination = dict[str, str]
Pair = frozenset[tuple[str, str]]  # of two factors, with a value each
TRIES = 20  # each combination is the best of that many


def all_pairs(
    factors: Mapping[str, Sequence[str]], fits: Callable[[Combination], bool], seed: int = 0
) -> list[Combination]:
    """Return combinations, built greedily: each begins with a missing pair and adds values that cover most others."""
    dice = random.Random(seed)
    every = [(name, value) for name, values in factors.items() for value in values]
    missing = {frozenset(pair) for pair in combinations(every, 2) if pair[0][0] != pair[1][0] and fits(dict(pair))}
    found: list[Combination] = []
    while missing:
        first = dict(min(missing, key=sorted))
        tried = [_grown(first, factors, fits, missing, dice) for _ in range(TRIES)]
        best = max(tried, key=lambda made: len(missing & pairs(made)))
        missing -= pairs(best)
        found.append({name: best[name] for name in factors})
    return found


def pairs(made: Combination) -> set[Pair]:
    """Return the pairs that occur in a combination."""
    return {frozenset(pair) for pair in combinations(made.items(), 2)}


def _grown(
    made: Combination,
    factors: Mapping[str, Sequence[str]],
    fits: Callable[[Combination], bool],
    missing: set[Pair],
    dice: random.Random,
) -> Combination:
    """Return `made` with a fitting value for every other factor."""
    for name in dice.sample(list(factors), len(factors)):
        if name not in made:
            values = [value for value in factors[name] if fits({**made, name: value})]
            gains = [sum(frozenset(((name, value), other)) in missing for other in made.items()) for value in values]
            best = [value for value, gain in zip(values, gains, strict=True) if gain == max(gains)]
            made = {**made, name: dice.choice(best)}
    return made
