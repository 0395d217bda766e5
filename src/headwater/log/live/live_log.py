"""The live log: a log plus an in-memory tail, so that changes are read at once and made durable in blocks.

    stage ──> [ kept | staged ]  tail in memory, what live readers read
                  ^       │ flush
                  └───────┴──> wrapped log, durable

Staged transactions are durable at their source under the same offsets: after a crash capture brings them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.log.disk.retention import Kept, Spent
from headwater.log.live.retention_lease import Lease, Leases
from headwater.log.live.staged_tail import Tail
from headwater.log.log import Held, Log, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES, in_order
from headwater.model.change import Transaction
from headwater.model.clock import wall_ms

KEEP_CHANGES = 4096
KEEP_BYTES = 32 << 20
LOOK_SECONDS = 1.0  # between two looks at the blocks
LOOK_SHARE = 20  # such a look may take one part of so many of the time
NOTHING_KEPT = Kept(Retention(), ())

Listener = Callable[[], None]


class LiveLog:
    """See `Log`. `latest` counts staged transactions, `durable` does not.

    One thread stages, appends, unstages and restarts; `flush` may run in another; anybody reads.
    """

    def __init__(
        self,
        wrapped: Log,
        *,
        keep_changes: int = KEEP_CHANGES,
        retention_changes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self.wrapped = wrapped
        self._retention_changes = retention_changes  # the horizon follows it at once; space follows in steps
        self._keep_changes = keep_changes
        self._clock = clock
        self._moving = threading.RLock()  # held while staged ones go to disk; taken before _changed
        self._changed = threading.Condition()  # guards what follows; never held during I/O
        self._tail = Tail()
        self._latest = self._highest = wrapped.latest
        self._ts = _newest_ts(wrapped)
        self._staged_since: float | None = None
        self._is_shut = False
        self._listeners: tuple[Listener, ...] = ()
        self._leases = Leases(now_ms)
        self._now_ms = now_ms
        self._kept, self._look_again_at = NOTHING_KEPT, 0.0
        self._closed = (wrapped.clock_ceiling, self._latest)

    # Staging

    def stage(self, parts: Iterable[Transaction]) -> int:
        """Make whole transactions readable in this process at once; returns the new `latest`."""
        new = list(in_order(parts, after=self._latest, ts=self._ts))
        if not new:
            return self._latest
        with self._changed:
            self._tail.extend(new)
            if self._staged_since is None:
                self._staged_since = self._clock()
            self._reached(new[-1])
        self._tell()
        return self._latest

    def flush(self, *, notes: Mapping[str, str] | None = None) -> int:
        """Append everything staged to the wrapped log in one step; returns the new `durable`."""
        with self._moving:
            began = self._clock()
            staged = self._staged()
            if staged or notes:
                self.wrapped.append(staged, notes=notes)
            with self._changed:
                self._settle(began)
            return self.durable

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """See Log. What is staged goes first, in the same step."""
        with self._moving:
            began = self._clock()
            passed = Tail()
            self.wrapped.append(chain(self._staged(), self._remembered(parts, passed)), notes=notes)
            with self._changed:
                if passed:
                    self._continue_with(passed)
                self._settle(began)
        self._tell()
        return self._latest

    def unstage(self) -> int:
        """Forget what is staged (its continuity with the log is lost); returns how many changes that was."""
        with self._moving, self._changed:
            lost = self.staged_changes
            self._tail.drop_after(self.durable)
            self._latest, self._staged_since = self.durable, None
            return lost

    def _staged(self) -> list[Transaction]:
        with self._changed:
            return self._tail.cut(self.durable, self._latest)

    def _remembered(self, parts: Iterable[Transaction], passed: Tail) -> Iterator[Transaction]:
        """`parts` as they come, the newest of them kept in `passed`."""
        for part in parts:
            yield part
            passed.extend([part])
            self._bound(passed, upto=part.upto)

    def _continue_with(self, passed: Tail) -> None:
        if self._tail and passed.first == self._tail.newest.upto + 1:
            self._tail.extend(passed.cut(passed.first - 1, passed.newest.upto))
        else:
            self._tail = passed
        self._reached(passed.newest)

    def _reached(self, part: Transaction) -> None:
        self._latest, self._ts = part.upto, part.ts
        self._highest = max(self._highest, part.upto)

    def _settle(self, began: float) -> None:
        """After a move: what is left was staged since it `began`, and what is durable need not stay."""
        self._latest = max(self._latest, self.durable)
        self._staged_since = began if self.staged_changes else None
        self._bound(self._tail, upto=self.durable)

    def _bound(self, tail: Tail, *, upto: int) -> None:
        # With some slack: dropping a few at a time would move all the others each time.
        if tail.changes > self._keep_changes * 9 // 8 or tail.weight > KEEP_BYTES:
            tail.forget(upto=upto, changes=self._keep_changes, weight=KEEP_BYTES)

    @property
    def durable(self) -> int:
        """The newest offset in the wrapped log."""
        return self.wrapped.latest

    @property
    def staged_changes(self) -> int:
        """How many changes are readable but not yet in the wrapped log."""
        return max(self._latest - self.durable, 0)

    @property
    def staged_since(self) -> float | None:
        """When the oldest of them was staged, by the clock given, or a little before; None without any."""
        return self._staged_since

    # Being told

    def wait_beyond(self, offset: int, timeout: float | None = None) -> bool:
        """Sleep until `latest` passes `offset`, the log is closed or `timeout` ends; whether it passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest > offset or self._is_shut, timeout)
            return self._latest > offset

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` whenever `latest` moved, in the capture thread: it must not block or raise."""
        with self._changed:
            self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Call it no more."""
        with self._changed:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    @property
    def has_listeners(self) -> bool:
        """Whether anybody is told."""
        return bool(self._listeners)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # Closed time

    @property
    def closed(self) -> tuple[int, int]:
        """A hybrid time and an offset: whatever is read after this offset, now or ever, has a later time.

        A transaction ends at the offset. Moves on, also when idle, while somebody listens.
        """
        return self._closed

    def close_at(self, ts: int) -> None:
        """Promise that everything staged from now on gets a time above `ts`."""
        self._closed = (ts, self._latest)

    # Reading

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        """See Log."""
        self._check_kept(after)
        upto = min(self._latest if upto is None else upto, after + (BLOCK_CHANGES if limit is None else limit))
        found = self._from_tail(after, upto)
        if found is None:
            found = self.wrapped.read(after=after, upto=upto, limit=limit)
            # What was staged when we looked may have been flushed and forgotten since: ask again.
            if found and found[-1].upto < upto:
                found += self._from_tail(found[-1].upto, upto) or []
        return found

    def _from_tail(self, after: int, upto: int) -> list[Transaction] | None:
        """(after, upto] from memory; None when memory begins later."""
        with self._changed:
            if after >= self._latest:
                return []
            held = self._tail and self._tail.first <= after + 1
            return self._tail.cut(after, upto) if held else None

    def recent(self, after: int, upto: int) -> list[Transaction] | None:
        """(after, upto] without any I/O; None when it is not all in memory, and `read` must be asked."""
        return None if after + 1 < self.horizon else self._from_tail(after, upto)

    def scan(self, *, after: int, upto: int | None = None) -> Iterator[Transaction]:
        """See Log."""
        self._check_kept(after)
        return self._pages(after, self._latest if upto is None else min(upto, self._latest))

    def _pages(self, after: int, upto: int) -> Iterator[Transaction]:
        with self._changed:
            in_memory = self._tail.first if self._tail else self._latest + 1
        if after + 1 < in_memory:
            edge = min(upto, in_memory - 1)
            yield from self.wrapped.scan(after=after, upto=edge)
            after = edge
        while after < upto:
            page = self.read(after=after, upto=upto)
            if not page:
                return  # unstaged meanwhile
            yield from page
            after = page[-1].upto

    def _check_kept(self, after: int) -> None:
        horizon = self.horizon
        if after + 1 < horizon:
            raise OffsetExpired(after, horizon, self._latest)

    def offset_at(self, ts: int) -> int:
        """See Log."""
        with self._changed:
            found = self._tail.offset_at(ts)
        return max(self.wrapped.offset_at(ts) if found is None else found, self.horizon - 1)

    def first_whole(self, offset: int) -> int:
        """See Log."""
        offset = max(offset, self.horizon)
        with self._changed:
            if offset > self._latest:
                return self._latest + 1
            if self._tail and self._tail.first <= offset:
                return self._tail.first_whole(offset) or self._latest + 1
        return self.wrapped.first_whole(offset)  # past its own latest begins the first staged transaction

    def reach(self, after: int, *, changes: int, bytes: int) -> int:
        """See Log. Only what is durable counts."""
        return self.wrapped.reach(after, changes=changes, bytes=bytes)

    # Retention and leases

    @property
    def horizon(self) -> int:
        """See Log. Exact for the count at any moment."""
        kept = self.wrapped.horizon
        if self._retention_changes is None:
            return kept
        due = self._latest - self._retention_changes + 1
        if self._leases:
            with self._changed:
                due = min(due, self._leases.floor or due)
        return max(kept, due)

    def hold(self, name: str, offset: int, *, until_ms: int, max_bytes: int, again: bool = False) -> None:
        """Keep everything after `offset` although retention would drop it; replaces the lease of that name.

        It ends by `release`, at `until_ms`, when more than `max_bytes` are kept for its sake, or with the
        generation. OffsetExpired when some of it is gone, with `again` (a lease of an earlier run) from the file.
        """
        with self._moving, self._changed:
            if not again or offset + 1 < self.wrapped.horizon:
                self._check_kept(offset)
            self._leases.put(name, Lease(offset, until_ms, max_bytes))

    def release(self, name: str) -> None:
        """End a lease; nothing happens if there is none."""
        with self._changed:
            self._leases.drop(name)

    def held(self, name: str) -> bool:
        """Whether that lease holds still."""
        with self._changed:
            return name in self._leases.live()

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """See Log. Flushes first: the count is exact for everything readable. Leases hold by themselves."""
        with self._moving:  # no lease comes between the look and the step
            self.flush()
            with self._changed:
                leases = self._leases.live()
                floors = [floor for floor in (hold, self._leases.floor) if floor is not None]
            freed = self.wrapped.retain(retention, now_ms=now_ms, hold=min(floors, default=None))
            for name, lease in leases.items():
                if self.wrapped.overdue(lease.offset) > lease.max_bytes:
                    self.release(name)
            self._look_at_blocks(retention)
            return freed

    def _look_at_blocks(self, retention: Retention) -> None:
        """Look what limits by bytes and age mean now, unless that takes more than a little of the time."""
        began = self._clock()
        if (retention.bytes is None and retention.age_ms is None) or began < self._look_again_at:
            return
        self._kept = Kept(retention, self.wrapped.blocks())
        self._look_again_at = began + max(LOOK_SECONDS, LOOK_SHARE * (self._clock() - began))

    def spent(self, cursor: int) -> Spent:
        """Return how far a reader at `cursor` is on its way to losing its place by bytes and age."""
        return self._kept.spent(cursor, now_ms=self._now_ms())

    @property
    def forgets_by_time(self) -> bool:
        """Whether a reader may lose its place though no change comes, or by the size of those that do."""
        return self._kept is not NOTHING_KEPT

    def blocks(self) -> list[Held]:
        """See Log."""
        return self.wrapped.blocks()

    def overdue(self, after: int) -> int:
        """See Log."""
        return self.wrapped.overdue(after)

    # The rest is the wrapped log's

    @property
    def generation(self) -> str:
        """See Log."""
        return self.wrapped.generation

    @property
    def generation_reason(self) -> str:
        """See Log."""
        return self.wrapped.generation_reason

    @property
    def generation_first(self) -> int:
        """See Log."""
        return self.wrapped.generation_first

    @property
    def latest(self) -> int:
        """See Log."""
        return self._latest

    @property
    def highest(self) -> int:
        """The highest offset anybody could ever read here, unstaged ones included."""
        return self._highest

    @property
    def position(self) -> str:
        """See Log."""
        with self._changed:
            return self._tail.newest.position if self._tail else self.wrapped.position

    @property
    def clock_ceiling(self) -> int:
        """See Log."""
        return max(self.wrapped.clock_ceiling, self._ts)

    def raise_ceiling(self, ts: int) -> None:
        """See Log."""
        self.wrapped.raise_ceiling(ts)

    def note(self, name: str) -> str:
        """See Log."""
        return self.wrapped.note(name)

    def set_notes(self, **notes: str) -> None:
        """See Log."""
        self.wrapped.set_notes(**notes)

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """See Log. Drops what is staged; `first` lies beyond everything that was ever readable."""
        if first <= self._highest:
            raise InvalidRequest(f"a new generation starts after {self._highest}, not at {first}")
        with self._moving:
            name = self.wrapped.restart(first=first, reason=reason, name=name)
            with self._changed:
                self._tail = Tail()
                self._latest = self._highest = first - 1
                self._staged_since = None
                self._leases.clear()
                self._closed = (self._closed[0], first - 1)
        self._tell()
        return name

    def merge(self) -> int:
        """See Log."""
        return self.wrapped.merge()

    def close(self) -> None:
        """See Log. What is staged and not flushed comes again from its source."""
        with self._changed:
            self._is_shut = True
            self._changed.notify_all()
        self.wrapped.close()


def _newest_ts(log: Log) -> int:
    kept = log.horizon <= log.latest
    return log.read(after=log.latest - 1)[-1].ts if kept else 0
