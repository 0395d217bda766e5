"""Guards: what was seen while an answer was made tells that some changes cannot matter to it after all.

A guard may only hold back a delivery, or let an older tag stand. It is recorded in the same read as the answer, and
serves one instance until that is invalidated, or until the rows it was made from have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headwater.model.change import Change
from headwater.model.dependencies.dependency import MAX_KEYS, Analysis, KeyGuard, Param, TopGuard
from headwater.model.literal import Value
from headwater.model.table import Row, Table
from headwater.queries.dependencies.bound_dependencies import Bound
from headwater.queries.dependencies.column_bytes import Shapes, View, shapes_of
from headwater.queries.dependencies.template import is_unclear
from headwater.sources.query import Queryable, Read


class _Keys(msgspec.Struct, frozen=True):
    """Rows that hold none of these in `column` do not matter."""

    column: str
    keys: frozenset[bytes]

    def excludes(self, view: View, table: Table) -> bool:
        """Whether a row cannot matter."""
        cell = view[table.index[self.column]]
        return cell is not None and cell not in self.keys


class _Top(msgspec.Struct, frozen=True):
    """Rows that sort behind this one do not matter."""

    order: tuple[tuple[str, bool], ...]
    last: tuple[bytes, ...]

    def excludes(self, view: View, table: Table) -> bool:
        """Whether a row cannot matter."""
        for (column, descends), last in zip(self.order, self.last, strict=True):
            cell = view[table.index[column]]
            if cell is None:
                return False
            if cell != last:
                return (cell < last) is descends
        return False


class _Guard:
    """One guard of one answer, and the definitions of the columns that its bytes were written for."""

    __slots__ = ("place", "sees", "table", "what")

    def __init__(self, place: int, sees: frozenset[int], table: Table, what: _Keys | _Top) -> None:
        self.place, self.sees, self.table, self.what = place, sees, table, what


class GuardState:
    """The guards of one answer of one instance. For one thread.

    It must be asked about every change that matters to the instance after the answer was made, in their order: even
    a change that is held back may end a guard that was made from the rows it touched.
    """

    def __init__(self, shapes: Shapes, bound: Bound, guards: Sequence[_Guard]) -> None:
        self._shapes = shapes
        self._bound = bound
        self._guards = list(guards)
        self._recorded = len(self._guards)

    def __bool__(self) -> bool:
        return bool(self._guards)

    @property
    def is_whole(self) -> bool:
        """Whether every guard that was recorded still holds."""
        return len(self._guards) == self._recorded

    @property
    def size(self) -> int:
        """How many keys it holds, about."""
        return sum(len(each.what.keys) if isinstance(each.what, _Keys) else 1 for each in self._guards)

    @classmethod
    def record(
        cls,
        source: Queryable,
        tables: Mapping[str, Table],
        analysis: Analysis,
        args: Mapping[str, Value],
        bound: Bound,
        answer: Read,
    ) -> GuardState:
        """Guards of `answer`, which was read with its keys."""
        shapes = shapes_of(source)
        made = []
        for guard, rows in zip(analysis.guards, answer.keys, strict=True):
            table = tables.get(analysis.dependencies[guard.place].table)
            if table is not None:
                made += _made(guard, shapes, table, args, answer, rows)
        return cls(shapes, bound, made)

    def suppresses(self, change: Change, place: int) -> bool:
        """Whether `change`, which matters to `place` and to none before it, leaves the answer as it is.

        If not, the answer is stale, and the guards are gone: they come back with the next answer.
        """
        if not self._guards:
            return False
        places = self._bound.places
        touched = {number for number in range(place, len(places)) if places[number].matters(change)} | {place}
        try:
            is_held_back = all(self._excludes(change, number, touched) for number in touched)
        except Exception:  # the one rule: never silence
            is_held_back = False
        # What a guard was made from is not what it was, though the answer is.
        self._guards = [guard for guard in self._guards if not guard.sees & touched] if is_held_back else []
        return is_held_back

    def _excludes(self, change: Change, place: int, touched: set[int]) -> bool:
        """Whether a guard tells that the rows of `change` do not matter to `place`. One that was made from rows that
        this very change touches cannot tell: in a self-join, a row may meet itself."""
        return not is_unclear(change) and any(
            self._is_outside(guard, change)
            for guard in self._guards
            if guard.place == place and not guard.sees & touched
        )

    def _is_outside(self, guard: _Guard, change: Change) -> bool:
        table = change.table
        if table is not guard.table and table.columns != guard.table.columns:
            return False
        found = self._bound.places[guard.place]
        fit = found.template.fit(table)
        if fit is None:
            return False
        views = [View(self._shapes.of(table), row) for row in (change.before, change.after) if row is not None]
        return all(guard.what.excludes(view, table) or not fit.holds(view, found.values) for view in views)


def _made(
    guard: KeyGuard | TopGuard,
    shapes: Shapes,
    table: Table,
    args: Mapping[str, Value],
    answer: Read,
    rows: Sequence[Row] | None,
) -> list[_Guard]:
    """The guard, if it could be recorded."""
    if isinstance(guard, KeyGuard):
        keys = None if rows is None or len(rows) > MAX_KEYS else _cells(shapes, table, guard.column, rows)
        if keys is None:
            return []
        return [_Guard(guard.place, frozenset(guard.sees), table, _Keys(guard.column, keys))]
    last = _last(guard, shapes, table, args, answer)
    return [] if last is None else [_Guard(guard.place, frozenset(), table, _Top(guard.order, last))]


def _cells(shapes: Shapes, table: Table, column: str, rows: Sequence[Row]) -> frozenset[bytes] | None:
    """The keys as `column` would compare them. They come from columns of its own kind: nothing is converted."""
    place = table.index.get(column)
    if place is None:
        return None
    encode = shapes.of(table).encoder(place)
    found = frozenset(encode(value) for (value,) in rows)
    return None if None in found else found  # type: ignore[return-value]


def _last(
    guard: TopGuard, shapes: Shapes, table: Table, args: Mapping[str, Value], answer: Read
) -> tuple[bytes, ...] | None:
    """What the last row of a full window sorts by."""
    full = args.get(guard.rows.name) if isinstance(guard.rows, Param) else guard.rows.value
    is_full = type(full) is int and 0 < full == len(answer.rows) and not answer.truncated
    if not is_full or len(guard.last) != len(guard.order):
        return None
    shape, row = shapes.of(table), answer.rows[-1]
    places = [table.index.get(column) for column, _ in guard.order]
    cells = [None if at is None else shape.encoder(at)(row[last]) for at, last in zip(places, guard.last, strict=True)]
    return None if None in cells else tuple(cells)  # type: ignore[arg-type]
