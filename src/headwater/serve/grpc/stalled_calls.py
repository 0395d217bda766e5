"""Stalls: callers that leave an answer unread are let go. Looked at now and then: a message costs nothing for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from headwater.errors import HeadwaterError, Unavailable

LOOKS = 4  # in the time that a message may wait


class Pouring(Protocol):
    """A call with many answers."""

    @property
    def pending(self) -> int | None:
        """Which message its caller has not taken yet; None where it waits for none."""
        ...

    def cut(self, error: HeadwaterError) -> None:
        """End it."""
        ...


class Stalls:
    """Ends a call of which the same message waits for `seconds`, or a look longer. In one loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: dict[Pouring, tuple[int | None, float]] = {}  # the message that waited, and since when
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, call: Pouring) -> Iterator[None]:
        """As long as it lasts."""
        self._seen[call] = None, 0.0
        if self._timer is None:
            self._later()
        try:
            yield
        finally:
            del self._seen[call]
            if not self._seen and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / LOOKS, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for call, (waited, since) in self._seen.items():
            pending = call.pending
            if pending is None or pending != waited:
                self._seen[call] = pending, now
            elif now - since >= self._seconds:
                call.cut(unread(self._seconds))
        self._later()


def unread(seconds: float) -> Unavailable:
    """For a caller that does not read."""
    return Unavailable(
        f"an answer was left unread for {seconds:g} s",
        hint="Take the answers faster, or resume where you stopped; serve.stall_seconds is the limit.",
    )
