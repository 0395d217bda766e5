"""Checks of a database's head, one shared by all concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headwater.database import Database
from headwater.model.work.work_context import shared_context
from headwater.sources.read import SourceHead

CATCH_UP_SECONDS = 0.25  # longest wait of a reader until the log has the commits from before its request

Run = Callable[..., Awaitable[Any]]


class HeadCheck(msgspec.Struct, frozen=True):
    """One check of the database's head for several requests. It starts after the last of them: fresh for all."""

    number: int
    source_head: SourceHead
    is_caught_up: bool  # the log holds every change committed before the check


class HeadChecks:
    """Head checks of one database. Not thread-safe: use it in the event loop."""

    def __init__(
        self,
        database: Database,
        advance: Callable[[], object] = lambda: None,
        is_near: Callable[[], bool] = lambda: True,
    ) -> None:
        self._database = database
        self._advance = advance  # applies new log entries; called in a thread, because there may be many
        self._is_near = is_near  # returns whether `advance` has so few entries to apply that the loop may call it
        self._shared: HeadCheck | None = None  # the check made in this pass of the loop
        self._next: asyncio.Task[HeadCheck] | None = None  # the check that has not started
        self._running: asyncio.Task[HeadCheck] | None = None
        self._advancing: asyncio.Task[object] | None = None
        self._number = 0

    async def check(self) -> HeadCheck:
        """Return the head of the database at a moment after this call."""
        peeked = self.peek()
        if peeked is not None:
            return peeked
        if self._next is None:
            self._next = asyncio.create_task(self._check(), context=shared_context())
        return await asyncio.shield(self._next)

    def peek(self) -> HeadCheck | None:
        """Return the head without a thread; None if the log has to catch up first.

        One check serves a whole pass of the loop: every request handled in this pass had arrived before it.
        """
        if self._shared is None:
            found = self._database.peek_head()
            if found is None or not self._is_near():
                return None
            self._number += 1
            self._shared = HeadCheck(self._number, found, is_caught_up=True)
            asyncio.get_running_loop().call_soon(self._forget)
        return self._shared

    async def catch_up(self, wait: Callable[[], object]) -> None:
        """Run `wait` in a thread, once for all callers; return when it ends, at the latest after CATCH_UP_SECONDS."""
        if self._advancing is None or self._advancing.done():
            self._advancing = asyncio.create_task(asyncio.to_thread(wait))
            # All callers may have timed out before it fails: retrieve the exception so that asyncio does not log it.
            self._advancing.add_done_callback(lambda task: task.cancelled() or task.exception())
        advancing = self._advancing
        await asyncio.wait({advancing}, timeout=CATCH_UP_SECONDS)
        if advancing.done():
            advancing.result()

    def _forget(self) -> None:
        self._shared = None

    async def _check(self) -> HeadCheck:
        if self._running is not None:
            await asyncio.wait({self._running})
        check, self._next = self._next, None  # a request that arrives from now on needs the next check
        self._running = check
        self._number += 1
        try:
            # Not in the threads of queries: slow queries would delay the check.
            return HeadCheck(self._number, *await asyncio.to_thread(self._wait_for_head))
        finally:
            if self._running is check:
                self._running = None

    def _wait_for_head(self) -> tuple[SourceHead, bool]:
        found = self._database.wait_for_head(CATCH_UP_SECONDS)
        self._advance()
        return found
