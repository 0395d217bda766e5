"""Draws of evenly spread members from a set of numbers of unknown size: dense, with gaps, or scattered. No I/O.

The set is known only by lookups around a number. A gap that was found is excluded from later draws; the rest is cut
into strata with about equally many members each, by the density found there, and every round draws one number from
each stratum. So draws are even both for a million neighbours plus one distant number and for scattered numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

ROUNDS = (512, 512)  # strata of the rounds before the final one: each round resolves at least ten times finer
TRIES = 8  # draws in a stratum that turns out to have a few large gaps
MANY = 64  # gaps smaller than this fraction of a stratum are too many to find them all


Gap = tuple[int, int]  # first and last number of the gap


class Neighbours(NamedTuple):
    """Members of the set near a number: those below it, descending, and those from it on, ascending."""

    below: list[int]
    above: list[int]

    def gap(self, number: int) -> Gap | None:
        """Return the gap around `number`; None if `number` is a member."""
        if self.above and self.above[0] == number:
            return None
        return (self.below[0] + 1 if self.below else number, self.above[0] - 1 if self.above else number)


class NumberRange(NamedTuple):
    """Numbers from `low` to `high`, both included; `density` is the fraction that are members."""

    low: int
    high: int
    density: float

    @property
    def size(self) -> int:
        return self.high - self.low + 1


class Open:
    """The numbers that may be members: all outside the gaps found so far."""

    def __init__(self, pieces: list[NumberRange]) -> None:
        self.pieces = pieces
        self._lows = [piece.low for piece in pieces]
        self._before = [0, *accumulate(piece.size for piece in pieces)]

    def upto(self, number: int) -> int:
        """Return how many of these numbers are at most `number`."""
        place = bisect_right(self._lows, number)
        if not place:
            return 0
        return self._before[place] - max(self.pieces[place - 1].high - number, 0)

    def density(self, number: int, around: Neighbours, room: int) -> float:
        """Return the fraction of members near `number`; the gap around it counts for at most `room`."""
        members = [*reversed(around.below), *around.above]
        way = self.upto(members[-1]) - self.upto(members[0])
        if gap := around.gap(number):
            way -= max(self.upto(gap[1]) - self.upto(gap[0] - 1) - room, 0)
        return (len(members) - 1) / way if way else 1.0


class SampledMember(NamedTuple):
    """A member, and the number of members that it represents."""

    number: int
    members: float


FindAround = Callable[[int], Neighbours]


def spread(low: int, high: int, count: int, find: FindAround, random: Random) -> list[SampledMember]:
    """Return about `count` members of the set; `low` is its first and `high` its last member."""
    left = Open(_octaves(low, high))
    draws: list[SampledMember] = []
    for strata in (*ROUNDS, count):
        seen: list[NumberRange] = []
        draws = []
        for stratum in _strata(left.pieces, strata):
            found = _draw(stratum, left, find, random)
            if found is not None:
                draws.append(found[0])
                seen += found[1]
        left = Open(seen)
    return draws


def _octaves(low: int, high: int) -> list[NumberRange]:
    """Return the first estimate: members are densest at the ends and around zero."""
    powers = [1 << power for power in range(64)]
    edges = {edge for p in powers for edge in (p, -p, low + p, high + 1 - p) if low < edge <= high} | {low, high + 1}
    return [NumberRange(a, b - 1, 1 / (b - a)) for a, b in pairwise(sorted(edges))]


def _strata(pieces: list[NumberRange], count: int) -> Iterator[list[NumberRange]]:
    """Yield `pieces` in at most `count` ordered portions with about equally many members each."""
    share = sum(piece.size * piece.density for piece in pieces) / count
    portion: list[NumberRange] = []
    held = 0.0
    for piece in pieces:
        while True:
            fits = (share - held) / piece.density
            if piece.size < fits:
                portion.append(piece)
                held += piece.size * piece.density
                break
            edge = piece.low + max(round(fits), 1)
            yield [*portion, piece._replace(high=edge - 1)]
            portion, held = [], 0.0
            if edge > piece.high:
                break
            piece = piece._replace(low=edge)
    if portion:
        yield portion


def _draw(
    stratum: list[NumberRange], known: Open, find: FindAround, random: Random
) -> tuple[SampledMember, list[NumberRange]] | None:
    """Return a member in or next to the stratum, and the rest of the stratum with the density found there."""
    left, whole = stratum, sum(piece.size for piece in stratum)
    size = whole
    for _ in range(TRIES):
        number = _nth(left, random.randrange(size))
        around = find(number)
        gap = around.gap(number)
        if gap is None:
            break
        left = list(_without(left, gap))
        if not left:
            return None
        before, size = size, sum(piece.size for piece in left)
        if before - size < size // MANY:
            break
    # If only gaps were found, assume the density around the last gap for the whole stratum.
    members = known.density(number, around, room=whole) * (size if gap is None else whole)
    seen = [piece._replace(density=members / size) for piece in left]
    return SampledMember((around.above or around.below)[0], members), seen


def _nth(pieces: list[NumberRange], n: int) -> int:
    for piece in pieces:
        if n < piece.size:
            return piece.low + n
        n -= piece.size
    raise IndexError(n)


def _without(pieces: Iterable[NumberRange], gap: Gap) -> Iterator[NumberRange]:
    """Yield `pieces` without the numbers in `gap`."""
    for piece in pieces:
        if gap[1] < piece.low or gap[0] > piece.high:
            yield piece
            continue
        if piece.low < gap[0]:
            yield piece._replace(high=gap[0] - 1)
        if piece.high > gap[1]:
            yield piece._replace(low=gap[1] + 1)
