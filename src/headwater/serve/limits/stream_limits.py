"""Limit on open streams and waiting polls per client address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import LimitExceeded
from headwater.model.work.usage import Usage
from headwater.serve.call import Scope
from headwater.serve.limits.rates import place_of


class StreamCounts:
    """Counts streams and polls: at most `most` per client, by its address, or by the /64 of an IPv6 address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Usage[str] = Usage()

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """Count a stream or poll while it is open; LimitExceeded if the client has too many."""
        place = place_of(client)
        taken = self._taken[place]
        if taken >= self._most:
            raise LimitExceeded(
                f"{taken} streams and waiting polls are open from {client}, the limit is reached",
                hint="Close one, read several tables by one subscription, or raise serve.max_streams_per_client.",
            )
        with self._taken.held(place):
            yield


def client_of(scope: Scope) -> str:
    """Return the client address of a request."""
    address: str = (scope.get("client") or ("",))[0]
    return address
