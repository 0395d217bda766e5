"""Waiting until the log is durable beyond an offset, in the loop: it takes no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headwater.errors import LimitExceeded
from headwater.log.live import LiveLog

MOST = 1_024  # who wait at the same time; each is called by the capture thread at every commit
FLUSH_SECONDS = 0.01  # between two looks at what is staged: that it became durable is told to nobody
LOOK_SECONDS = 1.0  # between two looks whether there is still something to wait for


class Waiting:
    """Those who wait. Used in one loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._asleep: set[asyncio.Event] = set()
        self._drained = 0  # how often everybody was sent away

    async def beyond(self, log: LiveLog, offset: int, seconds: float, is_there: Callable[[], bool]) -> None:
        """Sleep until `offset` is passed, `seconds` are over, or the database is gone."""
        if len(self._asleep) >= self._most:
            raise LimitExceeded(f"{self._most} callers wait for changes already", hint="Ask again without wait_ms.")
        loop, moved = asyncio.get_running_loop(), asyncio.Event()
        until, drained = loop.time() + seconds, self._drained

        def tell() -> None:
            loop.call_soon_threadsafe(moved.set)

        self._asleep.add(moved)
        log.add_listener(tell)
        try:
            while log.durable <= offset and is_there() and (left := until - loop.time()) > 0:
                if self._drained != drained:
                    break
                moved.clear()
                pause = FLUSH_SECONDS if log.latest > offset else LOOK_SECONDS
                with suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), min(left, pause))
        finally:
            log.remove_listener(tell)
            self._asleep.discard(moved)

    def drain(self) -> None:
        """The server goes away: everybody is answered now."""
        self._drained += 1
        for moved in self._asleep:
            moved.set()
