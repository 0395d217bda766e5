"""The effect of each change on the watched key spans of a feed. Does not read the log itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headwater.errors import NotSupported
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span, encode_key, joined
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.model.table_ddl import table_ddl
from headwater.ranges.pull.jobs import SCHEMA_CHANGED, TABLE_DROPPED
from headwater.ranges.pull.pages import effects_on_keys, row_weight
from headwater.ranges.pull.table_changes import stop_of
from headwater.sources.read import Reader

EVERY = (Span(),)


class WatchedSpan(NamedTuple):
    """A span of keys of a table that a feed follows."""

    table: str
    span: Span


class KeyChanged(NamedTuple):
    """A key was set, or deleted if `after` is None. `before` and `after` are rows under this key: an update that moves
    a row to another key gives two events."""

    key: bytes
    table: Table
    before: Row | None
    after: Row | None
    offset: int
    part: Transaction


class SpanDeleted(NamedTuple):
    """Every key of a span was deleted."""

    watched: WatchedSpan
    offset: int
    part: Transaction


class TableChanged(NamedTuple):
    """A table has a new definition."""

    table: Table
    ddl: str
    offset: int
    part: Transaction


SpanChange = KeyChanged | SpanDeleted | TableChanged


class FeedStopped(Exception):
    """Rows of `table` changed without row changes in the log: a feed of it cannot continue past this change."""

    def __init__(self, table: str) -> None:
        super().__init__(table)
        self.table = table


class SpanSet:
    """Spans of one table, joined if they overlap or touch, so that a key is found by bisection."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._joined = joined(spans)
        self._starts = [span.start for span in self._joined]

    def __len__(self) -> int:
        return len(self._joined)

    def contains(self, key: bytes) -> bool:
        """Return whether one of the spans contains `key`."""
        place = bisect_right(self._starts, key) - 1
        return place >= 0 and self._joined[place].contains(key)


class Spans:
    """The spans of one feed; none means the whole database. It remembers the key columns of each table."""

    def __init__(self, source: Reader, watched: Sequence[WatchedSpan], *, hides_ddl: bool = False) -> None:
        self._hides_ddl = hides_ddl  # the reader is restricted to tables: no statement is shown as it was run
        self.watched = tuple(dict.fromkeys(watched))
        by_table: dict[str, list[Span]] = {}
        for each in self.watched:
            by_table.setdefault(each.table, []).append(each.span)
        self._by_table = {table: tuple(spans) for table, spans in by_table.items()}
        self._covers = {table: SpanSet(spans) for table, spans in by_table.items()}
        self._place: PerTable[Callable[[Key], bytes]] = PerTable(lambda table: self._order(source, table))
        self._keys: dict[str, tuple[str, ...]] = {}

    def of(self, table: str) -> tuple[Span, ...]:
        """Return the watched spans of `table`."""
        return self._by_table.get(table, ()) if self.watched else EVERY

    def _order(self, source: Reader, table: Table) -> Callable[[Key], bytes]:
        try:
            return source.order(table, table.key)
        except NotSupported:  # only the database knows the order: without bounds, any unique encoding will do
            if any(span != Span() for span in self.of(table.name)):
                raise
            return encode_key

    def changes_of(self, part: Transaction, offset: int, change: Change) -> Iterator[SpanChange]:
        """Yield the effects of `change` on the watched keys; raise FeedStopped if they are not known."""
        spans = self.of(change.table.name)
        if not spans:
            return
        if change.op > Op.DELETE:
            yield from self._whole(part, offset, change, spans)
            return
        self._check_key(change.table)
        table, cover = change.table, self._covers.get(change.table.name, EVERYTHING)
        for key, _, before, after in effects_on_keys(change, self._place(table)):
            if cover.contains(key):
                yield KeyChanged(key, table, before, after, offset, part)

    def _whole(self, part: Transaction, offset: int, change: Change, spans: Iterable[Span]) -> Iterator[SpanChange]:
        """Yield the effects of a change of a table rather than of a row."""
        table = change.table
        gone = stop_of(change)
        if gone == SCHEMA_CHANGED:
            raise FeedStopped(table.name)
        if gone:  # emptied, dropped or renamed: no rows are left under this name
            for span in spans:
                yield SpanDeleted(WatchedSpan(table.name, span), offset, part)
        if change.op is Op.SCHEMA_CHANGE:
            if gone == TABLE_DROPPED:
                self._keys.pop(table.name, None)
            else:
                self._check_key(table)
            yield TableChanged(table, table_ddl(change) if self._hides_ddl else change.ddl or "", offset, part)

    def _check_key(self, table: Table) -> None:
        """Raise FeedStopped if the key columns of a table changed: keys sent before are not comparable."""
        if self._keys.setdefault(table.name, table.key) != table.key:
            raise FeedStopped(table.name)


def weight(change: SpanChange) -> int:
    """Return about how many bytes the rows of a change take in a message."""
    rows = (change.before, change.after) if isinstance(change, KeyChanged) else ()
    return 64 + sum(row_weight(row) for row in rows if row is not None)


EVERYTHING = SpanSet(EVERY)
