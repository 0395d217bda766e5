"""Catch-ups: how much of the log each caller may have read again, so that none who connects in a loop hurts others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headwater.errors import LimitExceeded

MINUTE = 60.0


@dataclass
class _Account:
    """What one caller has left to read, and who of its catch-ups runs."""

    left: float
    at: float
    places: asyncio.Semaphore
    users: int = field(default=0)


class Catchups:
    """At most `most` at a time for each caller, others wait; and `budget` changes a minute. In one loop.

    Whoever has anything left may begin, however long it takes, and is in debt then: a single reader that is far
    behind is let in, the same one again and again is not.
    """

    def __init__(self, most: int, budget: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._budget, self._clock = most, budget, clock
        self._accounts: dict[Hashable, _Account] = {}
        self.running = self.waiting = 0

    @asynccontextmanager
    async def place(self, who: Hashable, changes: int) -> AsyncIterator[None]:
        """A place to read that many changes; LimitExceeded, with the time to wait, where `who` read too much."""
        account = self._account(who)
        self._charge(account, changes)
        account.users += 1
        try:
            self.waiting += 1
            try:
                await account.places.acquire()
            finally:
                self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
                account.places.release()
        finally:
            account.users -= 1

    def _account(self, who: Hashable) -> _Account:
        now = self._clock()
        for name, each in list(self._accounts.items()):
            each.left = min(each.left + (now - each.at) * self._budget / MINUTE, self._budget)
            each.at = now
            if not each.users and each.left >= self._budget:
                del self._accounts[name]  # as if it had never come
        return self._accounts.setdefault(who, _Account(self._budget, now, asyncio.Semaphore(self._most)))

    def _charge(self, account: _Account, changes: int) -> None:
        if account.left <= 0:
            seconds = (1 - account.left) * MINUTE / self._budget
            raise LimitExceeded(
                f"{self._budget} changes a minute are granted for catch-ups, and more were read",
                hint="Connect again later, from the newest checkpoint, or with skip_catchup where gaps are fine; "
                "feeds.catchup_budget is the limit.",
                retry_after_ms=int(seconds * 1000) + 1,
            )
        account.left -= changes
