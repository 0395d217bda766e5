"""Rates: how often somebody may ask. A bucket of tokens is one number: the moment at which it is full again."""

from __future__ import annotations

import functools
import ipaddress
import time
from collections.abc import Callable, Hashable

from headwater.errors import LimitExceeded

MOST = 20_000  # buckets that are not full, whose owners asked a moment ago
_ROUNDING = 1e-9  # seconds: who waits exactly as long as told is let in


class Buckets:
    """One bucket for each key: `burst` tokens, refilled by `rate` per second; what is not known is full.

    In one loop, so without a lock. Never more than `most`: full ones are forgotten first, then the oldest.
    """

    def __init__(
        self, rate: float, burst: int, *, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate, self.burst = rate, burst
        self._token = 1 / rate  # seconds
        self._depth = (burst - 1) * self._token
        self._most, self._clock = most, clock
        self._full: dict[Hashable, float] = {}  # when each will be full

    def __len__(self) -> int:
        return len(self._full)

    def take(self, key: Hashable) -> float:
        """Take a token; 0.0, or in how many seconds there will be one, and nothing was taken."""
        now = self._clock()
        full = self._full.get(key)
        if full is None:
            if len(self._full) >= self._most:
                self._forget(now)
            full = now
        elif full < now:
            full = now
        wait = full - now - self._depth
        if wait > _ROUNDING:
            return wait
        self._full[key] = full + self._token
        return 0.0

    def _forget(self, now: float) -> None:
        """Make room, for many at a time: each look at all of them is then paid by many who came."""
        kept = {key: full for key, full in self._full.items() if full > now}
        for key in list(kept)[: max(len(kept) - self._most * 3 // 4, 0)]:
            del kept[key]
        self._full = kept


def too_often(who: str, rate: float, wait: float, hint: str) -> LimitExceeded:
    """What is told to who asks again before `wait` seconds are over."""
    after = max(int(wait * 1000 + 0.999), 1)
    return LimitExceeded(
        f"more than {rate:g} requests per second {who}", hint=f"Wait {after} ms. {hint}", retry_after_ms=after
    )


@functools.lru_cache(maxsize=4096)
def place_of(address: str) -> str:
    """Whom an address belongs to: of IPv6 a whole /64 is one customer's."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((found, 64), strict=False))
