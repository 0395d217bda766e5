"""Pages of the log for one subscriber: filtered and encoded changes, limited in count, bytes and work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from headwater.errors import HeadwaterError, TransactionTooLarge
from headwater.feeds.filters.filter import Filter, NewerThanSnapshot
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.registry import encoder
from headwater.feeds.options import ATOMIC_STRICT, Options, Shape
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Op, Transaction
from headwater.sources.read import Readable

SCAN = 16_384  # changes scanned for one page, so that a selective filter returns, too
MAX_TRANSACTION = 16 << 20  # bytes up to which a transaction is delivered as a whole


class Invalidate:
    """The op of a delivered invalidation."""

    word = "invalidate"


INVALIDATE = Invalidate()


def signature_of(options: Options, allowed_tables: frozenset[str] | None = None) -> bytes:
    """Return bytes that are equal for equal options of readers that are restricted to the same tables."""
    scope = b"" if allowed_tables is None else msgspec.msgpack.encode(sorted(allowed_tables))
    return msgspec.msgpack.encode(options) + scope


def shape_of(options: Options, is_restricted: bool) -> Shape:
    """Return the wire form for readers with these options; `is_restricted`: their credentials name tables."""
    return msgspec.structs.replace(options.shape, hides_ddl=is_restricted)


class View:
    """The filter and encoder of one subscriber. Views with the same `signature` deliver the same."""

    is_whole = False  # delivers whole transactions only: its readers are never inside a transaction
    is_outdated = False  # the schema changed: the query must be analysed again before the view delivers more

    def __init__(
        self, options: Options, source: Readable, made: Encoder | None = None, *, is_restricted: bool = False
    ) -> None:
        self.options = options
        self.filter = Filter(options, source, is_restricted=is_restricted)
        self.encoder = encoder(shape_of(options, is_restricted), source) if made is None else made
        self.signature = signature_of(options, frozenset() if is_restricted else None)
        self.is_slow = False  # the filter was too slow for the hub: the readers read the log on their own
        self.is_costly = False  # the filter was too slow for the loop: a thread evaluates it from then on

    def warm(self, source: Readable) -> None:
        """Compile the filter for the current tables. Blocks: call it in a thread."""
        if self.options.looks_at_rows:
            for name, table in source.describe().items():
                if self.filter.wants(name):
                    self.filter.interest(table)

    def page(
        self,
        log: LiveLog,
        *,
        after: int,
        upto: int | None = None,
        limit: int,
        most: int,
        scan: int = SCAN,
        newer: NewerThanSnapshot | None = None,
    ) -> Page:
        """Return at most `limit` changes and about `most` bytes after `after`, from at most `scan` scanned changes.

        `upto` of the page also moves over changes that do not match. Raises OffsetExpired if `after` was evicted.
        """
        collector = _Collector(self, after, limit, most, newer)
        for part in parts_of(log, after, upto):
            if not collector.take(part, split=True) or collector.is_full or collector.upto - after >= scan:
                break
        return collector.page()

    def whole_page(
        self,
        log: LiveLog,
        *,
        after: int,
        limit: int,
        most: int,
        scan: int = SCAN,
        newer: NewerThanSnapshot | None = None,
        largest: int = MAX_TRANSACTION,
    ) -> Page:
        """Return a page like `page`, but split no transaction unless it is larger than `largest` bytes.

        A larger transaction is delivered in parts, or raises TransactionTooLarge if the options say `atomic_strict`.
        """
        collector = _Collector(self, after, limit, most, newer)
        for part in parts_of(log, after, None):
            in_first = collector.in_first
            if not collector.take(part, split=False):
                break
            if in_first and collector.size > largest:
                if self.options.txn == ATOMIC_STRICT:
                    raise _too_large(log, self, part, largest)
                count = len(collector.deliveries)
                return self.page(log, after=after, upto=part.upto, limit=count, most=largest, newer=newer)
            if not collector.in_first and (collector.is_over or (part.last and collector.is_full)):
                break
            # A page may end inside a transaction as long as the page delivers nothing of that transaction.
            if collector.upto - after >= scan and not (collector.in_first and collector.deliveries):
                break
        return collector.whole_page()


class Delivery(NamedTuple):
    """One encoded change."""

    offset: int
    op: Op | Invalidate
    data: bytes


class Page(NamedTuple):
    """The changes in (after, upto] of the log that pass the filter of a subscriber."""

    deliveries: list[Delivery]
    upto: int
    ts: int  # the timestamp of the transaction that ends at `upto`; 0 when none ends there
    size: int = 0


class _Collector:
    """Builds a page from parts in order, and tracks the whole transactions that fit into the page."""

    def __init__(self, view: View, after: int, limit: int, most: int, newer: NewerThanSnapshot | None) -> None:
        self._view, self._after, self._limit, self._most, self._newer = view, after, limit, most, newer
        self.deliveries: list[Delivery] = []
        self.size = 0
        self.upto, self.ts = after, 0
        self._fitting: tuple[int, int, int, int] | None = None  # count, upto, ts, size

    @property
    def is_full(self) -> bool:
        return len(self.deliveries) >= self._limit or self.size >= self._most

    @property
    def is_over(self) -> bool:
        return len(self.deliveries) > self._limit or self.size > self._most

    @property
    def in_first(self) -> bool:
        """Return whether the first transaction has not ended yet."""
        return self._fitting is None

    def take(self, part: Transaction, *, split: bool) -> bool:
        """Add `part`; with `split` stop inside the part when the page is full.

        Return False where the filter raises an error for `part`: the changes before it are delivered first, and the
        next page raises.
        """
        encode = self._view.encoder.change
        try:
            ops = self._view.filter.decide(part.changes, first=part.first, newer=self._newer)
        except HeadwaterError:
            if self.in_first and not (split and self.upto > self._after):
                raise
            return False
        for place, op in enumerate(ops):
            if op is None:
                continue
            offset = part.first + place
            data = encode(part, offset, part.changes[place], op)
            self.deliveries.append(Delivery(offset, op, data))
            self.size += len(data)
            if split and self.is_full:
                self.upto, self.ts = offset, part.ts if part.last and offset == part.upto else 0
                return True
        self.upto, self.ts = part.upto, part.ts if part.last else 0
        if part.last and (self._fitting is None or not self.is_over):
            self._fitting = len(self.deliveries), self.upto, self.ts, self.size
        return True

    def page(self) -> Page:
        return Page(self.deliveries, self.upto, self.ts, self.size)

    def whole_page(self) -> Page:
        """Return the page with as many whole transactions as fit, at least the first."""
        if self._fitting is None:
            return self.page()
        count, upto, ts, size = self._fitting
        return Page(self.deliveries[:count], upto, ts, size)


def _too_large(log: LiveLog, view: View, part: Transaction, largest: int) -> TransactionTooLarge:
    end = part
    while not end.last:
        end = log.read(after=end.upto)[0]
    first = part.first - part.start
    return TransactionTooLarge(
        f"the transaction at offset {first} is larger than {largest} bytes",
        first_offset=first,
        last_offset=end.upto,
        pull_url=pull_url(view.options, after=first - 1, upto=end.upto),
    )


def pull_url(options: Options, *, after: int, upto: int) -> str:
    """Return the path that reads the changes in (after, upto] as a subscriber with these options receives them."""
    table = f"/{_quoted(options.tables[0])}" if len(options.tables) == 1 else ""
    images = [name for name in ("before", "after") if getattr(options, name)]
    params: dict[str, Any] = {"from_offset": after, "upto": upto, "include": ",".join(images), "format": options.format}
    for field in ("ops", "columns"):
        if getattr(options, field):
            params[field] = ",".join(getattr(options, field))
    for field in ("pk", "pk_range", "spans"):
        if getattr(options, field) is not None:
            params[field] = msgspec.json.encode(getattr(options, field)).decode()
    if options.where is not None:
        params["where"] = options.where
    if options.shard is not None:
        params["shard"] = f"{options.shard.index}/{options.shard.of}"
    query = "&".join(f"{name}={_quoted(str(value))}" for name, value in params.items())
    return f"/api/v1/changes/{options.db}{table}?{query}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def parts_of(log: LiveLog, after: int, upto: int | None) -> Iterator[Transaction]:
    """Yield the parts in (after, upto]; without `upto`, up to the head at the time of the call."""
    return chain.from_iterable(blocks_of(log, after, upto))


def blocks_of(log: LiveLog, after: int, upto: int | None) -> Iterator[list[Transaction]]:
    """Yield the parts in (after, upto], one list per stored block: a caller that stops there reads no block twice."""
    end = log.latest if upto is None else min(upto, log.latest)
    at = after
    while at < end:
        parts = log.read(after=at, upto=end, limit=None)
        if not parts:
            return
        yield parts
        at = parts[-1].upto
