"""Rows as columns of PostgreSQL's text: Arrow without converting single values, and values on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from psycopg import pq

from headwater.model.literal import Value
from headwater.model.table import Row
from headwater.sources.postgres.read.key_order_page import PageRows
from headwater.sources.postgres.read.text_cells import MOST, texts_of
from headwater.sources.postgres.schema.table_shapes import Shape
from headwater.sources.postgres.values import cell_reader

if TYPE_CHECKING:
    import pyarrow as pa


class TextColumns(PageRows):
    """Rows kept as columns of text."""

    def __init__(self, shape: Shape) -> None:
        self._types = shape.types
        self._parts: list[list[pa.StringArray]] = []
        self.count = self.weight = self.heaviest = 0

    def add(self, result: pq.abc.PGresult) -> None:
        found = texts_of(result)
        if self._parts and self.weight + found.weight > MOST:
            raise OverflowError
        self._parts.append(found.columns)
        self.count += result.ntuples
        self.weight += found.weight
        self.heaviest = max(self.heaviest, found.heaviest)

    def rows(self, limit: int) -> PackedRows:
        import pyarrow as pa

        columns = [pa.concat_arrays(parts) for parts in zip(*self._parts, strict=True)]
        return PackedRows(self._types, columns)[:limit]


class PackedRows(Sequence[Row]):
    """Rows in order, stored by column. Fulfils `arrow.Columnar`."""

    def __init__(self, types: Sequence[int], columns: Sequence[pa.StringArray]) -> None:
        self._types, self._columns = types, columns
        self._readers = [cell_reader(oid) for oid in types]

    def column(self, place: int) -> pa.Array | list[Value]:
        """Return a column in Arrow's type for its kind, or as values if that type cannot hold one."""
        from headwater.sources.postgres.read.arrow_columns import array_of

        texts = self._columns[place]
        found = array_of(self._types[place], texts)
        return self._values(place) if found is None else found

    def _values(self, place: int) -> list[Value]:
        return list(map(self._readers[place], self._columns[place].cast("binary").to_pylist()))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[Row]:
        return zip(*map(self._values, range(len(self._columns))), strict=True)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> PackedRows: ...
    def __getitem__(self, place: int | slice) -> Row | PackedRows:
        if isinstance(place, slice):
            return PackedRows(self._types, [column[place] for column in self._columns])
        texts = [column[place].as_py() for column in self._columns]
        cells = [None if text is None else text.encode() for text in texts]
        return tuple([read(cell) for read, cell in zip(self._readers, cells, strict=True)])
