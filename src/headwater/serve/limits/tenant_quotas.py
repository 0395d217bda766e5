"""Quotas per database: request rate and open streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.config import QuotasConfig
from headwater.errors import LimitExceeded
from headwater.serve.limits.rates import Buckets, too_often

Quota = Callable[[str], QuotasConfig | None]  # of the database with this name; None if there is none


class Tenant:
    """The request and stream counters of one database."""

    __slots__ = ("_bucket", "_most", "_name", "refused_requests", "refused_streams", "requests", "streams")

    def __init__(self, name: str, quota: QuotasConfig) -> None:
        self._name, self._most = name, quota.max_streams
        self._bucket = None if quota.rate is None else Buckets(quota.rate, quota.burst)
        self.requests = self.streams = self.refused_requests = self.refused_streams = 0

    def enter(self) -> None:
        """Count a request; LimitExceeded if the rate of the database is exceeded."""
        if self._bucket is not None and (wait := self._bucket.take(self._name)):
            self.refused_requests += 1
            hint = f"All callers of {self._name!r} share this limit: send requests less often, or raise its rate."
            raise too_often(f"for the database {self._name!r}", self._bucket.rate, wait, hint)
        self.requests += 1

    @contextmanager
    def count_stream(self) -> Iterator[None]:
        """Count a stream or waiting poll while it is open; LimitExceeded if there are too many."""
        if self._most is not None and self.streams >= self._most:
            self.refused_streams += 1
            raise LimitExceeded(
                f"{self.streams} streams and waiting polls of {self._name!r} are open, the limit is reached",
                hint="Close one, read several tables by one subscription, or raise the quota max_streams.",
            )
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


class Tenants:
    """The counters of every requested database. Not thread-safe."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._known: dict[str, Tenant] = {}

    def get(self, name: str) -> Tenant | None:
        """Return the counters of `name`; None, and nothing stored, for a database that does not exist."""
        found = self._known.get(name)
        if found is None and (quota := self._quota(name)) is not None:
            found = self._known[name] = Tenant(name, quota)
        return found

    def all(self) -> dict[str, Tenant]:
        """Return the counters by database, without dropped databases."""
        return {name: one for name, one in list(self._known.items()) if self._quota(name) is not None}
