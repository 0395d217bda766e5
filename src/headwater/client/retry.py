"""When to try again: full jitter between tries, and an end after a time without progress."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from headwater.errors import HeadwaterError

FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0


class Patience:
    """Counts failures since the last progress. One for each thing that is tried again."""

    def __init__(self, seconds: float, jitter: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._jitter, self._clock = seconds, jitter, clock
        self._failures = 0
        self._until = 0.0

    def progress(self) -> None:
        """Something came: begin to count anew."""
        self._failures = 0

    def wait(self, error: HeadwaterError) -> float:
        """Seconds to wait before the next try; raises `error` when it has been tried for long enough."""
        now = self._clock()
        if not self._failures:
            self._until = now + self._seconds
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures, 16))
        # Full jitter: clients that were cut off together do not come back together.
        seconds = max(self._jitter.uniform(0, longest), float(error.extra.get("retry_after", 0)))
        self._failures += 1
        if now + seconds >= self._until:
            raise error
        return seconds
