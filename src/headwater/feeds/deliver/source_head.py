"""Checks whether the log has caught up with its database, shared by concurrent callers."""

from __future__ import annotations

import asyncio

from headwater.database import CATCH_UP_SECONDS, Database
from headwater.feeds.deliver.hub import Run
from headwater.model.work.work_context import shared_context


class SharedHeadCheck:
    """Shares one check among all readers that wait for it: a thousand readers cost one call. Use it in the loop."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next: dict[str, asyncio.Task[bool]] = {}  # checks that have not begun
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def caught_up(self, name: str, database: Database) -> bool:
        """Wait briefly until the log holds every commit before this call; return whether it does."""
        check = self._next.get(name)
        if check is None:
            check = self._next[name] = asyncio.create_task(self._check(name, database), context=shared_context())
        return await asyncio.shield(check)

    async def _check(self, name: str, database: Database) -> bool:
        running = self._running.get(name)
        if running is not None:
            await asyncio.wait({running})
        check = self._running[name] = self._next.pop(name)  # a caller from now on needs a new check
        try:
            return bool(await self._run(database.catch_up, CATCH_UP_SECONDS))
        finally:
            if self._running.get(name) is check:
                del self._running[name]
