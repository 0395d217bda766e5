"""Retries: exponential backoff with full jitter, up to a time without progress."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from headwater.errors import HeadwaterError

FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0


class Backoff:
    """Failures since the last progress, of one call or transfer."""

    def __init__(self, seconds: float, jitter: random.Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._jitter, self._clock = seconds, jitter, clock
        self._failures = 0
        self._until = 0.0

    def progress(self) -> None:
        """Reset the count: data was received."""
        self._failures = 0

    def wait(self, error: HeadwaterError) -> float:
        """Return the seconds to wait before the next try; raise `error` when the time is over."""
        now = self._clock()
        if not self._failures:
            self._until = now + self._seconds
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures, 16))
        # Full jitter: clients that were disconnected together do not reconnect together.
        seconds = max(self._jitter.uniform(0, longest), float(error.extra.get("retry_after", 0)))
        self._failures += 1
        if now + seconds >= self._until:
            raise error
        return seconds
