"""Retention of a live log: its horizon, the leases that hold it back, and how close readers are to being evicted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from headwater.errors import OffsetExpired
from headwater.log.disk.retention import EvictionProgress, RetentionLimits
from headwater.log.live.head import Head
from headwater.log.log import Log, Retention

MEASURE_SECONDS = 1.0  # between two measurements of the blocks
MEASURE_SHARE = 20  # a measurement may take one part in so many of the time
_UNLIMITED = RetentionLimits(Retention(), ())


class Lease(msgspec.Struct, frozen=True):
    """Everything after `offset` stays until `until_ms`, unless that costs more than `max_bytes`."""

    offset: int
    until_ms: int
    max_bytes: int


class LiveRetention:
    """Decides how far the log `wrapped` is trimmed. `moving` is the lock of flushes, taken before `head.changed`."""

    def __init__(
        self,
        wrapped: Log,
        head: Head,
        moving: threading.RLock,
        *,
        changes: int | None,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._wrapped, self._head, self._moving = wrapped, head, moving
        self._changes = changes  # the horizon follows it at once; space follows in steps
        self._clock, self._now_ms = clock, now_ms
        self._leases: dict[str, Lease] = {}  # by name; guarded by head.changed
        self._kept, self._measure_at = _UNLIMITED, 0.0

    @property
    def horizon(self) -> int:
        """Return the first offset still retained; it follows the limit by count at once, but not past a lease."""
        kept = self._wrapped.horizon
        if self._changes is None:
            return kept
        due = self._head.latest - self._changes + 1
        if self._leases:
            with self._head.changed:
                due = min(due, self._floor() or due)
        return max(kept, due)

    def check_kept(self, after: int) -> None:
        """Raise OffsetExpired if the change that follows `after` was evicted."""
        horizon = self.horizon
        if after + 1 < horizon:
            raise OffsetExpired(after, horizon, self._head.latest)

    def hold(self, name: str, offset: int, *, until_ms: int, max_bytes: int, again: bool = False) -> None:
        """Keep everything after `offset` although retention would drop it; replaces the lease of that name.

        It ends by `release`, at `until_ms`, when more than `max_bytes` are kept for its sake, or with the
        generation. OffsetExpired if some of it is gone; for a lease of an earlier run (`again`), gone from the file.
        """
        with self._moving, self._head.changed:
            if not again or offset + 1 < self._wrapped.horizon:
                self.check_kept(offset)
            self._leases[name] = Lease(offset, until_ms, max_bytes)

    def release(self, name: str) -> None:
        """End a lease; nothing happens if there is none."""
        with self._head.changed:
            self._leases.pop(name, None)

    def held(self, name: str) -> bool:
        """Return whether the lease of that name has not ended."""
        with self._head.changed:
            return name in self._live()

    def release_all(self) -> None:
        """End every lease."""
        with self._head.changed:
            self._leases.clear()

    def _live(self) -> dict[str, Lease]:
        """Remove expired leases, for good even if the clock steps back, and return the others."""
        now = self._now_ms()
        self._leases = {name: lease for name, lease in self._leases.items() if now < lease.until_ms}
        return self._leases

    def _floor(self) -> int | None:
        """Return the first offset that any lease keeps; None without leases."""
        return min((lease.offset + 1 for lease in self._live().values()), default=None)

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None) -> int:
        """Trim one step (see Log.retain), and end leases that keep too many bytes; the caller holds `moving`."""
        with self._head.changed:
            floors = [floor for floor in (hold, self._floor()) if floor is not None]
            leases = dict(self._leases)
        freed = self._wrapped.retain(retention, now_ms=now_ms, hold=min(floors, default=None))
        for name, lease in leases.items():
            if self._wrapped.overdue(lease.offset) > lease.max_bytes:
                self.release(name)
        self._measure(retention)
        return freed

    def _measure(self, retention: Retention) -> None:
        """Read the sizes of the blocks for limits by bytes and age, unless that takes too much of the time."""
        began = self._clock()
        if (retention.bytes is None and retention.age_ms is None) or began < self._measure_at:
            return
        self._kept = RetentionLimits(retention, self._wrapped.blocks())
        self._measure_at = began + max(MEASURE_SECONDS, MEASURE_SHARE * (self._clock() - began))

    def spent(self, cursor: int) -> EvictionProgress:
        """Return how close a reader at `cursor` is to being evicted by bytes and age."""
        return self._kept.spent(cursor, now_ms=self._now_ms())

    @property
    def forgets_by_time(self) -> bool:
        """Return whether a limit by bytes or age applies: time alone, or large rows, can evict a reader."""
        return self._kept is not _UNLIMITED
