"""A few threads for calls that block, shared fairly by all databases and by the callers of each."""

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
    """Threads shared fairly among databases and their callers. In one loop, which alone touches it."""

    async def wait(self, whose: Holder) -> None:
        """Wait for a thread; raise Busy when too many calls of the database wait already."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.enqueue(whose, mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given a thread in the same moment
                self.give_back(whose)
            raise


def submitted(pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> Future[T]:
    """Submit `call` to `pool` in the context of its caller. Unavailable once the pool is shut down."""
    try:
        return pool.submit(copy_context().run, call, *args)
    except RuntimeError:
        raise stopping() from None


def stopping() -> Unavailable:
    """Return the error of a call that got no thread because the server stops."""
    return Unavailable("the server is stopping", hint="Connect again in a moment.")


class Threads:
    """A pool of threads, of which each database and each caller gets its turn. Make and use it in one loop.

    However many may wait: those who ask are streams, of which there are only so many.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """The value of `call(*args)`, which may block. Unavailable after `close`."""
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
            with suppress(RuntimeError):  # the loop is closed: nobody waits for a thread any more
                loop.call_soon_threadsafe(self._over, whose, waiter, done)

        running.add_done_callback(over)  # of the thread: a caller who leaves does not end what it does
        return await waiter

    def _over(self, whose: Holder, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        self._turns.give_back(whose)
        if waiter.done():
            return  # its caller left
        if done.cancelled():  # it had its turn, and the pool was closed before it began
            waiter.set_exception(stopping())
        elif (error := done.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(done.result())

    def close(self) -> None:
        """Wait for what runs; what has not begun never will."""
        self._pool.shutdown(wait=True, cancel_futures=True)
