"""Order of captured changes: each change's before-image must be the after-image of the previous change of its key.

A user's trigger created after ours fires first, and so does the action of a foreign key: such an inner change is
captured before the outer change. Within one page the correct order can be recovered; where it cannot, the table needs a
new snapshot.
"""

from __future__ import annotations

import marshal
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal

from headwater.model.change import Change
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Key, Row
from headwater.sources.sqlite.capture.change_decoder import Numbered

Place = tuple[str, int, Key]  # table, its version (images of two shapes are not comparable), key
Places = tuple[Place | None, Place | None]  # of the row before and after a change

MAX_EARLIER = 1 << 16  # keys of earlier pages with which a page is compared


class ImageChain:
    """Sorter of the pages of one call of the reader: a transaction is in one call, in one page or several."""

    def __init__(self) -> None:
        # The image that earlier pages left under a key, by the key's hash; the newest are at the end.
        self._last: OrderedDict[int, int | None] = OrderedDict()

    def page(self, changes: list[Numbered], *, is_followed: bool = True) -> tuple[list[Numbered], set[str]]:
        """Return `changes` in an order in which the images of each key chain, and the tables without such an order.

        `is_followed`: the images of these changes are compared with those of the next page.
        """
        found = [_places(change) for _, change in changes]
        count = sum([(before is not None) + (after is not None and after != before) for before, after in found])
        places = {place for pair in found for place in pair if place is not None}
        hashes = {place: _hash(place) for place in places} if self._last or is_followed else {}
        earlier = {place: self._last[known] for place, known in hashes.items() if known in self._last}
        if len(places) == count and not earlier:  # the usual case: no key occurs twice
            ordered, lost = changes, set[str]()
        else:
            ordered, lost = _in_order(changes, earlier)
            found = [_places(change) for _, change in ordered]
        if is_followed:
            self._remember(ordered, found, hashes)
        return ordered, lost

    def _remember(self, changes: list[Numbered], found: list[Places], hashes: dict[Place, int]) -> None:
        last = self._last
        for (_, change), (before, after) in zip(changes, found, strict=True):
            if before is not None and before != after:
                last[hashes[before]] = None
                last.move_to_end(hashes[before])
            if after is not None:
                last[hashes[after]] = image(change.after)
                last.move_to_end(hashes[after])
        while len(last) > MAX_EARLIER:
            last.popitem(last=False)


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
    return None if row is None else hash(_encoded(row))


def _hash(place: Place) -> int:
    """Return a hash of table and key, encoded: Python's hashes of -1 and -2 are equal."""
    table, version, key = place
    return hash((table, version, _encoded(key)))


def _encoded(row: Row) -> bytes:
    try:
        return marshal.dumps(row, 0)  # type: ignore[arg-type]  # faster; this version encodes equal values alike
    except ValueError:  # a decimal
        return encode_row(row)


def _places(change: Change) -> Places:
    """Return table and key of both images; None for a key with a NULL, because such keys do not identify a row."""
    table = change.table
    keys = [None if row is None else _apart(table.key_of(row)) for row in (change.before, change.after)]
    before, after = (None if key is None or None in key else (table.name, table.version, key) for key in keys)
    return before, after


def _apart(key: Key) -> Key:
    """Return `key` with decimals as text, as SQLite compares them: 1.0 and 1.00 are two keys."""
    return tuple(str(v) if type(v) is Decimal else v for v in key) if Decimal in map(type, key) else key


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
