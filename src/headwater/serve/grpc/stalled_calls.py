"""Cut-off of gRPC callers that leave an answer unread, checked periodically, so that messages cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from headwater.errors import HeadwaterError, Unavailable

CHECKS = 4  # within the time that a message may wait


class StreamingCall(Protocol):
    """A call with a stream of answers."""

    @property
    def pending(self) -> int | None:
        """Return the number of the message that the caller has not received yet; None if there is none."""

    def cut(self, error: HeadwaterError) -> None:
        """End the call with `error`."""


class StalledCalls:
    """Ends a call whose current message waits for `seconds`, plus at most one check interval. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: dict[StreamingCall, tuple[int | None, float]] = {}  # the message that waited, and since when
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, call: StreamingCall) -> Iterator[None]:
        """Watch a call while the context is open."""
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
        self._timer = asyncio.get_running_loop().call_later(self._seconds / CHECKS, self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        for call, (waited, since) in self._seen.items():
            pending = call.pending
            if pending is None or pending != waited:
                self._seen[call] = pending, now
            elif now - since >= self._seconds:
                call.cut(unread(self._seconds))
        self._later()


def unread(seconds: float) -> Unavailable:
    """Return the error for a caller that does not read."""
    return Unavailable(
        f"an answer was left unread for {seconds:g} s",
        hint="Read faster, or resume from your last position; the limit is serve.stall_seconds.",
    )
