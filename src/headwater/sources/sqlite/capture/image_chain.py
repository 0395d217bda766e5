"""Order of captured changes: each change's before-image must be the after-image of the previous change of its key.

A user's trigger created after ours fires first, and so does the action of a foreign key: such an inner change is
captured before the outer change. Within one page the correct order can be recovered; where it cannot, the table needs a
new snapshot.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from decimal import Decimal

from headwater.model.change import Change
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Row
from headwater.sources.sqlite.capture.change_decoder import Numbered

Place = tuple[str, int, Key]  # table, its version (images of two shapes are not comparable), key

MAX_EARLIER = 1 << 16  # keys of earlier pages with which a page is compared


class ImageChain:
    """Puts the pages of one call of the reader in order: a transaction is in one call, in one page or several."""

    def __init__(self) -> None:
        self._last: dict[int, int | None] = {}  # the image that earlier pages left under a key, by the key's hash

    def page(self, changes: list[Numbered], *, is_last: bool = False) -> tuple[list[Numbered], set[str]]:
        """Return `changes` in an order in which the images of each key chain, and the tables without such an order."""
        places, are_apart = _all_places(changes)
        earlier = {place: self._last[known] for place in places if (known := _hash(place)) in self._last}
        ordered, lost = (changes, set[str]()) if are_apart and not earlier else _in_order(changes, earlier)
        if not is_last:
            self._remember(ordered)
        return ordered, lost

    def _remember(self, changes: list[Numbered]) -> None:
        last = self._last
        for _, change in changes:
            for place, row in zip(_places(change), (None, change.after), strict=True):
                if place is not None:
                    known = _hash(place)
                    last.pop(known, None)  # the newest are at the end
                    last[known] = image(row)
        while len(last) > MAX_EARLIER:
            del last[next(iter(last))]


def _in_order(changes: list[Numbered], earlier: dict[Place, int | None]) -> tuple[list[Numbered], set[str]]:
    """Return `changes`, which follow the images `earlier`, in order, and the tables that have no order."""
    last = dict(earlier)
    broken: set[Place] = set()
    for _, change in changes:
        before, after = _places(change)
        if before is not None:
            if before in last and last[before] != image(change.before):
                broken.add(before)
            last[before] = None
        if after is not None:
            if last.get(after) is not None:  # the key had a row already
                broken.add(after)
            last[after] = image(change.after)
    return _reorder(changes, broken, earlier) if broken else (changes, set())


def image(row: Row | None) -> int | None:
    """Return a hash of the encoded row, in which 1 differs from 1.0, and NaN equals NaN."""
    return None if row is None else hash(encode_row(row))


def _hash(place: Place) -> int:
    """Return a hash of table and key, encoded: Python's hashes of -1 and -2 are equal."""
    table, version, key = place
    return hash((table, version, encode_row(key)))


def _places(change: Change) -> tuple[Place | None, Place | None]:
    """Return table and key of both images; None for a key with a NULL, because such keys do not identify a row."""
    table = change.table
    keys = [None if row is None else _apart(table.key_of(row)) for row in (change.before, change.after)]
    before, after = (None if key is None or None in key else (table.name, table.version, key) for key in keys)
    return before, after


def _apart(key: Key) -> Key:
    """Return `key` with decimals as text, as SQLite compares them: 1.0 and 1.00 are two keys."""
    return tuple(str(v) if type(v) is Decimal else v for v in key) if Decimal in map(type, key) else key


def _all_places(changes: list[Numbered]) -> tuple[set[Place], bool]:
    """Return table and key of all images, and whether no key occurs twice, the usual case."""
    count = 0
    seen: set[Place] = set()
    for _, change in changes:
        mine = {place for place in _places(change) if place is not None}
        count += len(mine)
        seen |= mine
    return seen, len(seen) == count


def _reorder(
    changes: list[Numbered], broken: set[Place], earlier: dict[Place, int | None]
) -> tuple[list[Numbered], set[str]]:
    """Sort the changes of each broken key into chain order, within the offsets that these changes occupy."""
    result, lost = list(changes), set[str]()
    for places, indexes in _groups(changes):
        if places.isdisjoint(broken):
            continue
        captured = [changes[index][1] for index in indexes]
        ordered = None if len(places) > 1 and _has_inserts_or_deletes(captured) else _chain(captured)
        if ordered is None or not _follows(ordered[0], places, earlier):
            lost |= {name for name, *_ in places}
            continue
        for index, change in zip(indexes, ordered, strict=True):
            result[index] = (changes[index][0], change)
    return result, lost


def _has_inserts_or_deletes(changes: list[Change]) -> bool:
    """Return whether a row is inserted or deleted: a moved row may then be mistaken for a new one under its old key."""
    return any(change.before is None or change.after is None for change in changes)


def _follows(first: Change, places: set[Place], earlier: dict[Place, int | None]) -> bool:
    """Return whether the changes of `places`, of which `first` is the first, can follow the images `earlier`."""
    before, after = _places(first)
    expected = {before or after: image(first.before)}
    return all(earlier[place] == expected.get(place) for place in places if place in earlier)


def _groups(changes: list[Numbered]) -> list[tuple[set[Place], list[int]]]:
    """Return keys with the indexes of their changes; keys between which a row was moved are in one group."""
    parents: dict[Place, Place] = {}

    def root(place: Place) -> Place:
        while (parent := parents.setdefault(place, place)) != place:
            parents[place] = parents[parent]
            place = parent
        return place

    found = [[place for place in _places(change) if place is not None] for _, change in changes]
    for places in found:
        for place in places[1:]:
            parents[root(place)] = root(places[0])
    groups: defaultdict[Place, tuple[set[Place], list[int]]] = defaultdict(lambda: (set(), []))
    for index, places in enumerate(found):
        if places:
            group, indexes = groups[root(places[0])]
            group.update(places)
            indexes.append(index)
    return list(groups.values())


def _chain(changes: list[Change]) -> list[Change] | None:
    """Return the changes ordered so that each `before` is the previous `after`; None if there is no such order."""
    images = [(image(change.before), image(change.after)) for change in changes]
    reached = Counter(after for _, after in images)
    starts = [at for at, (before, after) in enumerate(images) if reached[before] == (before == after)]
    if len(starts) != 1:
        return None
    following: defaultdict[int | None, deque[int]] = defaultdict(deque)
    for at, (before, _) in enumerate(images):
        if at != starts[0]:
            following[before].append(at)
    order = [starts[0]]
    while waiting := following[images[order[-1]][1]]:
        order.append(waiting.popleft())
    return [changes[at] for at in order] if len(order) == len(changes) else None
