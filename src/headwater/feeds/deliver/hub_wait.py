"""Waiting until the hub publishes something that passes a filter, without taking what it publishes."""

from __future__ import annotations

import asyncio
import contextlib

from headwater.feeds.deliver.hub import Hub
from headwater.feeds.groups.group import Group
from headwater.feeds.groups.log_reader import View


def silent(id: int | str, word: str, data: bytes) -> bytes:
    """The frame of who only wants to know that something came."""
    return b""


class Waiting:
    """One reader that reads the log itself and sleeps in between."""

    def __init__(self, hub: Hub, view: View) -> None:
        self._hub, self._view = hub, view
        self._sleeping: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Look again."""
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    async def beyond(self, cursor: int, seconds: float) -> int:
        """Sleep until something after `cursor` may pass; returns the offset up to which nothing does."""
        group = self._hub.join(self._view, silent)
        try:
            if group.is_live and group.seek(cursor) != group.published or group.failed is not None:
                return cursor  # something came meanwhile; the log tells what
            if group.is_live:
                group.waiting.add(self)
            elif cursor < self._hub.reached(self._view):
                return cursor
            else:
                self._hub.sleep(self)  # for whatever comes next: nobody decides for it here
            self._sleeping = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sleeping, seconds)
            return max(cursor, self._quiet_upto(group, cursor))
        finally:
            self._sleeping = None
            group.waiting.discard(self)
            self._hub.leave(group)

    def _quiet_upto(self, group: Group, cursor: int) -> int:
        """Also while it slept the log may have gone a long way, and forgotten what lies at the cursor."""
        seen = group.seek(cursor)
        if seen is None or not group.is_live:
            return cursor
        return self._hub.reached(self._view) if seen == group.published else group.offset_after(seen) - 1
