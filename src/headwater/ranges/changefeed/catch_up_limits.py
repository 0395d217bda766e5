"""Limits of catch-up reads per caller, so that a client that reconnects in a loop does not slow down others."""

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
    """The remaining budget of one caller, and its concurrent catch-ups."""

    left: float
    at: float
    slots: asyncio.Semaphore
    users: int = field(default=0)


class CatchUpLimits:
    """At most `most` concurrent catch-ups per caller, more wait, and `budget` changes a minute. Use it in one loop.

    A caller with any budget left may start, however many changes it reads, and is in debt afterwards: a single reader
    that is far behind is admitted, the same reader again and again is not.
    """

    def __init__(self, most: int, budget: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._budget, self._clock = most, budget, clock
        self._accounts: dict[Hashable, _Account] = {}
        self.running = self.waiting = 0

    @asynccontextmanager
    async def slot(self, who: Hashable, changes: int) -> AsyncIterator[None]:
        """Charge `changes` and hold a slot to read them; LimitExceeded, with `retry_after_ms`, if no budget is left."""
        account = self._account(who)
        self._charge(account, changes)
        account.users += 1
        try:
            self.waiting += 1
            try:
                await account.slots.acquire()
            finally:
                self.waiting -= 1
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
                account.slots.release()
        finally:
            account.users -= 1

    def _account(self, who: Hashable) -> _Account:
        now = self._clock()
        for name, each in list(self._accounts.items()):
            each.left = min(each.left + (now - each.at) * self._budget / MINUTE, self._budget)
            each.at = now
            if not each.users and each.left >= self._budget:
                del self._accounts[name]  # a new account would be the same
        return self._accounts.setdefault(who, _Account(self._budget, now, asyncio.Semaphore(self._most)))

    def _charge(self, account: _Account, changes: int) -> None:
        if account.left <= 0:
            seconds = (1 - account.left) * MINUTE / self._budget
            raise LimitExceeded(
                f"the catch-up limit of {self._budget} changes a minute is exceeded",
                hint="Reconnect later, from the newest checkpoint, or with skip_catchup if gaps are acceptable; "
                "feeds.catchup_budget sets the limit.",
                retry_after_ms=int(seconds * 1000) + 1,
            )
        account.left -= changes
