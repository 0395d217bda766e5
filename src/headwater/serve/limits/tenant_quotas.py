"""Tenants: what each database takes of the server in requests and streams, and no more than its quota."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from headwater.config import QuotasConfig
from headwater.errors import LimitExceeded
from headwater.serve.limits.rates import Buckets, too_often

Quota = Callable[[str], QuotasConfig | None]


@runtime_checkable
class Limited(Protocol):
    """Databases that may take so much and no more."""

    def quota(self, name: str) -> QuotasConfig | None:
        """What the database `name` may take; None if there is none of that name."""
        ...


class Tenant:
    """One database, and what it takes now."""

    __slots__ = ("_bucket", "_most", "_name", "refused_requests", "refused_streams", "requests", "streams")

    def __init__(self, name: str, quota: QuotasConfig) -> None:
        self._name, self._most = name, quota.max_streams
        self._bucket = None if quota.rate is None else Buckets(quota.rate, quota.burst)
        self.requests = self.streams = self.refused_requests = self.refused_streams = 0

    def enter(self) -> None:
        """One request more."""
        if self._bucket is not None and (wait := self._bucket.take(self._name)):
            self.refused_requests += 1
            hint = f"The limit is that of all who use {self._name!r}: ask less often, or raise its rate."
            raise too_often(f"for the database {self._name!r}", self._bucket.rate, wait, hint)
        self.requests += 1

    @contextmanager
    def stay(self) -> Iterator[None]:
        """One stream or waiting poll more, as long as it lasts."""
        if self._most is not None and self.streams >= self._most:
            self.refused_streams += 1
            raise LimitExceeded(
                f"{self.streams} streams and waiting polls of {self._name!r} are open, and no more are granted",
                hint="Close one, read several tables by one subscription, or raise its max_streams.",
            )
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


class Tenants:
    """Every database that was asked for. In one loop."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._known: dict[str, Tenant] = {}

    def get(self, name: str) -> Tenant | None:
        """The database `name`; None if there is none: nothing is kept of names that anybody may think of."""
        found = self._known.get(name)
        if found is None and (quota := self._quota(name)) is not None:
            found = self._known[name] = Tenant(name, quota)
        return found

    def all(self) -> dict[str, Tenant]:
        """By name; those that were dropped are left out."""
        return {name: one for name, one in list(self._known.items()) if self._quota(name) is not None}
