"""A bridge between the event loop and the threads that read and commit."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from headwater.errors import Busy
from headwater.feeds.fair_threads import T, Threads
from headwater.model.work.usage import Usage
from headwater.model.work.work_context import UNNAMED, Holder

MAX_WAITING = 1000  # blocking calls of a database, running or waiting; beyond it callers receive Busy
SHARES = 4  # one caller may have this fraction (1/n) of a database's waiting calls


class Bridge(Threads):
    """Turns futures of other threads into awaitables of this event loop, and runs blocking calls in a few threads.

    A call raises Busy if too many calls of the same database run or wait, or too many of the same caller wait.
    """

    def __init__(self, *, threads: int, most: int = MAX_WAITING) -> None:
        super().__init__(threads, "headwater-read", most)
        self._most_of_one = max(most // SHARES, 1)
        self._waiting: Usage[Holder] = Usage()  # calls without a thread, by database and caller

    def wait(self, future: Future[T]) -> asyncio.Future[T]:
        """Return an awaitable of `future`; cancelling it does not cancel the work."""
        return self._awaited(future, None)

    async def _wait(self, whose: Holder) -> None:
        """Wait for a thread. Raises Busy if too many calls of the database run or wait, or of the caller wait."""
        if whose[1] not in UNNAMED and self._waiting[whose] >= self._most_of_one:
            raise Busy(
                f"{self._most_of_one} of your requests are waiting, the limit of one caller",
                hint="Retry in a moment, or send fewer requests in parallel.",
            )
        with self._waiting.held(whose):
            await super()._wait(whose)
