"""Places: how many streams and waiting polls each client has, so that none takes them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import LimitExceeded
from headwater.serve.call import Scope
from headwater.serve.limits.rates import place_of


class Places:
    """At most `most` for each client, who is known by address: of IPv6 by its /64."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: dict[str, int] = {}

    @contextmanager
    def take(self, client: str) -> Iterator[None]:
        """One place, as long as it lasts; LimitExceeded when the client has them all."""
        place = place_of(client)
        taken = self._taken.get(place, 0)
        if taken >= self._most:
            raise LimitExceeded(
                f"{taken} streams and waiting polls are open from {client}, and no more are granted",
                hint="Close one, read several tables by one subscription, or raise serve.max_streams_per_client.",
            )
        self._taken[place] = taken + 1
        try:
            yield
        finally:
            self._taken[place] -= 1
            if not self._taken[place]:
                del self._taken[place]


def client_of(scope: Scope) -> str:
    """The address of who asks."""
    address: str = (scope.get("client") or ("",))[0]
    return address
