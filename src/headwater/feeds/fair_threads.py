"""A small thread pool for blocking calls, shared fairly by all databases and by the callers of each."""

from __future__ import annotations

import asyncio
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

    The number of waiting calls has no limit of its own: the callers are streams, whose number is limited.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(*args)`, which may block, from a thread; raise Unavailable after `close`."""
        whose = holder()
        if not self._turns.take(whose):
            await self._turns.wait(whose)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        try:
            running = submitted(self._pool, call, *args)
        except BaseException:
            self._turns.give_back(whose)
            raise

        def over(done: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits for a thread any more
                loop.call_soon_threadsafe(self._over, whose, waiter, done)

        running.add_done_callback(over)  # on the thread's future: a cancelled caller does not end the call
        return await waiter

    def _over(self, whose: Holder, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        self._turns.give_back(whose)
        if waiter.done():
            return  # the caller was cancelled
        if done.cancelled():  # the pool was closed before the call began
            waiter.set_exception(stopping())
        elif (error := done.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(done.result())

    def close(self) -> None:
        """Wait for running calls and cancel those that have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
