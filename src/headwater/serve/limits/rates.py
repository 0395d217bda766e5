"""Token buckets that limit request rates. A bucket is one number: the time at which it is full again."""

from __future__ import annotations

import functools
import ipaddress
import time
from collections.abc import Callable, Hashable

from headwater.errors import LimitExceeded

MOST = 20_000  # buckets that are not full: owners of the others need no entry
_ROUNDING = 1e-9  # seconds: a caller who waits exactly as long as required is admitted


class Buckets:
    """One bucket per key, with `burst` tokens, refilled by `rate` per second; an unknown key has a full bucket.

    Not thread-safe. Holds at most `most` buckets: full ones are evicted first, then the oldest.
    """

    def __init__(
        self, rate: float, burst: int, *, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate = rate
        self._token = 1 / rate  # seconds
        self._depth = (burst - 1) * self._token
        self._most, self._clock = most, clock
        self._full: dict[Hashable, float] = {}  # when each will be full

    def take(self, key: Hashable) -> float:
        """Take a token and return 0.0; without a token, return the seconds until there is one."""
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
        """Evict many buckets at once, so that the scan over all of them is rare."""
        not_full = {key: full for key, full in self._full.items() if full > now}
        for key in list(not_full)[: max(len(not_full) - self._most * 3 // 4, 0)]:
            del not_full[key]
        self._full = not_full


def too_often(subject: str, rate: float, wait: float, hint: str) -> LimitExceeded:
    """Return the error for a rate exceeded by `subject` ("by 'ann'"), who must wait for `wait` seconds."""
    after = max(int(wait * 1000 + 0.999), 1)
    return LimitExceeded(
        f"more than {rate:g} requests per second {subject}", hint=f"Wait {after} ms. {hint}", retry_after_ms=after
    )


@functools.lru_cache(maxsize=4096)
def place_of(address: str) -> str:
    """Return the network that counts as one client: the /64 of an IPv6 address, any other `address` unchanged."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((found, 64), strict=False))
