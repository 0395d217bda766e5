"""A wait until the hub publishes a change that passes a filter, for readers that read the log themselves."""

from __future__ import annotations

import asyncio
import contextlib

from headwater.feeds.deliver.hub import Hub
from headwater.feeds.groups.group import Group
from headwater.feeds.groups.log_reader import View


def silent(id: int | str, word: str, data: bytes) -> bytes:
    """Return an empty frame, for readers that only wait for the hub to publish."""
    return b""


class HubWait:
    """One reader that reads the log itself and sleeps between reads."""

    def __init__(self, hub: Hub, view: View) -> None:
        self._hub, self._view = hub, view
        self._sleeping: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """End the sleep."""
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)

    async def beyond(self, cursor: int, seconds: float) -> int:
        """Sleep, at most `seconds`, until a change after `cursor` may pass; return the offset up to which none does."""
        group = self._hub.join(self._view, silent)
        try:
            if group.is_live and group.seek(cursor) != group.published or group.failed is not None:
                return cursor  # a change was published concurrently; the caller reads it from the log
            if group.is_live:
                group.waiting.add(self)
            elif cursor < self._hub.reached(self._view):
                return cursor
            else:
                self._hub.sleep(self)  # wake at the next batch: the hub does not evaluate the filter of this group
            self._sleeping = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sleeping, seconds)
            return max(cursor, self._quiet_upto(group, cursor))
        finally:
            self._sleeping = None
            group.waiting.discard(self)
            self._hub.leave(group)

    def _quiet_upto(self, group: Group, cursor: int) -> int:
        """Return the offset up to which no change passes; `cursor` if the group dropped frames during the sleep."""
        seen = group.seek(cursor)
        if seen is None or not group.is_live:
            return cursor
        return self._hub.reached(self._view) if seen == group.published else group.offset_after(seen) - 1
