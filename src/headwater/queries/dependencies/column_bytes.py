"""Encoding of column values as comparable bytes, and the identity of values, for matching changes to queries."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary, ref

from headwater.errors import NotSupported
from headwater.model.literal import UNAVAILABLE, Embedding, Unavailable, Value
from headwater.model.table import Key, Row, Table
from headwater.sources.query import Queryable

MAX_SHAPES = 64  # cached per table; others are created again on each use
_EXACT = frozenset({int, str, bytes, type(None), bool})  # types whose equal values are identical
_KNOWN, _SHORT = 4_096, 64  # cached values per column, and the longest text that is cached
Encode = Callable[[Value], bytes | None]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are identical in type and content.

    1 differs from 1.0, 0.0 from -0.0, and the decimal 1.0 from 1.00; a NaN equals itself; UNAVAILABLE differs from all.
    """
    kind = type(a)
    if kind is not type(b) or kind is Unavailable:
        return False
    if kind is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if kind is Decimal:
        return bool(a.as_tuple() == b.as_tuple())
    if kind is Embedding:
        return a.model == b.model and len(a.values) == len(b.values) and all(map(same, a.values, b.values))
    return bool(a == b)


Watched = tuple[tuple[int, int], ...]  # a column's index in the row, and the bit that represents it


def difference(watched: Watched, before: Row, after: Row) -> int:
    """Return the bits of the `watched` columns whose values are not the `same` in both rows."""
    found = 0
    for place, bit in watched:
        a, b = before[place], after[place]
        if a is b and a is not UNAVAILABLE:
            continue
        kind = type(a)
        if kind is type(b) and kind in _EXACT:
            if a != b:
                found |= bit
        elif not same(a, b):
            found |= bit
    return found


class _Encoders(dict[int, Encode]):
    """Encoders by column index, created on first use."""

    def __init__(self, make: Callable[[int], Encode]) -> None:
        self._make = make

    def __missing__(self, place: int) -> Encode:
        found = self[place] = self._make(place)
        return found


class Shape:
    """The encoders of one version of a table of one source."""

    def __init__(self, source: ref[Queryable], table: Table) -> None:
        self.table = table
        self._source = source
        self.encoders = _Encoders(self._make)

    def encoder(self, place: int) -> Encode:
        """Return the encoder of the column at index `place`; it returns None for a value without a known encoding."""
        return self.encoders[place]

    def _make(self, place: int) -> Encode:
        source = self._source()
        try:
            if source is None:
                raise NotSupported("the source is closed")
            return _remembering(source.order(self.table, (self.table.names[place],)))
        except NotSupported:
            return lambda value: None


def _remembering(order: Callable[[Key], bytes]) -> Encode:
    """Return `order` for one column, with a cache of short texts."""
    known: dict[Value, bytes] = {}

    def encode(value: Value) -> bytes | None:
        kind = type(value)
        is_short = kind is str and len(value) < _SHORT  # type: ignore[arg-type]
        if is_short:
            found = known.get(value)
            if found is not None:
                return found
        elif kind is Unavailable:
            return None
        try:
            found = order((value,))
        except Exception:  # whatever the cause, the value has no known encoding
            return None
        if is_short:
            if len(known) >= _KNOWN:
                known.clear()
            known[value] = found
        return found

    return encode


class View(dict[int, "bytes | None"]):
    """The encoded values of a row by column index, each encoded on first use."""

    __slots__ = ("_encoders", "_row")

    def __init__(self, shape: Shape, row: Row) -> None:
        self._encoders = shape.encoders
        self._row = row

    def __missing__(self, place: int) -> bytes | None:
        found = self[place] = self._encoders[place](self._row[place])
        return found


class Shapes:
    """The shapes of one source. Thread-safe: shapes that two threads make concurrently are equal."""

    def __init__(self, source: Queryable) -> None:
        self._source = ref(source)  # weak, because the source is the weak key under which these shapes are cached
        self._known: dict[str, list[Shape]] = {}  # by table name, the most recently used first

    def of(self, table: Table) -> Shape:
        """Return the shape of `table`, cached for MAX_SHAPES versions of each table."""
        known = self._known.get(table.name, ())
        if known and known[0].table is table:
            return known[0]
        found = next((shape for shape in known if shape.table == table), None)
        made = found or Shape(self._source, table)
        made.table = table  # the next change most likely refers to the same object
        rest = [shape for shape in known if shape is not made]
        self._known[table.name] = [made, *rest[: MAX_SHAPES - 1]]
        return made


_SHAPES: WeakKeyDictionary[Any, Shapes] = WeakKeyDictionary()


def shapes_of(source: Queryable) -> Shapes:
    """Return the shapes of `source`, which live as long as it does."""
    return _SHAPES.get(source) or _SHAPES.setdefault(source, Shapes(source))
