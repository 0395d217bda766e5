"""Pages of one range, requested one after the other: rows as of a version, and changes since."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headwater.database import Database
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.ranges.pull.jobs import SCHEMA_CHANGED, WAL_HORIZON_EXCEEDED, changes_gone, stop_message
from headwater.ranges.pull.snapshot import read_as_of
from headwater.ranges.pull.table_changes import stop_of
from headwater.sources.read import Reader

SCAN = 65_536  # changes scanned for one page; a page of a quiet range may be empty


class PageLimits(NamedTuple):
    """The approximate size of a page, which has at least one row, or both sides of one change."""

    rows: int
    bytes: int


class Rows(NamedTuple):
    """Rows in key order. `end` means that there are no more."""

    table: Table
    rows: list[tuple[bytes, Row]]
    end: bool


class KeyChange(NamedTuple):
    """The effect of a change on one key of a range. An image outside the range is omitted."""

    key: bytes
    op: Op
    table: Table
    before: Row | None
    after: Row | None
    offset: int
    part: Transaction
    last: bool = False  # the last change of its transaction in the range


class Log(NamedTuple):
    """The changes of a range up to `upto`."""

    seen: list[KeyChange]
    upto: int


def rows_page(database: Database, table: Table, span: Span, version: int, limits: PageLimits) -> Rows:
    """Return the first rows of `span` as of `version`. Raises OffsetExpired and Conflict as `read_as_of` does."""
    source = database.source
    place, key_of = source.order(table, table.key), table.key_of
    found: list[tuple[bytes, Row]] = []
    weight = 0
    pieces = read_as_of(source, database.log, table, version, span=span, chunk_rows=limits.rows + 1)
    try:
        for _, rows in pieces:
            for row in rows:
                key = place(key_of(row))
                # Rows that share a key (it contains NULLs) stay on one page: the next page begins after their key.
                if (len(found) >= limits.rows or weight >= limits.bytes) and key != found[-1][0]:
                    return Rows(table, found, False)
                found.append((key, row))
                weight += row_weight(row)
        return Rows(table, found, True)
    finally:
        pieces.close()  # type: ignore[attr-defined]  # a generator


def log_page(database: Database, table: Table, span: Span, after: int, upto: int, limits: PageLimits) -> Log:
    """Return the first changes of `span` in (after, upto].

    The page ends before a change after which the rows are not known; a page that begins there raises OffsetExpired. A
    page ends inside a transaction only if more of it follows, so that the last change of each is always marked.
    """
    page = _Page(table, span, limits, database.source)
    covered, is_whole = after, True
    for part in database.log.scan(after=after, upto=upto):
        if part.start == 0:
            page.begin_transaction()
        if covered - after >= SCAN and not page.in_midst:
            return Log(page.seen, covered)
        for offset, change in enumerate(part.changes, part.first):
            if reason := page.stops(change):
                if offset == after + 1:
                    message, log = stop_message(table.name, offset, reason), database.log
                    raise changes_gone(after, log.horizon, log.latest, reason, message)
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
    """Return about how many bytes a row takes."""
    return sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row) + 16 * len(row)


def effects_on_keys(change: Change, place: Callable[[Key], bytes]) -> list[tuple[bytes, Op, Row | None, Row | None]]:
    """Return key, op, before and after image for each key that a row change affects: two if an update moved the row."""
    key_of = change.table.key_of
    old = None if change.before is None else place(key_of(change.before))
    new = None if change.after is None else place(key_of(change.after))
    if old is not None and new is not None and old != new:
        return [(old, Op.DELETE, change.before, None), (new, Op.INSERT, None, change.after)]
    key = old if new is None else new
    return [] if key is None else [(key, change.op, change.before, change.after)]


class _Page:
    """Collects changes in order until it is full."""

    def __init__(self, table: Table, span: Span, limits: PageLimits, source: Reader) -> None:
        self._table, self._span, self._limits = table, span, limits
        self._place = PerTable(lambda shape: source.order(shape, shape.key))
        self._weight = 0
        self._whole = 0  # number of changes of complete transactions
        self.seen: list[KeyChange] = []

    @property
    def in_midst(self) -> bool:
        """Return whether the last transaction in the page is not complete."""
        return self._whole < len(self.seen)

    def stops(self, change: Change) -> str:
        """Return the reason why a reader of the table must stop at this change; "" if it may continue."""
        if change.table.name != self._table.name:
            return ""
        if change.op > Op.DELETE:
            return stop_of(change)
        return SCHEMA_CHANGED if change.table.key != self._table.key else ""

    def take(self, part: Transaction, offset: int, change: Change) -> bool:
        """Add the effects of `change` on the span; return False if it has any and the page is full."""
        if change.table.name != self._table.name or change.op > Op.DELETE:
            return True
        effects = effects_on_keys(change, self._place(change.table))
        found = [
            KeyChange(key, op, change.table, before, after, offset, part)
            for key, op, before, after in effects
            if self._span.contains(key)
        ]
        if found and (len(self.seen) >= self._limits.rows or self._weight >= self._limits.bytes):
            return False
        self.seen += found
        for row in (change.before, change.after) if found else ():
            self._weight += 0 if row is None else row_weight(row)
        return True

    def begin_transaction(self) -> None:
        """Mark the last change of the previous transaction."""
        if self.in_midst:
            self.seen[-1] = self.seen[-1]._replace(last=True)
            self._whole = len(self.seen)

    def hold_back(self) -> int:
        """Remove the newest change, which may or may not be the last of its transaction, and return its offset."""
        offset = self.seen[-1].offset
        while self.seen and self.seen[-1].offset == offset:
            self.seen.pop()
        return offset


def check_log(log: LiveLog, after: int) -> None:
    """Raise OffsetExpired if changes after `after` were trimmed."""
    if after + 1 < log.horizon:
        raise changes_gone(after, log.horizon, log.latest, WAL_HORIZON_EXCEEDED)
