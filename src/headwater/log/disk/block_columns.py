"""The changes of a block by column: all ops, all shapes, all images. `columns_compiled` does the same where it was
built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from headwater.model.change import Change
from headwater.model.table import Row, Table

FORM = 1  # of the result: a compiled twin that was built for another one is not used

Rows = tuple[tuple[Any, ...] | None, ...]
Remarks = dict[int, tuple[str | None, bool]]  # place of a change to its ddl and resnapshot
# Ops; per change a place among the tables, none where there is only one; the tables; before and after images; remarks;
# whether all values are written as they are.
Columns = tuple[bytes, list[int], tuple[Table, ...], Rows, Rows, Remarks, bool]

# msgspec would write a Decimal, a UUID or our structs as plain text or maps and lose what they are.
_SAFE_AS_THEY_ARE = frozenset({type(None), bool, int, float, str, bytes})


def in_python(changes: tuple[Change, ...]) -> Columns:
    """Return the columns of `changes`."""
    shapes, tables = _shapes([change.table for change in changes])
    before, after = tuple([change.before for change in changes]), tuple([change.after for change in changes])
    ops = bytes([change.op for change in changes])
    return ops, shapes, tables, before, after, _remarks(changes), _safe(before) and _safe(after)


def _shapes(tables: list[Table]) -> tuple[list[int], tuple[Table, ...]]:
    marks = list(map(id, tables))  # hashing a Table walks all its columns; its identity is enough here
    known = dict(zip(marks, tables, strict=True))
    if len(known) == 1:
        return [], (tables[0],)
    places = {mark: place for place, mark in enumerate(known)}
    return [places[mark] for mark in marks], tuple(known.values())


def _remarks(changes: Sequence[Change]) -> Remarks:
    return {
        place: (change.ddl, change.resnapshot)
        for place, change in enumerate(changes)
        if change.ddl is not None or change.resnapshot
    }


def _safe(rows: Iterable[Row | None]) -> bool:
    return _SAFE_AS_THEY_ARE.issuperset(map(type, chain.from_iterable(filter(None, rows))))


try:
    from headwater.log.disk import block_columns_compiled as _built

    IS_BUILT = _built.FORM == FORM
except ImportError:
    IS_BUILT = False

columns = _built.columns if IS_BUILT else in_python
