"""Images of one key must chain: what a change found is what the one before it left.

A user's trigger created after ours fires first, so its inner change is captured before the outer one.
Inside one transaction the right order can be recovered; where it cannot, the table needs a new snapshot.
"""

from __future__ import annotations

from collections import defaultdict

from headwater.model.change import Change
from headwater.model.table import Key, Row
from headwater.sources.sqlite.decode import Numbered


def settle(changes: list[Numbered]) -> tuple[list[Numbered], set[str]]:
    """`changes` in an order in which every key's images chain, and the tables for which there is none."""
    if _all_apart(changes):
        return changes, set()
    last: dict[tuple[str, Key], Row | None] = {}
    broken: set[tuple[str, Key]] = set()
    for _, change in changes:
        if change.row is None:
            continue
        name, key_of = change.table.name, change.table.key_of
        if change.before is not None:
            place = (name, key_of(change.before))
            if last.get(place, change.before) != change.before:
                broken.add(place)
            if change.after is not None and key_of(change.after) != place[1]:
                last[place] = None
        elif last.get((name, key_of(change.after or ()))) is not None:
            broken.add((name, key_of(change.after or ())))
        if change.after is not None:
            last[(name, key_of(change.after))] = change.after
        elif change.before is not None:
            last[(name, key_of(change.before))] = None
    return _reorder(changes, broken) if broken else (changes, set())


def _all_apart(changes: list[Numbered]) -> bool:
    """Whether no key occurs twice, which is the usual case and leaves nothing to check."""
    count = 0
    seen: set[tuple[str, Key]] = set()
    for _, change in changes:
        mine = {(change.table.name, change.table.key_of(r)) for r in (change.before, change.after) if r is not None}
        count += len(mine)
        seen |= mine
    return len(seen) == count


def _reorder(changes: list[Numbered], broken: set[tuple[str, Key]]) -> tuple[list[Numbered], set[str]]:
    """Put the changes of each broken key into chain order, in the places they hold together."""
    places: dict[tuple[str, Key], list[int]] = defaultdict(list)
    for index, (_, change) in enumerate(changes):
        row = change.before if change.before is not None else change.after
        if row is not None and (place := (change.table.name, change.table.key_of(row))) in broken:
            places[place].append(index)
    result, lost = list(changes), set()
    for (name, _), indexes in places.items():
        ordered = _chain([changes[index][1] for index in indexes])
        if ordered is None:
            lost.add(name)
            continue
        for index, change in zip(indexes, ordered, strict=True):
            result[index] = (changes[index][0], change)
    lost |= {name for name, key in broken if (name, key) not in places}
    return result, lost


def _chain(changes: list[Change]) -> list[Change] | None:
    """The one order in which each change's `before` is the `after` of the one before it."""
    waiting = list(changes)
    starts = [c for c in waiting if not any(o is not c and o.after == c.before for o in waiting)]
    if len(starts) != 1:
        return None
    ordered = [starts[0]]
    waiting.remove(starts[0])
    while waiting:
        following = [c for c in waiting if c.before == ordered[-1].after]
        if not following:
            return None
        ordered.append(following[0])
        waiting.remove(following[0])
    return ordered
