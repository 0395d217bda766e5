"""Change feeds of key spans: changes after a time, then live changes, and checkpoints.

base ──> catch-up from the log, under a budget ──> steady ──> durable changes as they are written
                      checkpoints on the way, by the clock, and a last one before the end

Only durable changes are sent: so the time of a change never differs after a crash.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headwater.database import Database
from headwater.errors import HeadwaterError, InvalidRequest, NotFound, OffsetExpired, Unavailable
from headwater.log.live.live_log import LiveLog
from headwater.model.change import image_bytes
from headwater.model.clock import Timestamp, ts_ms, ts_text, wall_ms
from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits
from headwater.ranges.changefeed.watched_spans import FeedStopped, SpanChange, Spans, WatchedSpan, weight
from headwater.ranges.pull.durable_wait import DurableWaits
from headwater.ranges.pull.jobs import (
    LOG_GENERATION_CHANGED,
    SCHEMA_CHANGED,
    WAL_HORIZON_EXCEEDED,
    changes_gone,
    stop_message,
)

SKEW_MS = 60_000  # how far the clock of a client may be ahead of the server's
SCAN = 16_384  # changes scanned for one page
PAGE, PAGE_BYTES = 1_000, 256 << 10  # approximate size of a page
INLINE = 64  # changes that may be read, and checkpoints that may be made, in the event loop
INLINE_BYTES = 64 << 10  # approximate size of those changes
CREATED = "created"  # the reason of a first generation
SLOW, STOPPING = "SLOW_CONSUMER", "SERVER_STOPPING"


class FeedStart(NamedTuple):
    """The start of a feed: after a time or an offset, of a generation if it is known; now if neither is given."""

    ts: Timestamp | None = None
    offset: int | None = None
    generation: str = ""


class CaughtUp(NamedTuple):
    """The event that the catch-up is complete."""

    offset: int
    generation: str


class Checkpoint(NamedTuple):
    """The event that all changes up to `ts` have been sent, of one span, or of all spans if `watched` is None."""

    watched: WatchedSpan | None
    ts: Timestamp
    offset: int
    generation: str


Event = SpanChange | CaughtUp | Checkpoint


def threshold(log: LiveLog) -> Timestamp:
    """Return the oldest time after which the log is known to have every change."""
    horizon = log.horizon
    is_whole = horizon == log.generation_first
    if is_whole and log.generation_reason == CREATED:
        return 0
    kept = log.read(after=log.first_whole(horizon) - 1, limit=1)
    oldest = kept[0].ts - 1 if kept else log.clock_ceiling
    # A time just before the first change of a later generation may belong to the generation that ended there.
    return oldest + 1 if is_whole else oldest


def begin(log: LiveLog, base: FeedStart, *, now_ms: Callable[[], int] = wall_ms) -> int:
    """Return the offset after which a feed begins.

    Raise OffsetExpired, with the threshold, if changes after `base` may be trimmed; InvalidRequest if `base` is in the
    future.
    """
    if base.generation and base.generation != log.generation:
        words = f"the log is of generation {log.generation}, not {base.generation[:40]!r}"
        raise lost(log, log.latest, LOG_GENERATION_CHANGED, words)
    if base.offset is not None:
        if base.offset > log.latest:
            raise InvalidRequest(
                f"base_offset {base.offset} is beyond the latest offset {log.latest}",
                hint="Send an offset that this server reported, or omit it to begin now.",
            )
        if base.offset + 1 < log.generation_first:
            words = (
                f"offset {base.offset} is of an earlier generation: {log.generation} begins at {log.generation_first}"
            )
            raise lost(log, base.offset, LOG_GENERATION_CHANGED, words)
        if base.offset + 1 < log.horizon:
            raise lost(log, base.offset, WAL_HORIZON_EXCEEDED)
        return base.offset
    if base.ts is None:
        return log.latest
    if ts_ms(base.ts) > now_ms() + SKEW_MS and base.ts > log.clock_ceiling:
        raise InvalidRequest(
            f"the base {ts_text(base.ts)} is in the future",
            hint="Send milliseconds since 1970, or omit the base to begin now.",
        )
    whole = base.generation and log.horizon == log.generation_first
    if not whole and base.ts < threshold(log):
        raise lost(log, log.horizon - 2, WAL_HORIZON_EXCEEDED)
    return min(log.offset_at(base.ts), log.durable)


def lost(log: LiveLog, after: int, reason: str, message: str = "") -> OffsetExpired:
    """Return the error for changes after `after` that are not available."""
    error = changes_gone(after, log.horizon, log.latest, reason, message)
    error.extra["threshold"] = ts_text(threshold(log))
    return error


def resolved(log: LiveLog, cursor: int, last: Timestamp) -> Timestamp:
    """Return a time such that all changes after `cursor` are later.

    `last` is the time of a transaction that ends at `cursor`, or 0.
    """
    closed, at = log.closed  # read before the following changes: changes staged after it have a later time
    following = log.read(after=cursor, limit=1)
    if following:
        return following[0].ts - 1
    return max(closed if at <= cursor else 0, last)


@dataclass(frozen=True)
class FeedTiming:
    """The interval of checkpoints, and how long a reader may be behind, in seconds."""

    checkpoints: float
    patience: float
    only_resolved: bool = False


@dataclass(frozen=True)
class FeedContext:
    """The limits and functions that all feeds of a server share."""

    waiting: DurableWaits
    catchups: CatchUpLimits
    run: Callable[..., Awaitable[Any]]  # runs a blocking call in a thread
    is_stopping: Callable[[], bool]


class ChangeFeed:
    """One open feed; `make` turns an event into a message. Use it in one task."""

    def __init__(
        self,
        database: Database,
        is_there: Callable[[], bool],
        spans: Spans,
        cursor: int,
        floor: Timestamp,
        pace: FeedTiming,
        rooms: FeedContext,
        make: Callable[[Event], Any],
    ) -> None:
        self._log, self._is_there, self._spans = database.log, is_there, spans
        self.cursor, self._floor, self._pace, self._rooms, self._make = cursor, floor, pace, rooms, make
        self.generation = database.log.generation
        self._last = 0  # the time of the transaction that ends at the cursor
        self.promised: Timestamp = 0  # the time of the newest checkpoint; 0 before the first
        self._due_at = time.monotonic() + pace.checkpoints
        self._behind_since: float | None = None
        # Called before each checkpoint; raises to end the feed.
        self.before_checkpoint: Callable[[], Awaitable[None]] | None = None
        self.least: Callable[[], float] = lambda: 0.0  # shortest interval of checkpoints, a limit of the caller

    async def pages(self, who: Hashable) -> AsyncIterator[list[Any]]:
        """Yield lists of messages, as changes become durable, until an error ends the feed."""
        target = self._log.durable
        if self.cursor < target:
            async with self._rooms.catchups.slot(who, target - self.cursor):
                while self.cursor < target:
                    yield await self._page(target)
                    if due := await self._due():  # after the page: if this fails, the page was sent
                        yield due
        yield [self._make(CaughtUp(self.cursor, self.generation)), *self.checkpoints()]
        while True:
            self._check()
            upto = self._log.durable
            if self.cursor < upto:
                yield await self._page(upto)
                self._check_pace(upto)
            else:
                self._behind_since = None
            if due := await self._due():
                yield due
            if self.cursor >= self._log.durable:
                left = max(self._due_at - time.monotonic(), 0.001)
                await self._rooms.waiting.beyond(self._log, self.cursor, left, self._goes_on)

    def checkpoints(self) -> list[Any]:
        """Return the checkpoints at the cursor; none if no time is known."""
        try:
            found = resolved(self._log, self.cursor, self._last)
        except HeadwaterError:  # the log was closed concurrently: the last checkpoint still holds
            found = 0
        self.promised = max(self.promised, found)
        self._due_at = time.monotonic() + max(self._pace.checkpoints, self.least())
        if not self.promised:
            return []
        spans: list[WatchedSpan | None] = [] if self._pace.only_resolved else [*self._spans.watched]
        return [self._make(Checkpoint(each, self.promised, self.cursor, self.generation)) for each in [*spans, None]]

    async def _due(self) -> list[Any]:
        if time.monotonic() < self._due_at:
            return []
        if self.before_checkpoint is not None:
            await self.before_checkpoint()
        few = self._pace.only_resolved or len(self._spans.watched) <= INLINE
        if few and self._log.recent(self.cursor, self.cursor + 1) is not None:
            return self.checkpoints()
        found: list[Any] = await self._rooms.run(self.checkpoints)
        return found

    def _goes_on(self) -> bool:
        return self._log.generation == self.generation and self._is_there() and not self._rooms.is_stopping()

    def _check(self) -> None:
        """Raise if the server is stopping, the database was dropped or the log began another generation."""
        if self._rooms.is_stopping():
            raise Unavailable("the server is stopping", hint="Reconnect in a moment.", reason=STOPPING)
        if not self._is_there():
            raise NotFound("the database was dropped")
        if self._log.generation != self.generation:
            words = f"the log began generation {self._log.generation}, but this feed is of {self.generation}"
            raise lost(self._log, self.cursor, LOG_GENERATION_CHANGED, words)

    def _check_pace(self, upto: int) -> None:
        """Raise Unavailable if the reader is behind for too long; a page that reaches `upto` counts as keeping up."""
        now = time.monotonic()
        if self.cursor >= upto:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > self._pace.patience:
            raise slow()

    async def _page(self, upto: int) -> list[Any]:
        self._check()
        if self.cursor + 1 < self._log.horizon:
            raise lost(self._log, self.cursor, WAL_HORIZON_EXCEEDED)
        if upto - self.cursor <= INLINE and self._is_light(upto):
            page = self._read(upto)
        else:
            page = await self._rooms.run(self._read, upto)
        if isinstance(page, HeadwaterError):
            raise page
        return list(page)

    def _is_light(self, upto: int) -> bool:
        """Return whether the changes up to `upto` are in memory, and small enough to be encoded in the loop."""
        parts = self._log.recent(self.cursor, upto)
        return parts is not None and sum([image_bytes(part.changes) for part in parts]) <= INLINE_BYTES

    def _read(self, upto: int) -> list[Any] | HeadwaterError:
        """Return the messages before the first error; return or raise the error if there are none.

        The cursor never passes an undelivered change, because a feed that fails sends a last checkpoint at it.
        """
        found: list[Any] = []
        try:
            return self._gather(found, upto)
        except HeadwaterError:
            if found:
                return found  # the next page fails, if it still does
            raise

    def _gather(self, found: list[Any], upto: int) -> list[Any] | HeadwaterError:
        size, began = 0, self.cursor
        for part in self._log.scan(after=self.cursor, upto=upto):
            skip = part.ts <= self._floor
            for offset, change in enumerate(part.changes, part.first):
                try:
                    seen = () if skip else tuple(self._spans.changes_of(part, offset, change))
                except FeedStopped as stop:
                    if found or self.cursor > began:
                        return found
                    words = stop_message(stop.table, offset, SCHEMA_CHANGED)
                    return changes_gone(self.cursor, self._log.horizon, self._log.latest, SCHEMA_CHANGED, words)
                found += [self._make(each) for each in seen]  # all messages of a change, or none
                size += sum(map(weight, seen))
                self.cursor, self._last = offset, 0
                if len(found) >= PAGE or size >= PAGE_BYTES:
                    break
            if part.last and self.cursor == part.upto:
                self._last = part.ts
            if len(found) >= PAGE or size >= PAGE_BYTES or self.cursor - began >= SCAN:
                break
        return found


def slow() -> Unavailable:
    """Return the error for a reader that does not keep up."""
    return Unavailable(
        "the consumer is too slow: it was behind for too long",
        hint="Reconnect from the last checkpoint, watch fewer spans, or read faster.",
        reason=SLOW,
    )
