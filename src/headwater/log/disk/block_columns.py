# cython: language_level=3, boundscheck=False, wraparound=False, infer_types=True
"""The changes of a block by column: all ops, all shapes, all images. Compiled where there was a C compiler at the
installation: then an edit has no effect until `make setup`."""

from __future__ import annotations

from typing import Any

from headwater.model.change import Change
from headwater.model.table import Row, Table

Rows = list[tuple[Any, ...] | None]
Remarks = dict[int, tuple[str | None, bool]]  # place of a change to its ddl and resnapshot
# Ops; per change a place among the tables, none where there is only one; the tables; before and after images; remarks;
# whether all values are written as they are.
Columns = tuple[bytes, list[int], tuple[Table, ...], Rows, Rows, Remarks, bool]


def columns(changes: tuple[Change, ...]) -> Columns:
    """Return the columns of `changes`."""
    ops = bytearray(len(changes))
    shapes: list[int] = []
    tables: list[Table] = []
    places: dict[int, int] = {}  # by identity: hashing a Table walks all its columns
    before: list[Row | None] = [None] * len(changes)
    after: list[Row | None] = [None] * len(changes)
    remarks: dict[int, tuple[str | None, bool]] = {}
    # msgspec would write a Decimal, a UUID or our structs as plain text or maps and lose what they are. The images are
    # checked in place: a call for each would take 6 to 25 % longer where this is not compiled.
    is_plain = is_one = True
    last = None
    shape = 0
    for place, change in enumerate(changes):
        ops[place] = change.op
        table = change.table
        if table is not last:
            last = table
            found = places.get(id(table))
            if found is None:
                if len(tables) == 1:
                    is_one, shapes = False, [0] * place  # so far the place of the only table need not be written
                found = places[id(table)] = len(tables)
                tables.append(table)
            shape = found
        if not is_one:
            shapes.append(shape)
        row: tuple[Any, ...] | None = change.before
        if row is not None:
            before[place] = row
            for value in row:
                kind = type(value)
                if kind is str or kind is int or value is None or kind is float or kind is bool or kind is bytes:
                    continue
                is_plain = False
                break
        row = change.after
        if row is not None:
            after[place] = row
            for value in row:
                kind = type(value)
                if kind is str or kind is int or value is None or kind is float or kind is bool or kind is bytes:
                    continue
                is_plain = False
                break
        if change.ddl is not None or change.resnapshot:
            remarks[place] = (change.ddl, change.resnapshot)
    return bytes(ops), shapes, tuple(tables), before, after, remarks, is_plain
