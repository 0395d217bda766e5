"""Versions: how far the log was looked at on behalf of queries, and what of it mattered to which.

Nothing here runs by itself: whoever asks advances first. Instances that are watched know the last change that
mattered to them; for all others a sketch of bounded size, or a look into the log, tells whether one can have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from headwater.errors import OffsetExpired
from headwater.log.log import Log
from headwater.model.try_lock import try_lock
from headwater.queries.dependencies.bound_dependencies import Bound
from headwater.queries.dependencies.change_sketch import Sketch
from headwater.queries.dependencies.guarded_instances import Guarded
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_router import Router
from headwater.sources.query import Queryable

MAX_SCAN = 10_000  # changes that are looked at for one question; beyond that an answer costs less
MAX_BEHIND = 100  # changes that the loop itself may take in, or scan; fewer where many instances are watched
LEAST_BEHIND = 8
ROUTED_AT_ONCE = 50_000  # changes times watched instances that the loop may take in


class Watched:
    """An instance whose last relevant change is known, if it came after `since`.

    `steady` is where the last change stands that may have changed the answer. Of what mattered behind it, guards told
    that the answer stayed: each change was asked about in order, of guards recorded before it, whose own rows nothing
    had touched. So the answer is one and the same at every offset from `steady` on, and a tag is good from there.
    """

    __slots__ = ("bound", "last", "since", "steady")

    def __init__(self, bound: Bound, last: int, since: int) -> None:
        self.bound, self.last, self.since, self.steady = bound, last, since, last

    def matters(self, offset: int) -> None:
        """What stands at `offset` mattered, and for all we know the answer is another."""
        self.last = self.steady = offset


class Versions:
    """Of one database. From any thread."""

    def __init__(self, source: Queryable, log: Log) -> None:
        self._source, self._log = source, log
        self._lock = threading.RLock()  # guards what follows
        self.looked_at = 0  # changes that were routed
        self.seconds = 0.0  # it took
        self.guarded = Guarded()
        self.allowed = 0  # tags that are current only by guards
        self._leaving: deque[Hashable] = deque()  # forgotten while another thread had the lock
        self._begin()

    def _begin(self) -> None:
        self._generation, self._applied = self._log.generation, self._log.latest
        self._router: Router = Router(self._source)
        self._sketch = Sketch(self._applied)
        self._watched: dict[Hashable, Watched] = {}
        self._leaving.clear()
        self.guarded.clear()

    def advance(self) -> int:
        """Look at all that is in the log by now; the offset that was reached."""
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
        """Wait for the lock, then advance. Blocks: not in the loop."""
        with self._lock:
            self.advance()

    @property
    def is_near(self) -> bool:
        """Return whether so little is new in the log that the loop itself may advance."""
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
        """The log was trimmed faster than we looked: everything may have mattered."""
        self._applied = self._log.latest
        self._sketch = Sketch(self._applied)
        self.guarded.clear()
        for watched in self._watched.values():
            watched.since = self._applied
            watched.matters(self._applied)

    def watch(self, key: Hashable, bound: Bound, *, last: int | None = None, since: int | None = None) -> None:
        """Keep track of an instance from now on. `last` mattered to it, and nothing else after `since`."""
        with self._lock:
            self.advance()
            self.forget(key)  # at once, because the lock is held
            start = self._applied if since is None else since
            self._watched[key] = watched = Watched(bound, start if last is None else last, start)
            self._router.add(key, bound)
            if start < self._applied:
                self._recall(watched)

    def _recall(self, watched: Watched) -> None:
        """What mattered between `since` and now, from the log."""
        try:
            for part in self._log.scan(after=watched.since, upto=self._applied):
                for offset, change in enumerate(part.changes, part.first):
                    if watched.bound.matters(change) is not None:
                        watched.matters(offset)
        except OffsetExpired:
            watched.since = self._applied
            watched.matters(self._applied)

    def forget(self, key: Hashable) -> None:
        """Stop tracking an instance. Does not wait: a thread that has the lock may have it for long."""
        self._leaving.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._leave()
            finally:
                self._lock.release()

    def _leave(self) -> None:
        """Remove the instances that were forgotten. The lock is held."""
        while self._leaving:
            key = self._leaving.popleft()
            if self._watched.pop(key, None) is not None:
                self._router.remove(key)
                self.guarded.drop(key)

    def last(self, key: Hashable) -> tuple[int, int] | None:
        """Of a watched instance: the offset of the last change that mattered, and how far was looked."""
        with self._lock:
            self._leave()
            watched = self._watched.get(key)
            return None if watched is None else (watched.last, self._applied)

    def is_current(self, key: Hashable, bound: Bound, offset: int) -> bool:
        """Whether the answer at `offset` is the answer still, as far as was looked; False where that is not known.

        A later offset is current wherever an earlier one is. May scan the log: see `is_known`.
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

    def is_known(self, key: Hashable, bound: Bound, offset: int) -> bool:
        """Return whether `is_current` needs no scan of the log."""
        with self._lock:
            if offset > self._applied or self._applied - offset > MAX_SCAN:
                return True
            watched = self._of(key, bound)
            return (watched is not None and offset >= watched.since) or self._sketch.version(bound) <= offset

    def _of(self, key: Hashable, bound: Bound) -> Watched | None:
        """What is known of an instance, as it is understood: by another analysis other things matter."""
        found = self._watched.get(key)
        return found if found is not None and found.bound is bound else None

    # --- guards ----------------------------------------------------------------------------------------------

    def wants_guards(self, key: Hashable, bound: Bound) -> bool:
        """Whether the next answer of an instance had better bring guards."""
        with self._lock:
            return self._of(key, bound) is not None and not self.guarded.is_whole(key)

    def guard(self, key: Hashable, bound: Bound, state: GuardState, offset: int) -> None:
        """Keep the guards of its answer at `offset`, unless something that they were not asked about came after."""
        with self._lock:
            self.advance()
            watched = self._of(key, bound)
            if state and watched is not None and watched.last <= offset:
                self.guarded.put(key, state, offset)

    def is_guarded(self, key: Hashable) -> bool:
        """Whether `steady` may say more of an instance than its last relevant change. Without waiting."""
        watched = self._watched.get(key)
        return watched is not None and (key in self.guarded or watched.steady < watched.last)

    def steady(self, key: Hashable, bound: Bound, upto: int) -> int | None:
        """An offset from which on the answer stayed the same until `upto` or later; None where none is known, or too
        much would have to be looked at for it."""
        with self._lock:
            if self._applied < upto <= self._applied + MAX_SCAN:
                self.advance()
            watched = self._of(key, bound)
            if watched is None or self._applied < upto:
                return None
            return max(watched.steady, watched.since)

    @property
    def behind(self) -> int:
        """How many changes were not looked at yet."""
        return self._log.latest - self._applied

    @property
    def watching(self) -> int:
        """How many instances are watched."""
        return len(self._watched)
