"""Limits on open connections, in total and per client address."""

from __future__ import annotations

import resource

from headwater.errors import LimitExceeded
from headwater.model.work.usage import Usage
from headwater.serve.limits.rates import place_of

RESERVE = 64  # connections above each limit that may still request the health routes
HEALTH = ("/healthz", "/readyz")
OVER_LIMIT_SECONDS = 2  # time in which a connection over the limit must request the health routes
MIN_SPARE_FILES = 200  # file descriptors reserved for databases, the log and their threads
_FILES = "the limit of open files (ulimit -n, LimitNOFILE=), which lowers serve.max_connections here"
_OPEN_FILES = (1 << 16, 10_240)  # values to try if there is no hard limit: macOS grants less than it reports


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard,) if hard != resource.RLIM_INFINITY else _OPEN_FILES:
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return wanted
    return _OPEN_FILES[0] if soft == resource.RLIM_INFINITY else soft


def spare_files(files: int) -> int:
    """Return how many of `files` file descriptors connections may not use."""
    return max(files // 5, MIN_SPARE_FILES)


def connections_for(files: int, *, ports: int) -> int:
    """Return how many connections each of `ports` ports may have if the process may open `files` files."""
    return max((files - spare_files(files)) // ports - RESERVE, files // (4 * ports), 1)


class ConnectionLimits:
    """Counts connections: at most `most` in total and `per_client` from one address. Not thread-safe.

    `reserve` more of each may request the health routes.
    """

    def __init__(self, most: int, per_client: int, *, reserve: int = RESERVE) -> None:
        self._most, self._per_client, self._reserve = most, per_client, reserve
        self._from: Usage[str] = Usage()
        self.is_lowered = False  # whether the limit of open files set `most`
        self.refused = 0

    @property
    def open(self) -> int:
        """Return the number of open connections."""
        return self._from.total

    def enter(self, address: str) -> LimitExceeded | None:
        """Count a new connection; return an error if it is over a limit, and may request the health routes only."""
        here = self.add(address)
        if here <= self._per_client and self.open <= self._most:
            return None
        self.refused += 1
        if here > self._per_client:
            what, setting = (
                f"{self._per_client} connections are open from {address}",
                "serve.max_connections_per_client",
            )
        else:
            what = f"{self._most} connections are open"
            setting = _FILES if self.is_lowered else "serve.max_connections"
        return LimitExceeded(f"{what}, the limit is reached", hint=f"Close or reuse connections, or raise {setting}.")

    def add(self, address: str) -> int:
        """Count a new connection without checking the limits; return how many are open from its address."""
        return self._from.add(place_of(address))

    def is_over_limit(self, address: str) -> bool:
        """Return whether a limit is exceeded, so that only health requests are answered."""
        return self._from[place_of(address)] > self._per_client or self.open > self._most

    def is_full(self, address: str) -> bool:
        """Return whether the reserve above a limit is used up too, so that a connection is closed without an answer."""
        here = self._from[place_of(address)]
        return here > self._per_client + self._reserve or self.open > self._most + self._reserve

    def leave(self, address: str) -> None:
        """Uncount a connection that was closed."""
        self._from.remove(place_of(address))
