"""A small thread pool for blocking calls, shared fairly by all databases and by the callers of each."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from headwater.errors import Unavailable
from headwater.model.work.fair_shares import FairShares
from headwater.model.work.work_context import Holder, holder

T = TypeVar("T")


class Turns(FairShares["asyncio.Future[None]"]):
    """Threads shared fairly among databases and their callers. Use it in one loop only."""

    async def wait(self, whose: Holder) -> None:
        """Wait for a thread; raise Busy when too many calls of the database run or wait already."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.enqueue(whose, mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the call was cancelled at the moment in which it got a thread
                self.give_back(whose)
            raise


def submitted(pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> Future[T]:
    """Submit `call` to `pool` in the context of its caller; raise Unavailable once the pool is shut down."""
    try:
        return pool.submit(copy_context().run, call, *args)
    except RuntimeError:
        raise stopping() from None


def stopping() -> Unavailable:
    """Return the error of a call that got no thread because the server stops."""
    return Unavailable("the server is stopping", hint="Connect again in a moment.")


class Threads:
    """A thread pool that serves databases and callers in turn. Create and use it in one loop.

    Calls that end together wake the event loop once, not once each. Without `most`, the number of waiting calls has no
    limit of its own: the callers are streams, whose number is limited.
    """

    def __init__(self, threads: int, name: str, most: int = sys.maxsize) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads, most)  # used by the event loop's thread only
        self._lock = threading.Lock()
        self._done: list[tuple[asyncio.Future[Any], Future[Any], Holder | None]] = []  # guarded by _lock

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, run in a thread; raise Busy if too many calls wait, Unavailable after `close`."""
        whose = holder()
        if not self._turns.take(whose):
            await self._wait(whose)
        try:
            future = submitted(self._pool, function, *args)
        except BaseException:
            self._turns.give_back(whose)
            raise
        return await self._awaited(future, whose)

    async def _wait(self, whose: Holder) -> None:
        """Wait for a thread."""
        await self._turns.wait(whose)

    def _awaited(self, future: Future[T], whose: Holder | None) -> asyncio.Future[T]:
        """Return an awaitable of `future`, which uses a thread on behalf of `whose`, if given.

        Cancelling it does not cancel the work.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(lambda done: self._finished(loop, waiter, done, whose))
        return waiter

    def _finished(
        self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[Any], done: Future[Any], whose: Holder | None
    ) -> None:
        with self._lock:
            first = not self._done
            self._done.append((waiter, done, whose))
        if first:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits any more
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

    def close(self) -> None:
        """Wait for running calls and cancel those that have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
