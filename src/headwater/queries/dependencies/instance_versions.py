"""The last relevant change of each instance, computed from the log.

Nothing runs in the background: callers advance first. For a watched instance the last relevant change is known
exactly; for any other instance a sketch of bounded size, or a scan of the log, decides whether a tag is current.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from headwater.errors import OffsetExpired
from headwater.log.log import Log
from headwater.model.work.try_lock import try_lock
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.queries.dependencies.change_sketch import Sketch
from headwater.queries.dependencies.guarded_instances import GuardedInstances
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.query import Queryable

MAX_SCAN = 10_000  # changes scanned to check one tag; beyond that executing the query costs less
MAX_BEHIND = 100  # changes that the event loop itself may apply or scan; fewer if many instances are watched
LEAST_BEHIND = 1  # one change can be relevant to all of 50,000 watched instances: about 40 ms
ROUTED_AT_ONCE = 50_000  # changes times watched instances that the event loop may apply


class WatchedInstance:
    """An instance whose last relevant change is known, if its offset is after `since`.

    `steady` is the offset of the last change that may have changed the answer. Guards proved that all later relevant
    changes left the answer unchanged: each change was checked in order, by guards recorded before it, whose own rows
    no change had touched. So the answer is the same at every offset from `steady` on, and tags from there are current.
    """

    __slots__ = ("bound", "last", "since", "steady")

    def __init__(self, bound: BoundDependencies, last: int, since: int) -> None:
        self.bound, self.last, self.since, self.steady = bound, last, since, last

    def matters(self, offset: int) -> None:
        """Record a relevant change at `offset` that may have changed the answer."""
        self.last = self.steady = offset


class InstanceVersions:
    """The instance versions of one database. Thread-safe."""

    def __init__(self, source: Queryable, log: Log) -> None:
        self._source, self._log = source, log
        self._lock = threading.RLock()  # guards all fields below
        self.looked_at = 0  # routed changes
        self.seconds = 0.0  # time spent routing
        self.guarded = GuardedInstances()
        self.allowed = 0  # tags that are current only because of guards
        self._leaving: deque[Hashable] = deque()  # keys to remove as soon as the lock is free
        self._begin()

    def _begin(self) -> None:
        self._generation, self._applied = self._log.generation, self._log.latest
        self._router: Router = Router(self._source)
        self._sketch = Sketch(self._applied)
        self._watched: dict[Hashable, WatchedInstance] = {}
        self._leaving.clear()
        self.guarded.clear()

    def advance(self) -> int:
        """Apply the log up to its end and return that offset."""
        if self._log.latest == self._applied and self._log.generation == self._generation:
            return self._applied
        with self._lock:
            if self._log.generation != self._generation:
                self._begin()
            started = time.perf_counter()
            try:
                self._apply(self._log.latest)
            except OffsetExpired:
                self._restart()
            self.seconds += time.perf_counter() - started
            return self._applied

    def catch_up(self) -> None:
        """Wait for the lock, then advance. Blocks: do not call it in the event loop."""
        with self._lock:
            self.advance()

    @property
    def is_near(self) -> bool:
        """Return whether the backlog is so small that the event loop itself may advance."""
        return self.behind <= max(LEAST_BEHIND, min(MAX_BEHIND, ROUTED_AT_ONCE // (len(self._watched) + 1)))

    @contextmanager
    def try_hold(self) -> Iterator[bool]:
        """Take the lock without waiting; yield whether it was free and `is_near` holds.

        Inside, the methods of this class do not block the loop.
        """
        with try_lock(self._lock) as is_held:
            yield is_held and self.is_near

    def _apply(self, upto: int) -> None:
        self._leave()
        self.guarded.begin()
        for part in self._log.scan(after=self._applied, upto=upto) if upto > self._applied else ():
            for offset, change in enumerate(part.changes, part.first):
                for key, place in self._router.route(change):
                    watched = self._watched[key]
                    if key in self.guarded and self.guarded.suppresses(key, offset, change, place):
                        watched.last = offset
                    else:
                        watched.matters(offset)
                self._sketch.apply(offset, change)
            self._applied = part.upto
            self.looked_at += len(part.changes)

    def _restart(self) -> None:
        """Start again at the end of the log, which was trimmed past our offset: any change may have been relevant."""
        self._applied = self._log.latest
        self._sketch = Sketch(self._applied)
        self.guarded.clear()
        for watched in self._watched.values():
            watched.since = self._applied
            watched.matters(self._applied)

    def watch(
        self, key: Hashable, bound: BoundDependencies, *, last: int | None = None, since: int | None = None
    ) -> None:
        """Track an instance. The caller knows that after `since` no change but that at `last` was relevant to it."""
        with self._lock:
            self.advance()
            self.forget(key)  # takes effect immediately, because this thread holds the lock
            start = self._applied if since is None else since
            self._watched[key] = watched = WatchedInstance(bound, start if last is None else last, start)
            self._router.add(key, bound)
            if start < self._applied:
                self._recall(watched)

    def _recall(self, watched: WatchedInstance) -> None:
        """Scan the log after `since` for relevant changes."""
        try:
            for part in self._log.scan(after=watched.since, upto=self._applied):
                for offset, change in enumerate(part.changes, part.first):
                    if watched.bound.matters(change) is not None:
                        watched.matters(offset)
        except OffsetExpired:
            watched.since = self._applied
            watched.matters(self._applied)

    def forget(self, key: Hashable) -> None:
        """Stop tracking an instance. Does not wait for the lock, which a thread may hold for long."""
        self._leaving.append(key)
        with try_lock(self._lock) as is_held:
            if is_held:
                self._leave()

    def _leave(self) -> None:
        """Remove the instances in `_leaving`. The caller holds the lock."""
        while self._leaving:
            key = self._leaving.popleft()
            if self._watched.pop(key, None) is not None:
                self._router.remove(key)
                self.guarded.drop(key)

    def last(self, key: Hashable) -> tuple[int, int] | None:
        """Return the last relevant change of an instance, and the offset applied so far; None if it is not watched."""
        with self._lock:
            self._leave()
            watched = self._watched.get(key)
            return None if watched is None else (watched.last, self._applied)

    def is_current(self, key: Hashable, bound: BoundDependencies, offset: int) -> bool:
        """Return whether the answer at `offset` is current at the applied offset; False if that is not known.

        If an offset is current, every later one is. May scan the log: see `is_known`.
        """
        with self._lock:
            if offset > self._applied:
                return False
            watched = self._of(key, bound)
            if watched is not None and offset >= watched.since:
                self.allowed += watched.steady <= offset < watched.last
                return watched.steady <= offset
            if self._sketch.version(bound) <= offset:
                return True
            applied = self._applied
        if applied - offset > MAX_SCAN:
            return False
        try:
            parts = self._log.scan(after=offset, upto=applied) if offset < applied else ()
            return all(bound.matters(change) is None for part in parts for change in part.changes)
        except OffsetExpired:
            return False

    def is_known(self, key: Hashable, bound: BoundDependencies, offset: int) -> bool:
        """Return whether `is_current` needs no scan of the log."""
        with self._lock:
            if offset > self._applied or self._applied - offset > MAX_SCAN:
                return True
            watched = self._of(key, bound)
            return (watched is not None and offset >= watched.since) or self._sketch.version(bound) <= offset

    def _of(self, key: Hashable, bound: BoundDependencies) -> WatchedInstance | None:
        """Return the watched instance, if it has this analysis: with another one other changes are relevant."""
        found = self._watched.get(key)
        return found if found is not None and found.bound is bound else None

    # --- guards ----------------------------------------------------------------------------------------------

    def wants_guards(self, key: Hashable, bound: BoundDependencies) -> bool:
        """Return whether the next answer of an instance should record guards."""
        with self._lock:
            return self._of(key, bound) is not None and not self.guarded.is_whole(key)

    def guard(self, key: Hashable, bound: BoundDependencies, state: GuardState, offset: int) -> None:
        """Store the guards of the answer at `offset`, unless a later relevant change was applied without them."""
        with self._lock:
            self.advance()
            watched = self._of(key, bound)
            if state and watched is not None and watched.last <= offset:
                self.guarded.put(key, state, offset)

    def is_guarded(self, key: Hashable) -> bool:
        """Return whether `steady` may be before the last relevant change of an instance. Does not wait."""
        watched = self._watched.get(key)
        return watched is not None and (key in self.guarded or watched.steady < watched.last)

    def steady(self, key: Hashable, bound: BoundDependencies, upto: int) -> int | None:
        """Return an offset from which the answer is unchanged until `upto` or later.

        None if no such offset is known, or if finding it takes applying more than MAX_SCAN changes.
        """
        with self._lock:
            if self._applied < upto <= self._applied + MAX_SCAN:
                self.advance()
            watched = self._of(key, bound)
            if watched is None or self._applied < upto:
                return None
            return max(watched.steady, watched.since)

    @property
    def behind(self) -> int:
        """Return the number of changes in the log that are not applied."""
        return self._log.latest - self._applied

    @property
    def watching(self) -> int:
        """Return the number of watched instances."""
        return len(self._watched)
