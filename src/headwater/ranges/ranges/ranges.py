"""Ranges: how tables are cut for parallel reading, who reads them, and how far the log behind them is durable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from headwater.config import FeedsConfig, PullConfig
from headwater.database import Database, Databases
from headwater.errors import (
    InvalidRequest,
    NotFound,
    NotOwner,
    OffsetExpired,
    StaleEpoch,
    Unavailable,
)
from headwater.log.live.live_log import LiveLog
from headwater.model.clock import wall_ms
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span, decode_key
from headwater.model.principal import OWNER, Principal
from headwater.model.table import Table
from headwater.ranges.captured_table import keyed_table
from headwater.ranges.pull.durable_wait import Waiting
from headwater.ranges.pull.table_status import Described, Step, find_change, find_end, look, look_again
from headwater.ranges.ranges.lease import check_lease, check_subscriber, durable_now, may_change
from headwater.ranges.ranges.range import Range
from headwater.ranges.ranges.split import (
    Merge,
    Split,
    applied,
    bounds,
    cut,
    measured,
    pieces,
    resized,
    sample_size,
    within,
)
from headwater.ranges.ranges.store import Cut, Pull, Store
from headwater.sources.read import Sample

ATTEMPTS = 5  # against those who change the same at the same time
SMALLEST_TARGET, LARGEST_TARGET = 1 << 20, 1 << 30  # bytes of a range that callers other than owners may choose
GROWTH = 10  # measured again when a tenth of what a range holds on average may have changed


class Listed(NamedTuple):
    """The ranges of a table, and the generation of the log they are good for."""

    generation: str
    ranges: list[Range]


class Registered(NamedTuple):
    """Rows can be read as of offset `version`, and changes after it, for so many seconds."""

    generation: str
    version: int
    lease_seconds: float


class Entered(NamedTuple):
    """A range, and the table it is part of."""

    db: str
    database: Database
    table: Table
    range: Range


Run = Callable[..., Awaitable[Any]]


class Ranges:
    """The pulls of one server. From any thread; `describe` in its loop."""

    def __init__(
        self,
        databases: Databases,
        store: Store,
        config: PullConfig,
        leases: FeedsConfig,
        *,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        self._databases, self._store, self._config, self._leases = databases, store, config, leases
        self._now_ms = now_ms
        self._waiting = Waiting()
        # By database: a lease is checked, held in the log and stored in one step, and so is its release.
        self._leasing: dict[str, threading.Lock] = {}

    def drain(self) -> None:
        """In the loop: answer everybody who waits; the server goes away."""
        self._waiting.drain()

    # --- cutting ---------------------------------------------------------------------------------------------

    def listed(self, who: Principal, db: str | None, table: str, target_bytes: int | None = None) -> Listed:
        """Return the ranges of `table`, split at the first call, and again as they grow and shrink.

        An owner's `target_bytes` is for every call from then on, another caller's only for a table never split before:
        ranges that others read must not become stale because a viewer asks for another size.
        """
        place = self._place(who, db, table)
        if who.role == OWNER:
            held = self._ensure(place, target_bytes)
            target = target_bytes or held.target
        else:
            held = self._ensure(place, first_target=self._bounded(target_bytes))
            target = held.target
        ranges = self._ranges(place)
        if target != held.target or _is_due(held, ranges, place.database.source.head()):
            self._resize(place, ranges, target)
        return Listed(place.database.log.generation, self._ranges(place))

    def find(self, who: Principal, db: str | None, table: str, id: int, epoch: int) -> Span:
        """The keys of a range; StaleEpoch with those that hold them now, NotFound if there never was one."""
        place = self._place(who, db, table)
        self._ensure(place)
        return self._live(place, self._ranges(place), id, epoch).span

    def owner(self, id: int) -> tuple[str, str] | None:
        """The database and the table of a range, of whatever epoch; None if it is not known, or no longer."""
        return self._store.owner(id) if id < 2**63 else None

    def enter(self, who: Principal, id: int, epoch: int) -> Entered:
        """A range by its id alone; NotFound also where its table is none of the caller's business, StaleEpoch."""
        owner = self.owner(id)
        if owner is None or not who.may(*owner):
            raise NotFound(f"there is no range {id}", hint="ListRanges lists those of a table.")
        place = self._place(who, *owner)
        self._ensure(place)
        return Entered(*place, self._live(place, self._ranges(place), id, epoch))

    def split(self, who: Principal, db: str | None, table: str, id: int, epoch: int, at: bytes | None = None) -> Listed:
        """Cut one range in two, at the key `at` or in its middle; the two."""
        place = self._place(who, db, table)
        for _ in range(ATTEMPTS):
            held, ranges = self._ensure(place), self._ranges(place)
            one = self._live(place, ranges, id, epoch)
            sample = self._sample(place, len(ranges))
            bound = _middle(sample, one) if at is None else _inside(sample.table, one, at)
            number = ranges.index(one)
            if self._change(place, held, ranges, [Split(number, (bound,))], sample):
                return Listed(place.database.log.generation, self._ranges(place)[number : number + 2])
        raise _contended(table)

    def merge(self, who: Principal, db: str | None, table: str, pair: Sequence[tuple[int, int]]) -> Listed:
        """Make one of two neighbours, named by id and epoch; the one."""
        place = self._place(who, db, table)
        for _ in range(ATTEMPTS):
            held, ranges = self._ensure(place), self._ranges(place)
            first, last = sorted(ranges.index(self._live(place, ranges, id, epoch)) for id, epoch in pair)
            if last != first + 1:
                raise InvalidRequest("these ranges are not neighbours", hint="The end of one is the start of another.")
            if self._change(place, held, ranges, [Merge(first, last)], self._sample(place, len(ranges))):
                return Listed(place.database.log.generation, self._ranges(place)[first : first + 1])
        raise _contended(table)

    def _place(self, who: Principal, db: str | None, table: str) -> _Place:
        name = real_name(db)
        who.check(name, [table])
        database = self._databases.database(name)
        return _Place(name, database, keyed_table(database.source, table, who, name))

    def _ranges(self, place: _Place) -> list[Range]:
        return self._store.ranges(place.db, place.table.name)

    def _bounded(self, target: int | None) -> int | None:
        """Return a target that a caller other than an owner may choose; the configured one is always allowed."""
        if target is None:
            return None
        configured = self._config.target_bytes
        return min(max(target, min(SMALLEST_TARGET, configured)), max(LARGEST_TARGET, configured))

    def _ensure(self, place: _Place, target: int | None = None, *, first_target: int | None = None) -> Cut:
        """Return the generation, version and target of the ranges; split the table if there are none for it as it is.

        `target` replaces that of earlier ranges, `first_target` is used if there were none.
        """
        generation, name = place.database.log.generation, place.table.name
        held = self._store.cut(place.db, name)
        if held is not None and held.fits(generation, place.table.version):
            return held
        target = target or (held.target if held is not None else first_target or self._config.target_bytes)
        head = place.database.source.head()
        sample = self._sample(place, 1)
        if sample_size(count := pieces(sample.bytes, target)) > sample_size(1):
            sample = self._sample(place, count)
        spans = cut(sample, target)
        fresh = Cut(generation, place.table.version, target, head)
        self._store.begin(
            place.db, name, fresh, lambda new_id: measured(sample, [Range(new_id(), 1, span) for span in spans])
        )
        return self._store.cut(place.db, name) or fresh

    def _sample(self, place: _Place, count: int) -> Sample:
        return place.database.source.sample(place.table.name, sample_size(count))

    def _resize(self, place: _Place, ranges: list[Range], target: int) -> None:
        head = place.database.source.head()
        total = sum(one.bytes for one in ranges)
        sample = self._sample(place, max(pieces(total, target), len(ranges)))
        steps = resized(sample, [one.span for one in ranges], target)
        held = Cut(place.database.log.generation, place.table.version, target, head)
        self._change(place, held, ranges, steps, sample)  # if somebody was faster, that is good, too

    def _change(
        self, place: _Place, held: Cut, ranges: list[Range], steps: Sequence[Split | Merge], sample: Sample
    ) -> bool:
        def new(new_id: Callable[[], int]) -> list[Range]:
            return measured(sample, applied(ranges, steps, new_id))

        return self._store.change(place.db, place.table.name, held, ranges, new)

    def _live(self, place: _Place, ranges: list[Range], id: int, epoch: int) -> Range:
        found = next((one for one in ranges if one.id == id), None)
        if found is not None and found.epoch == epoch:
            return found
        heirs = self._store.heirs(place.db, place.table.name, id, epoch)
        if heirs is None:
            raise NotFound(f"table {place.table.name!r} has no range {id}", hint="pull.ranges lists them.")
        raise StaleEpoch(
            f"range {id} of epoch {epoch} is no more", ranges=[heir.wire() for heir in heirs], range=id, epoch=epoch
        )

    # --- leases ----------------------------------------------------------------------------------------------

    def register(
        self,
        who: Principal,
        db: str | None,
        table: str,
        subscriber: str,
        *,
        range: int | None = None,
        epoch: int | None = None,
        keep: int | None = None,
    ) -> Registered:
        """An offset at which everything committed before this call is durable; the log after it is kept.

        With `keep` the log after that earlier offset is kept. OffsetExpired when it is gone, Conflict when another
        principal has registered this subscriber on the table.
        """
        check_subscriber(subscriber)
        if (range is None) != (epoch is None):
            raise InvalidRequest("`range` and `epoch` belong together", hint="Send both, or none for the whole table.")
        place = self._place(who, db, table)
        if range is not None and epoch is not None:
            self.find(who, db, table, range, epoch)
        generation, version = durable_now(place.database)
        kept = version if keep is None else keep
        if kept > version:
            raise InvalidRequest(f"`keep` lies beyond the newest offset, {version}")
        pull = Pull(place.db, subscriber, table, range or 0, generation, kept, self._until(), who.name)
        with self._lease_lock(place.db):
            check_lease(who, pull, self._store.others(pull, now_ms=self._now_ms()))
            self._hold(place.database.log, pull)
        return Registered(generation, version, self._leases.lease_seconds)

    def release(self, who: Principal, db: str | None, table: str, subscriber: str) -> bool:
        """Give up every lease of `subscriber` on `table`; return whether there was one.

        Leases that another principal registered are none, except to an owner.
        """
        check_subscriber(subscriber)
        name = real_name(db)
        who.check(name, [table])
        log = self._databases.database(name).log
        with self._lease_lock(name):
            dropped = self._store.drop_leases(name, table, subscriber, None if who.role == OWNER else who.name)
            for pull in dropped:
                log.release(pull.name)
        return bool(dropped)

    def _hold(self, log: LiveLog, pull: Pull) -> None:
        """In the log first: a lease that cannot be had replaces none."""
        log.hold(pull.name, pull.kept, until_ms=pull.until_ms, max_bytes=self._leases.lease_bytes)
        self._store.put_lease(pull, now_ms=self._now_ms())

    def keep_up(self, who: Principal, entered: Entered, subscriber: str) -> None:
        """Renew the leases of a subscriber that reads on. NotOwner if it has none that `who` may renew."""
        now, db, log = self._now_ms(), entered.db, entered.database.log
        mine = [
            pull
            for pull in self._store.leases(db)
            if (pull.subscriber, pull.table, pull.generation) == (subscriber, entered.table.name, log.generation)
            and may_change(who, pull.owner)
        ]
        if not any(pull.until_ms > now for pull in mine):
            hint = "CdcRegister registers it; the version it tells holds as long as rows are pulled."
            raise NotOwner(f"{subscriber!r} is not registered on {entered.table.name!r}, or no longer", hint=hint)
        for pull in mine:
            if now < pull.until_ms < now + self._leases.lease_seconds * 500:  # half of it is over
                self._renew(log, pull)

    def _renew(self, log: LiveLog, pull: Pull) -> None:
        with self._lease_lock(pull.db):
            if pull not in self._store.leases(pull.db):
                return  # released, or replaced by an owner, since it was looked up
            with suppress(OffsetExpired):  # a reader of what is gone gets this error when it asks for it
                self._hold(log, msgspec.structs.replace(pull, until_ms=self._until()))

    def _lease_lock(self, db: str) -> threading.Lock:
        return self._leasing.setdefault(db, threading.Lock())

    def _until(self) -> int:
        return self._now_ms() + int(self._leases.lease_seconds * 1000)

    # --- looking ---------------------------------------------------------------------------------------------

    async def describe(
        self,
        who: Principal,
        db: str | None,
        table: str,
        *,
        after: int | None = None,
        wait_ms: int = 0,
        shape: int | None = None,
        step: Step | None = None,
        run: Run = asyncio.to_thread,
    ) -> Described:
        """The table and its log; with `after` and `wait_ms`, once the log is durable beyond `after`.

        With `shape`, a version that is not the present one: where it first changed after `after`, and to what.
        With `step`, where a step of that size after `after` ends. `run` runs what blocks in a thread.
        """
        if (wait_ms or step) and after is None:
            raise InvalidRequest("this needs `after`", hint="Send the `latest` of the answer before.")
        name = real_name(db)
        who.check(name, [table])
        seen: Described = await run(look, self._databases.database(name), who, name, table)
        if after is not None and wait_ms and seen.latest <= after:
            log = self._databases.database(name).log
            await self._waiting.beyond(log, after, wait_ms / 1000, lambda: name in self._databases.names())
            seen = await run(look_again, self._databases.database(name), who, seen)
        if after is not None and shape is not None and shape != seen.table.version:
            seen = await run(find_change, self._databases.database(name).log, seen, after)
        if after is not None and step is not None and seen.horizon <= after + 1 <= seen.latest:
            seen = await run(find_end, self._databases.database(name).log, seen, after, step)
        return seen


class _Place(NamedTuple):
    """A table of an open database."""

    db: str
    database: Database
    table: Table


def _is_due(held: Cut, ranges: Sequence[Range], head: int) -> bool:
    rows = sum(one.rows for one in ranges)
    return (head - held.at) * GROWTH * len(ranges) > rows


def _middle(sample: Sample, one: Range) -> bytes:
    found = bounds(within(sample.points, one.span), 2)
    if not found:
        raise InvalidRequest(f"range {one.id} has too few keys to be split", hint="Name the key by `at`.")
    return found[0]


def _inside(table: Table, one: Range, at: bytes) -> bytes:
    if len(decode_key(at)) > len(table.key):
        raise InvalidRequest(f"a key of {table.name!r} has {len(table.key)} columns, not more")
    if at <= one.span.start or (one.span.end is not None and at >= one.span.end):
        raise InvalidRequest("`at` does not lie inside the range", hint="It begins at its start, and ends at its end.")
    return at


def _contended(table: str) -> Unavailable:
    return Unavailable(f"others change the ranges of {table!r} at this moment", hint="Try again.")
