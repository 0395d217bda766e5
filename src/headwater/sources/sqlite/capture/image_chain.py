"""Order of captured changes: each change's before-image must be the after-image of the previous change of its key.

A user's trigger created after ours fires first, so its inner change is captured before the outer change.
Within one transaction the correct order can be recovered; where it cannot, the table needs a new snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from decimal import Decimal

from headwater.model.change import Change
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Row
from headwater.sources.sqlite.capture.change_decoder import Numbered

Place = tuple[str, int, Key]  # table, its version (images of two shapes are not comparable), key


def chain_images(changes: list[Numbered]) -> tuple[list[Numbered], set[str]]:
    """Return `changes` in an order in which the images of every key chain, and the tables that have no such order."""
    if _all_apart(changes):
        return changes, set()
    last: dict[Place, Row | None] = {}
    broken: set[Place] = set()
    for _, change in changes:
        before, after = _places(change)
        if before is not None:
            if before in last and not same(last[before], change.before):
                broken.add(before)
            last[before] = None
        elif after is not None and last.get(after) is not None:
            broken.add(after)
        if after is not None:
            last[after] = change.after
    return _reorder(changes, broken) if broken else (changes, set())


def same(one: Row | None, other: Row | None) -> bool:
    """Return whether two images are identical: 1 differs from 1.0, and NaN equals NaN."""
    return one is other or (one is not None and other is not None and encode_row(one) == encode_row(other))


def _places(change: Change) -> tuple[Place | None, Place | None]:
    """Return table and key of both images; None for a key with a NULL, because such keys do not identify a row."""
    table = change.table
    keys = [None if row is None else _apart(table.key_of(row)) for row in (change.before, change.after)]
    before, after = (None if key is None or None in key else (table.name, table.version, key) for key in keys)
    return before, after


def _apart(key: Key) -> Key:
    """Return `key` with decimals as text, as SQLite compares them: 1.0 and 1.00 are two keys."""
    return tuple(str(v) if type(v) is Decimal else v for v in key) if Decimal in map(type, key) else key


def _all_apart(changes: list[Numbered]) -> bool:
    """Return whether no key occurs twice: the usual case, in which there is nothing to check."""
    count = 0
    seen: set[Place] = set()
    for _, change in changes:
        mine = {place for place in _places(change) if place is not None}
        count += len(mine)
        seen |= mine
    return len(seen) == count


def _reorder(changes: list[Numbered], broken: set[Place]) -> tuple[list[Numbered], set[str]]:
    """Sort the changes of each broken key into chain order, within the offsets that these changes occupy."""
    places: dict[Place, list[int]] = defaultdict(list)
    for index, (_, change) in enumerate(changes):
        before, after = _places(change)
        if (place := before or after) in broken and place is not None:
            places[place].append(index)
    result, lost = list(changes), set()
    for (name, *_), indexes in places.items():
        ordered = _chain([changes[index][1] for index in indexes])
        if ordered is None:
            lost.add(name)
            continue
        for index, change in zip(indexes, ordered, strict=True):
            result[index] = (changes[index][0], change)
    lost |= {place[0] for place in broken if place not in places}
    return result, lost


def _chain(changes: list[Change]) -> list[Change] | None:
    """Return the changes ordered so that each `before` is the previous `after`; None if there is no such order."""
    waiting = list(changes)
    starts = [c for c in waiting if not any(o is not c and same(o.after, c.before) for o in waiting)]
    if len(starts) != 1:
        return None
    ordered = [starts[0]]
    waiting = [c for c in waiting if c is not starts[0]]
    while waiting:
        following = [c for c in waiting if same(c.before, ordered[-1].after)]
        if not following:
            return None
        ordered.append(following[0])
        waiting = [c for c in waiting if c is not following[0]]
    return ordered
