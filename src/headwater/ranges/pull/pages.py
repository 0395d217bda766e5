"""Pages of one range for pullers that ask for one after the other: rows as of a version, and what happened since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headwater.database import Database
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table
from headwater.ranges.pull.jobs import SCHEMA_CHANGED, TABLE_DROPPED, TRUNCATED, WAL_HORIZON_EXCEEDED, gone
from headwater.ranges.pull.snapshot import read_table_as_of
from headwater.ranges.pull.table_changes import stop_of
from headwater.sources.read import Reader

SCAN = 65_536  # changes looked at for one page; a quiet range comes back for more
WORDS = {TRUNCATED: "emptied", TABLE_DROPPED: "dropped or renamed", SCHEMA_CHANGED: "altered or rewritten"}


class Limits(NamedTuple):
    """How much a page holds, about. At least one row, or the two sides of one change."""

    rows: int
    bytes: int


class Rows(NamedTuple):
    """Rows in the order of their keys. `end`: there are no more."""

    table: Table
    rows: list[tuple[bytes, Row]]
    end: bool


class Seen(NamedTuple):
    """What a change did to one key of a range. An image outside the range is withheld."""

    key: bytes
    op: Op
    table: Table
    before: Row | None
    after: Row | None
    offset: int
    part: Transaction
    last: bool = False  # nothing more of its transaction concerns the range


class Log(NamedTuple):
    """What happened up to `upto`."""

    seen: list[Seen]
    upto: int


def rows_page(database: Database, table: Table, span: Span, version: int, limits: Limits) -> Rows:
    """The first rows of `span` as they were at `version`. OffsetExpired, Conflict: see `read_table_as_of`."""
    source = database.source
    place, key_of = source.order(table, table.key), table.key_of
    found: list[tuple[bytes, Row]] = []
    weight = 0
    pieces = read_table_as_of(source, database.log, table, version, span=span, chunk_rows=limits.rows + 1)
    try:
        for _, rows in pieces:
            for row in rows:
                key = place(key_of(row))
                # Rows that share a key, which holds NULLs then, are not torn apart: the next page begins behind it.
                if (len(found) >= limits.rows or weight >= limits.bytes) and key != found[-1][0]:
                    return Rows(table, found, False)
                found.append((key, row))
                weight += row_weight(row)
        return Rows(table, found, True)
    finally:
        pieces.close()  # type: ignore[attr-defined]  # a generator


def log_page(
    database: Database, table: Table, span: Span, after: int, upto: int, limits: Limits, *, scan: int = SCAN
) -> Log:
    """What happened to `span` in (after, upto], the first of it.

    It ends before a change that leaves rows in a state nobody told; who begins there is refused: OffsetExpired.
    A page ends inside a transaction only where more of it follows, so that the last of each is always marked.
    """
    page = _Page(table, span, limits, database.source)
    covered, is_whole = after, True
    for part in database.log.scan(after=after, upto=upto):
        if part.start == 0:
            page.begin_transaction()
        if covered - after >= scan and not page.in_midst:
            return Log(page.seen, covered)
        for offset, change in enumerate(part.changes, part.first):
            if reason := page.stops(change):
                if offset == after + 1:
                    raise _stopped(database.log, table.name, after, reason)
                page.begin_transaction()
                return Log(page.seen, offset - 1)
            if not page.take(part, offset, change):
                return Log(page.seen, offset - 1)
        covered, is_whole = part.upto, part.last
    if is_whole:
        page.begin_transaction()
    elif page.in_midst:
        covered = page.hold_back() - 1
    return Log(page.seen, covered)


def row_weight(row: Row) -> int:
    """About how many bytes a row takes."""
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row) + 16 * len(row)


class _Page:
    """Takes changes in order until it is full."""

    def __init__(self, table: Table, span: Span, limits: Limits, source: Reader) -> None:
        self._table, self._span, self._limits = table, span, limits
        self._place = PerTable(lambda shape: source.order(shape, shape.key))
        self._weight = 0
        self._whole = 0  # how many belong to transactions that are over
        self.seen: list[Seen] = []

    @property
    def in_midst(self) -> bool:
        """Whether something of a transaction was taken that goes on."""
        return self._whole < len(self.seen)

    def stops(self, change: Change) -> str:
        """Why nobody who follows the table may pass this unknowingly; "" if it may."""
        if change.table.name != self._table.name:
            return ""
        if change.op > Op.DELETE:
            return stop_of(change)
        return SCHEMA_CHANGED if change.table.key != self._table.key else ""

    def take(self, part: Transaction, offset: int, change: Change) -> bool:
        """Add what `change` did to the span; False if it did something and the page is full."""
        if change.table.name != self._table.name or change.op > Op.DELETE:
            return True
        found = list(self._sides(part, offset, change))
        if found and (len(self.seen) >= self._limits.rows or self._weight >= self._limits.bytes):
            return False
        self.seen += found
        for row in (change.before, change.after) if found else ():
            self._weight += 0 if row is None else row_weight(row)
        return True

    def _sides(self, part: Transaction, offset: int, change: Change) -> Iterator[Seen]:
        table, key_of, place = change.table, change.table.key_of, self._place(change.table)
        old = None if change.before is None else place(key_of(change.before))
        new = None if change.after is None else place(key_of(change.after))
        if old is not None and new is not None and old != new:
            if self._span.contains(old):
                yield Seen(old, Op.DELETE, table, change.before, None, offset, part)
            if self._span.contains(new):
                yield Seen(new, Op.INSERT, table, None, change.after, offset, part)
            return
        key = new if new is not None else old
        if key is not None and self._span.contains(key):
            yield Seen(key, change.op, table, change.before, change.after, offset, part)

    def begin_transaction(self) -> None:
        """The one before is over: mark its last."""
        if self.in_midst:
            self.seen[-1] = self.seen[-1]._replace(last=True)
            self._whole = len(self.seen)

    def hold_back(self) -> int:
        """Leave out the newest, of which nobody knows yet whether it is the last; its offset."""
        offset = self.seen[-1].offset
        while self.seen and self.seen[-1].offset == offset:
            self.seen.pop()
        return offset


def _stopped(log: LiveLog, table: str, after: int, reason: str) -> Exception:
    message = f"table {table!r} was {WORDS[reason]} at offset {after + 1}: its rows changed unseen"
    return gone(after, log.horizon, log.latest, reason, message)


def check_log(log: LiveLog, after: int) -> None:
    """OffsetExpired where what follows `after` is not all there."""
    if after + 1 < log.horizon:
        raise gone(after, log.horizon, log.latest, WAL_HORIZON_EXCEEDED)
