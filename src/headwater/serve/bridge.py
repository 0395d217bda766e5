"""Bridge: from the threads that read and commit to the loop that answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from headwater.errors import Busy

T = TypeVar("T")

MAX_WAITING = 1000  # blocking calls in threads or waiting for one; beyond that callers are told to retry


class Bridge:
    """Turns futures of other threads into awaitables of this loop, and runs blocking calls in a few threads.

    Futures that finish together (a group commit) wake the loop once, not once each.
    """

    def __init__(self, *, threads: int, most: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="headwater-read")
        self._most = most
        self._waiting = 0  # touched by the loop's thread only
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any]]] = []  # guarded by _lock

    def wait(self, future: Future[T]) -> asyncio.Future[T]:
        """An awaitable of `future`. Cancelling it does not cancel the work."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: self._finished(loop, waiter, done))
        return waiter

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """The value of `function(*args)`, which may block."""
        if self._waiting >= self._most:
            raise Busy(f"{self._most} reads are waiting already")
        self._waiting += 1
        try:
            return await self.wait(self._threads.submit(function, *args))
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Wait for running calls and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _finished(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        with self._lock:
            first = not self._done
            self._done.append((waiter, done))
        if first:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        for waiter, future in done:
            if waiter.done():
                continue  # its request was cancelled
            if future.cancelled():
                waiter.cancel()
            elif (error := future.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(future.result())
