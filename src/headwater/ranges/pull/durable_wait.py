"""Waiting until the log is durable beyond an offset, in the loop: it takes no thread."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from headwater.errors import LimitExceeded
from headwater.log.live.live_log import LiveLog
from headwater.model.work.work_context import CALLER, UNNAMED

MOST = 1_024  # who wait at the same time
SHARES = 4  # one caller has at most a fourth of the places
FLUSH_SECONDS = 0.01  # between two checks whether staged changes are durable: the log notifies nobody of that
LOOK_SECONDS = 1.0  # between two looks whether there is still something to wait for


class Waiting:
    """Those who wait. Used in one loop."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._asleep: dict[LiveLog, _Sleepers] = {}
        self._count = 0
        self._of_caller: Counter[str] = Counter()  # by account; no entries of 0
        self._drained = 0  # how often everybody was sent away

    async def beyond(self, log: LiveLog, offset: int, seconds: float, is_there: Callable[[], bool]) -> None:
        """Sleep until `offset` is passed, `seconds` are over, or the database is gone."""
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
                    await asyncio.wait_for(sleeper.moved.wait(), min(left, LOOK_SECONDS))
        finally:
            self._leave(log, sleeper, caller)

    def _check_room(self, caller: str) -> None:
        if self._count >= self._most:
            raise LimitExceeded(f"{self._most} callers wait for changes already", hint="Ask again without wait_ms.")
        share = max(self._most // SHARES, 1)
        if caller not in UNNAMED and self._of_caller[caller] >= share:
            raise LimitExceeded(f"{share} of your waits are open already", hint="Ask again without wait_ms.")

    def _enter(self, log: LiveLog, sleeper: _Sleeper, caller: str) -> None:
        self._count += 1
        self._of_caller[caller] += 1
        sleepers = self._asleep.get(log)
        if sleepers is None:
            sleepers = self._asleep[log] = _Sleepers(log)
            log.add_listener(sleepers.tell)
        sleepers.all.add(sleeper)
        sleepers.look()

    def _leave(self, log: LiveLog, sleeper: _Sleeper, caller: str) -> None:
        self._count -= 1
        self._of_caller[caller] -= 1
        if not self._of_caller[caller]:
            del self._of_caller[caller]
        sleepers = self._asleep[log]
        sleepers.all.discard(sleeper)
        if not sleepers.all:
            log.remove_listener(sleepers.tell)
            sleepers.close()
            del self._asleep[log]

    def drain(self) -> None:
        """The server goes away: everybody is answered now."""
        self._drained += 1
        for sleepers in self._asleep.values():
            sleepers.wake()


class _Sleeper:
    """One who waits until `offset` is passed."""

    def __init__(self, offset: int) -> None:
        self.offset, self.moved = offset, asyncio.Event()


class _Sleepers:
    """Those who wait for one log. One timer looks for all of them, and wakes those whose offset is passed."""

    def __init__(self, log: LiveLog) -> None:
        self._log, self._loop = log, asyncio.get_running_loop()
        self._asked = False  # touched by both sides, at worst once too often
        self._timer: asyncio.TimerHandle | None = None
        self.all: set[_Sleeper] = set()

    def tell(self) -> None:
        """In the capture thread: something was staged."""
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._told)

    def _told(self) -> None:
        self._asked = False
        self.look()

    def look(self) -> None:
        """Wake those whose offset is passed; look again while something is staged."""
        durable = self._log.durable
        for sleeper in self.all:
            if sleeper.offset < durable:
                sleeper.moved.set()
        if self._timer is None and self.all and self._log.latest > durable:
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()

    def wake(self) -> None:
        """Let everybody look."""
        for sleeper in self.all:
            sleeper.moved.set()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
