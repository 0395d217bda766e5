"""A page of a table in key order: limited in rows and approximately in bytes, after a key and inside a span."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from typing import Protocol
from uuid import UUID

from psycopg import pq

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.keys.key import Span
from headwater.model.literal import Time, Value, is_date, is_datetime, is_time
from headwater.model.table import Column, Key, Row
from headwater.sources.key_span import SpanRows, key_at
from headwater.sources.postgres.key_order import is_odd, is_own_order, order, ordered_by
from headwater.sources.postgres.protocol_session import CAN_CHUNK, Link, cells_of
from headwater.sources.postgres.schema.table_shapes import Shape
from headwater.sources.postgres.values import Bound, cell_reader, to_bound

MAX_BYTES = 16 * 1024 * 1024  # approximate size of a chunk
FIRST = 64  # rows of the first fetch; each next fetch is at most twice as large
FETCH = 10_000 if CAN_CHUNK else 1_000  # limit of a fetch in rows
PART = 500  # most rows that libpq holds at a time
_HOURS = re.compile(rb"([+-]\d\d):00\Z")


class PageRows(Protocol):
    """The rows taken from a table so far."""

    count: int  # of rows
    weight: int  # bytes of their cells
    heaviest: int  # bytes of the largest row

    def add(self, result: pq.abc.PGresult) -> None:
        """Add the rows of `result`; OverflowError, and none is added, if all rows together are too large."""

    def rows(self, limit: int) -> Sequence[Row]:
        """Return the first `limit` of the rows taken."""


Take = Callable[[Shape], PageRows]


class Decoded(PageRows):
    """Rows as values."""

    def __init__(self, shape: Shape) -> None:
        self._readers = [cell_reader(oid) for oid in shape.types]
        self._rows: list[Row] = []
        self.count = self.weight = self.heaviest = 0

    def add(self, result: pq.abc.PGresult) -> None:
        cells = cells_of(result)
        readers = self._readers
        self._rows += [tuple([read(cell) for read, cell in zip(readers, row, strict=True)]) for row in cells]
        weights = [sum([8 if cell is None else len(cell) for cell in row]) for row in cells]
        self.count = len(self._rows)
        self.weight += sum(weights)
        self.heaviest = max([self.heaviest, *weights])

    def rows(self, limit: int) -> Sequence[Row]:
        return tuple(self._rows[:limit])


def read_page(
    link: Link, shape: Shape, odd: Collection[str], after: Key | None, span: Span | None, limit: int, taken: PageRows
) -> tuple[Sequence[Row], Key | None]:
    """Return at most `limit` rows, and the key of the last if more may follow; `taken`, empty before, collects them."""
    table = shape.table
    bounds = None if span is None or span == Span() else SpanRows(table, span, order(table, table.key, odd))
    text = _PageSql(shape, odd)
    conditions = [text.beyond(after)] if after is not None else []
    if span is not None and bounds is not None:
        conditions += [text.near(span.start, is_start=True), text.near(span.end, is_start=False)]
    found = [condition for condition in conditions if condition]
    where = f" WHERE {' AND '.join(found)}" if found else ""
    sql = f"SELECT {shape.column_list} FROM {shape.own}{where} ORDER BY {text.keys(len(table.key))} LIMIT {limit + 1}"
    more = _fetch(link, sql, text.params, limit, taken)
    rows = taken.rows(limit)
    last = rows[-1] if more else None
    if last is not None and bounds is not None and bounds.is_past(last):
        last = None
    return rows if bounds is None else bounds.inside(rows), None if last is None else table.key_of(last)


def _fetch(link: Link, sql: str, params: list[Bound], limit: int, taken: PageRows) -> bool:
    """Take about `limit` rows and MAX_BYTES; return whether more may follow the first `limit`."""
    first = FIRST
    while True:
        link.run(f"DECLARE headwater_chunk NO SCROLL CURSOR FOR {sql}", params)
        try:
            is_end = _filled(link, limit, taken, first)
        except OverflowError:
            if first == 1:
                raise NotSupported("one row holds more than 2 GiB") from None
            is_end, first = False, first // 8 or 1
        link.run("CLOSE headwater_chunk")
        if is_end or taken.count:
            return not is_end or taken.count > limit


def _filled(link: Link, limit: int, taken: PageRows, first: int) -> bool:
    """Take rows from the cursor; return whether it is exhausted. OverflowError if not even the first rows fit."""
    size = first
    while taken.count <= limit and taken.weight < MAX_BYTES:
        # A fetch of rows like the largest so far uses an eighth of the remaining bytes: one large row does no harm.
        fit = max((MAX_BYTES - taken.weight) // (8 * taken.heaviest or 1 << 18), 1)
        size = min(FETCH, limit + 1 - taken.count, fit, size)
        received, is_cut = 0, False
        # Rows may grow suddenly: rows received past the limit are discarded. The next chunk begins with them.
        for part in link.parts(f"FETCH FORWARD {size} FROM headwater_chunk", min(fit, PART)):
            received += part.ntuples
            if not part.ntuples and taken.count:
                continue  # libpq's final empty result
            if is_cut or taken.weight >= MAX_BYTES:
                is_cut = True
                continue
            try:
                taken.add(part)
            except OverflowError:
                is_cut = True
        if is_cut:
            if not taken.count:
                raise OverflowError
            return False
        if received < size:
            return True
        size *= 2
    return False


class _PageSql:
    """The SQL of a page, and its parameters."""

    def __init__(self, shape: Shape, odd: Collection[str]) -> None:
        self._shape = shape
        self._columns = [shape.column(name) for name in shape.table.key]
        self._odd = odd
        self.params: list[Bound] = []

    def keys(self, count: int) -> str:
        """Return the SQL of the first `count` key columns for comparison."""
        return ", ".join(ordered_by(column, self._odd) for column in self._columns[:count])

    def beyond(self, after: Key) -> str:
        """Return the condition for keys greater than `after`; InvalidRequest if it has too few or too many values."""
        if len(after) != len(self._columns):
            raise InvalidRequest(f"the key of {self._shape.table.name!r} has {len(self._columns)} values")
        return self._compared(">", after)

    def near(self, data: bytes | None, *, is_start: bool) -> str:
        """Return an index condition for keys from the start, or up to the end, of a span, and perhaps some more."""
        found = key_at(data) if data else None
        if found is None:
            return ""
        key, is_behind = found
        fits: list[Value] = []
        for column, value in zip(self._columns, key, strict=False):
            fit = _fitting(column, value)
            if fit is None or is_odd(column, self._odd):
                break
            fits.append(fit)
        if not fits:
            return ""
        is_whole = len(fits) == len(key)
        if is_start:
            return self._compared(">" if is_behind and is_whole else ">=", tuple(fits))
        return self._compared("<=" if is_behind or not is_whole else "<", tuple(fits))

    def _compared(self, comparison: str, key: Key) -> str:
        marks = []
        for column, value in zip(self._columns, key, strict=False):
            own = is_own_order(column) or is_odd(column, self._odd)
            by_text = not own and ordered_by(column, self._odd).startswith("format(")
            self.params.append(_as_text(value) if by_text else self._shape.bound(column.name, value))
            marks.append(f"${len(self.params)}::{'text' if by_text else self._shape.cast(column.name)}")
        return f"({self.keys(len(key))}) {comparison} ({', '.join(marks)})"


def _as_text(value: Value) -> Bound:
    """Return the value as PostgreSQL's own text, in which a whole-hour time zone has no minutes."""
    bound = to_bound(value)
    return _HOURS.sub(rb"\1", bound) if isinstance(value, Time) and bound is not None else bound


def _fitting(column: Column, value: Value) -> Value:
    """Return a value decoded from key bytes as a value of the column; None if that is uncertain."""
    match column.kind, value:
        case "bool", int() if value in (0, 1):
            return bool(value)
        case "i64", int():
            return value if abs(value) < 2**31 or column.declared == "bigint" else None
        case "f64", int() | float():
            return float(value) if float(value) == value else None
        case ("dec", Decimal()) | ("bytes", bytes()) | ("uuid", UUID()) | ("str", str()):
            return value
        case "date", str():
            return value if is_date(value) else None
        case "datetime", str():
            return value if is_datetime(value) else None
        case "time", str():
            return Time(value) if is_time(value) else None
    return None
