"""Reading the log as one subscriber sees it: pages of encoded changes, bounded in count, bytes and work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from headwater.errors import HeadwaterError, TransactionTooLarge
from headwater.feeds.filters.filter import Cut, Filter
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.registry import encoder
from headwater.feeds.options import ATOMIC_STRICT, Options
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Op, Transaction
from headwater.sources.read import Readable

SCAN = 16_384  # changes looked at for one page; a quiet filter comes back for more
MAX_TRANSACTION = 16 << 20  # bytes of one transaction that are kept together


class Invalidate:
    """What an invalidation is delivered as, where a change has its op."""

    word = "invalidate"


INVALIDATE = Invalidate()


def signature_of(options: Options, held: frozenset[str] | None = None) -> bytes:
    """Return bytes that are equal for the same options of readers held to the same tables."""
    scope = b"" if held is None else msgspec.msgpack.encode(sorted(held))
    return msgspec.msgpack.encode(options) + scope


class View:
    """What one subscriber sees: a filter and an encoder. Views with one `signature` see the same."""

    is_whole = False  # only whole transactions tell anything: its readers never stand in the midst of one
    is_outdated = False  # the schema moved, and what is seen from here on must be understood anew

    def __init__(self, options: Options, source: Readable, made: Encoder | None = None) -> None:
        self.options = options
        self.filter = Filter(options, source)
        self.encoder = encoder(options.shape, source) if made is None else made
        self.signature = signature_of(options)
        self.is_slow = False  # its filter took too long in the hub: its readers read the log by themselves
        self.is_costly = False  # its filter took too long in the loop: a thread decides from then on

    def warm(self, source: Readable) -> None:
        """Compile the filter for the tables as they are: it takes a while, and the loop must not wait for it."""
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
        cut: Cut | None = None,
    ) -> Page:
        """See `read_page`."""
        collector = _Collector(self, after, limit, most, cut)
        for part in parts_of(log, after, upto):
            if not collector.take(part, split=True) or collector.is_full or collector.upto - after >= scan:
                break
        return collector.page()


class Delivery(NamedTuple):
    """One change as it goes out."""

    offset: int
    op: Op | Invalidate
    data: bytes


class Page(NamedTuple):
    """A stretch of the log as a subscriber sees it: everything in (after, upto] that passes its filter."""

    deliveries: list[Delivery]
    upto: int
    ts: int  # of the transaction that ends at `upto`; 0 when one does not end there
    size: int = 0


class _Collector:
    """Takes parts in order, and remembers how far the whole transactions reach that fit into the page."""

    def __init__(self, view: View, after: int, limit: int, most: int, cut: Cut | None) -> None:
        self._view, self._after, self._limit, self._most, self._cut = view, after, limit, most, cut
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
        """Whether the first transaction has not ended yet."""
        return self._fitting is None

    def take(self, part: Transaction, *, split: bool) -> bool:
        """Add `part`; with `split` stop in its midst when the page is full.

        False where the filter does not fit it: what comes before goes out first, the next page raises.
        """
        encode = self._view.encoder.change
        try:
            ops = self._view.filter.decide(part.changes, first=part.first, cut=self._cut)
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
        """As many whole transactions as fit, at least the first."""
        if self._fitting is None:
            return self.page()
        count, upto, ts, size = self._fitting
        return Page(self.deliveries[:count], upto, ts, size)


def read_page(
    log: LiveLog,
    view: View,
    *,
    after: int,
    upto: int | None = None,
    limit: int,
    most: int,
    scan: int = SCAN,
    cut: Cut | None = None,
) -> Page:
    """At most `limit` changes and about `most` bytes after `after`, looking at no more than `scan` changes.

    `upto` of the answer moves also over what does not match. Raises OffsetExpired past the horizon.
    """
    return view.page(log, after=after, upto=upto, limit=limit, most=most, scan=scan, cut=cut)


def read_whole(
    log: LiveLog,
    view: View,
    *,
    after: int,
    limit: int,
    most: int,
    scan: int = SCAN,
    cut: Cut | None = None,
    largest: int = MAX_TRANSACTION,
) -> Page:
    """Like `read_page`, but a transaction is never split between pages, unless it is larger than `largest`.

    Such a one comes in parts, or raises TransactionTooLarge for who asked for `atomic_strict`.
    """
    collector = _Collector(view, after, limit, most, cut)
    for part in parts_of(log, after, None):
        in_first = collector.in_first
        if not collector.take(part, split=False):
            break
        if in_first and collector.size > largest:
            if view.options.txn == ATOMIC_STRICT:
                raise _too_large(log, view, part, largest)
            count = len(collector.deliveries)
            return read_page(log, view, after=after, upto=part.upto, limit=count, most=largest, cut=cut)
        if not collector.in_first and (collector.is_over or (part.last and collector.is_full)):
            break
        # In the midst of a transaction nothing is split as long as nothing of it is delivered.
        if collector.upto - after >= scan and not (collector.in_first and collector.deliveries):
            break
    return collector.whole_page()


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
    """Where the changes in (after, upto] are read as a subscriber with these options sees them."""
    table = f"/{_quoted(options.tables[0])}" if len(options.tables) == 1 else ""
    images = [name for name in ("before", "after") if getattr(options, name)]
    asked: dict[str, Any] = {"from_offset": after, "upto": upto, "include": ",".join(images), "format": options.format}
    for field in ("ops", "columns"):
        if getattr(options, field):
            asked[field] = ",".join(getattr(options, field))
    for field in ("pk", "pk_range", "spans"):
        if getattr(options, field) is not None:
            asked[field] = msgspec.json.encode(getattr(options, field)).decode()
    if options.where is not None:
        asked["where"] = options.where
    if options.shard is not None:
        asked["shard"] = f"{options.shard.index}/{options.shard.of}"
    query = "&".join(f"{name}={_quoted(str(value))}" for name, value in asked.items())
    return f"/api/v1/changes/{options.db}{table}?{query}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def parts_of(log: LiveLog, after: int, upto: int | None) -> Iterator[Transaction]:
    """What lies in (after, upto], up to now where `upto` is not given."""
    return chain.from_iterable(blocks_of(log, after, upto))


def blocks_of(log: LiveLog, after: int, upto: int | None) -> Iterator[list[Transaction]]:
    """The same as it is stored: who stops at the end of a block does not read it twice."""
    end = log.latest if upto is None else min(upto, log.latest)
    at = after
    while at < end:
        parts = log.read(after=at, upto=end, limit=None)
        if not parts:
            return
        yield parts
        at = parts[-1].upto
