"""The pull API: ranges of tables for parallel reading, the leases of readers, and the state of the durable log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from headwater.model.keys.range import Range
from headwater.model.principal import OWNER, Principal
from headwater.model.table import Table
from headwater.ranges.captured_table import keyed_table
from headwater.ranges.pull.durable_wait import DurableWaits
from headwater.ranges.pull.table_status import (
    ChangedTables,
    Described,
    Step,
    changed_tables,
    find_change,
    find_end,
    read_status,
    wait_for_status,
)
from headwater.ranges.ranges.lease import check_lease, check_subscriber, durable_now, may_change
from headwater.ranges.ranges.split import (
    Merge,
    Split,
    applied,
    bounds,
    measured,
    pieces,
    resized,
    sample_size,
    split_into_spans,
    within,
)
from headwater.ranges.ranges.store import Pull, RangeBasis, Store
from headwater.sources.read import Sample

ATTEMPTS = 5  # retries after concurrent changes
SMALLEST_TARGET, LARGEST_TARGET = 1 << 20, 1 << 30  # bytes of a range that callers other than owners may choose
_LIST = "List the ranges of the table: pull.ranges, or ListRanges over gRPC."
PAUSE_SECONDS = 0.05  # between two checks for changes of tables: commits of other tables are not checked one by one
GROWTH = 10  # ranges are measured again when a tenth of the rows of an average range may have changed


class RangeList(NamedTuple):
    """The ranges of a table, and the generation of the log for which they are valid."""

    generation: str
    ranges: list[Range]


class RegisteredLease(NamedTuple):
    """A lease: rows as of offset `version`, and changes after it, are available for `lease_seconds`."""

    generation: str
    version: int
    lease_seconds: float


class RangeInTable(NamedTuple):
    """A range and its table."""

    db: str
    database: Database
    table: Table
    range: Range


Run = Callable[..., Awaitable[Any]]


class Ranges:
    """The pulls of one server. Thread-safe, except `describe`, which runs in the event loop."""

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
        self._waiting = DurableWaits()
        # One lock per database: a lease is checked, held in the log and stored atomically, and so is its release.
        self._leasing: dict[str, threading.Lock] = {}

    def drain(self) -> None:
        """Answer all waiting requests, because the server is stopping. Call it in the event loop."""
        self._waiting.drain()

    # --- splitting -------------------------------------------------------------------------------------------

    def listed(self, who: Principal, db: str | None, table: str, target_bytes: int | None = None) -> RangeList:
        """Return the ranges of `table`, split at the first call, and again as they grow and shrink.

        An owner's `target_bytes` is for every call from then on, another caller's only for a table never split before:
        ranges that others read must not become stale because a viewer asks for another size.
        """
        opened = self._open_table(who, db, table)
        if who.role == OWNER:
            held = self._ensure(opened, target_bytes)
            target = target_bytes or held.target
        else:
            held = self._ensure(opened, first_target=self._bounded(target_bytes))
            target = held.target
        ranges = self._ranges(opened)
        if target != held.target or _is_due(held, ranges, opened.database.source.head()):
            self._resize(opened, ranges, target)
        return RangeList(opened.database.log.generation, self._ranges(opened))

    def find(self, who: Principal, db: str | None, table: str, id: int, epoch: int) -> Span:
        """Return the keys of a range; StaleEpoch with the ranges that have replaced it, NotFound if it is unknown."""
        opened = self._open_table(who, db, table)
        self._ensure(opened)
        return self._live(opened, self._ranges(opened), id, epoch).span

    def owner(self, id: int) -> tuple[str, str] | None:
        """Return the database and the table of a range of any epoch; None if the range is not known."""
        return self._store.owner(id) if id < 2**63 else None

    def enter(self, who: Principal, id: int, epoch: int) -> RangeInTable:
        """Return a range by its id; NotFound, also if its table is outside the caller's scopes, or StaleEpoch."""
        owner = self.owner(id)
        if owner is None or not who.may(*owner):
            raise NotFound(f"there is no range {id}", hint=_LIST)
        opened = self._open_table(who, *owner)
        self._ensure(opened)
        return RangeInTable(*opened, self._live(opened, self._ranges(opened), id, epoch))

    def split(
        self, who: Principal, db: str | None, table: str, id: int, epoch: int, at: bytes | None = None
    ) -> RangeList:
        """Split one range at the key `at`, or in its middle, and return both parts; StaleEpoch if it was replaced."""
        opened = self._open_table(who, db, table)
        for _ in range(ATTEMPTS):
            held, ranges = self._ensure(opened), self._ranges(opened)
            one = self._live(opened, ranges, id, epoch)
            sample = self._sample(opened, len(ranges))
            bound = _middle(sample, one) if at is None else _inside(sample.table, one, at)
            number = ranges.index(one)
            if self._change(opened, held, ranges, [Split(number, (bound,))], sample):
                return RangeList(opened.database.log.generation, self._ranges(opened)[number : number + 2])
        raise _contended(table)

    def merge(self, who: Principal, db: str | None, table: str, pair: Sequence[tuple[int, int]]) -> RangeList:
        """Merge two neighbours, given by id and epoch, and return the new range; StaleEpoch if one was replaced."""
        opened = self._open_table(who, db, table)
        for _ in range(ATTEMPTS):
            held, ranges = self._ensure(opened), self._ranges(opened)
            first, last = sorted(ranges.index(self._live(opened, ranges, id, epoch)) for id, epoch in pair)
            if last != first + 1:
                raise InvalidRequest(
                    "these ranges are not neighbours", hint="The end of the first must be the start of the second."
                )
            if self._change(opened, held, ranges, [Merge(first, last)], self._sample(opened, len(ranges))):
                return RangeList(opened.database.log.generation, self._ranges(opened)[first : first + 1])
        raise _contended(table)

    def _open_table(self, who: Principal, db: str | None, table: str) -> _OpenTable:
        name = real_name(db)
        who.check(name, [table])
        database = self._databases.database(name)
        return _OpenTable(name, database, keyed_table(database.source, table, who, name))

    def _ranges(self, opened: _OpenTable) -> list[Range]:
        return self._store.ranges(opened.db, opened.table.name)

    def _bounded(self, target: int | None) -> int | None:
        """Return a target that a caller other than an owner may choose; the configured one is always allowed."""
        if target is None:
            return None
        configured = self._config.target_bytes
        return min(max(target, min(SMALLEST_TARGET, configured)), max(LARGEST_TARGET, configured))

    def _ensure(self, opened: _OpenTable, target: int | None = None, *, first_target: int | None = None) -> RangeBasis:
        """Return the generation, version and target of the ranges; split the table if it has no valid ranges.

        `target` replaces that of earlier ranges, `first_target` is used if there were none.
        """
        generation, name = opened.database.log.generation, opened.table.name
        held = self._store.cut(opened.db, name)
        if held is not None and (held.generation, held.version) == (generation, opened.table.version):
            return held
        target = target or (held.target if held is not None else first_target or self._config.target_bytes)
        head = opened.database.source.head()
        sample = self._sample(opened, 1)
        if sample_size(count := pieces(sample.bytes, target)) > sample_size(1):
            sample = self._sample(opened, count)
        spans = split_into_spans(sample, target)
        fresh = RangeBasis(generation, opened.table.version, target, head)
        self._store.begin(
            opened.db, name, fresh, lambda new_id: measured(sample, [Range(new_id(), 1, span) for span in spans])
        )
        return self._store.cut(opened.db, name) or fresh

    def _sample(self, opened: _OpenTable, count: int) -> Sample:
        return opened.database.source.sample(opened.table.name, sample_size(count))

    def _resize(self, opened: _OpenTable, ranges: list[Range], target: int) -> None:
        head = opened.database.source.head()
        total = sum(one.bytes for one in ranges)
        sample = self._sample(opened, max(pieces(total, target), len(ranges)))
        steps = resized(sample, [one.span for one in ranges], target)
        held = RangeBasis(opened.database.log.generation, opened.table.version, target, head)
        self._change(opened, held, ranges, steps, sample)  # a concurrent resize is equally good: ignore the result

    def _change(
        self, opened: _OpenTable, held: RangeBasis, ranges: list[Range], steps: Sequence[Split | Merge], sample: Sample
    ) -> bool:
        return self._store.change(
            opened.db, opened.table.name, held, ranges, lambda new_id: measured(sample, applied(ranges, steps, new_id))
        )

    def _live(self, opened: _OpenTable, ranges: list[Range], id: int, epoch: int) -> Range:
        found = next((one for one in ranges if one.id == id), None)
        if found is not None and found.epoch == epoch:
            return found
        heirs = self._store.heirs(opened.db, opened.table.name, id, epoch)
        if heirs is None:
            raise NotFound(f"table {opened.table.name!r} has no range {id}", hint=_LIST)
        raise StaleEpoch(
            f"range {id} of epoch {epoch} was replaced",
            ranges=[heir.wire() for heir in heirs],
            range=id,
            epoch=epoch,
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
    ) -> RegisteredLease:
        """Return an offset up to which everything committed before this call is durable, and retain the log after it.

        With `keep` the log after that earlier offset is retained. OffsetExpired if it was trimmed, Conflict if another
        principal has registered this subscriber on the table.
        """
        check_subscriber(subscriber)
        if (range is None) != (epoch is None):
            raise InvalidRequest("`range` and `epoch` belong together", hint="Send both, or none for the whole table.")
        opened = self._open_table(who, db, table)
        if range is not None and epoch is not None:
            self.find(who, db, table, range, epoch)
        generation, version = durable_now(opened.database)
        kept = version if keep is None else keep
        if kept > version:
            raise InvalidRequest(
                f"`keep` {keep} is beyond the newest offset, {version}", hint="Send an offset that was reported before."
            )
        pull = Pull(opened.db, subscriber, table, range or 0, generation, kept, self._until(), who.name)
        with self._lease_lock(opened.db):
            check_lease(who, pull, self._store.others(pull, now_ms=self._now_ms()))
            self._hold(opened.database.log, pull)
        return RegisteredLease(generation, version, self._leases.lease_seconds)

    def release(self, who: Principal, db: str | None, table: str, subscriber: str) -> bool:
        """Release every lease of `subscriber` on `table`; return whether there was one.

        Leases that another principal registered are ignored, unless `who` is an owner.
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
        """Hold a lease in the log, then store it: a lease that fails must not replace an earlier one."""
        log.hold(pull.name, pull.kept, until_ms=pull.until_ms, max_bytes=self._leases.lease_bytes)
        self._store.put_lease(pull, now_ms=self._now_ms())

    def keep_up(self, who: Principal, entered: RangeInTable, subscriber: str) -> None:
        """Renew the leases of a subscriber that continues to read; NotOwner if it has none that `who` may renew."""
        now, db, log = self._now_ms(), entered.db, entered.database.log
        mine = [
            pull
            for pull in self._store.leases(db)
            if (pull.subscriber, pull.table, pull.generation) == (subscriber, entered.table.name, log.generation)
            and may_change(who, pull.owner)
        ]
        if not any(pull.until_ms > now for pull in mine):
            hint = "Call CdcRegister; the version that it returns stays valid as long as rows are pulled."
            raise NotOwner(f"{subscriber!r} has no live registration on {entered.table.name!r}", hint=hint)
        for pull in mine:
            if now < pull.until_ms < now + self._leases.lease_seconds * 500:  # half of the lease has passed
                self._renew(log, pull)

    def _renew(self, log: LiveLog, pull: Pull) -> None:
        with self._lease_lock(pull.db):
            if pull not in self._store.leases(pull.db):
                return  # released, or replaced by an owner, since it was looked up
            with suppress(OffsetExpired):  # the reader receives this error when it reads the trimmed part
                self._hold(log, msgspec.structs.replace(pull, until_ms=self._until()))

    def _lease_lock(self, db: str) -> threading.Lock:
        return self._leasing.setdefault(db, threading.Lock())

    def _until(self) -> int:
        return self._now_ms() + int(self._leases.lease_seconds * 1000)

    # --- state of the log ------------------------------------------------------------------------------------

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
        """Return the table and the state of its log; with `after` and `wait_ms`, once the log is durable past `after`.

        With `shape`, an older version of the table: also the first schema change after `after`. With `step`: also the
        offset at which a step of that size after `after` ends. `run` runs blocking calls in a thread.
        """
        if (wait_ms or step) and after is None:
            raise InvalidRequest(
                "`wait_ms` and a step need `after`", hint="Send `latest` of the previous answer as `after`."
            )
        name = real_name(db)
        who.check(name, [table])
        status: Described = await run(wait_for_status, self._databases.database(name), who, name, table)
        if after is not None and wait_ms and status.latest <= after:
            log = self._databases.database(name).log
            await self._waiting.beyond(log, after, wait_ms / 1000, lambda: name in self._databases.names())
            again = partial(read_status, caught_up=status.caught_up)
            status = await run(again, self._databases.database(name), who, name, status.table.name, status)
        if after is not None and shape is not None and shape != status.table.version:
            status = await run(find_change, self._databases.database(name), who, status, after)
        if after is not None and step is not None and status.horizon <= after + 1 <= status.latest:
            status = await run(find_end, self._databases.database(name).log, status, after, step)
        return status

    async def changed_tables(
        self,
        who: Principal,
        db: str | None,
        offsets: Mapping[str, int],
        *,
        wait_ms: int = 0,
        run: Run = asyncio.to_thread,
    ) -> ChangedTables:
        """Return which tables have durable changes after their offset; wait until there is one, `wait_ms` at most."""
        name = real_name(db)
        who.check(name, list(offsets))
        log, clock = self._databases.database(name).log, asyncio.get_running_loop().time
        until = clock() + wait_ms / 1000
        while True:
            found: ChangedTables = await run(changed_tables, log, offsets)
            if found.changed or (left := until - clock()) <= 0:
                return found
            await self._waiting.beyond(log, found.latest, left, lambda: name in self._databases.names())
            if log.durable <= found.latest:
                return found  # the time is over, the database was removed, or the server is stopping
            await asyncio.sleep(min(PAUSE_SECONDS, max(until - clock(), 0)))


class _OpenTable(NamedTuple):
    """A table of an open database."""

    db: str
    database: Database
    table: Table


def _is_due(held: RangeBasis, ranges: Sequence[Range], head: int) -> bool:
    rows = sum(one.rows for one in ranges)
    return (head - held.at) * GROWTH * len(ranges) > rows


def _middle(sample: Sample, one: Range) -> bytes:
    found = bounds(within(sample.points, one.span), 2)
    if not found:
        raise InvalidRequest(f"range {one.id} has too few keys to be split", hint="Send the key in `at`.")
    return found[0]


def _inside(table: Table, one: Range, at: bytes) -> bytes:
    if len(decode_key(at)) > len(table.key):
        raise InvalidRequest(
            f"`at` has more columns than a key of {table.name!r}", hint=f"Send at most {len(table.key)} values."
        )
    if at <= one.span.start or (one.span.end is not None and at >= one.span.end):
        raise InvalidRequest("`at` is not inside the range", hint="Send a key after its start and before its end.")
    return at


def _contended(table: str) -> Unavailable:
    return Unavailable(f"the ranges of {table!r} are being changed concurrently", hint="Retry.")
