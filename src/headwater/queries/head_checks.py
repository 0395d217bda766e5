"""Looks: where a database stands, asked once for all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headwater.database import Database
from headwater.model.work.work_context import shared_context
from headwater.sources.read import Look

CATCH_UP_SECONDS = 0.25  # longest a reader waits for what was committed before it asked

Run = Callable[..., Awaitable[Any]]


class Seen(msgspec.Struct, frozen=True):
    """A look that began after all who share it had asked."""

    number: int
    look: Look
    is_caught_up: bool  # the log holds everything that was committed then


class Looks:
    """Of one database, in the loop."""

    def __init__(
        self,
        database: Database,
        advance: Callable[[], object] = lambda: None,
        is_near: Callable[[], bool] = lambda: True,
    ) -> None:
        self._database = database
        self._advance = advance  # takes in what is new in the log: in the thread, for it may be much
        self._is_near = is_near  # whether `advance` has so little before it that the loop may call it
        self._shared: Seen | None = None  # of this pass of the loop
        self._next: asyncio.Task[Seen] | None = None  # has not begun
        self._running: asyncio.Task[Seen] | None = None
        self._advancing: asyncio.Task[object] | None = None
        self._number = 0

    async def look(self) -> Seen:
        """Where the database stands, at a moment after this call."""
        glanced = self.glance()
        if glanced is not None:
            return glanced
        if self._next is None:
            self._next = asyncio.create_task(self._look(), context=shared_context())
        return await asyncio.shield(self._next)

    def glance(self) -> Seen | None:
        """Without a thread, where the log is up to date anyway. One is enough for a pass of the loop: whoever comes
        to it in this pass had asked before."""
        if self._shared is None:
            found = self._database.glance()
            if found is None or not self._is_near():
                return None
            self._number += 1
            self._shared = Seen(self._number, found, is_caught_up=True)
            asyncio.get_running_loop().call_soon(self._forget)
        return self._shared

    async def catch_up(self, wait: Callable[[], object]) -> None:
        """Run `wait` in a thread, once for all callers. Returns after CATCH_UP_SECONDS in any case."""
        if self._advancing is None or self._advancing.done():
            self._advancing = asyncio.create_task(asyncio.to_thread(wait))
            self._advancing.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may be nobody's
        advancing = self._advancing
        await asyncio.wait({advancing}, timeout=CATCH_UP_SECONDS)
        if advancing.done():
            advancing.result()

    def _forget(self) -> None:
        self._shared = None

    async def _look(self) -> Seen:
        if self._running is not None:
            await asyncio.wait({self._running})
        look, self._next = self._next, None  # who comes from now on needs another
        self._running = look
        self._number += 1
        try:
            return Seen(self._number, *await asyncio.to_thread(self._see))  # not where queries run: they may be slow
        finally:
            if self._running is look:
                self._running = None

    def _see(self) -> tuple[Look, bool]:
        found = self._database.look(CATCH_UP_SECONDS)
        self._advance()
        return found
