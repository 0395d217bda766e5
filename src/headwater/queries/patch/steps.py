"""Steps from one list of rows to another: which to remove, replace, insert and move. Pure; rows are known by marks.

Two rows with one mark are the same row, unchanged. Rows whose mark stands on one side only are matched by their key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_MOVE_WORK = 1_000_000  # moved rows times rows: beyond it the whole answer is cheaper than the search for places

Mark = bytes
KeyOf = Callable[[int], bytes]


@dataclass
class Steps:
    """What to do, in this order: remove, replace in place, insert, move. Each step sees the work of those before."""

    removed: list[int] = field(default_factory=list)  # places in the old list
    updated: list[int] = field(default_factory=list)  # places in the new list
    added: list[tuple[int, int]] = field(default_factory=list)  # where to insert, and the place in the new list
    moved: list[tuple[int, int, int]] = field(default_factory=list)  # place in the new list; out of, into


class NoSteps(Exception):
    """The lists cannot be told apart row by row, or not cheaply; the message is a reason for the wire."""


def steps(old: Sequence[Mark], new: Sequence[Mark], old_key: KeyOf, new_key: KeyOf, *, ordered: bool = True) -> Steps:
    """The steps from `old` to `new`; in an unordered list new rows go to the end, and nothing moves."""
    start, tail = _same_ends(old, new)
    old_end, new_end = len(old) - tail, len(new) - tail
    found = Steps()
    came_from = _matched(found, range(start, old_end), range(start, new_end), old, new, old_key, new_key)
    if not ordered:
        rest = len(old) - len(found.removed)
        strangers = [place for place in range(start, new_end) if came_from[place - start] is None]
        found.added = [(rest + count, place) for count, place in enumerate(strangers)]
        return found
    _arrange(found, came_from, start)
    return found


def _same_ends(old: Sequence[Mark], new: Sequence[Mark]) -> tuple[int, int]:
    """How many rows at the start, and how many at the end, are the same."""
    shorter = min(len(old), len(new))
    start = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    most = shorter - start
    tail = next((back for back in range(most) if old[-1 - back] != new[-1 - back]), most)
    return start, tail


def _matched(
    found: Steps, olds: range, news: range, old: Sequence[Mark], new: Sequence[Mark], old_key: KeyOf, new_key: KeyOf
) -> list[int | None]:
    """Per row of `news` its old place, None for a new one; fills in what is removed and updated."""
    olds_here, news_here = old[olds.start : olds.stop], new[news.start : news.stop]
    by_mark, here = dict(zip(olds_here, olds, strict=True)), set(news_here)
    if len(by_mark) != len(olds) or len(here) != len(news):
        raise NoSteps("duplicate_keys")
    came_from = list(map(by_mark.get, news_here))
    gone = sorted(by_mark[mark] for mark in by_mark.keys() - here)
    strangers = [place for place, known in zip(news, came_from, strict=True) if known is None]
    by_key = {old_key(place): place for place in gone}
    keys = [new_key(place) for place in strangers]
    if len(by_key) != len(gone) or len(set(keys)) != len(keys):
        raise NoSteps("duplicate_keys")
    for place, key in zip(strangers, keys, strict=True):
        if key in by_key:
            came_from[place - news.start] = by_key.pop(key)
            found.updated.append(place)
    found.removed = sorted(by_key.values())
    return came_from


def _arrange(found: Steps, came_from: list[int | None], start: int) -> None:
    """Fill in `added` and `moved`. Rows that keep their order stay; the others go behind their new neighbour."""
    survivors = [place for place in came_from if place is not None]
    staying = set(longest_rise(survivors))
    stands: int | None = None  # the old place of the last row that stays
    for new_place, old_place in enumerate(came_from, start):
        if old_place is None:
            left = start if stands is None else stands + 1 - bisect_left(found.removed, stands)
            found.added.append((left + len(found.added), new_place))
        elif old_place in staying:
            stands = old_place
    if len(staying) < len(survivors):
        _move(found, came_from, staying, start)


def _move(found: Steps, came_from: list[int | None], staying: set[int], start: int) -> None:
    """In the order of the new list, so that whatever stands before a row is in its place already."""
    movers = [at for at, old_place in enumerate(came_from) if old_place is not None and old_place not in staying]
    if len(movers) * len(came_from) > MOST_MOVE_WORK:
        raise NoSteps("reordered")
    # The list as a client holds it now, by places in the new one.
    held = sorted((place, at) for at, place in enumerate(came_from) if place is not None)
    now = [at for _, at in held]
    for into, new_place in found.added:
        now.insert(into - start, new_place - start)
    for at in movers:
        out_of = now.index(at)
        del now[out_of]
        into = now.index(at - 1) + 1 if at else 0
        now.insert(into, at)
        if into != out_of:
            found.moved.append((at + start, out_of + start, into + start))


def longest_rise(numbers: Sequence[int]) -> list[int]:
    """A longest increasing subsequence of distinct `numbers`."""
    if all(left < right for left, right in zip(numbers, numbers[1:], strict=False)):
        return list(numbers)
    tails: list[int] = []  # the smallest last number of a rise of each length
    before: dict[int, int | None] = {}
    for number in numbers:
        length = bisect_left(tails, number)
        before[number] = tails[length - 1] if length else None
        tails[length : length + 1] = [number]
    rise: list[int] = []
    number_or_none: int | None = tails[-1]
    while number_or_none is not None:
        rise.append(number_or_none)
        number_or_none = before[number_or_none]
    return rise[::-1]
