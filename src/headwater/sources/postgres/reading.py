"""Reading rows with the exact offset of the read: one by its key, or a bounded stretch of a table in key order.

A read sees the transactions of its snapshot. When all that were committed before it are on our stream, it is known
whether these are exactly the first so many of the log; if not (a commit was seen in another order than it is logged),
the read is made again. Only chunks need that; other reads are told an offset up to which they surely saw everything.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import Protocol, TypeVar
from uuid import UUID

from headwater.errors import Busy, InvalidRequest, NotSupported
from headwater.model.key import Span, decode_key
from headwater.model.literal import Time, Value, is_date, is_datetime, is_time
from headwater.model.predicate import key_is
from headwater.model.table import Column, Key, Row, Table
from headwater.sources.postgres.link import Cells, Link, Pool
from headwater.sources.postgres.order import is_odd, is_own_order, order, ordered_by
from headwater.sources.postgres.session import PostgresSession, is_read_only, run_statement
from headwater.sources.postgres.shapes import Shape, Shapes
from headwater.sources.postgres.statements import Args, check_ours, examine
from headwater.sources.postgres.values import Bound, cell_reader, to_bound
from headwater.sources.source import Chunk, Read, Result

T = TypeVar("T")
MAX_BYTES = 16 * 1024 * 1024  # of a chunk, about
TRIES = 10  # of a read whose snapshot is no beginning of the log
FETCH = 1_000  # rows taken from PostgreSQL at a time, at most
ALL_ROWS = "SET LOCAL row_security = off"  # where a policy would hide some, PostgreSQL refuses
_HOURS = re.compile(rb"([+-]\d\d):00\Z")


class Visibility(Protocol):
    """Which offset a snapshot stands for. `snapshot` is the text of pg_current_snapshot()."""

    def reading(self) -> AbstractContextManager[None]:
        """Around a read and the question where it stands."""
        ...

    def seen(self, snapshot: str) -> int:
        """The offset up to which it surely sees everything; it may see more."""
        ...

    def exact(self, snapshot: str) -> int | None:
        """The offset up to which it sees everything, and nothing after; None where there is none: read again."""
        ...


class Reading:
    """Reads of one database. From any thread."""

    def __init__(
        self,
        pool: Pool,
        shapes: Shapes,
        visibility: Visibility,
        odd: Callable[[], Collection[str]] = lambda: (),
        *,
        statement_seconds: float = 30.0,
    ) -> None:
        self._pool, self._shapes, self._visibility, self._odd = pool, shapes, visibility, odd
        self._seconds = statement_seconds

    def exact(self, work: Callable[[Link], T], seconds: float | None = None) -> tuple[T, int]:
        """What `work` reads in one snapshot, and its offset."""

        for _ in range(TRIES):
            with self._visibility.reading():
                value, snapshot = self._pool.read(lambda link: (work(link), snapshot_of(link)), seconds)
                offset = self._visibility.exact(snapshot)
            if offset is not None:
                return value, offset
        raise Busy("commits come faster than a read finds its place among them", hint="Try again in a moment.")

    def seen(self, work: Callable[[Link], T], seconds: float | None = None) -> tuple[T, int]:
        """The same with an offset up to which it surely saw everything: no barrier, and never again."""
        with self._visibility.reading():
            value, snapshot = self._pool.read(lambda link: (work(link), snapshot_of(link)), seconds)
            return value, self._visibility.seen(snapshot)

    def read(self, sql: str, args: Args = ()) -> Read:
        """See Source. It runs in a transaction that only reads: PostgreSQL refuses what writes."""

        def read(link: Link) -> Result:
            statement, bound = examine(link, sql, args)
            result = run_statement(link, statement, bound)
            check_ours(link)
            return result

        result, offset = self.seen(read, self._seconds)
        return Read(result.columns, result.rows, offset, result.truncated)

    def is_read_only(self, sql: str) -> bool:
        """See Source."""
        return self._pool.read(lambda link: is_read_only(link, sql))

    def get(self, table: str, key: Key) -> tuple[Table, Row | None, int]:
        """See Source."""

        def read(link: Link) -> tuple[Table, Row | None]:
            session = PostgresSession(link, self._shapes)
            found = session.describe(table)
            rows = session.select(table, key_is(found, key), 1)
            return found, rows[0] if rows else None

        (shape, row), offset = self.seen(read)
        return shape, row, offset

    def chunk(self, table: str, *, after: Key | None, span: Span | None, limit: int) -> Chunk:
        """See Source."""
        odd = self._odd()

        def read(link: Link) -> tuple[Table, list[Row], Key | None]:
            link.script(ALL_ROWS)
            shape = self._shapes.shape(link, table)
            shape.need_key()
            return (shape.table, *_stretch(link, shape, odd, after, span, max(limit, 1)))

        (shape, rows, next_key), offset = self.exact(read)
        return Chunk(shape, tuple(rows), offset, next_key)


def snapshot_of(link: Link) -> str:
    """What the transaction sees: one snapshot from its first statement to its last."""
    ((snapshot,),) = link.run("SELECT pg_current_snapshot()::text").texts()
    return str(snapshot)


# --- a stretch -------------------------------------------------------------------------------------------


def _stretch(
    link: Link, shape: Shape, odd: Collection[str], after: Key | None, span: Span | None, limit: int
) -> tuple[list[Row], Key | None]:
    table = shape.table
    bounds = None if span is None or span == Span() else _Bounds(table, span, odd)
    text = _Text(shape, odd)
    conditions = [text.beyond(after)] if after is not None else []
    if span is not None and bounds is not None:
        conditions += [text.near(span.start, is_start=True), text.near(span.end, is_start=False)]
    found = [condition for condition in conditions if condition]
    where = f" WHERE {' AND '.join(found)}" if found else ""
    sql = f"SELECT {shape.column_list} FROM {shape.sql}{where} ORDER BY {text.keys(len(table.key))} LIMIT {limit + 1}"
    rows, more = _fetched(link, shape, sql, text.params, limit)
    last = rows[-1] if more else None
    if bounds is None:
        return rows, None if last is None else table.key_of(last)
    if last is not None and bounds.is_past(last):
        last = None
    return bounds.inside(rows), None if last is None else table.key_of(last)


def _fetched(link: Link, shape: Shape, sql: str, params: list[Bound], limit: int) -> tuple[list[Row], bool]:
    """At most `limit` rows and about MAX_BYTES; whether there may be others."""
    readers = [cell_reader(oid) for oid in shape.types]
    rows: list[Row] = []
    weight = heaviest = 0
    link.run(f"DECLARE headwater_chunk NO SCROLL CURSOR FOR {sql}", params)
    while len(rows) <= limit and weight < MAX_BYTES:
        # Rows like the heaviest so far are an eighth of what is left: one sudden row is no flood.
        size = min(FETCH, limit + 1 - len(rows), max((MAX_BYTES - weight) // (8 * heaviest or 1 << 18), 1))
        cells = link.run(f"FETCH FORWARD {size} FROM headwater_chunk").rows
        rows += [tuple([read(cell) for read, cell in zip(readers, row, strict=True)]) for row in cells]
        if len(cells) < size:
            link.run("CLOSE headwater_chunk")
            return rows[:limit], len(rows) > limit
        weights = [_weight(row) for row in cells]
        heaviest = max(heaviest, *weights)
        weight += sum(weights)
    link.run("CLOSE headwater_chunk")
    return rows[:limit], True


def _weight(row: Cells) -> int:
    return sum([8 if cell is None else len(cell) for cell in row])


class _Bounds:
    """A span over rows that come in the order of their places."""

    def __init__(self, table: Table, span: Span, odd: Collection[str]) -> None:
        self._span = span
        place, key_of = order(table, table.key, odd), table.key_of
        self._place: Callable[[Row], bytes] = lambda row: place(key_of(row))

    def is_past(self, row: Row) -> bool:
        """Whether `row` lies behind the end."""
        return self._span.end is not None and self._place(row) >= self._span.end

    def inside(self, rows: list[Row]) -> list[Row]:
        """Those of `rows`, which are in order, that lie in the span."""
        low = bisect_left(rows, self._span.start, key=self._place)
        end = self._span.end
        return rows[low:] if end is None else rows[low : bisect_left(rows, end, low, key=self._place)]


class _Text:
    """The SQL of a stretch, and its parameters."""

    def __init__(self, shape: Shape, odd: Collection[str]) -> None:
        self._shape = shape
        self._columns = [shape.column(name) for name in shape.table.key]
        self._odd = odd
        self.params: list[Bound] = []

    def keys(self, count: int) -> str:
        """The first columns of the key, as they are compared."""
        return ", ".join(ordered_by(column, self._odd) for column in self._columns[:count])

    def beyond(self, after: Key) -> str:
        """Keys greater than `after`."""
        if len(after) != len(self._columns):
            raise InvalidRequest(f"the key of {self._shape.table.name!r} has {len(self._columns)} values")
        return self._compared(">", after)

    def near(self, data: bytes | None, *, is_start: bool) -> str:
        """Keys from the start of a span, or up to its end, and maybe some more: where PostgreSQL can seek to."""
        found = _key_at(data) if data else None
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
    """The value as PostgreSQL's own text: whole hours of a time zone have no minutes there."""
    bound = to_bound(value)
    return _HOURS.sub(rb"\1", bound) if isinstance(value, Time) and bound is not None else bound


def _key_at(data: bytes) -> tuple[Key, bool] | None:
    """The key at which a span begins or ends; and whether just behind all keys that begin with it (`prefix_end`)."""
    candidates = [(data, False)]
    if data[-1:] > b"\0":
        candidates.append((data[:-1] + bytes([data[-1] - 1]), True))
    for found, is_behind in candidates:
        with contextlib.suppress(InvalidRequest, NotSupported):
            if key := decode_key(found):
                return key, is_behind
    return None


def _fitting(column: Column, value: Value) -> Value:
    """A value from key bytes as a value of the column; None if that is not sure."""
    match column.kind, value:
        case "bool", int() if value in (0, 1):
            return bool(value)
        case "i64", int():
            return value if abs(value) < 2**31 or column.declared == "bigint" else None
        case "f64", int() | float():
            return float(value) if float(value) == value else None
        case "dec", Decimal():
            return value
        case "bytes", bytes():
            return value
        case "uuid", UUID():
            return value
        case "date", str():
            return value if is_date(value) else None
        case "datetime", str():
            return value if is_datetime(value) else None
        case "time", str():
            return Time(value) if is_time(value) else None
        case "str", str():
            return value
    return None
