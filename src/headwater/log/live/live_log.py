"""The live log: a log plus an in-memory tail, so that changes are read at once and made durable in blocks.

    stage ──> [ kept | staged ]  tail in memory, for live readers
                  ^       │ flush
                  └───────┴──> wrapped log, durable

Staged transactions are durable at their source under the same offsets: after a crash capture reads them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from headwater.errors import InvalidRequest
from headwater.log.live.head import Head
from headwater.log.live.live_retention import LiveRetention
from headwater.log.live.staged_tail import Tail
from headwater.log.log import Log, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES, in_order
from headwater.model.change import Transaction
from headwater.model.clock import wall_ms

KEEP_CHANGES = 4096
KEEP_BYTES = 32 << 20


class LiveLog:
    """A `Log`, which documents the methods, with a tail in memory: `latest` counts staged transactions, `durable` not.

    One thread stages, appends, unstages and restarts; `flush` may run in another; any thread reads.
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
        self._keep_changes, self._clock = keep_changes, clock
        self._moving = threading.RLock()  # held while staged transactions go to disk; taken before the head's
        ts = wrapped.read(after=wrapped.latest - 1)[-1].ts if wrapped.horizon <= wrapped.latest else 0
        self._head = head = Head(wrapped.latest, ts=ts, closed_ts=wrapped.clock_ceiling)
        self._changed = head.changed
        self._retention = kept = LiveRetention(
            wrapped, head, self._moving, changes=retention_changes, clock=clock, now_ms=now_ms
        )
        self._tail = Tail()
        # Time of the oldest staged change by `clock`, or a little before; None without any.
        self.staged_since: float | None = None
        self.wait_beyond, self.close_at = head.wait_beyond, head.close_at
        self.add_listener, self.remove_listener = head.add_listener, head.remove_listener
        self.hold, self.release, self.held, self.spent = kept.hold, kept.release, kept.held, kept.spent
        self.note, self.set_notes, self.raise_ceiling = wrapped.note, wrapped.set_notes, wrapped.raise_ceiling
        self.blocks, self.overdue, self.merge = wrapped.blocks, wrapped.overdue, wrapped.merge
        self.reach, self.last_of = wrapped.reach, wrapped.last_of  # only durable changes count

    @property
    def generation(self) -> str:
        return self.wrapped.generation

    @property
    def generation_reason(self) -> str:
        return self.wrapped.generation_reason

    @property
    def generation_first(self) -> int:
        return self.wrapped.generation_first

    # Staging

    def stage(self, parts: Iterable[Transaction]) -> int:
        """Make whole transactions readable in this process at once; return the new `latest`."""
        new = list(in_order(parts, after=self._head.latest, ts=self._head.ts))
        if not new:
            return self._head.latest
        with self._changed:
            self._tail.extend(new)
            if self.staged_since is None:
                self.staged_since = self._clock()
            self._head.move(new[-1])
        self._head.notify()
        return self._head.latest

    def flush(self, *, notes: Mapping[str, str] | None = None) -> int:
        """Append everything staged to the wrapped log in one step; return the new `durable`."""
        with self._moving:
            began = self._clock()
            staged = self._staged()
            if staged or notes:
                self.wrapped.append(staged, notes=notes)
            with self._changed:
                self._settle(began)
            return self.durable

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        """Append `parts` durably, after the staged transactions, in one step; return the new `latest`."""
        with self._moving:
            began = self._clock()
            passed = Tail()
            self.wrapped.append(chain(self._staged(), self._remembered(parts, passed)), notes=notes)
            with self._changed:
                if passed:
                    self._continue_with(passed)
                self._settle(began)
        self._head.notify()
        return self._head.latest

    def unstage(self) -> int:
        """Drop the staged transactions, which no longer continue the log; return how many changes that was."""
        with self._moving, self._changed:
            lost = self.staged_changes
            self._tail.drop_after(self.durable)
            self._head.latest, self.staged_since = self.durable, None
            return lost

    def _staged(self) -> list[Transaction]:
        with self._changed:
            return self._tail.cut(self.durable, self._head.latest)

    def _remembered(self, parts: Iterable[Transaction], passed: Tail) -> Iterator[Transaction]:
        """Yield `parts`, and keep the newest of them in `passed`."""
        for part in parts:
            yield part
            passed.extend([part])
            self._bound(passed, upto=part.upto)

    def _continue_with(self, passed: Tail) -> None:
        if self._tail and passed.first == self._tail.newest.upto + 1:
            self._tail.extend(passed.cut(passed.first - 1, passed.newest.upto))
        else:
            self._tail = passed
        self._head.move(passed.newest)

    def _settle(self, began: float) -> None:
        """Update head and tail after a flush: the rest was staged after `began`, and durable parts may leave memory."""
        self._head.latest = max(self._head.latest, self.durable)
        self.staged_since = began if self.staged_changes else None
        self._bound(self._tail, upto=self.durable)

    def _bound(self, tail: Tail, *, upto: int) -> None:
        # With some slack: dropping a few at a time would move all the others each time.
        if tail.changes > self._keep_changes * 9 // 8 or tail.weight > KEEP_BYTES:
            tail.forget(upto=upto, changes=self._keep_changes, weight=KEEP_BYTES)

    @property
    def durable(self) -> int:
        """Return the newest offset in the wrapped log."""
        return self.wrapped.latest

    @property
    def staged_changes(self) -> int:
        """Return the number of changes that are readable but not yet in the wrapped log."""
        return max(self._head.latest - self.durable, 0)

    # Reading

    def read(self, *, after: int, upto: int | None = None, limit: int | None = 512) -> list[Transaction]:
        self._retention.check_kept(after)
        upto = min(self._head.latest if upto is None else upto, after + (BLOCK_CHANGES if limit is None else limit))
        found = self._from_tail(after, upto)
        if found is None:
            found = self.wrapped.read(after=after, upto=upto, limit=limit)
            # A flush may have moved staged changes out of memory since: check the tail again.
            if found and found[-1].upto < upto:
                found += self._from_tail(found[-1].upto, upto) or []
        return found

    def _from_tail(self, after: int, upto: int) -> list[Transaction] | None:
        """Return the changes in (after, upto] from memory; None if memory begins later."""
        with self._changed:
            if after >= self._head.latest:
                return []
            held = self._tail and self._tail.first <= after + 1
            return self._tail.cut(after, upto) if held else None

    def recent(self, after: int, upto: int) -> list[Transaction] | None:
        """Return the changes in (after, upto] without I/O; None if memory lacks some of them: then call `read`."""
        return None if after + 1 < self.horizon else self._from_tail(after, upto)

    def scan(self, *, after: int, upto: int | None = None, table: str | None = None) -> Iterator[Transaction]:
        self._retention.check_kept(after)
        return self._pages(after, self._head.latest if upto is None else min(upto, self._head.latest), table)

    def _pages(self, after: int, upto: int, table: str | None) -> Iterator[Transaction]:
        with self._changed:
            in_memory = self._tail.first if self._tail else self._head.latest + 1
        if after + 1 < in_memory:
            edge = min(upto, in_memory - 1)
            yield from self.wrapped.scan(after=after, upto=edge, table=table)
            after = edge
        while after < upto:
            page = self.read(after=after, upto=upto)
            if not page:
                return  # unstaged since
            yield from page
            after = page[-1].upto

    def offset_at(self, ts: int) -> int:
        with self._changed:
            found = self._tail.offset_at(ts)
        return max(self.wrapped.offset_at(ts) if found is None else found, self.horizon - 1)

    def first_whole(self, offset: int) -> int:
        offset = max(offset, self.horizon)
        with self._changed:
            if offset > self._head.latest:
                return self._head.latest + 1
            if self._tail and self._tail.first <= offset:
                return self._tail.first_whole(offset) or self._head.latest + 1
        return self.wrapped.first_whole(offset)  # past its own latest begins the first staged transaction

    # Retention

    @property
    def horizon(self) -> int:
        """Return the first offset still retained; it follows the limit by count at once, without `retain`."""
        return self._retention.horizon

    def retain(self, retention: Retention, *, now_ms: int, hold: int | None = None) -> int:
        """Flush, then trim one step as Log.retain does; leases hold the horizon back in addition to `hold`."""
        with self._moving:
            self.flush()
            return self._retention.retain(retention, now_ms=now_ms, hold=hold)

    @property
    def forgets_by_time(self) -> bool:
        """Return whether a limit by bytes or age applies: time alone, or large rows, can evict a reader."""
        return self._retention.forgets_by_time

    # Head

    @property
    def closed(self) -> tuple[int, int]:
        """Return a hybrid time and an offset: every change after this offset, now or later, has a later time.

        A transaction ends at the offset. While the log has listeners, both advance also without changes.
        """
        return self._head.closed

    @property
    def has_listeners(self) -> bool:
        """Return whether there is a listener."""
        return self._head.has_listeners

    @property
    def latest(self) -> int:
        """Return the newest offset, staged ones included; `horizon - 1` if there is none."""
        return self._head.latest

    @property
    def highest(self) -> int:
        """Return the highest offset that was ever readable here, unstaged ones included."""
        return self._head.highest

    @property
    def position(self) -> str:
        with self._changed:
            return self._tail.newest.position if self._tail else self.wrapped.position

    @property
    def clock_ceiling(self) -> int:
        return max(self.wrapped.clock_ceiling, self._head.ts)

    def restart(self, *, first: int, reason: str, name: str = "") -> str:
        """Begin a new generation without the staged transactions (see Log); `first` must be above `highest`."""
        if first <= self._head.highest:
            raise InvalidRequest(
                f"offset {first} is not after {self._head.highest}, the last of the log", hint="Start later."
            )
        with self._moving:
            name = self.wrapped.restart(first=first, reason=reason, name=name)
            with self._changed:
                self._tail, self.staged_since = Tail(), None
                self._retention.release_all()
                self._head.restart(first)
        self._head.notify()
        return name

    def close(self) -> None:
        """End all waits and close the wrapped log; staged transactions are not flushed: capture reads them again."""
        self._head.stop()
        self.wrapped.close()
