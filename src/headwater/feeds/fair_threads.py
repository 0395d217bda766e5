"""A few threads for calls that block, shared fairly by all databases and by the callers of each."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from headwater.errors import Busy
from headwater.model.work_context import UNNAMED, Holder, holder

SPARE = 4  # one thread in so many is left to other databases, and to other callers of a database


class Turns:
    """Shares `threads` among databases and their callers; at most `most` calls of one database run or wait.

    The calls of a caller wait behind its own only: the callers that wait go on in turn. A call that runs is not
    stopped, so no database may have every thread, and no caller every thread of its database. In one loop, which alone
    touches it.
    """

    def __init__(self, threads: int, most: int = sys.maxsize) -> None:
        self._free, self._share, self._most = threads, threads - threads // SPARE, most
        self._caller_share = max(self._share - max(self._share // SPARE, 1), 1)
        self._open_share = self._share - self._share // SPARE  # of all who have no name of their own
        self._running: Counter[str | Holder] = Counter()  # by database, and by caller of a database
        self._queued: Counter[str] = Counter()  # by database
        self._waiting: dict[Holder, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first

    def take(self, whose: Holder) -> bool:
        """Try to acquire a thread without waiting."""
        share = self._open_share if whose[1] in UNNAMED else self._caller_share
        if not self._free or self._running[whose[0]] >= self._share or self._running[whose] >= share:
            return False
        self._free -= 1
        self._running[whose[0]] += 1
        self._running[whose] += 1
        return True

    async def wait(self, whose: Holder) -> None:
        """Wait for a thread; raise Busy when too many calls of the database wait already."""
        if self._queued[whose[0]] + self._running[whose[0]] >= self._most:
            raise Busy(f"{self._most} reads are waiting already")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(mine)
        self._queued[whose[0]] += 1
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given a thread in the same moment
                self.give_back(whose)
            raise

    def give_back(self, whose: Holder) -> None:
        """Release the thread of a call that is over."""
        self._free += 1
        for each in (whose[0], whose):
            self._running[each] -= 1
            if not self._running[each]:
                del self._running[each]
        if self._waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        for whose in list(self._waiting):
            queue = self._waiting[whose]
            while queue and queue[0].done():  # its caller left
                self._next(whose)
            if queue and self.take(whose):
                self._next(whose).set_result(None)
                self._waiting[whose] = self._waiting.pop(whose)  # from now on the last in turn
            if not queue:
                del self._waiting[whose]

    def _next(self, whose: Holder) -> asyncio.Future[None]:
        self._queued[whose[0]] -= 1
        if not self._queued[whose[0]]:
            del self._queued[whose[0]]
        return self._waiting[whose].popleft()


class Threads:
    """A pool of threads, of which each database and each caller gets its turn. Make and use it in one loop.

    However many may wait: those who ask are streams, of which there are only so many.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = Turns(threads)

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """The value of `call(*args)`, which may block."""
        whose = holder()
        if not self._turns.take(whose):
            await self._turns.wait(whose)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        try:
            running = self._pool.submit(copy_context().run, call, *args)
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
        if done.cancelled():
            waiter.cancel()
        elif (error := done.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(done.result())

    def close(self) -> None:
        """Wait for what runs; what has not begun never will."""
        self._pool.shutdown(wait=True, cancel_futures=True)
