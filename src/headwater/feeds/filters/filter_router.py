"""A router that finds the filters a change may pass, at a cost independent of the number of filters.

Filters are indexed per table version, by a condition that a row must meet to pass. The router never misses a filter;
whether a change passes a filter that it found is decided by the filter itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from headwater.errors import HeadwaterError
from headwater.feeds.filters.filter import ROW_OPS, Filter
from headwater.feeds.filters.row_filter import Interest, share
from headwater.model.change import Change, Op
from headwater.model.keys.key import Span
from headwater.model.keys.span_index import SpanIndex
from headwater.model.table import Key, Row, Table

T = TypeVar("T", bound=Hashable)
Tokens = dict[T, None]  # a set that keeps its order
Columns = tuple[str, ...]


class Router(Generic[T]):
    """The filters of one database, each under a token. Not thread-safe."""

    def __init__(self) -> None:
        self._filters: dict[T, Filter] = {}
        self._named: dict[str, dict[T, Filter]] = {}  # by the tables that the filters name
        self._everywhere: dict[T, Filter] = {}  # filters that name no table
        self._indexes: dict[str, _TableIndex[T]] = {}

    def add(self, token: T, filter: Filter) -> None:
        """Route to `token` the changes that may pass `filter`; replaces an earlier filter of `token`."""
        self.remove(token)
        self._filters[token] = filter
        for group in self._groups(filter):
            group[token] = filter
        for index in self._indexes_of(filter):
            index.add(token, filter)

    def remove(self, token: T) -> None:
        """Route nothing to `token` any more; an unknown token is ignored."""
        filter = self._filters.pop(token, None)
        if filter is None:
            return
        for group in self._groups(filter):
            del group[token]
        for index in self._indexes_of(filter):
            index.remove(token)
            if not index.filters:
                del self._indexes[index.table.name]
        for name in filter.tables:
            if not self._named[name]:
                del self._named[name]

    def route(self, changes: Sequence[Change]) -> dict[T, list[int]]:
        """Return for each token the positions in `changes` of the changes that may pass its filter, in order."""
        found: dict[T, list[int]] = {}
        for place, change in enumerate(changes):
            index = self._index(change.table)
            for tokens in () if index is None else index.concerned(change):
                for token in tokens:
                    places = found.get(token)
                    if places is None:
                        found[token] = [place]
                    elif places[-1] != place:
                        places.append(place)
        return found

    def prepare(self, table: Table, most: int) -> bool:
        """Index new filters on `table` until about `most` of their values are indexed; return whether some are left."""
        index = self._index(table)
        return index is not None and index.index_new(most)

    def count(self, change: Change) -> int:
        """Return the number of tokens that `route` finds for `change`; a token may count more than once."""
        index = self._index(change.table)
        return 0 if index is None else sum([len([*tokens]) for tokens in index.concerned(change)])

    def _groups(self, filter: Filter) -> list[dict[T, Filter]]:
        return [self._named.setdefault(name, {}) for name in filter.tables] or [self._everywhere]

    def _indexes_of(self, filter: Filter) -> list[_TableIndex[T]]:
        names = filter.tables or list(self._indexes)
        return [self._indexes[name] for name in names if name in self._indexes]

    def _index(self, table: Table) -> _TableIndex[T] | None:
        index = self._indexes.get(table.name)
        if index is not None and index.fits(table):
            return index
        filters = self._everywhere | self._named.get(table.name, {})
        if filters:
            self._indexes[table.name] = _TableIndex(table, filters)
        return self._indexes.get(table.name)


class _TableIndex(Generic[T]):
    """The filters on one table, for one version of it."""

    def __init__(self, table: Table, filters: dict[T, Filter]) -> None:
        self.table = table
        self.filters = filters
        self._fresh = dict(filters)  # not indexed yet
        self._homes: dict[T, tuple[_Lookup[T], _Trait]] = {}
        self._lookups: dict[frozenset[Op] | None, _Lookup[T]] = {}  # by the ops that may pass
        self._by_op: list[list[_Lookup[T]]] = [[] for _ in range(len(Op) + 1)]  # a list: ops hash slowly
        self._writers: dict[Columns, Writer] = {}

    def fits(self, table: Table) -> bool:
        """Return whether the index was built for this version of the table."""
        if table is not self.table:
            if table != self.table:
                return False
            self.table = table  # the next change most likely has the same object
        return True

    def add(self, token: T, filter: Filter) -> None:
        """Add a filter, which is indexed at the next change."""
        self.filters[token] = self._fresh[token] = filter

    def remove(self, token: T) -> None:
        """Remove `token`, which must be in the index."""
        del self.filters[token]
        if self._fresh.pop(token, None) is None:
            lookup, trait = self._homes.pop(token)
            lookup.remove(token, trait)

    def concerned(self, change: Change) -> Iterable[Iterable[T]]:
        """Return groups of the tokens whose filter `change` may pass; a token may occur more than once."""
        if change.before is None and change.after is None:
            return [self.filters]
        if self._fresh:
            self.index_new()
        images = _Images(change, self._writers)
        found: list[Iterable[T]] = []
        try:
            for lookup in self._by_op[change.op]:
                lookup.find(images, found)
            return found
        except HeadwaterError:  # a value without a byte encoding cannot be looked up: every filter must decide
            return [self.filters]

    def index_new(self, most: float = math.inf) -> bool:
        """Index new filters until about `most` values are indexed; return whether filters are left."""
        values = 0
        while self._fresh and values <= most:
            token = next(iter(self._fresh))
            filter = self._fresh.pop(token)
            try:
                ops, trait = filter.raw_ops(), _trait(filter.interest(self.table), self.table)
                if trait.columns and trait.columns not in self._writers:
                    self._writers[trait.columns] = _writer(self.table, trait.columns, filter)
            except HeadwaterError:  # the filter does not fit this version: `decide` raises the error
                ops, trait = None, _Trait()
            lookup = self._lookup(ops)
            lookup.add(token, trait)
            self._homes[token] = lookup, trait
            values += 1 + len(trait.wanted)
        return bool(self._fresh)

    def _lookup(self, ops: frozenset[Op] | None) -> _Lookup[T]:
        if ops not in self._lookups:
            lookup = self._lookups[ops] = _Lookup(self.table.key)
            for op in ROW_OPS if ops is None else ROW_OPS & ops:
                self._by_op[op].append(lookup)
        return self._lookups[ops]


class _Trait(msgspec.Struct, frozen=True):
    """The condition by which a filter is indexed: bytes of some columns, a shard of them, or spans of keys."""

    columns: Columns = ()  # empty: the filter matches every row
    of: int = 0  # not 0: `wanted` holds shard numbers out of `of`
    wanted: Collection[bytes | int] = ()
    spans: tuple[Span, ...] | None = None


def _trait(interest: Interest, table: Table) -> _Trait:
    """Return the most selective condition of `interest`."""
    if interest.points is not None:
        return _Trait(table.key, wanted=interest.points)
    if interest.pin is not None and interest.pin.column in table.index:
        return _Trait((interest.pin.column,), wanted=interest.pin.values)
    if interest.spans is not None:
        return _Trait(table.key, spans=interest.spans)
    if interest.shard is not None and table.key:
        return _Trait(table.key, interest.shard.of, (interest.shard.index,))
    return _Trait()


class _Lookup(Generic[T]):
    """Tokens by the trait that a row must match."""

    def __init__(self, key: Columns) -> None:
        self._key = key
        self._always: Tokens[T] = {}
        self._exact: dict[tuple[Columns, int], dict[bytes | int, Tokens[T]]] = {}  # by columns, shard count, value
        self._spans: SpanIndex[T] = SpanIndex()

    def add(self, token: T, trait: _Trait) -> None:
        """Add `token`, which must not be in the lookup."""
        if not trait.columns:
            self._always[token] = None
        elif trait.spans is not None:
            self._spans.add(token, trait.spans)
        for value in trait.wanted:
            self._exact.setdefault((trait.columns, trait.of), {}).setdefault(value, {})[token] = None

    def remove(self, token: T, trait: _Trait) -> None:
        """Remove `token`, which was added with `trait`."""
        if not trait.columns:
            del self._always[token]
        elif trait.spans is not None:
            self._spans.remove(token)
        for value in trait.wanted:
            self._forget(token, (trait.columns, trait.of), value)

    def _forget(self, token: T, by: tuple[Columns, int], value: bytes | int) -> None:
        tokens = self._exact[by][value]
        del tokens[token]
        if not tokens:
            del self._exact[by][value]
        if not self._exact[by]:
            del self._exact[by]

    def find(self, images: _Images, found: list[Iterable[T]]) -> None:
        """Add to `found` the tokens whose trait one of the images matches."""
        if self._always:
            found.append(self._always)
        for (columns, of), tokens in self._exact.items():
            for written in images.of(columns):
                value = share(written, of) if of else written
                if value in tokens:
                    found.append(tokens[value])
        if self._spans:
            for written in images.of(self._key):
                found.extend(self._spans.at(written))


Writer = Callable[[Change], list[bytes]]


class _Images:
    """The images of one change as bytes, encoded lazily and once per set of columns."""

    __slots__ = ("_change", "_writers", "_written")

    def __init__(self, change: Change, writers: dict[Columns, Writer]) -> None:
        self._change = change
        self._writers = writers
        self._written: dict[Columns, list[bytes]] = {}

    def of(self, columns: Columns) -> list[bytes]:
        """Return the bytes of `columns` in each image; one entry if both images are the same."""
        written = self._written.get(columns)
        if written is None:
            written = self._written[columns] = self._writers[columns](self._change)
        return written


def _writer(table: Table, columns: Columns, filter: Filter) -> Writer:
    order = filter.order(table, columns)
    pick = table.key_of if columns == table.key else _picker(table, columns)

    def write(change: Change) -> list[bytes]:
        before, after = change.before, change.after
        if before is None or after is None:
            return [order(pick(row)) for row in (before, after) if row is not None]
        old, new = pick(before), pick(after)
        if old == new and [*map(type, old)] == [*map(type, new)]:  # Decimal(1) equals 1 but has other bytes
            return [order(new)]
        return [order(old), order(new)]

    return write


def _picker(table: Table, columns: Columns) -> Callable[[Row], Key]:
    (place,) = [table.index[name] for name in columns]
    return lambda row: (row[place],)
