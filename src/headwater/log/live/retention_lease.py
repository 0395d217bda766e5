"""Leases: who may keep old changes a while longer than retention says, each bounded in time and bytes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Lease(msgspec.Struct, frozen=True):
    """Everything after `offset` stays until `until_ms`, unless that costs more than `max_bytes`."""

    offset: int
    until_ms: int
    max_bytes: int


class Leases:
    """The leases of one log by name. Not locked: its owner is."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._leases: dict[str, Lease] = {}

    def __bool__(self) -> bool:
        return bool(self._leases)

    def live(self) -> dict[str, Lease]:
        """Those that have not run out. One that has is gone for good, also when the clock steps back."""
        now = self._now_ms()
        self._leases = {name: lease for name, lease in self._leases.items() if now < lease.until_ms}
        return self._leases

    @property
    def floor(self) -> int | None:
        """The first offset that one of them keeps."""
        return min((lease.offset + 1 for lease in self.live().values()), default=None)

    def put(self, name: str, lease: Lease) -> None:
        """Add a lease, or replace the one of that name."""
        self._leases = {**self._leases, name: lease}

    def drop(self, name: str) -> None:
        """Remove a lease, if there is one."""
        self._leases = {other: lease for other, lease in self._leases.items() if other != name}

    def clear(self) -> None:
        """Remove all."""
        self._leases = {}
