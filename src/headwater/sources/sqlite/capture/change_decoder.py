"""Conversion of capture table rows to changes, without I/O; one row decoder per layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.keys.key import encode_key
from headwater.model.table import Row
from headwater.sources.sqlite.capture.trigger_plan import Layout
from headwater.sources.sqlite.capture.triggers import ANCHOR
from headwater.sources.sqlite.types import FROM_STORED

CaptureRow = tuple[Any, ...]  # seq, layout, op, c0, c1, …
Replaced = tuple[int, int, Row]  # head, layout (negative: the row shares the rowid, not the key), the stored row
Numbered = tuple[int, Change]
Aside = dict[tuple[int, bytes], Row]  # (layout, key) to the row that an insert may have replaced
FIRST = 3  # index of the first cell in a CaptureRow


def row_decoder(layout: Layout) -> Callable[[Sequence[Any]], Row]:
    """Return a function that converts a stored row to values; most tables need no conversion."""
    columns = layout.table.columns
    rich = [(place, FROM_STORED[c.kind]) for place, c in enumerate(columns) if c.kind in FROM_STORED]
    if not rich:
        return tuple

    def decode(stored: Sequence[Any]) -> Row:
        values = list(stored)
        for place, read in rich:
            values[place] = read(values[place])
        return tuple(values)

    return decode


class Decoder:
    """Decoder of capture rows for all layouts of one file."""

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self.layouts = layouts
        self._rows = {n: row_decoder(layout) for n, layout in layouts.items()}

    def change(self, row: CaptureRow) -> Change | None:
        """Return the change of one capture row; None for an anchor."""
        op = row[2]
        if op == ANCHOR:
            return None
        layout, decode = self.layouts[row[1]], self._rows[row[1]]
        table, width = layout.table, len(layout.table.columns)
        if op == Op.INSERT:
            return Change(Op.INSERT, table, None, decode(row[FIRST : FIRST + width]))
        if op == Op.UPDATE:
            middle = FIRST + width
            return Change(Op.UPDATE, table, decode(row[middle : middle + width]), decode(row[FIRST:middle]))
        if op == Op.DELETE:
            return Change(Op.DELETE, table, decode(row[FIRST : FIRST + width]), None)
        return Change(Op.SCHEMA_CHANGE, table, ddl=row[3], resnapshot=bool(row[4]))

    def page(self, rows: Iterable[CaptureRow], replaced: Sequence[Replaced], aside: Aside) -> list[Numbered]:
        """Return the changes of consecutive rows, with a REPLACE on a key joined into one update.

        `aside` holds possibly replaced rows from earlier pages of the transaction: a page may end between such a row
        and the insert that replaced it.
        """
        found = [(row, change) for row in rows if (change := self.change(row)) is not None]
        if not replaced and not aside:
            return [(row[0], change) for row, change in found]
        pending = [item for item in reversed(replaced) if item[1] > 0]
        joined: list[Numbered] = []
        for row, change in found:
            while pending and pending[-1][0] < row[0]:
                _, n, stored = pending.pop()
                aside[self._key_of(n, stored)] = self._rows[n](stored)
            joined.append((row[0], self._settle(change, row, aside)))
        return joined

    def doubtful(self, replaced: Sequence[Replaced]) -> set[str]:
        """Return the tables in which an explicit rowid may have replaced a row: no capture row shows whether it did."""
        return {self.layouts[-n].table.name for _, n, _ in replaced if n < 0}

    def _settle(self, change: Change, row: CaptureRow, aside: Aside) -> Change:
        """Turn an insert onto a row in `aside` into an update; any other change of the key proves no replacement."""
        width = len(change.table.columns)
        images = (change.before is not None) + (change.after is not None)
        starts = [FIRST + width * image for image in range(images)]
        taken = [aside.pop(self._key_of(row[1], row[start : start + width]), None) for start in starts]
        if change.op is Op.INSERT and taken[0] is not None:
            return Change(Op.UPDATE, change.table, taken[0], change.after)
        return change

    def _key_of(self, n: int, stored: Sequence[Any]) -> tuple[int, bytes]:
        """Return the layout and the key as SQLite compares it, from stored values: two decimals may be one number."""
        table = self.layouts[n].table
        collations = [table.columns[place].collation for place in table.key_places]
        return n, encode_key(tuple(stored[place] for place in table.key_places), collations)
