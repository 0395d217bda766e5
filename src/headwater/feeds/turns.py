"""Turns: a few threads for what blocks, shared by all databases so that each gets its turn."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from headwater.errors import Busy

SPARE = 4  # one thread in so many is left to the other databases

WHOSE: ContextVar[str] = ContextVar("whose", default="")  # the database for which a task works; "": for none


class Turns:
    """Who may have one of `threads` now; at most `most` calls of one database run or wait. In one loop, which alone
    touches it.

    The calls of a database wait behind its own only: those of all that wait go on in turn. What already runs is not
    stopped, so no database may have every thread.
    """

    def __init__(self, threads: int, most: int = sys.maxsize) -> None:
        self._free, self._share, self._most = threads, threads - threads // SPARE, most
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first

    def take(self, whose: str) -> bool:
        """Whether there is a thread for it at once; then it has it."""
        running = self._running.get(whose, 0)
        if not self._free or running >= self._share:
            return False
        self._free -= 1
        self._running[whose] = running + 1
        return True

    async def wait(self, whose: str) -> None:
        """Until it has a thread; Busy when too many wait already."""
        queue = self._waiting.setdefault(whose, deque())
        if len(queue) + self._running.get(whose, 0) >= self._most:
            raise Busy(f"{self._most} reads are waiting already")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given a thread in the same moment
                self.give_back(whose)
            raise

    def give_back(self, whose: str) -> None:
        """Its call is over."""
        self._free += 1
        left = self._running[whose] - 1
        if left:
            self._running[whose] = left
        else:
            del self._running[whose]
        if self._waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        for whose in list(self._waiting):
            queue = self._waiting[whose]
            while queue and queue[0].done():  # its caller left
                queue.popleft()
            if queue and self.take(whose):
                queue.popleft().set_result(None)
                self._waiting[whose] = self._waiting.pop(whose)  # from now on the last in turn
            if not queue:
                del self._waiting[whose]


class Threads:
    """A pool of threads, of which each database gets its turn. Make and use it in one loop.

    However many may wait: those who ask are streams, of which there are only so many.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """The value of `call(*args)`, which may block."""
        whose = WHOSE.get()
        if not self._turns.take(whose):
            await self._turns.wait(whose)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        try:
            running = self._pool.submit(call, *args)
        except BaseException:
            self._turns.give_back(whose)
            raise

        def over(done: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for a thread any more
                loop.call_soon_threadsafe(self._over, whose, waiter, done)

        running.add_done_callback(over)  # of the thread: a caller who leaves does not end what it does
        return await waiter

    def _over(self, whose: str, waiter: asyncio.Future[Any], done: Future[Any]) -> None:
        self._turns.give_back(whose)
        if waiter.done():
            return  # its caller left
        if done.cancelled():
            waiter.cancel()
        elif (error := done.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(done.result())

    def close(self) -> None:
        """Wait for what runs; what has not begun never will."""
        self._pool.shutdown(wait=True, cancel_futures=True)
