"""One poll: a page of a feed, at once or as soon as a change passes."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headwater.errors import OffsetExpired
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.hub_wait import HubWait
from headwater.feeds.deliver.start_position import check_reached
from headwater.feeds.groups.log_reader import Page
from headwater.feeds.snapshot import SnapshotPage, SnapshotReader
from headwater.feeds.subscriptions.registry import unknown

MOST_BYTES = 8 << 20  # of one page
SCAN_SECONDS = 0.5  # how long a poll searches on while no change passes its filter


class PollRequest(msgspec.Struct, frozen=True):
    """The parameters of one poll."""

    from_offset: int | None = None
    limit: int = 200
    wait_ms: int = 0
    cursor: str | None = None  # of the snapshot


class Poll:
    """One call of cdc.poll."""

    def __init__(self, consumer: Consumer, request: PollRequest, *, caught_up: bool) -> None:
        self.consumer, self._request = consumer, request
        self._caught_up = caught_up  # whether the log holds everything that was committed before the request
        self._deadline = time.monotonic() + request.wait_ms / 1000
        self._waiting = HubWait(consumer.hub, consumer.view)
        subscription = consumer.subscription
        assert subscription is not None
        self._subscription = subscription
        self._began = self._cursor = self._resume()

    def wake(self) -> None:
        """End the wait."""
        self._waiting.wake()

    changed = wake  # the subscription was paused, moved or closed

    def stop(self) -> None:
        """End the wait and allow no other, because the server is stopping."""
        self._deadline = 0.0
        self.wake()

    def _resume(self) -> int:
        """Return the offset after which the page begins."""
        offset = self._request.from_offset
        if offset is not None:
            check_reached(self.consumer.log, offset, "from_offset", self._caught_up)
        return self._subscription.cursor if offset is None else self._subscription.resume(offset)

    async def answer(self) -> dict[str, Any]:
        """Return a page of changes, after `wait_ms` at most; raise NotFound if the subscription was closed."""
        consumer = self.consumer
        while True:
            if consumer.closed:
                raise unknown(self._subscription.id)
            if consumer.paused or consumer.why_lost(self._cursor):
                return self._without_changes()
            try:
                page = await consumer.read(self._page)
            except OffsetExpired:
                return self._without_changes()
            self._cursor = page.upto
            if page.deliveries:
                return self._with(page)
            if page.upto < consumer.log.latest and time.monotonic() < self._deadline + SCAN_SECONDS:
                continue
            if page.upto < consumer.log.latest or not await self._wait():
                return self._with(page)

    def _page(self) -> Page:
        consumer, request = self.consumer, self._request
        view = consumer.view
        read = view.whole_page if view.options.txn else view.page
        return read(
            consumer.log,
            after=self._cursor,
            limit=request.limit,
            most=MOST_BYTES,
            newer=consumer.snapshot_filter(self._cursor),
        )

    async def _wait(self) -> bool:
        """Wait until a change passes the filter or the time is over; return False if no time was left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._cursor = await self._waiting.beyond(self._cursor, left)
        return True

    # --- answers -----------------------------------------------------------------------------------------------------

    def _with(self, page: Page) -> dict[str, Any]:
        delivered = page.deliveries[-1].offset if page.deliveries else -1
        if not page.deliveries:
            self.consumer.note_quiet(self._began, delivered, self._cursor)
        caught_up = self._caught_up and self._cursor >= self.consumer.reach
        events = [msgspec.Raw(delivery.data) for delivery in page.deliveries]
        return self._body(events, self._cursor, {"caught_up": caught_up})

    def _without_changes(self) -> dict[str, Any]:
        """Return a page without changes that says why: evicted changes first, otherwise the pause."""
        consumer = self.consumer
        reason = consumer.why_lost(self._cursor)
        if not reason:
            return self._body([], self._cursor, {"caught_up": False})
        from_offset = consumer.log.horizon - 1
        more = {"resnapshot_from_offset": from_offset, "resnapshot_reason": reason, **consumer.snapshot_urls()}
        return self._body([], from_offset, {**more, "caught_up": False}, lost=True)

    async def rows(self, reader: SnapshotReader) -> dict[str, Any]:
        """Return a page of snapshot rows; while the subscription is paused, a page without rows."""
        if self.consumer.paused:
            return self._body([], self._cursor, {"caught_up": False})
        page: SnapshotPage = await self.consumer.run(reader.page, self._request.limit, MOST_BYTES)
        snapshot: dict[str, Any] = {"done": page.done, "cursor": page.cursor}
        if page.restarted:
            snapshot |= {"restarted": True, "reason": page.reason}
        events = [msgspec.Raw(data) for _, data in page.rows]
        return self._body(events, page.offset, {"caught_up": False, "snapshot": snapshot})

    def _body(
        self, events: list[msgspec.Raw], next_offset: int, more: dict[str, Any], *, lost: bool = False
    ) -> dict[str, Any]:
        consumer = self.consumer
        found = consumer.pressure(self._cursor)
        return {
            "events": events,
            "next_offset": next_offset,
            "earliest_offset": consumer.earliest,
            "latest_offset": consumer.log.latest,
            "resnapshot_required": lost,
            **more,
            "backpressure": found,
        }
