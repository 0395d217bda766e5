"""Giving each transaction its hybrid time, once, in order, and never below one that was given before a crash."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headwater.log.log import Log
from headwater.model.change import Transaction
from headwater.model.clock import HybridClock, ts_of_ms, wall_ms

AHEAD_MS = 5_000  # how far the ceiling is promised ahead: one small durable write per this much time


class Stamper:
    """Used by the capture thread only."""

    def __init__(self, log: Log, now_ms: Callable[[], int] = wall_ms) -> None:
        self._log, self._now_ms = log, now_ms
        self._ceiling = log.clock_ceiling
        self._clock = HybridClock(self._ceiling)
        self._last = 0  # the time of the transaction whose parts are being stamped

    def stamp(self, part: Transaction) -> Transaction:
        """`part` with its time; the parts of one transaction share theirs."""
        if part.start == 0:
            self._last = self.tick()
        return msgspec.structs.replace(part, ts=self._last)

    def tick(self) -> int:
        """A time above all given out before, below all that come, also after a crash."""
        ts = self._clock.tick(self._now_ms())
        if ts > self._ceiling:
            ceiling = ts + ts_of_ms(AHEAD_MS)
            self._log.raise_ceiling(ceiling)
            self._ceiling = ceiling
        return ts
