"""The live hub of a database: it tails the log and encodes and frames each change once for all streams.

    log ──recent──> hub ──router──> group (filter, shape, framing) ──joined frames──> streams at their cursors

A stream is a cursor, not a queue. Published frames stay in memory for a short while, within one limit for all
groups together; a stream that is too slow for the frames in memory reads the log instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Hashable
from time import perf_counter, thread_time
from typing import Any

from headwater.errors import HeadwaterError, OffsetExpired
from headwater.feeds.filters.filter import Filter
from headwater.feeds.filters.filter_router import Router
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.frame import Frame
from headwater.feeds.formats.registry import encoder
from headwater.feeds.groups.group import Group, Sleeper
from headwater.feeds.groups.hub_batch import LONGEST_SECONDS, Batch, Decided, Found, SlowFilters, bounded, first_changes
from headwater.feeds.groups.log_reader import View, shape_of, signature_of
from headwater.feeds.options import Options, Shape
from headwater.feeds.query_feeds.invalidation import Invalidations, invalidations
from headwater.feeds.query_feeds.query_groups import Frames, InstanceGroups, Steady, steady_at
from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.query_feeds.relevant_changes import schema_changes, transaction_of
from headwater.log.live.live_log import LiveLog
from headwater.model.bounded_cache import BoundedCache
from headwater.model.change import Transaction
from headwater.model.table import Table
from headwater.model.work.work_context import shared_context
from headwater.sources.read import Readable, SourceHead

logger = logging.getLogger("headwater.feeds")

BATCH, BATCH_BYTES = 1024, 4 << 20  # changes and approximate bytes that are routed before the streams may write
MOST_ROUTED = 4096  # pairs of a change and a group that the loop routes and frames in one turn: about 15 ms for queries
MOST_INDEXED = 4096  # values of new filters that the loop indexes in one turn: about 5 ms
NEVER = 2**63 - 1
KEPT_FRAMES = 16_384  # frames in memory, all groups together
KEPT_BYTES = 16 << 20
FEW, APART = 4, 256  # at most FEW streams read the log on their own when they are more than APART changes behind
TURN_SECONDS = 0.005  # the hub publishes for this long, then yields to other tasks of the loop
SHARE_SECONDS = 0.025  # CPU time of the loop that a filter may use for one batch before a thread evaluates it
ENCODERS, VIEWS = 1024, 4096  # cache sizes: the next reader with the same options shares them
VIEWS_BYTES = 32 << 20  # approximate memory of cached views
VIEW_BYTES, BYTES_OF_OPTIONS = 2048, 36  # memory of a view, and for each byte of its signature, as measured

Run = Callable[..., Any]  # runs a blocking call in a thread; awaitable


class Hub:
    """The live side of one database. Every method runs in the event loop unless its docstring names a thread."""

    def __init__(self, log: LiveLog, source: Readable, run: Run, instances: InstanceGroups | None = None) -> None:
        self._log, self._source, self._run, self._instances = log, source, run, instances
        self._loop = asyncio.get_running_loop()
        self._groups: dict[Hashable, Group] = {}
        self._waiting: set[Sleeper] = set()  # to be woken by the next batch, whatever it contains
        self._router: Router[Group] = Router()
        self._encoder: Callable[[Shape], Encoder] = functools.lru_cache(ENCODERS)(lambda shape: encoder(shape, source))
        self._invalidations: Callable[[Shape], Invalidations] = functools.lru_cache(ENCODERS)(invalidations)
        self._views: BoundedCache[bytes, View] = BoundedCache(VIEWS, VIEWS_BYTES)
        self.streams: set[Sleeper] = set()  # all open streams, also those that read the log on their own
        self._shapes: dict[str, Table] = {}  # by table name, as last published
        self._frame_groups: deque[Group] = deque()  # one entry per frame in memory, oldest first
        self._frame_bytes = 0
        # A wake-up of the loop is scheduled. Both threads write this flag; a race costs at most one extra wake-up.
        self._wake_scheduled = False
        self._staged = asyncio.Event()
        self.upto = self._routed = log.latest  # changes up to `upto` are published, up to `_routed` being published
        self._whole = self.upto  # the end of the last transaction that was published completely
        self.ts = 0  # the timestamp of the transaction that ends at `upto`; 0 inside a transaction
        self._schema: int | None = None  # the schema version at the last check, for sources that must be queried
        self._checkpoint_ts = 0  # the time of the newest checkpoint; checkpoints never go back
        self.epoch = 0  # raised when continuity is lost: every stream reads the log again
        log.add_listener(self._on_staged)
        self._task = self._loop.create_task(self._publish_forever(), context=shared_context())

    async def close(self) -> None:
        """Stop publishing."""
        self._log.remove_listener(self._on_staged)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _on_staged(self) -> None:
        """Wake the hub after a commit was staged. Runs in the capture thread."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._staged.set)

    # --- groups ----------------------------------------------------------------------------------------------

    def reached(self, view: View) -> int:
        """Return the highest offset that the hub has published for `view`."""
        return self._whole if view.is_whole else self.upto

    def view(
        self, options: Options, instance: QueryInstance | None = None, allowed_tables: frozenset[str] | None = None
    ) -> View:
        """Return the view of `options`, compiled once; views of the same shape share one encoder.

        `allowed_tables` are the tables that the reader's credential is restricted to, None if it is not: restricted
        readers see no DDL statements. Options that name a query need its current instance; for them, readers with
        other restrictions have another view.
        """
        if instance is None and allowed_tables is not None:
            allowed_tables = frozenset()  # the options name the tables, so all restricted readers receive the same
        signature = signature_of(options, allowed_tables)
        found = self._views.get(signature)
        if found is None:
            if instance is None:
                is_restricted = allowed_tables is not None
                made = self._encoder(shape_of(options, is_restricted))
                found = View(options, self._source, made, is_restricted=is_restricted)
            else:
                found = self._query_view(options, instance, allowed_tables)
            self._views.put(signature, found, VIEW_BYTES + BYTES_OF_OPTIONS * len(signature))
        if instance is not None and isinstance(found, QueryView) and self._instances is not None:
            found.set_instance(instance)
            self._instances.set_instance(instance)
        return found

    def _query_view(self, options: Options, instance: QueryInstance, allowed_tables: frozenset[str] | None) -> View:
        assert self._instances is not None
        made = self._invalidations(shape_of(options, allowed_tables is not None))
        confirmation = self._instances.confirmation_of(instance.key) if options.confirm else None
        return QueryView(options, self._source, instance, made, confirmation, allowed_tables)

    def join(self, view: View, frame: Frame) -> Group:
        """Add a member to the group of `view` and `frame` and return the group. Its frames begin after `upto`."""
        if not self._groups:
            # Without a group there was no reader: changes committed since then need not be published.
            self.upto, self.ts = self._log.latest, 0
            self._routed = self._whole = self.upto
        key = (view.signature, frame)
        group = self._groups.get(key)
        if group is None:
            # Such a view publishes whole transactions, so its group must begin where a transaction ends: at the head.
            since = self._log.latest if view.is_whole else 0
            group = self._groups[key] = Group(view, frame, max(self.upto, self._routed, since))
            if view.is_slow:
                self._exclude(group)
            elif isinstance(view, QueryView) and self._instances is not None:
                self._instances.add(group, view)
            else:
                self._router.add(group, view.filter)
        group.members += 1
        return group

    def leave(self, group: Group) -> None:
        """Remove a member of `group`; without members the group ends."""
        group.members -= 1
        if not group.members:
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Publish nothing to `group` any more. A failed group was removed before, and its key may have a new group."""
        key = (group.view.signature, group.frame)
        if self._groups.get(key) is group:
            self._unroute(group)
            del self._groups[key]

    def _unroute(self, group: Group) -> None:
        self._router.remove(group)
        if self._instances is not None:
            self._instances.remove(group)

    def is_far(self, view: View, cursor: int) -> bool:
        """Return whether a reader at `cursor` is too far behind for published frames and should read the log.

        Frames published now would be dropped before such a reader reaches them. With few readers the limit is lower:
        pages of the log cost less than changes that are routed and kept one by one. A view of whole transactions is
        never far behind.
        """
        return (
            self._log.latest - cursor > (min(APART, KEPT_FRAMES) if self._has_few_streams else KEPT_FRAMES)
            and not view.is_whole
        )

    @property
    def _has_few_streams(self) -> bool:
        streams, groups = len(self.streams), self._groups
        # Members that only wait, such as polls, are not streams, but they profit from published frames, too.
        return max(streams, len(groups)) <= FEW and sum([each.members for each in groups.values()]) <= streams

    def sleep(self, sleeper: Sleeper) -> None:
        """Wake `sleeper` after the next batch is published."""
        self._waiting.add(sleeper)

    # --- publishing ------------------------------------------------------------------------------------------

    async def _publish_forever(self) -> None:
        while True:
            await self._staged.wait()
            self._staged.clear()
            self._wake_scheduled = False
            try:
                while self._groups and self.upto < self._log.latest:
                    await self._publish_batch()
            except OffsetExpired:
                self._reset()
            except Exception:
                logger.exception("publishing failed")
                self._reset()

    async def _publish_batch(self) -> None:
        """Publish one batch and let the streams write it."""
        if self._has_few_streams and self._log.latest - self.upto > APART:
            self._suspend_all()
            if not self._groups:
                return
        parts = await self._next_parts()
        await self._refresh_views(parts)
        if parts and parts[0].first == self.upto + 1:  # false if every group ended and a new one joined concurrently
            await self._publish(self._routable(parts))
        await asyncio.sleep(0)  # let the streams write

    async def _next_parts(self) -> list[Transaction]:
        upto = min(self._log.latest, self.upto + BATCH)
        parts = self._log.recent(self.upto, upto)
        if parts is None:  # a huge transaction is in the log on disk only
            parts = await self._run(self._read, self.upto, upto)
        return bounded(parts, BATCH_BYTES)

    async def _refresh_views(self, parts: list[Transaction]) -> None:
        """Compile every filter for new table shapes in a thread: thousands of filters would block the loop."""
        shapes = [change.table for part in parts for change in part.changes]
        for table in {id(table): table for table in shapes}.values():
            known = self._shapes.get(table.name)
            if known is not table:
                self._shapes[table.name] = table
                if known != table:
                    filters = [group.view.filter for group in self._groups.values()]
                    await self._run(_warm, table, [each for each in filters if each.wants(table.name)])
            while self._router.prepare(table, MOST_INDEXED):
                await asyncio.sleep(0)
        if self._instances:
            if await self._has_schema_moved():
                self._instances.outdate()
            for group, error in (await self._instances.refresh(max(map(schema_changes, parts), default=-1))).items():
                self._fail(group, error)

    async def _has_schema_moved(self) -> bool:
        """Return whether queries must be analysed again although the log has no schema change.

        Settings of PostgreSQL's role, collations and search paths change what a query reads, and no stream has them:
        without this check, a feed would keep the old analysis. A source with a cheap head check logs every such change.
        """
        source = self._source
        if source.peek_head() is not None:
            return False
        with contextlib.suppress(HeadwaterError):
            found: SourceHead = await self._run(source.read_head)
            known, self._schema = self._schema, found.schema
            return known != found.schema
        return False

    def _routable(self, parts: list[Transaction]) -> list[Transaction]:
        """Return the first of `parts`: at most MOST_ROUTED pairs of a change and a group, at least one change."""
        changes = [change for part in parts for change in part.changes]
        if len(changes) * len(self._groups) <= MOST_ROUTED:
            return parts
        pairs = 0
        for count, change in enumerate(changes):
            pairs += self._router.count(change) + (self._instances.count(change) if self._instances else 0)
            if pairs > MOST_ROUTED and count:
                return first_changes(parts, count)
        return parts

    def _read(self, after: int, upto: int) -> list[Transaction]:
        return self._log.read(after=after, upto=upto)

    def _reset(self) -> None:
        """Send every stream back to the log, because continuity with the published frames is lost."""
        self.epoch += 1
        self.upto, self.ts = self._log.latest, 0
        self._routed = self._whole = self.upto
        if self._instances is not None:
            self._instances.reset()
        for group in self._groups.values():
            group.since = self.upto if group.is_live else NEVER
            group.wake()
        self._wake_waiting()

    async def _publish(self, parts: list[Transaction]) -> None:
        """Route, filter, encode and frame `parts`, and publish the frames to their groups."""
        batch = Batch(parts)
        before, self._routed = self.upto, parts[-1].upto  # a group that joins from now on begins after `_routed`
        decided = await self._decide(batch)
        steady = await self._steady(parts[-1].upto)
        frames_of = await self._encode(batch, decided)
        if self.upto != before:
            self._wake_waiting()
            return  # every group ended and a new one joined concurrently, or continuity was lost
        self.upto, self.ts = parts[-1].upto, parts[-1].ts if parts[-1].last else 0
        self._whole = self.upto if parts[-1].last else max(self._whole, transaction_of(parts[-1]) - 1)
        passing: dict[Group, Found] = {}  # for groups of query instances
        for group, found in decided.items():
            if not group.is_live:
                continue  # the members of this group read the log
            if isinstance(found, HeadwaterError):
                self._fail(group, found)
            elif found is None:
                self._exclude(group)
            elif group.view.is_whole:
                passing[group] = found
            elif group in frames_of:
                self._publish_to(group, *frames_of[group])
            elif found:
                self._frame_bytes -= group.skip(self.upto)
        for group, frames in {} if self._instances is None else self._instances.frames(batch, passing, steady).items():
            self._publish_to(group, frames, _size(frames))
        self._drop_oldest()
        self._wake_waiting()

    async def _decide(self, batch: Batch) -> dict[Group, Decided]:
        """Return the changes of `batch` that pass the filter of each group that the router found."""
        decided: dict[Group, Decided] = {}
        costly: list[tuple[Group, list[int]]] = []
        began, last = perf_counter(), thread_time()
        for group, positions in self._routed_to(batch).items():
            if not batch.is_cheap(group, positions):
                costly.append((group, positions))
                continue
            decided[group] = batch.decide(group, positions)
            now = thread_time()
            if now - last > SHARE_SECONDS:
                group.view.is_costly = True
            if perf_counter() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began, now = perf_counter(), thread_time()
            last = now
        return decided | await self._decide_costly(batch, costly)

    async def _encode(self, batch: Batch, decided: dict[Group, Decided]) -> dict[Group, tuple[Frames, int]]:
        """Return the frames of each group and their size, up to the limit in memory; the other groups skip the batch.

        Large changes are encoded in a thread, as for readers of the log, once for all groups with the same encoding.
        Nothing is published here: a stream that sees a new `upto` must find all frames up to that offset.
        """
        made: dict[Group, tuple[Frames, int]] = {}
        count = size = 0
        began = perf_counter()
        for group, found in decided.items():
            if not isinstance(found, list) or not found or group.view.is_whole:
                continue
            if batch.is_large(group, found):
                frames: Frames = await self._run(batch.frames, group, found)
                began = perf_counter()
            else:
                frames = batch.frames(group, found)
            bytes_ = _size(frames)
            count, size = count + len(frames), size + bytes_
            if made and (count > KEPT_FRAMES or size > KEPT_BYTES):
                break
            made[group] = frames, bytes_
            self._drop_oldest(count, size)
            if perf_counter() - began > TURN_SECONDS:
                await asyncio.sleep(0)
                began = perf_counter()
        return made

    async def _decide_costly(self, batch: Batch, groups: list[tuple[Group, list[int]]]) -> dict[Group, Decided]:
        """Evaluate costly filters in a thread; one that takes too long is left there, a new thread takes the others."""
        decided: dict[Group, Decided] = {}
        while groups:
            costly = SlowFilters(batch, groups)
            work = asyncio.ensure_future(self._run(costly.run))
            # Retrieve the exception: no other task may be left to do so, and asyncio would log it.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            while not work.done() and not costly.is_late:
                await asyncio.wait({work}, timeout=LONGEST_SECONDS / 2)
            if work.done():
                work.result()
            found, groups = costly.stop()
            decided |= found
        return decided

    async def _steady(self, upto: int) -> Steady:
        """Return the instances whose result is known to be unchanged. Checks only guarded instances, in a thread."""
        guarded = self._instances.guarded() if self._instances else {}
        return await self._run(steady_at, guarded, upto) if guarded else {}

    def _routed_to(self, batch: Batch) -> dict[Group, list[int]]:
        found = self._router.route(batch.changes)
        return found | self._instances.route(batch) if self._instances else found

    def _publish_to(self, group: Group, frames: Frames, size: int) -> None:
        self._frame_groups.extend([group] * len(frames))
        self._frame_bytes += size
        group.publish(frames)

    def _fail(self, group: Group, error: HeadwaterError) -> None:
        self._forget(group)  # before its members learn of the error: a reader that joins from now on gets a new group
        group.fail(error)

    def _exclude(self, group: Group) -> None:
        """Let each stream of `group` read the log on its own for good, because its filter is too slow for the hub."""
        group.view.is_slow = True
        self._unroute(group)
        group.is_live, group.since = False, NEVER
        group.wake()

    def _suspend_all(self) -> None:
        for group in [group for group in self._groups.values() if group.is_live and not group.view.is_whole]:
            self._suspend(group)
        self._wake_waiting()

    def _suspend(self, group: Group) -> None:
        """Let the streams of `group` read the log on their own until they have caught up and join again."""
        self._forget(group)
        group.is_live, group.is_suspended = False, True
        group.wake()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for sleeper in waiting:
            sleeper.wake()

    def _drop_oldest(self, coming: int = 0, coming_bytes: int = 0) -> None:
        """Drop the oldest frames until the rest and the `coming` frames fit into the limit."""
        most, most_bytes = KEPT_FRAMES - coming, KEPT_BYTES - coming_bytes
        while self._frame_groups and (len(self._frame_groups) > most or self._frame_bytes > most_bytes):
            group = self._frame_groups.popleft()
            self._frame_bytes -= group.forget_oldest()
            if group.is_unread and group.is_live and not group.view.is_whole:
                self._suspend(group)
                self._frame_bytes -= group.clear()

    def checkpoint(self) -> tuple[int, int] | None:
        """Return a time and an offset after which no change up to that time follows; None inside a transaction."""
        ts, offset = self._log.closed
        if offset == self.upto:
            self._checkpoint_ts = max(self._checkpoint_ts, ts)
        elif not self.ts:
            return None
        # The log may be ahead of the hub and closed at a later offset; the checkpoint for this offset is still valid.
        self._checkpoint_ts = max(self._checkpoint_ts, self.ts)
        return (self._checkpoint_ts, self.upto) if self._checkpoint_ts else None


def _size(frames: Frames) -> int:
    return len(frames[0][1]) if len(frames) == 1 else sum([len(frame) for _, frame in frames])


def _warm(table: Table, filters: list[Filter]) -> None:
    """Compile `filters` for `table`, ignoring errors. Run it in a thread: it may block the loop."""
    for each in filters:
        with contextlib.suppress(HeadwaterError):  # the filter raises the same error when it is applied
            each.interest(table)
