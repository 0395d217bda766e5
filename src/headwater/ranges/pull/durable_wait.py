"""Waiting until the log is durable beyond an offset, in the loop: it takes no thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headwater.errors import LimitExceeded
from headwater.log.live.live_log import LiveLog

MOST = 1_024  # who wait at the same time
FLUSH_SECONDS = 0.01  # between two looks at what is staged: that it became durable is told to nobody
LOOK_SECONDS = 1.0  # between two looks whether there is still something to wait for


class Waiting:
    """Those who wait. Used in one loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._asleep: dict[LiveLog, _Sleepers] = {}
        self._count = 0
        self._drained = 0  # how often everybody was sent away

    async def beyond(self, log: LiveLog, offset: int, seconds: float, is_there: Callable[[], bool]) -> None:
        """Sleep until `offset` is passed, `seconds` are over, or the database is gone."""
        if self._count >= self._most:
            raise LimitExceeded(f"{self._most} callers wait for changes already", hint="Ask again without wait_ms.")
        loop, moved = asyncio.get_running_loop(), asyncio.Event()
        until, drained = loop.time() + seconds, self._drained
        self._enter(log, moved)
        try:
            while log.durable <= offset and is_there() and (left := until - loop.time()) > 0:
                if self._drained != drained:
                    break
                moved.clear()
                pause = FLUSH_SECONDS if log.latest > offset else LOOK_SECONDS
                with suppress(TimeoutError):
                    await asyncio.wait_for(moved.wait(), min(left, pause))
        finally:
            self._leave(log, moved)

    def _enter(self, log: LiveLog, moved: asyncio.Event) -> None:
        self._count += 1
        sleepers = self._asleep.get(log)
        if sleepers is None:
            sleepers = self._asleep[log] = _Sleepers()
            log.add_listener(sleepers.tell)
        sleepers.events.add(moved)

    def _leave(self, log: LiveLog, moved: asyncio.Event) -> None:
        self._count -= 1
        sleepers = self._asleep[log]
        sleepers.events.discard(moved)
        if not sleepers.events:
            log.remove_listener(sleepers.tell)
            del self._asleep[log]

    def drain(self) -> None:
        """The server goes away: everybody is answered now."""
        self._drained += 1
        for sleepers in self._asleep.values():
            sleepers.wake()


class _Sleepers:
    """Those who wait for one log. It calls one of them at every commit, however many they are."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = False  # touched by both sides, at worst once too often
        self.events: set[asyncio.Event] = set()

    def tell(self) -> None:
        """In the capture thread: something was staged."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """In the loop: let everybody look."""
        self._asked = False
        for event in self.events:
            event.set()
