"""Bridge: from the threads that read and commit to the loop that answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from headwater.feeds.turns import Holder, Turns, holder

T = TypeVar("T")

MAX_WAITING = 1000  # blocking calls of a database, running or waiting; beyond that callers are told to retry


class Bridge:
    """Turns futures of other threads into awaitables of this loop, and runs blocking calls in a few threads.

    Futures that finish together (a group commit) wake the loop once, not once each.
    """

    def __init__(self, *, threads: int, most: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="headwater-read")
        self._turns = Turns(threads, most)  # touched by the loop's thread only
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any], Holder | None]] = []  # guarded by _lock

    def wait(self, future: Future[T]) -> asyncio.Future[T]:
        """An awaitable of `future`. Cancelling it does not cancel the work."""
        return self._awaited(future, None)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """The value of `function(*args)`, which may block; Busy if too many of the same database wait."""
        whose = holder()
        if not self._turns.take(whose):
            await self._turns.wait(whose)
        try:
            future = self._threads.submit(function, *args)
        except BaseException:
            self._turns.give_back(whose)
            raise
        return await self._awaited(future, whose)

    def _awaited(self, future: Future[T], whose: Holder | None) -> asyncio.Future[T]:
        """An awaitable of `future`, which has a thread of `whose`, or None."""
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
            if future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(future.result())
