"""Sessions: what is open in somebody's name, so that it ends when the name does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.model.principal import Principal

End = Callable[[], object]


class Sessions:
    """Streams by the credential of their reader; `holds` tells whether that was not revoked. In one loop."""

    def __init__(self, holds: Callable[[Principal], bool] = lambda who: True) -> None:
        self._holds = holds
        self._open: dict[str, set[End]] = {}

    @contextmanager
    def during(self, who: Principal, end: End) -> Iterator[None]:
        """`end` is called if the credential expires or is revoked meanwhile, or was before."""
        timer: asyncio.TimerHandle | None = None
        if who.until is not None:
            left = who.until / 1000 - time.time()
            timer = asyncio.get_running_loop().call_later(max(left, 0), end)
        if who.credential:
            self._open.setdefault(who.credential, set()).add(end)
            if not self._holds(who):  # revoked after its holder came in, and before there was anything to end
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

    def revoke(self, credential: str) -> int:
        """End what is open; how many that were."""
        ends = list(self._open.get(credential, ()))
        for end in ends:
            end()
        return len(ends)
