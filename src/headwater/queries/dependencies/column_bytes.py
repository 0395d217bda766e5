"""Table shapes as matching needs them: what a column holds as bytes, and whether two values are the very same."""

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

MAX_SHAPES = 64  # per table; more than these are made anew when they are asked for
_EXACT = frozenset({int, str, bytes, type(None), bool})  # equal and of one type is the very same
_KNOWN, _SHORT = 4_096, 64  # values that are remembered per column, and how long text may be
Encode = Callable[[Value], bytes | None]


def same(a: Any, b: Any) -> bool:
    """Whether two values are the very same: 1 is not 1.0, 0.0 not -0.0, 1.0 not 1.00, a NaN is itself, and a value
    that is not known is the same as none."""
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


Watched = tuple[tuple[int, int], ...]  # a place in the row, and the bit that stands for it


def difference(watched: Watched, before: Row, after: Row) -> int:
    """The bits of the places that do not hold the very same."""
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
    """By place in the row, made when they are asked for."""

    def __init__(self, make: Callable[[int], Encode]) -> None:
        self._make = make

    def __missing__(self, place: int) -> Encode:
        found = self[place] = self._make(place)
        return found


class Shape:
    """One shape of a table of one source: its columns' bytes."""

    def __init__(self, source: ref[Queryable], table: Table) -> None:
        self.table = table
        self._source = source
        self.encoders = _Encoders(self._make)

    def encoder(self, place: int) -> Encode:
        """Bytes of values of the column at `place`; None where they cannot be told: it may be any value."""
        return self.encoders[place]

    def _make(self, place: int) -> Encode:
        source = self._source()
        try:
            if source is None:
                raise NotSupported("the source is gone")
            return _remembering(source.order(self.table, (self.table.names[place],)))
        except NotSupported:
            return lambda value: None


def _remembering(order: Callable[[Key], bytes]) -> Encode:
    """`order` for one column; short text that came lately is looked up, all else is written anew."""
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
        except Exception:  # whatever it is, the value is not known
            return None
        if is_short:
            if len(known) >= _KNOWN:
                known.clear()
            known[value] = found
        return found

    return encode


class View(dict[int, "bytes | None"]):
    """A row as bytes by place in the row, written when they are asked for, and once."""

    __slots__ = ("_encoders", "_row")

    def __init__(self, shape: Shape, row: Row) -> None:
        self._encoders = shape.encoders
        self._row = row

    def __missing__(self, place: int) -> bytes | None:
        found = self[place] = self._encoders[place](self._row[place])
        return found


class Shapes:
    """The shapes of one source. From any thread: what two make at once is equal."""

    def __init__(self, source: Queryable) -> None:
        self._source = ref(source)  # it is what these are kept by: weakly
        self._known: dict[str, list[Shape]] = {}  # by name, the one used last in front

    def of(self, table: Table) -> Shape:
        """The shape of `table`."""
        known = self._known.get(table.name, ())
        if known and known[0].table is table:
            return known[0]
        found = next((shape for shape in known if shape.table == table), None)
        made = found or Shape(self._source, table)
        made.table = table  # the next change most likely brings the same object
        rest = [shape for shape in known if shape is not made]
        self._known[table.name] = [made, *rest[: MAX_SHAPES - 1]]
        return made


_SHAPES: WeakKeyDictionary[Any, Shapes] = WeakKeyDictionary()


def shapes_of(source: Queryable) -> Shapes:
    """The shapes of `source`, for as long as it lives."""
    found = _SHAPES.get(source)
    if found is None:
        found = _SHAPES.setdefault(source, Shapes(source))
    return found
