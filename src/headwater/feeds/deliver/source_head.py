"""Heads: one look at how far a database has come, for all who ask at the same time."""

from __future__ import annotations

import asyncio

from headwater.database import CATCH_UP_SECONDS, Database
from headwater.feeds.deliver.hub import Run
from headwater.model.work.work_context import shared_context


class Heads:
    """In the loop. A thousand readers that come together cost one thread one look, not a thousand."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next: dict[str, asyncio.Task[bool]] = {}  # looks that have not begun
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def caught_up(self, name: str, database: Database) -> bool:
        """Wait, for a moment, until the log holds everything committed before this call; whether it does."""
        look = self._next.get(name)
        if look is None:
            look = self._next[name] = asyncio.create_task(self._look(name, database), context=shared_context())
        return await asyncio.shield(look)

    async def _look(self, name: str, database: Database) -> bool:
        running = self._running.get(name)
        if running is not None:
            await asyncio.wait({running})
        look = self._running[name] = self._next.pop(name)  # who comes from now on needs another
        try:
            return bool(await self._run(database.catch_up, CATCH_UP_SECONDS))
        finally:
            if self._running.get(name) is look:
                del self._running[name]
