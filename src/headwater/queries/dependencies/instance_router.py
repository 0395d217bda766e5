"""Finds the instances to which a change is relevant, at a cost that does not grow with the number of instances.

Instances are indexed by template, and within it by the values that a row must hold to fulfil their condition. The
result is exactly that of checking every instance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from headwater.model.change import Change
from headwater.model.keys.span_index import SpanIndex
from headwater.model.table import Row, Table
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, TableReference
from headwater.queries.dependencies.column_bytes import Encode, View, Watched, difference
from headwater.queries.dependencies.intervals import Spans
from headwater.queries.dependencies.template import (
    POINT,
    SPANS,
    CompiledTemplate,
    Holds,
    Path,
    Template,
    Values,
    is_unclear,
)
from headwater.sources.query import Queryable

Found = dict[Hashable, int]  # by instance key, the number of the first relevant table reference
Cells = tuple[bytes, ...] | bytes  # the encoded values of the columns of a path


class Router:
    """Instances of one database, each under a key. Not thread-safe."""

    def __init__(self, source: Queryable) -> None:
        self.source = source
        self._entries: dict[Hashable, tuple[_Entry, ...]] = {}
        self._tables: defaultdict[str, _Routes] = defaultdict(_Routes)
        self.failures = 0  # changes for which the index failed, so that every instance was checked

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Hashable, bound: BoundDependencies) -> None:
        """Route to `key` the changes that are relevant to `bound`, in place of its earlier dependencies."""
        self.remove(key)
        self._entries[key] = tuple(
            self._tables[reference.template.table].add(key, number, reference)
            for number, reference in enumerate(bound.references)
        )

    def remove(self, key: Hashable) -> None:
        """Stop routing to `key`; it need not be known."""
        for entry in self._entries.pop(key, ()):
            name = entry.home.template.table
            self._tables[name].remove(entry)
            if not self._tables[name].homes:
                del self._tables[name]

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        """Return the keys of the instances that `change` affects, each with its first affected table reference."""
        routes = self._tables.get(change.table.name)
        if routes is None:
            return []
        try:
            return list(routes.find(change).items())
        except Exception:  # a value cannot be read: check every instance, each with its own error handling
            self.failures += 1
            return list(routes.check_each(change).items())


class _Entry:
    """One table reference of one instance. Compared by identity."""

    __slots__ = ("home", "key", "number", "values")

    def __init__(self, home: _TemplateInstances, key: Hashable, number: int, values: Values) -> None:
        self.home, self.key, self.number, self.values = home, key, number, values


def _note(entry: _Entry, found: Found) -> None:
    if found.get(entry.key, entry.number) >= entry.number:
        found[entry.key] = entry.number


Met = _Entry | Mapping["_TemplateInstances", Iterable[_Entry]]


class _TemplateInstances:
    """The instances of one template. Those with exact values are in buckets that templates share."""

    def __init__(self, template: Template, buckets: dict[tuple[str, ...], _Buckets]) -> None:
        self.template = template
        self.count = 0
        self.unbound: dict[_Entry, None] = {}  # entries without a path: always or never true
        self.ranges = [_Ranges(path) for path in template.paths if path.kind == SPANS]
        exact = [path for path in template.paths if path.kind != SPANS]
        self.buckets = [(path, buckets.setdefault(path.columns, _Buckets())) for path in exact]

    def add(self, entry: _Entry) -> None:
        """Add an entry that is not here."""
        self.count += 1
        if not self.template.paths:
            self.unbound[entry] = None
        for ranges in self.ranges:
            ranges.add(entry)
        for path, buckets in self.buckets:
            for cells in _wanted(path, entry.values):
                buckets.add(cells, entry)

    def remove(self, entry: _Entry) -> None:
        """Remove an entry that is here."""
        self.count -= 1
        self.unbound.pop(entry, None)
        for ranges in self.ranges:
            ranges.remove(entry)
        for path, buckets in self.buckets:
            for cells in _wanted(path, entry.values):
                buckets.remove(cells, entry)


def _wanted(path: Path, values: Values) -> Iterable[Cells]:
    """Return the combinations of bytes that the columns of `path` may hold."""
    held: Any = [values[slot] for slot in path.slots]
    if len(held) > 1:
        return (tuple(held),)
    return held if path.kind == POINT else held[0]  # type: ignore[no-any-return]


class _Buckets:
    """Instances by the exact bytes that a set of columns must hold."""

    def __init__(self) -> None:
        # Most buckets have one instance, stored without a dictionary: dictionaries would take half of the memory.
        self.held: dict[Cells, _Entry | dict[_TemplateInstances, dict[_Entry, None]]] = {}

    def __iter__(self) -> Iterator[_Entry]:
        for held in self.held.values():
            if isinstance(held, _Entry):
                yield held
            else:
                for entries in held.values():
                    yield from entries

    def add(self, cells: Cells, entry: _Entry) -> None:
        """Add `entry`; it may be here already, because two paths of a template may have the same values."""
        held = self.held.setdefault(cells, entry)
        if isinstance(held, _Entry):
            if held is entry:
                return
            held = self.held[cells] = {held.home: {held: None}}
        held.setdefault(entry.home, {})[entry] = None

    def remove(self, cells: Cells, entry: _Entry) -> None:
        """Remove `entry`; it may have been removed already."""
        held = self.held.get(cells)
        if isinstance(held, dict):
            entries = held.get(entry.home, {})
            entries.pop(entry, None)
            if not entries:
                held.pop(entry.home, None)
        if held is entry or not held:
            self.held.pop(cells, None)


class _Ranges:
    """Instances by the spans that must contain the value of one column."""

    def __init__(self, path: Path) -> None:
        self.column = path.columns[0]
        self._slot = path.slots[0]
        self._index: SpanIndex[_Entry] = SpanIndex()
        self._entries: dict[_Entry, None] = {}

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def add(self, entry: _Entry) -> None:
        """Add an entry that is not here."""
        held = entry.values[self._slot]
        assert isinstance(held, Spans)
        self._entries[entry] = None
        self._index.add(entry, tuple(held.spans()))

    def remove(self, entry: _Entry) -> None:
        """Remove an entry that is here."""
        del self._entries[entry]
        self._index.remove(entry)

    def at(self, cell: bytes) -> Iterable[Iterable[_Entry]]:
        """Return the entries with a span that contains `cell`; an entry may occur more than once."""
        return self._index.at(cell)


class _Routes:
    """The instances that depend on one table."""

    def __init__(self) -> None:
        self.homes: dict[Template, _TemplateInstances] = {}
        self._buckets: dict[tuple[str, ...], _Buckets] = {}  # by their columns
        self._plan: _Plan | None = None  # for the table version of the last change

    def __iter__(self) -> Iterator[_Entry]:
        """Yield every entry, some more than once."""
        for buckets in self._buckets.values():
            yield from buckets
        for home in self.homes.values():
            yield from home.unbound
            for ranges in home.ranges:
                yield from ranges

    def add(self, key: Hashable, number: int, reference: TableReference) -> _Entry:
        """Add one table reference of the instance `key`."""
        home = self.homes.get(reference.template)
        if home is None:
            home = self.homes[reference.template] = _TemplateInstances(reference.template, self._buckets)
            self._plan = None
        entry = _Entry(home, key, number, reference.values)
        home.add(entry)
        return entry

    def remove(self, entry: _Entry) -> None:
        """Remove an entry that is here."""
        home = entry.home
        home.remove(entry)
        if not home.count:
            del self.homes[home.template]
            self._buckets = {columns: each for columns, each in self._buckets.items() if each.held}
            self._plan = None

    def find(self, change: Change) -> Found:
        """Return the instances to which `change` is relevant, by index."""
        found: Found = {}
        if is_unclear(change):
            for entry in self:
                _note(entry, found)
        else:
            self._plan_for(change.table).find(change.before, change.after, found)
        return found

    def check_each(self, change: Change) -> Found:
        """Return the instances to which `change` is relevant, by checking each."""
        found: Found = {}
        for entry in self:
            if entry.home.template.matters(change, entry.values):
                _note(entry, found)
        return found

    def _plan_for(self, table: Table) -> _Plan:
        plan = self._plan
        if plan is None or (plan.table is not table and plan.table != table):
            plan = self._plan = _Plan(table, self, self._buckets)
        plan.table = table  # the next change most likely refers to the same object
        return plan


class _Plan:
    """The lookups for changes of one version of a table; each set of columns is encoded and looked up once."""

    def __init__(self, table: Table, routes: _Routes, buckets: dict[tuple[str, ...], _Buckets]) -> None:
        self.table = table
        self._routes = routes
        self._fits: dict[_TemplateInstances, CompiledTemplate] = {}
        # Templates whose columns this version lacks: every change is relevant.
        self._strange: set[_TemplateInstances] = set()
        for home in routes.homes.values():
            fit = home.template.fit(table)
            if fit is None:
                self._strange.add(home)
            else:
                self._fits[home] = fit
        self._shape = next((fit.shape for fit in self._fits.values()), None)
        bits = {pair for fit in self._fits.values() for pair in fit.watched}
        self._watched: Watched = tuple(sorted(bits))
        self._open = [(fit.mask, home) for home, fit in self._fits.items() if home.template.tree is True]
        self._cells: list[tuple[int, int, Encode]] = []  # columns used in lookups: index in the row, bit, and encoder
        self._exact = [self._group(columns, each) for columns, each in buckets.items()]
        self._ranges = [
            (*self._cell(ranges.column), fit.mask, home, ranges)
            for home, fit in self._fits.items()
            for ranges in home.ranges
        ]
        self._looked_at = sum(bit for _, bit, _ in self._cells)

    def _cell(self, name: str) -> tuple[int, int]:
        """Return the index of a column in `_cells`, and its bit."""
        assert self._shape is not None
        place = self.table.index[name]
        cell = place, 1 << place, self._shape.encoder(place)
        if cell not in self._cells:
            self._cells.append(cell)
        return self._cells.index(cell), 1 << place

    def _group(self, columns: tuple[str, ...], buckets: _Buckets) -> tuple[Callable[[Any], Any], int, int, _Buckets]:
        """Return a getter of the cells of `columns`, their bits, the bits that the entries watch, and the buckets."""
        homes = [(home, fit) for home, fit in self._fits.items() if any(own is buckets for _, own in home.buckets)]
        mask = 0
        for _, fit in homes:
            mask |= fit.mask
        at = [self._cell(name) for name in columns] if homes else [(0, 0)]
        return itemgetter(*(number for number, _ in at)), sum(bit for _, bit in at), mask, buckets

    def find(self, before: Row | None, after: Row | None, found: Found) -> None:
        """Add to `found` the entries to which the change of a row is relevant."""
        if self._strange:
            for entry in self._routes:
                if entry.home in self._strange:
                    _note(entry, found)
        if before is None or after is None:
            rows, changed = [row for row in (before, after) if row is not None], -1  # every column changed
        else:
            rows, changed = [before, after], difference(self._watched, before, after)
            if not changed:
                return
        for mask, home in self._open:
            if changed & mask or changed == -1:
                for entry in home.unbound:
                    _note(entry, found)
        if self._cells and (met := self._look_up(rows, changed)):
            views = [View(self._shape, row) for row in rows]  # type: ignore[arg-type]
            for held in met:
                self._sift(held, views, changed, found)

    def _look_up(self, rows: list[Row], changed: int) -> list[Met]:
        """Return the entries whose condition may be true, including some that do not read the changed columns."""
        met: list[Met] = []
        row = rows[0]
        first = images = [[encode(row[place]) for place, _, encode in self._cells]]
        if changed & self._looked_at and len(rows) > 1:
            row, was = rows[1], first[0]
            pairs = zip(self._cells, was, strict=True)
            images = [was, [encode(row[place]) if bit & changed else cell for (place, bit, encode), cell in pairs]]
        for cells_of, columns, mask, buckets in self._exact:
            if mask & changed:
                # If these columns did not change, one of the two images is enough.
                for image in images if columns & changed else first:
                    cells = cells_of(image)
                    held = buckets.held.get(cells)
                    if held is not None:
                        met.append(held)
                    elif cells is None or (type(cells) is tuple and None in cells):
                        met.extend(buckets)  # a value is not known: every entry may match
        for number, bit, mask, home, ranges in self._ranges:
            if mask & changed:
                for image in images if bit & changed else first:
                    known = image[number]
                    for entries in [ranges] if known is None else ranges.at(known):
                        met.append({home: entries})
        return met

    def _sift(self, held: Met, views: list[View], changed: int, found: Found) -> None:
        """Add the entries of `held` that read a changed column and whose condition is true."""
        groups: Any = ((held.home, (held,)),) if isinstance(held, _Entry) else held.items()
        for home, entries in groups:
            fit = self._fits.get(home)
            if fit is not None and fit.mask & changed:
                _keep(entries, fit.holds, views, found)


def _keep(entries: Iterable[_Entry], holds: Holds, views: list[View], found: Found) -> None:
    for entry in entries:
        for view in views:
            if holds(view, entry.values):
                _note(entry, found)
                break
