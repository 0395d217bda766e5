"""Open streams and polls by credential, so that they end when their credential is revoked or expires."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.errors import Unauthorized
from headwater.model.principal import Principal

ENDED = "the credential was revoked, or has expired"
End = Callable[[], object]


class Sessions:
    """Open streams by their reader's credential; `holds` returns whether a credential is unrevoked. Not thread-safe."""

    def __init__(self, holds: Callable[[Principal], bool] = lambda who: True) -> None:
        self._holds = holds
        self._open: dict[str, set[End]] = {}

    @contextmanager
    def during(self, who: Principal, end: End) -> Iterator[None]:
        """Call `end` if the credential expires or is revoked within this context, or was revoked before it."""
        timer: asyncio.TimerHandle | None = None
        if who.until is not None:
            left = who.until / 1000 - time.time()
            timer = asyncio.get_running_loop().call_later(max(left, 0), end)
        if who.credential:
            self._open.setdefault(who.credential, set()).add(end)
            if not self._holds(who):  # revoked after the caller was admitted and before the stream was registered
                end()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if who.credential:
                mine = self._open.get(who.credential, set())
                mine.discard(end)
                if not mine:
                    self._open.pop(who.credential, None)

    @contextmanager
    def cancelling(
        self, who: Principal, on_end: End = lambda: None, has_response: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Call `on_end` and cancel the task when the credential ends; raise Unauthorized if no response has begun."""
        task = asyncio.current_task()
        assert task is not None
        has_ended = False

        def cancel() -> None:
            nonlocal has_ended
            has_ended = True
            on_end()
            task.cancel()

        try:
            with self.during(who, cancel):
                yield
        except asyncio.CancelledError:
            if not has_ended or has_response():  # the server stops, or the reader notices the missing end
                raise
            if task.uncancel():  # the server stops at the same moment
                raise
            raise Unauthorized(ENDED) from None

    def revoke(self, credential: str) -> int:
        """End the open streams of this credential; return their number."""
        ends = list(self._open.get(credential, ()))
        for end in ends:
            end()
        return len(ends)
