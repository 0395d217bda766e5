"""One poll: a page of a feed, at once or as soon as there is something in it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headwater.errors import OffsetExpired
from headwater.feeds.deliver.hub_wait import Waiting
from headwater.feeds.deliver.reader_state import Seat
from headwater.feeds.deliver.start_position import check_reached
from headwater.feeds.groups.log_reader import Page, read_page, read_whole
from headwater.feeds.snapshot import SnapshotPage, SnapshotReader
from headwater.feeds.subscriptions.registry import unknown

MOST_BYTES = 8 << 20  # of one page
SCAN_SECONDS = 0.5  # a page without a match looks on for this long before it answers


class Asked(msgspec.Struct, frozen=True):
    """The parameters of one poll."""

    from_offset: int | None = None
    limit: int = 200
    wait_ms: int = 0
    cursor: str | None = None  # of the snapshot


class Poll:
    """Answers one poll."""

    def __init__(self, seat: Seat, asked: Asked, *, caught_up: bool) -> None:
        self.seat, self._asked = seat, asked
        self._caught_up = caught_up  # whether the log holds everything that was committed before the request
        self._deadline = time.monotonic() + asked.wait_ms / 1000
        self._waiting = Waiting(seat.hub, seat.view)
        held = seat.subscription
        assert held is not None
        self._held = held
        self._began = self._cursor = self._resume()

    def wake(self) -> None:
        """Look again."""
        self._waiting.wake()

    changed = wake  # by pause, close and the like

    def stop(self) -> None:
        """The server goes away: answer now."""
        self._deadline = 0.0
        self.wake()

    def _resume(self) -> int:
        """Where the page begins."""
        asked = self._asked.from_offset
        if asked is not None:
            check_reached(self.seat.log, asked, "from_offset", self._caught_up)
        return self._held.cursor if asked is None else self._held.resume(asked)

    async def answer(self) -> dict[str, Any]:
        """The page."""
        seat = self.seat
        while True:
            if seat.closed:
                raise unknown(self._held.id)
            if seat.paused or seat.why_lost(self._cursor):
                return self._without_changes()
            try:
                page = await seat.read(self._page)
            except OffsetExpired:
                return self._without_changes()
            self._cursor = page.upto
            if page.deliveries:
                return self._with(page)
            if page.upto < seat.log.latest and time.monotonic() < self._deadline + SCAN_SECONDS:
                continue
            if page.upto < seat.log.latest or not await self._wait():
                return self._with(page)

    def _page(self) -> Page:
        seat, asked = self.seat, self._asked
        read = read_whole if seat.view.options.txn else read_page
        return read(
            seat.log, seat.view, after=self._cursor, limit=asked.limit, most=MOST_BYTES, cut=seat.cut(self._cursor)
        )

    async def _wait(self) -> bool:
        """Sleep until a change passes the filter, or for what is left of the time; False when none is."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._cursor = await self._waiting.beyond(self._cursor, left)
        return True

    # --- answers -----------------------------------------------------------------------------------------------------

    def _with(self, page: Page) -> dict[str, Any]:
        delivered = page.deliveries[-1].offset if page.deliveries else -1
        if not page.deliveries:
            self.seat.note_quiet(self._began, delivered, self._cursor)
        caught_up = self._caught_up and self._cursor >= self.seat.reach
        events = [msgspec.Raw(delivery.data) for delivery in page.deliveries]
        return self._body(events, self._cursor, {"caught_up": caught_up})

    def _without_changes(self) -> dict[str, Any]:
        """Paused, or lost: told, and nothing delivered. Being lost comes first."""
        seat = self.seat
        reason = seat.why_lost(self._cursor)
        if not reason:
            return self._body([], self._cursor, {"caught_up": False})
        from_offset = seat.log.horizon - 1
        more = {"resnapshot_from_offset": from_offset, "resnapshot_reason": reason, **seat.snapshot_urls()}
        return self._body([], from_offset, {**more, "caught_up": False}, lost=True)

    async def rows(self, reader: SnapshotReader) -> dict[str, Any]:
        """A page of the snapshot."""
        if self.seat.paused:
            return self._body([], self._cursor, {"caught_up": False})
        page: SnapshotPage = await self.seat.run(reader.page, self._asked.limit, MOST_BYTES)
        snapshot: dict[str, Any] = {"done": page.done, "cursor": page.cursor}
        if page.restarted:
            snapshot |= {"restarted": True, "reason": page.reason}
        events = [msgspec.Raw(data) for _, data in page.rows]
        return self._body(events, page.offset, {"caught_up": False, "snapshot": snapshot})

    def _body(
        self, events: list[msgspec.Raw], next_offset: int, more: dict[str, Any], *, lost: bool = False
    ) -> dict[str, Any]:
        seat = self.seat
        found = seat.pressure(self._cursor)
        return {
            "events": events,
            "next_offset": next_offset,
            "earliest_offset": seat.earliest,
            "latest_offset": seat.log.latest,
            "resnapshot_required": lost,
            **more,
            "backpressure": found,
        }
