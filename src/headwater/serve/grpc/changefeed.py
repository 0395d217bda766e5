"""headwater.v1.ChangeFeedService: changes of key spans from a time on, modelled on CockroachDB's rangefeeds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any

from headwater.database import Database
from headwater.errors import HeadwaterError, NotFound
from headwater.model.clock import ts_text
from headwater.model.database_name import real_name
from headwater.model.principal import OWNER, VIEWER, Principal
from headwater.model.work.usage import Usage
from headwater.ranges.changefeed.catch_up_limits import CatchUpLimits
from headwater.ranges.changefeed.changefeed import SLOW, ChangeFeed, FeedContext, FeedTiming, begin, slow
from headwater.ranges.changefeed.watched_spans import Spans
from headwater.ranges.pull.durable_wait import DurableWaits
from headwater.serve.api import Api
from headwater.serve.grpc.calls import Answer, Caller, Pour, Service
from headwater.serve.grpc.changefeed_messages import CheckpointBytes, EventEncoder, encoded, failure, images
from headwater.serve.grpc.changefeed_request import (
    RangeEpoch,
    base_of,
    enter,
    interval_of,
    least_interval,
    spans_of,
    tables_of,
)
from headwater.serve.limits.limits import identity
from headwater.serve.metrics.changefeed_metrics import ChangefeedCounters
from headwater.serve.thread_bridge import Bridge

CATCH_UP_SECONDS = 0.25  # longest initial wait of a feed for earlier commits


class ChangeFeedService(Service):
    """The change feed service; each call is a feed of its own."""

    service = "headwater.v1.ChangeFeedService"

    def __init__(self, api: Api, bridge: Bridge, numbers: ChangefeedCounters) -> None:
        self._api, self._run = api, bridge.call
        self._image = images()
        self._stopping = False
        self._waiting = DurableWaits(sys.maxsize)  # no limit of its own: streams are limited
        self._rooms: FeedContext | None = None
        self._numbers = numbers
        self._spans: Usage[Hashable] = Usage()  # spans of the open feeds by caller, without owners

    def methods(self) -> Mapping[str, Answer | Pour]:
        return {"ChangeFeed": self._pour}

    def drain(self) -> None:
        """Let every feed send its last checkpoint and end: the server stops."""
        self._stopping = True
        self._waiting.drain()

    async def _pour(self, caller: Caller, request: Any) -> AsyncIterator[bytes]:
        caller.who.need(VIEWER, "a change feed")
        feed: ChangeFeed | None = None
        feeds = self._api.feeding()
        feeds.readers.check_room()
        feeds.readers.other_streams += 1
        self._numbers.open += 1
        try:
            feed, spans = await self._open(caller.who, request)
            # Before anything can be cut off: a call cannot fail while these are sent with a first message.
            await caller.context.send_initial_metadata(())
            account = identity(caller.who, caller.address)
            with nullcontext() if caller.who.role == OWNER else self._slowed(feed, account, spans):
                async with aclosing(feed.pages(account)) as pages:  # type: ignore[type-var]  # a generator
                    async for page in pages:
                        if page:
                            with self._watched(caller, feed):
                                yield self._sent(page)
        except HeadwaterError as error:
            if feed is None and "threshold" not in error.extra and "ranges" not in error.extra:
                raise  # the status contains the whole error
            last = [] if feed is None else feed.checkpoints()
            self._numbers.slow += error.extra.get("reason") == SLOW
            with self._watched(caller, feed):
                yield self._sent([*last, encoded(failure(error))])
            raise
        finally:
            feeds.readers.other_streams -= 1
            self._numbers.open -= 1

    @contextmanager
    def _slowed(self, feed: ChangeFeed, account: Hashable, spans: int) -> Iterator[None]:
        """Make the checkpoints of the feed rarer, the more spans all feeds of its caller have."""
        feed.least = lambda: least_interval(self._spans[account])
        with self._spans.held(account, spans):
            yield

    def _sent(self, events: list[bytes]) -> bytes:
        self._numbers.events += len(events)
        self._numbers.checkpoints += sum(isinstance(event, CheckpointBytes) for event in events)
        made = b"".join(events)  # a ChangeFeedResponse
        events.clear()  # otherwise the feed would keep this page until the next one
        return made

    @contextmanager
    def _watched(self, caller: Caller, feed: ChangeFeed | None) -> Iterator[None]:
        """End the call unless the block ends in time."""
        seconds = self._api.feeding().config.slow_consumer_seconds
        timer = asyncio.get_running_loop().call_later(seconds, self._cut, caller, feed)
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self, caller: Caller, feed: ChangeFeed | None) -> None:
        """End the call of a slow reader; the status has the last checkpoint, because the reader would read no event."""
        self._numbers.slow += 1
        error = slow()
        if feed is not None and feed.promised:
            error.extra["checkpoint"] = ts_text(feed.promised)
        caller.cut(error)

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _open(self, who: Principal, request: Any) -> tuple[ChangeFeed, int]:
        """Return a feed, and the number of spans in each of its checkpoints."""
        name = real_name(request.db or None)
        who.check(name, tables_of(request))
        feeds, base = self._api.feeding(), base_of(request)
        interval = interval_of(request, feeds.config.checkpoint_seconds)
        database = feeds.databases.database(name)
        await self._run(_settle, database)
        ranges = self._api.pulling()
        watched, range_epochs = await self._run(spans_of, who, name, database, ranges, request)
        count = max(
            len(range_epochs if request.only_resolved else watched), 1
        )  # ranges are checked before each checkpoint
        pace = FeedTiming(
            max(interval, least_interval(count)), feeds.config.slow_consumer_seconds, request.only_resolved
        )
        cursor = await self._run(begin, database.log, base)

        def is_there() -> bool:
            try:
                return feeds.databases.database(name).log is database.log
            except NotFound:
                return False

        words = EventEncoder(self._image, request.with_diff)
        spans = Spans(database.source, watched, hides_ddl=who.tables(name) is not None)
        feed = ChangeFeed(database, is_there, spans, cursor, base.ts or 0, pace, self._shared(), words)
        if range_epochs:
            feed.before_checkpoint = lambda: self._check_ranges(who, range_epochs)
        return feed, count

    async def _check_ranges(self, who: Principal, range_epochs: list[RangeEpoch]) -> None:
        """Raise an error if one of the ranges was split, merged or moved."""
        await self._run(lambda: [enter(who, self._api.pulling(), each) for each in range_epochs])

    def _shared(self) -> FeedContext:
        if self._rooms is None:
            config = self._api.feeding().config
            self._numbers.catchups = CatchUpLimits(config.catchups, config.catchup_budget)
            self._rooms = FeedContext(self._waiting, self._numbers.catchups, self._run, lambda: self._stopping)
        return self._rooms


def _settle(database: Database) -> None:
    """Make earlier commits durable, so that they belong to the catch-up."""
    database.catch_up(CATCH_UP_SECONDS)
    with suppress(HeadwaterError):  # a full disk: the durable part can be sent nevertheless
        database.log.flush()
