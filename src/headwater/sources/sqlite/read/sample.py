"""Evenly spread sample of a table's rows, with the size of each row and the number of rows it represents."""

from __future__ import annotations

from random import Random
from typing import Any

from headwater.errors import NotSupported
from headwater.model.table import Table
from headwater.sources.read import Sample, SamplePoint
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.read.even_spread import Neighbours, spread
from headwater.sources.sqlite.row_fetch import fetch

NEAR = 8  # rows read on either side of a drawn number
ROW_BYTES = 8  # overhead of a row in addition to its values
SEED = 1  # fixed, so that a table always gives the same sample

Stored = tuple[Any, ...]
Drawn = tuple[Stored, float]  # a stored row, and the number of rows it represents


def read_sample(reader: GuardedConnection, name: str, size: int) -> Sample:
    """Return estimates of table `name` from about `size` of its rows, from all if it has fewer."""
    shape = reader.catalog.shape(name)
    size = max(size, 1)
    rows = _Rows(reader, shape.table)
    some = rows.get(f"LIMIT {size + 1}")
    if len(some) <= size:
        drawn = [(row, 1.0) for row in some]
    elif shape.rowid is not None:
        drawn = rows.by_rowid(ident(shape.rowid), size)
    else:
        drawn = rows.by_scan(size)
    return _weighed(shape.table, drawn)


class _Rows:
    """Reads of one table: keys, and the lengths of all values instead of the values."""

    def __init__(self, reader: GuardedConnection, table: Table) -> None:
        self._run = reader.db.execute
        self._name = ident(table.name)
        cells = [*map(ident, table.key), *(f"octet_length({ident(name)})" for name in table.names)]
        self._width = len(cells)
        self._select = f"SELECT {', '.join(cells)} FROM {self._name} "

    def get(self, rest: str, bindings: tuple[int, ...] = ()) -> list[Stored]:
        """Return keys and value lengths of the rows that the statement ending in `rest` selects."""
        return fetch(self._run, self._select + rest, bindings, self._width)

    def by_rowid(self, rowid: str, size: int) -> list[Drawn]:
        """Draw rows by rowid: the cost does not depend on the size of the table."""
        below = f"SELECT {rowid} FROM {self._name} WHERE {rowid} < ? ORDER BY {rowid} DESC LIMIT {NEAR}"
        above = f"SELECT {rowid} FROM {self._name} WHERE {rowid} >= ? ORDER BY {rowid} LIMIT {NEAR}"

        def find(number: int) -> Neighbours:
            return Neighbours(self._numbers(below, number), self._numbers(above, number))

        ends = [f"(SELECT {end}({rowid}) FROM {self._name})" for end in ("min", "max")]
        ((low, high),) = self._run(f"SELECT {', '.join(ends)}").fetchall()
        drawn = spread(int(str(low)), int(str(high)), size, find, Random(SEED))
        return [(row, d.members) for d in drawn for row in self.get(f"WHERE {rowid} = ?", (d.number,))]

    def _numbers(self, sql: str, number: int) -> list[int]:
        found: list[Any] = self._run(sql, (number,)).fetchall()
        return [number for (number,) in found]

    def by_scan(self, size: int) -> list[Drawn]:
        """Draw random rows in a scan of the whole table: without a rowid the distribution of keys is unknown."""
        total: Any = self._run(f"SELECT count(*) FROM {self._name}").get
        found = self.get("WHERE (random() & 9223372036854775807) % ? = 0", (max(total // size, 1),))
        found = found or self.get("LIMIT 1")
        return [(row, total / len(found)) for row in found]


def _weighed(table: Table, drawn: list[Drawn]) -> Sample:
    width = len(table.key)
    weights = [(members, members * (ROW_BYTES + sum(filter(None, row[width:])))) for row, members in drawn]
    rows, size = round(sum(members for members, _ in weights)), round(sum(bytes for _, bytes in weights))
    try:
        place = order(table, table.key)
    except NotSupported:  # only the application knows the order of such keys
        return Sample(table, rows, size)
    points = (SamplePoint(place(row[:width]), *weight) for (row, _), weight in zip(drawn, weights, strict=True))
    return Sample(table, rows, size, tuple(sorted(points, key=lambda point: point.place)))
