"""Numbers drawn from an uncounted set are evenly spread over it, whatever its gaps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sources.sqlite.read.even_spread import Neighbours, SampledMember, spread

I64 = st.integers(-(2**63), 2**63 - 1)


def draws(
    members: Iterable[int], count: int, seed: int = 1, most_looks: int = 10_000
) -> tuple[list[int], list[SampledMember]]:
    numbers = sorted(members)
    looks = 0

    def find(number: int) -> Neighbours:
        nonlocal looks
        looks += 1
        place = bisect_left(numbers, number)
        return Neighbours(numbers[max(place - 8, 0) : place][::-1], numbers[place : place + 8])

    found = spread(numbers[0], numbers[-1], count, find, Random(seed))
    assert looks <= most_looks
    return numbers, sorted(found)


def shares(numbers: list[int], found: list[SampledMember], parts: int) -> list[float]:
    """Return the share of numbers in each of `parts` ranges cut by the draws' estimates; 1.0 is even."""
    total = sum(draw.members for draw in found)
    edges, passed = [], 0.0
    for draw in found:
        if passed >= total / parts * (len(edges) + 1):
            edges.append(draw.number)
        passed += draw.members
    places = [0, *(bisect_left(numbers, edge) for edge in edges), len(numbers)]
    return [(b - a) * parts / len(numbers) for a, b in zip(places, places[1:], strict=False)]


def scattered(count: int, low: int = -(2**63), high: int = 2**63) -> set[int]:
    random = Random(7)
    return {random.randrange(low, high) for _ in range(count)}


def crowds(count: int, each: int, apart: int) -> set[int]:
    random = Random(8)
    return {crowd * apart + number for crowd in range(count) for number in range(random.randrange(1, each))}


# Each is made by the test that needs it: all of them take half a second and much memory.
SETS: dict[str, Callable[[], Collection[int]]] = {
    "without a gap": lambda: range(1, 200_001),
    "one far above": lambda: [*range(1, 200_001), 2**62],
    "one far below": lambda: [-(2**63), *range(200_000)],
    "two ends": lambda: [*range(-(2**63), -(2**63) + 50_000), *range(2**63 - 50_000, 2**63)],
    "each third": lambda: range(0, 600_000, 3),
    "half of them deleted": lambda: [n for n in range(200_000) if (n // 7_919) % 2],
    "deleted at random": lambda: [n for n in range(300_000) if (n * 2_654_435_761 >> 7) % 5],
    "hashes": lambda: scattered(100_000),
    "hashes and a sequence": lambda: scattered(30_000) | set(range(1, 100_001)),
    "a sequence far out and hashes": lambda: scattered(5_000, 0) | set(range(2**61, 2**61 + 100_000)),
    "shards in the upper bits": lambda: crowds(50, 4_000, 2**32),
    "one octave as full as the next": lambda: {int(2 ** (n / 2_000)) + n for n in range(100_000)},
}


@pytest.mark.parametrize("name", SETS)
def test_ranges_cut_at_draws_have_nearly_equal_counts(name: str) -> None:
    numbers, found = draws(SETS[name](), 1_024)
    cut = shares(numbers, found, 8)
    assert len(cut) == 8 and min(cut) > 0.75 and max(cut) < 1.25, cut
    assert 0.8 < sum(draw.members for draw in found) / len(numbers) < 1.2


def test_set_without_gaps_is_counted_exactly() -> None:
    for members in (range(5_000), [*range(5_000), 10**18]):
        _, found = draws(members, 500)
        assert round(sum(draw.members for draw in found)) == len(members)


def test_estimated_count_of_many_small_clusters_is_below_three_times_the_count() -> None:
    numbers, found = draws({crowd * 2**50 + n for crowd in range(3_000) for n in range(50)}, 1_024, most_looks=20_000)
    assert sum(draw.members for draw in found) < 3 * len(numbers)


@pytest.mark.slow
@given(st.sets(I64, min_size=2, max_size=60), st.integers(1, 40), st.integers(0, 99))
def test_draws_return_only_numbers_of_the_set(members: set[int], count: int, seed: int) -> None:
    numbers, found = draws(members, count, seed)
    assert found and {draw.number for draw in found} <= set(numbers)
    assert all(draw.members > 0 for draw in found)


@pytest.mark.slow
@given(st.lists(st.tuples(I64, st.integers(1, 400)), min_size=1, max_size=6), st.integers(0, 99))
def test_estimated_count_of_a_few_clusters_is_within_a_factor_of_two(crowds: list[tuple[int, int]], seed: int) -> None:
    members = {number for low, size in crowds for number in range(low, min(low + size, 2**63))}
    numbers, found = draws(members | {min(members) + 1}, 200, seed)
    assert 0.5 < sum(draw.members for draw in found) / len(numbers) < 2.0
