"""Worker slots shared fairly by databases and by their callers."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

from headwater.errors import Busy
from headwater.model.work.usage import Usage
from headwater.model.work.work_context import UNNAMED, Holder

SPARE = 4  # one place in so many is reserved for other databases, and for other callers of a database

W = TypeVar("W", "asyncio.Future[None]", "Future[None]")  # done once the place is handed over, or the caller left


class FairShares(Generic[W]):
    """Shares `places` among databases and their callers; at most `most` calls of one database hold a place or wait.

    A call waits only for earlier calls of the same caller: waiting callers take turns. A running call is not
    interrupted, so with SPARE places or more no database may have all of them, and no caller may have as many places
    as a database, whichever databases it calls. Not thread-safe.
    """

    def __init__(self, places: int, most: int = sys.maxsize, *, caller_share: int | None = None) -> None:
        self._free, self._share, self._most = places, places - places // SPARE, most
        self._caller_share = caller_share or max(self._share - max(self._share // SPARE, 1), 1)
        self._open_share = self._share - self._share // SPARE  # of all callers without a name together
        self._running: Usage[Holder] = Usage()  # by database, and by caller
        self._queued: Usage[str] = Usage()  # by database
        self._waiting: dict[Holder, deque[W]] = {}  # in the order of their turns

    @property
    def has_waiting(self) -> bool:
        """Return whether any call waits for a place."""
        return bool(self._waiting)

    def take(self, whose: Holder) -> bool:
        """Try to acquire a place without waiting; return whether it was acquired."""
        database, caller = _counted(whose)
        share = self._open_share if whose[1] in UNNAMED else self._caller_share
        if not self._free or self._running[database] >= self._share or self._running[caller] >= share:
            return False
        self._free -= 1
        self._running.add(database)
        self._running.add(caller)
        return True

    def enqueue(self, whose: Holder, waiter: W) -> None:
        """Queue `waiter`, to resolve it when it gets a place; Busy if too many calls of the database run or wait."""
        if self._queued[whose[0]] + self._running[_counted(whose)[0]] >= self._most:
            raise Busy(f"{self._most} reads of this database are running or waiting already")
        self._waiting.setdefault(whose, deque()).append(waiter)
        self._queued.add(whose[0])

    def give_back(self, whose: Holder) -> None:
        """Release the place of a call that ended, and hand it to the next waiting call."""
        self._free += 1
        for each in _counted(whose):
            self._running.remove(each)
        if self._waiting:
            self._hand_on()

    def _hand_on(self) -> None:
        for whose in list(self._waiting):
            queue = self._waiting[whose]
            while queue and queue[0].done():  # the caller left
                self._next(whose)
            if queue and self.take(whose):
                self._next(whose).set_result(None)
                self._waiting[whose] = self._waiting.pop(whose)  # move it to the end of the turns
            if not queue:
                del self._waiting[whose]

    def _next(self, whose: Holder) -> W:
        self._queued.remove(whose[0])
        return self._waiting[whose].popleft()


def _counted(whose: Holder) -> tuple[Holder, Holder]:
    """Return the two counters of a call: its database and its caller. Callers without a name count by database."""
    database, caller = whose
    return (database, ""), ("", caller) if caller not in UNNAMED else (database, "unnamed")


class FairPlaces:
    """Places shared fairly by threads, which block until they get one. Thread-safe."""

    def __init__(self, count: int, caller_share: int | None = None) -> None:
        self._lock = threading.Lock()  # guards _shares
        self._shares: FairShares[Future[None]] = FairShares(count, caller_share=caller_share)

    @contextmanager
    def held(self, whose: Holder) -> Generator[None]:
        """Wait for a place, without a limit of time, and hold it until the block ends."""
        self._acquire(whose)
        try:
            yield
        finally:
            self._release(whose)

    def yield_turn(self, whose: Holder) -> None:
        """Give the place to a waiting call, if there is one, and wait for another; the caller must hold a place."""
        if self.has_waiting:
            self._release(whose)
            self._acquire(whose)

    @property
    def has_waiting(self) -> bool:
        """Return whether any call waits for a place."""
        with self._lock:
            return self._shares.has_waiting

    def _acquire(self, whose: Holder) -> None:
        turn: Future[None] = Future()
        with self._lock:
            if self._shares.take(whose):
                return
            self._shares.enqueue(whose, turn)
        turn.result()

    def _release(self, whose: Holder) -> None:
        with self._lock:
            self._shares.give_back(whose)
