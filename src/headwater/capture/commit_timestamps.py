"""Hybrid timestamps of transactions: in commit order, and never below one assigned before a crash."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headwater.log.log import Log
from headwater.model.change import Transaction
from headwater.model.clock import ts_of_ms, wall_ms

AHEAD_MS = 5_000  # how far the durable ceiling is raised ahead: one small write per this much time


class Stamper:
    """Assigns timestamps. Use it in the capture thread only."""

    def __init__(self, log: Log, now_ms: Callable[[], int] = wall_ms) -> None:
        self._log, self._now_ms = log, now_ms
        self._ceiling = self._newest = log.clock_ceiling
        self._last = 0  # timestamp of the current transaction, for its further parts

    def stamp(self, part: Transaction) -> Transaction:
        """Return `part` with its timestamp; all parts of one transaction have the same."""
        if part.start == 0:
            self._last = self.tick()
        return msgspec.structs.replace(part, ts=self._last)

    def tick(self) -> int:
        """Return a timestamp above all earlier ones and below all later ones, also after a crash.

        The timestamp is the current time, or one above the newest timestamp if the wall clock is behind.
        """
        ts = self._newest = max(self._newest + 1, ts_of_ms(self._now_ms()))
        if ts > self._ceiling:
            ceiling = ts + ts_of_ms(AHEAD_MS)
            self._log.raise_ceiling(ceiling)
            self._ceiling = ceiling
        return ts
