"""Waits in the event loop, without a thread, until the log is durable past an offset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headwater.errors import LimitExceeded
from headwater.log.live.live_log import LiveLog
from headwater.model.work.usage import Usage
from headwater.model.work.work_context import CALLER, UNNAMED

MOST = 1_024  # concurrent waits
SHARES = 4  # one caller has at most a fourth of the waits
FLUSH_SECONDS = 0.01  # between two checks whether staged changes are durable: the log does not notify of that
CHECK_SECONDS = 1.0  # between two checks whether the database still exists


class DurableWaits:
    """The concurrent waits of a server. Use it in one event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._asleep: dict[LiveLog, _Sleepers] = {}
        self._held: Usage[str] = Usage()  # by account
        self._drained = 0  # number of calls of `drain`

    async def beyond(self, log: LiveLog, offset: int, seconds: float, is_there: Callable[[], bool]) -> None:
        """Sleep until `log` is durable past `offset`, `seconds` pass or not `is_there`; may raise LimitExceeded."""
        caller = CALLER.get()
        self._check_room(caller)
        loop, sleeper = asyncio.get_running_loop(), _Sleeper(offset)
        until, drained = loop.time() + seconds, self._drained
        self._enter(log, sleeper, caller)
        try:
            while log.durable <= offset and is_there() and (left := until - loop.time()) > 0:
                if self._drained != drained:
                    break
                sleeper.moved.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(sleeper.moved.wait(), min(left, CHECK_SECONDS))
        finally:
            self._leave(log, sleeper, caller)

    def _check_room(self, caller: str) -> None:
        if self._held.total >= self._most:
            raise LimitExceeded(f"{self._most} requests wait for changes already", hint="Retry without wait_ms.")
        share = max(self._most // SHARES, 1)
        if caller not in UNNAMED and self._held[caller] >= share:
            raise LimitExceeded(f"{share} of your requests wait for changes already", hint="Retry without wait_ms.")

    def _enter(self, log: LiveLog, sleeper: _Sleeper, caller: str) -> None:
        self._held.add(caller)
        sleepers = self._asleep.get(log)
        if sleepers is None:
            sleepers = self._asleep[log] = _Sleepers(log)
            log.add_listener(sleepers.notify)
        sleepers.all.add(sleeper)
        sleepers.check()

    def _leave(self, log: LiveLog, sleeper: _Sleeper, caller: str) -> None:
        self._held.remove(caller)
        sleepers = self._asleep[log]
        sleepers.all.discard(sleeper)
        if not sleepers.all:
            log.remove_listener(sleepers.notify)
            sleepers.close()
            del self._asleep[log]

    def drain(self) -> None:
        """End all waits, because the server is stopping."""
        self._drained += 1
        for sleepers in self._asleep.values():
            sleepers.wake()


class _Sleeper:
    """One wait until the log is durable past `offset`."""

    def __init__(self, offset: int) -> None:
        self.offset, self.moved = offset, asyncio.Event()


class _Sleepers:
    """The waits for one log. One timer checks for all of them, and wakes those whose offset is passed."""

    def __init__(self, log: LiveLog) -> None:
        self._log, self._loop = log, asyncio.get_running_loop()
        self._is_scheduled = False  # set by both threads; a race schedules at most one check too many
        self._timer: asyncio.TimerHandle | None = None
        self.all: set[_Sleeper] = set()

    def notify(self) -> None:
        """Schedule a check; called in the capture thread when changes are staged."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._notified)

    def _notified(self) -> None:
        self._is_scheduled = False
        self.check()

    def check(self) -> None:
        """Wake the waits whose offset is passed; check again while changes are staged."""
        durable = self._log.durable
        for sleeper in self.all:
            if sleeper.offset < durable:
                sleeper.moved.set()
        if self._timer is None and self.all and self._log.latest > durable:
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._check_again)

    def _check_again(self) -> None:
        self._timer = None
        self.check()

    def wake(self) -> None:
        """Wake all waits."""
        for sleeper in self.all:
            sleeper.moved.set()

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
