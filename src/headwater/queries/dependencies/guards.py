"""Guards: keys and limits recorded with an answer, which prove that some relevant changes leave it unchanged.

A guard may only suppress a delivery, or keep an older tag current. It is recorded in the same read as the answer,
and serves one instance until the answer is stale, or until the rows that the guard was made from change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headwater.model.change import Change
from headwater.model.dependencies.dependency import MAX_KEYS, Analysis, KeyGuard, Param, TopGuard
from headwater.model.literal import Value
from headwater.model.table import Row, Table
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.queries.dependencies.column_bytes import Shapes, View, shapes_of
from headwater.queries.dependencies.template import is_unclear
from headwater.sources.query import Queryable, ReadResult


class _Keys(msgspec.Struct, frozen=True):
    """Rows with none of `keys` in `column` are irrelevant."""

    column: str
    keys: frozenset[bytes]

    def excludes(self, view: View, table: Table) -> bool:
        """Return whether a row is irrelevant."""
        cell = view[table.index[self.column]]
        return cell is not None and cell not in self.keys


class _TopRows(msgspec.Struct, frozen=True):
    """Rows that sort after the last row of the answer are irrelevant."""

    order: tuple[tuple[str, bool], ...]
    last: tuple[bytes, ...]

    def excludes(self, view: View, table: Table) -> bool:
        """Return whether a row is irrelevant."""
        for (column, descends), last in zip(self.order, self.last, strict=True):
            cell = view[table.index[column]]
            if cell is None:
                return False
            if cell != last:
                return (cell < last) is descends
        return False


class _Guard:
    """One guard of one answer, and the table whose columns its bytes were encoded for."""

    __slots__ = ("place", "sees", "table", "what")

    def __init__(self, place: int, sees: frozenset[int], table: Table, what: _Keys | _TopRows) -> None:
        self.place, self.sees, self.table, self.what = place, sees, table, what


class GuardState:
    """The guards of one answer of one instance. Not thread-safe.

    Call `suppresses` for every relevant change after the answer, in order: even a suppressed change may end a guard
    that was made from the rows it touched.
    """

    def __init__(self, shapes: Shapes, bound: BoundDependencies, guards: Sequence[_Guard]) -> None:
        self._shapes = shapes
        self._bound = bound
        self._guards = list(guards)
        self._recorded = len(self._guards)

    def __bool__(self) -> bool:
        return bool(self._guards)

    @property
    def is_whole(self) -> bool:
        """Return whether every recorded guard still holds."""
        return len(self._guards) == self._recorded

    @property
    def size(self) -> int:
        """Return about how many keys the guards hold."""
        return sum(len(each.what.keys) if isinstance(each.what, _Keys) else 1 for each in self._guards)

    @classmethod
    def record(
        cls,
        source: Queryable,
        tables: Mapping[str, Table],
        analysis: Analysis,
        args: Mapping[str, Value],
        bound: BoundDependencies,
        answer: ReadResult,
    ) -> GuardState:
        """Return the guards of `answer`, which was read with the keys of its guards (`answer.keys`)."""
        shapes = shapes_of(source)
        made = []
        for guard, rows in zip(analysis.guards, answer.keys, strict=True):
            table = tables.get(analysis.dependencies[guard.place].table)
            if table is not None:
                made += _made(guard, shapes, table, args, answer, rows)
        return cls(shapes, bound, made)

    def suppresses(self, change: Change, place: int) -> bool:
        """Return whether `change`, whose first relevant table reference is `place`, leaves the answer unchanged.

        If not, the answer is stale and all guards are dropped; the next answer records new ones.
        """
        if not self._guards:
            return False
        references = self._bound.references
        touched = {number for number in range(place, len(references)) if references[number].matters(change)} | {place}
        try:
            is_suppressed = all(self._excludes(change, number, touched) for number in touched)
        except Exception:  # a change must never be missed
            is_suppressed = False
        # The answer is unchanged, but guards made from the rows that changed are not valid any more.
        self._guards = [guard for guard in self._guards if not guard.sees & touched] if is_suppressed else []
        return is_suppressed

    def _excludes(self, change: Change, place: int, touched: set[int]) -> bool:
        """Return whether a guard proves that the rows of `change` are irrelevant to table reference `place`.

        A guard made from rows that this change touches proves nothing: in a self-join, a row may match itself.
        """
        return not is_unclear(change) and any(
            self._is_outside(guard, change)
            for guard in self._guards
            if guard.place == place and not guard.sees & touched
        )

    def _is_outside(self, guard: _Guard, change: Change) -> bool:
        table = change.table
        if table is not guard.table and table.columns != guard.table.columns:
            return False
        found = self._bound.references[guard.place]
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
    answer: ReadResult,
    rows: Sequence[Row] | None,
) -> list[_Guard]:
    """Return a list with the guard, or an empty list if it could not be recorded."""
    if isinstance(guard, KeyGuard):
        keys = None if rows is None or len(rows) > MAX_KEYS else _cells(shapes, table, guard.column, rows)
        if keys is None:
            return []
        return [_Guard(guard.place, frozenset(guard.sees), table, _Keys(guard.column, keys))]
    last = _last(guard, shapes, table, args, answer)
    return [] if last is None else [_Guard(guard.place, frozenset(), table, _TopRows(guard.order, last))]


def _cells(shapes: Shapes, table: Table, column: str, rows: Sequence[Row]) -> frozenset[bytes] | None:
    """Return the keys as `column` compares them; they are from columns of the same kind and need no conversion."""
    place = table.index.get(column)
    if place is None:
        return None
    encode = shapes.of(table).encoder(place)
    found = frozenset(encode(value) for (value,) in rows)
    return None if None in found else found  # type: ignore[return-value]


def _last(
    guard: TopGuard, shapes: Shapes, table: Table, args: Mapping[str, Value], answer: ReadResult
) -> tuple[bytes, ...] | None:
    """Return the sort key of the last row, if the answer fills its LIMIT."""
    full = args.get(guard.rows.name) if isinstance(guard.rows, Param) else guard.rows.value
    is_full = type(full) is int and 0 < full == len(answer.rows) and not answer.truncated
    if not is_full or len(guard.last) != len(guard.order):
        return None
    shape, row = shapes.of(table), answer.rows[-1]
    places = [table.index.get(column) for column, _ in guard.order]
    cells = [None if at is None else shape.encoder(at)(row[last]) for at, last in zip(places, guard.last, strict=True)]
    return None if None in cells else tuple(cells)  # type: ignore[arg-type]
