"""A bridge between the event loop and the threads that read and commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from headwater.errors import Busy
from headwater.feeds.fair_threads import Turns, stopping, submitted
from headwater.model.work.usage import Usage
from headwater.model.work.work_context import UNNAMED, Holder, holder

T = TypeVar("T")

MAX_WAITING = 1000  # blocking calls of a database, running or waiting; beyond it callers receive Busy
SHARES = 4  # one caller may have this fraction (1/n) of a database's waiting calls


class Bridge:
    """Turns futures of other threads into awaitables of this event loop, and runs blocking calls in a few threads.

    Futures that finish together (a group commit) wake the event loop once, not once each.
    """

    def __init__(self, *, threads: int, most: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="headwater-read")
        self._turns = Turns(threads, most)  # used by the event loop's thread only
        self._most_of_one = max(most // SHARES, 1)
        self._waiting: Usage[Holder] = Usage()  # calls without a thread, by database and caller
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any], Holder | None]] = []  # guarded by _lock

    def wait(self, future: Future[T]) -> asyncio.Future[T]:
        """Return an awaitable of `future`; cancelling it does not cancel the work."""
        return self._awaited(future, None)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)`, which may block, in a thread and return its value.

        Raises Busy if too many calls of the same database wait, Unavailable after `close`.
        """
        whose = holder()
        if not self._turns.take(whose):
            await self._wait(whose)
        try:
            future = submitted(self._threads, function, *args)
        except BaseException:
            self._turns.give_back(whose)
            raise
        return await self._awaited(future, whose)

    async def _wait(self, whose: Holder) -> None:
        """Wait for a thread. Raises Busy if too many calls of the database run or wait, or of the caller wait."""
        if whose[1] not in UNNAMED and self._waiting[whose] >= self._most_of_one:
            raise Busy(
                f"{self._most_of_one} of your requests are waiting, the limit of one caller",
                hint="Retry in a moment, or send fewer requests in parallel.",
            )
        with self._waiting.held(whose):
            await self._turns.wait(whose)

    def _awaited(self, future: Future[T], whose: Holder | None) -> asyncio.Future[T]:
        """Return an awaitable of `future`, which uses a thread on behalf of `whose`, if given."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: self._finished(loop, waiter, done, whose))
        return waiter

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _finished(
        self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any], done: Future[Any], whose: Holder | None
    ) -> None:
        with self._lock:
            first = not self._done
            self._done.append((waiter, done, whose))
        if first:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for waiter, future, whose in done:
            if whose is not None:
                self._turns.give_back(whose)
            if waiter.done():
                continue  # its request was cancelled
            if future.cancelled() and whose is not None:  # its thread was never started: the server stops
                waiter.set_exception(stopping())
            elif future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(future.result())
