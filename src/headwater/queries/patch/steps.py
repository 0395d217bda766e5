"""Steps from one list of rows to another: which rows to remove, replace, insert and move.

Rows are identified by marks. Two rows with equal marks are the same row, unchanged. Rows whose mark is in one list
only are matched by their key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_MOVE_WORK = 1_000_000  # moved rows times rows: beyond it the whole answer is cheaper than computing the moves

Mark = bytes
KeyOf = Callable[[int], bytes]


@dataclass
class Steps:
    """Steps to apply in this order: remove, replace in place, insert, move. Each refers to the list as of then."""

    removed: list[int] = field(default_factory=list)  # indexes in the old list
    updated: list[int] = field(default_factory=list)  # indexes in the new list
    added: list[tuple[int, int]] = field(default_factory=list)  # where to insert, and the index in the new list
    moved: list[tuple[int, int, int]] = field(default_factory=list)  # index in the new list, then from where to where


class NoSteps(Exception):
    """The lists cannot be compared row by row, or not cheaply; the message is the `reset_reason` of the patch."""


def steps(old: Sequence[Mark], new: Sequence[Mark], old_key: KeyOf, new_key: KeyOf, *, ordered: bool = True) -> Steps:
    """Return the steps from `old` to `new`; in an unordered list new rows go to the end and no row moves."""
    start, tail = _same_ends(old, new)
    old_end, new_end = len(old) - tail, len(new) - tail
    found = Steps()
    old_places = _matched(found, range(start, old_end), range(start, new_end), old, new, old_key, new_key)
    if not ordered:
        rest = len(old) - len(found.removed)
        unmatched = [place for place in range(start, new_end) if old_places[place - start] is None]
        found.added = [(rest + count, place) for count, place in enumerate(unmatched)]
        return found
    _arrange(found, old_places, start)
    return found


def _same_ends(old: Sequence[Mark], new: Sequence[Mark]) -> tuple[int, int]:
    """Return how many rows at the start, and how many at the end, are the same."""
    shorter = min(len(old), len(new))
    start = next((place for place in range(shorter) if old[place] != new[place]), shorter)
    most = shorter - start
    tail = next((back for back in range(most) if old[-1 - back] != new[-1 - back]), most)
    return start, tail


def _matched(
    found: Steps, olds: range, news: range, old: Sequence[Mark], new: Sequence[Mark], old_key: KeyOf, new_key: KeyOf
) -> list[int | None]:
    """Return the old index of each row of `news`, None for a new row; fill in `removed` and `updated`."""
    olds_here, news_here = old[olds.start : olds.stop], new[news.start : news.stop]
    by_mark, here = dict(zip(olds_here, olds, strict=True)), set(news_here)
    if len(by_mark) != len(olds) or len(here) != len(news):
        raise NoSteps("duplicate_keys")
    old_places = list(map(by_mark.get, news_here))
    gone = sorted(by_mark[mark] for mark in by_mark.keys() - here)
    unmatched = [place for place, known in zip(news, old_places, strict=True) if known is None]
    by_key = {old_key(place): place for place in gone}
    keys = [new_key(place) for place in unmatched]
    if len(by_key) != len(gone) or len(set(keys)) != len(keys):
        raise NoSteps("duplicate_keys")
    for place, key in zip(unmatched, keys, strict=True):
        if key in by_key:
            old_places[place - news.start] = by_key.pop(key)
            found.updated.append(place)
    found.removed = sorted(by_key.values())
    return old_places


def _arrange(found: Steps, old_places: list[int | None], start: int) -> None:
    """Fill in `added` and `moved`. Rows that keep their order stay; each other row moves after its new neighbour."""
    survivors = [place for place in old_places if place is not None]
    staying = set(longest_rise(survivors))
    last_staying: int | None = None  # the old index of the last row that stays
    for new_place, old_place in enumerate(old_places, start):
        if old_place is None:
            left = start if last_staying is None else last_staying + 1 - bisect_left(found.removed, last_staying)
            found.added.append((left + len(found.added), new_place))
        elif old_place in staying:
            last_staying = old_place
    if len(staying) < len(survivors):
        _move(found, old_places, staying, start)


def _move(found: Steps, old_places: list[int | None], staying: set[int], start: int) -> None:
    """Fill in `moved`, in the order of the new list, so that all rows before a moved row are in place already."""
    movers = [at for at, old_place in enumerate(old_places) if old_place is not None and old_place not in staying]
    if len(movers) * len(old_places) > MOST_MOVE_WORK:
        raise NoSteps("reordered")
    # The client's list after removals and insertions, as indexes of the new list.
    held = sorted((place, at) for at, place in enumerate(old_places) if place is not None)
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
    """Return a longest increasing subsequence of distinct `numbers`."""
    if all(left < right for left, right in zip(numbers, numbers[1:], strict=False)):
        return list(numbers)
    tails: list[int] = []  # the smallest last number of an increasing subsequence of each length
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
