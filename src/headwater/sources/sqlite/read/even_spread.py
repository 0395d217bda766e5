"""Draws numbers that are evenly spread over a set nobody has counted: dense, full of gaps, or scattered. Pure.

The set is only known by looking around a number. A gap that is seen is drawn from no more; what is left is cut
into strata that hold about as many of the set each, by the density seen in them, and every round draws one number
from each stratum. So a million neighbours beside one number far away come out as well as numbers all over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

ROUNDS = (512, 512)  # strata before those of the answer: each round sees ten times finer, or more
TRIES = 8  # in a stratum that turns out to have a few large gaps
MANY = 64  # gaps that are smaller than this part of a stratum are too many to find them all


Gap = tuple[int, int]  # its first and its last number


class Around(NamedTuple):
    """Members of the set next to a number: those below it, downwards, and from it on, upwards."""

    below: list[int]
    above: list[int]

    def gap(self, number: int) -> Gap | None:
        """The numbers around `number` that are no members; None if it is one itself."""
        if self.above and self.above[0] == number:
            return None
        return (self.below[0] + 1 if self.below else number, self.above[0] - 1 if self.above else number)


class Piece(NamedTuple):
    """Numbers from `low` to `high`, both included, `density` of which are members."""

    low: int
    high: int
    density: float

    @property
    def size(self) -> int:
        return self.high - self.low + 1


class Open:
    """The numbers that may be members: all but those in gaps that were seen."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._lows = [piece.low for piece in pieces]
        self._before = [0, *accumulate(piece.size for piece in pieces)]

    def upto(self, number: int) -> int:
        """How many of them there are up to `number`."""
        place = bisect_right(self._lows, number)
        if not place:
            return 0
        return self._before[place] - max(self.pieces[place - 1].high - number, 0)

    def density(self, number: int, around: Around, room: int) -> float:
        """How many of those around are members, if the gap that `number` lies in counts for at most `room`."""
        members = [*reversed(around.below), *around.above]
        way = self.upto(members[-1]) - self.upto(members[0])
        if gap := around.gap(number):
            way -= max(self.upto(gap[1]) - self.upto(gap[0] - 1) - room, 0)
        return (len(members) - 1) / way if way else 1.0


class Draw(NamedTuple):
    """A member, and how many it stands for."""

    number: int
    members: float


Look = Callable[[int], Around]


def spread(low: int, high: int, count: int, look: Look, random: Random) -> list[Draw]:
    """About `count` members between `low` and `high`, which are the first and the last one."""
    left = Open(_octaves(low, high))
    draws: list[Draw] = []
    for strata in (*ROUNDS, count):
        seen: list[Piece] = []
        draws = []
        for stratum in _strata(left.pieces, strata):
            found = _draw(stratum, left, look, random)
            if found is not None:
                draws.append(found[0])
                seen += found[1]
        left = Open(seen)
    return draws


def _octaves(low: int, high: int) -> list[Piece]:
    """A first guess: members crowd at the ends and around zero, if anywhere."""
    powers = [1 << power for power in range(64)]
    edges = {edge for p in powers for edge in (p, -p, low + p, high + 1 - p) if low < edge <= high} | {low, high + 1}
    return [Piece(a, b - 1, 1 / (b - a)) for a, b in pairwise(sorted(edges))]


def _strata(pieces: list[Piece], count: int) -> Iterator[list[Piece]]:
    """`pieces` in at most `count` portions, in order, that hold about as many members each."""
    share = sum(piece.size * piece.density for piece in pieces) / count
    portion: list[Piece] = []
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


def _draw(stratum: list[Piece], known: Open, look: Look, random: Random) -> tuple[Draw, list[Piece]] | None:
    """A member of the stratum or next to it, and what is left of the stratum with the density seen there."""
    left, whole = stratum, _size(stratum)
    size = whole
    for _ in range(TRIES):
        number = _nth(left, random.randrange(size))
        around = look(number)
        gap = around.gap(number)
        if gap is None:
            break
        left = list(_without(left, gap))
        if not left:
            return None
        before, size = size, _size(left)
        if before - size < size // MANY:
            break
    # Where only gaps were seen, all of the stratum is like what lies around the last one.
    members = known.density(number, around, room=whole) * (size if gap is None else whole)
    seen = [piece._replace(density=members / size) for piece in left]
    return Draw((around.above or around.below)[0], members), seen


def _size(pieces: list[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def _nth(pieces: list[Piece], n: int) -> int:
    for piece in pieces:
        if n < piece.size:
            return piece.low + n
        n -= piece.size
    raise IndexError(n)


def _without(pieces: Iterable[Piece], gap: Gap) -> Iterator[Piece]:
    """`pieces` less the numbers in `gap`."""
    for piece in pieces:
        if gap[1] < piece.low or gap[0] > piece.high:
            yield piece
            continue
        if piece.low < gap[0]:
            yield piece._replace(high=gap[0] - 1)
        if piece.high > gap[1]:
            yield piece._replace(low=gap[1] + 1)
