"""Feeds: open streams and answer polls, in the loop that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from typing import Any

from headwater.config import FeedsConfig
from headwater.database import Database, Databases
from headwater.errors import HeadwaterError, InvalidRequest, LimitExceeded, NotFound, Unavailable
from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.consumer import Consumer
from headwater.feeds.deliver.hub import TURN_SECONDS, Hub
from headwater.feeds.deliver.hub_wait import silent
from headwater.feeds.deliver.poll import Poll, PollRequest
from headwater.feeds.deliver.source_head import SharedHeadCheck
from headwater.feeds.deliver.start_position import check_cursor, check_reached, cursor_of
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import ReaderPosition, Transport
from headwater.feeds.fair_threads import Threads
from headwater.feeds.groups.log_reader import View
from headwater.feeds.open_readers import OpenReaders
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.invalidation import BRIEF
from headwater.feeds.query_feeds.query_instances import Args, QueryInstances
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.snapshot import SNAPSHOT_EXPIRED, Lease, Position, SnapshotReader
from headwater.feeds.subscription import SnapshotState, Subscription, check_has_rows, owes_rows
from headwater.feeds.subscription_requests import Subscriptions, tables_of
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.subscribe_query import SubscribeQuery
from headwater.feeds.subscriptions.subscribe_table import SNAPSHOT, Request, SubscribeTable, check, named_tables
from headwater.feeds.watched_instances import WatchedInstances, allowed
from headwater.model.database_name import real_name
from headwater.model.principal import OWNER, Principal
from headwater.model.work.usage import Usage

THREADS = 4  # for log pages, snapshots and backtests; more would only share the interpreter
TICK_SECONDS = 0.25
SHORT_OPTIONS = 512  # bytes of the options of a stream that do not count
MOST_OPTIONS = 4 << 20  # of all open streams of one viewer or editor; a byte of a filter takes about 110 in memory
FLUSH_SECONDS = 5.0  # between two writes of the positions of quiet subscriptions


class Feeds:
    """Opens streams and answers polls. Create, use and close it in one loop; its own threads run blocking calls."""

    def __init__(self, databases: Databases, registry: Registry, config: FeedsConfig, *, max_streams: int) -> None:
        self.databases, self._registry, self.config = databases, registry, config
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(THREADS, "headwater-feeds")
        self.run = self._threads.call
        self._hubs: dict[str, Hub] = {}
        self.readers = OpenReaders(max_streams)
        self._unsubscribed = 0  # streams without a subscription, for the names of their leases
        self._heads = SharedHeadCheck(self.run)
        self._option_bytes: Usage[str] = Usage()  # of open streams, by account
        self._counted: dict[Stream | Batches, tuple[str, int]] = {}  # the account and bytes of each such stream
        # Held while the queries of a caller are checked: many requests would otherwise share the loop with the others.
        self._listing: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._watching: WatchedInstances | None = None
        self.subscriptions = Subscriptions(databases, registry, self._report_change)
        self._ticking = self._loop.create_task(self._tick())

    # --- life --------------------------------------------------------------------------------------------------------

    def serve_queries(self, instances: QueryInstances) -> None:
        """Serve feeds of queries too. Call it before the first reader."""
        self._watching = WatchedInstances(instances, self._registry, self.run)

    def _queries(self) -> WatchedInstances:
        if self._watching is None:
            raise Unavailable("this server serves no queries")
        return self._watching

    async def close(self) -> None:
        """Release the hubs and threads. Call it after the last reader was closed."""
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await self._flush()
        for each in [*self._hubs.values(), *([self._watching] if self._watching else ())]:
            await each.close()
        self._hubs = {}
        self._threads.close()

    async def _tick(self) -> None:
        flushed = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            self.readers.tick(now)
            if now - flushed >= FLUSH_SECONDS:
                flushed = now
                await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(HeadwaterError):
            await self.run(self._registry.flush_quiet)
            if self._watching is not None:
                await self._watching.flush()

    def _report_change(self, id: str, closed: bool) -> None:
        """Report a change of a subscription to its readers, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._subscription_changed, id, closed)

    def _subscription_changed(self, id: str, closed: bool) -> None:
        if closed and self._watching is not None:
            self._watching.remove(id)
        self.readers.subscription_changed(id, closed)

    def forget_database(self, db: str) -> None:
        """End the streams and subscriptions of a database that was dropped, from any thread."""
        self.subscriptions.forget(db)
        asyncio.run_coroutine_threadsafe(self._forget_database(db), self._loop)

    async def _forget_database(self, db: str) -> None:
        self.readers.database_dropped(db)
        if (hub := self._hubs.pop(db, None)) is not None:
            await hub.close()
        if self._watching is not None:
            self._watching.forget(db)

    # --- queries -----------------------------------------------------------------------------------------------------

    async def subscribe_query(self, who: Principal, params: SubscribeQuery, args: Args) -> dict[str, Any]:
        """Create or find a subscription to a query (cdc.subscribe_query); `args` are those of `params`, as Lits."""
        watching = self._queries()
        instance = await watching.ask(who, params.query_id, args)
        subscription, answer = await self.run(self.subscriptions.subscribe_query, who, params, args, instance)
        await watching.add(subscription.id, subscription.options, instance)
        hub = self._hub(instance.db, self.databases.database(instance.db))
        view = hub.view(subscription.options, instance, who.tables(instance.db))
        if isinstance(view, QueryView) and view.confirmation is not None:
            await self.run(view.confirmation.prime, instance)
        return {**answer}

    async def open_query(
        self, who: Principal, query_id: str, args: Args, opening: Transport, begin: ReaderPosition
    ) -> Stream:
        """Open a stream of the invalidations of a query, without a stored subscription."""
        self.readers.check_room()
        instance = await self._queries().ask(who, query_id, args)
        options = Options(db=instance.db, query_id=query_id, args=args or None, format=BRIEF)
        database = self.databases.database(instance.db)
        caught_up = await self._heads.caught_up(instance.db, database)
        hub = self._hub(instance.db, database)
        view = hub.view(options, instance, who.tables(instance.db))
        consumer = Consumer(database, hub, view, self.run, self._registry, refresh=self._refresh)
        offset = begin.cursor
        if offset is not None:
            check_reached(database.log, offset, "from_offset", caught_up)
        stream = self._opened(who, consumer, opening, database.log.latest if offset is None else offset, None)
        try:
            await self._queries().add(stream, options, instance)
        except BaseException:
            self.close_stream(stream)
            raise
        return stream

    async def _view(self, who: Principal, name: str, database: Database, options: Options) -> View:
        hub = self._hub(name, database)
        if not options.query_id:
            return hub.view(options, allowed_tables=who.tables(name))
        return hub.view(options, await self._queries().find(options), who.tables(name))

    async def _refresh(self, view: View) -> None:
        """Analyse the query of `view` again after a schema change."""
        name = view.options.db
        if isinstance(view, QueryView):
            instance = await self._queries().find(view.options)
            self._hub(name, self.databases.database(name)).view(view.options, instance, view.allowed_tables)
            view.set_instance(instance)
            view.check_scope()

    # --- reading -----------------------------------------------------------------------------------------------------

    async def poll(self, who: Principal, id: str, request: PollRequest) -> dict[str, Any]:
        """Return a page of a subscription's rows or changes (cdc.poll), after `request.wait_ms` at most."""
        subscription = await allowed(self._registry.get(who, id), who, self._queries)
        database = self.databases.database(subscription.db)
        caught_up = await self._heads.caught_up(subscription.db, database)
        poll = Poll(await self._consumer(who, database, subscription, caught_up), request, caught_up=caught_up)
        self._add_reader(who, id, poll)
        try:
            if request.wait_ms:
                await self.run(poll.consumer.view.warm, database.source)
            state = subscription.snapshot
            if request.cursor is not None:
                Position.parse(request.cursor)
                if state is None:
                    raise InvalidRequest("this subscription reads no snapshot", hint="Leave out `cursor`.")
            if state is not None and request.cursor is None and request.from_offset is not None:
                check_has_rows(state, request.from_offset)
            await self._note_rows_received(subscription, request.from_offset)
            if state is not None and owes_rows(state, request.cursor, request.from_offset):
                cursor = request.cursor or state.confirmed
                page = await poll.rows(self._rows(poll.consumer, subscription, state, cursor, rows=request.limit))
                if "snapshot" in page:
                    await self.run(lambda: self.subscriptions.note_page(subscription, done=page["snapshot"]["done"]))
                return page
            return await poll.answer()
        finally:
            self.readers.remove(id, poll)

    async def check_subscription(self, who: Principal, id: str) -> None:
        """Raise NotFound if `who` may not see the subscription, or not all data that its query reads."""
        await allowed(self._registry.get(who, id), who, self._queries)

    async def hidden_queries(self, who: Principal) -> set[str]:
        """Return the ids of queries that `who` can see subscriptions to, but that read data hidden from `who`."""
        hidden = set()
        async with self._listing.setdefault(who.account, asyncio.Lock()):
            began = time.perf_counter()
            for subscription in await self.run(self._registry.queries_to_check, who):
                try:
                    await allowed(subscription, who, self._queries)
                except NotFound:  # for every subscription to it: its tables do not depend on the arguments
                    hidden.add(subscription.options.query_id)
                if time.perf_counter() - began > TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
        return hidden

    async def open(self, who: Principal, id: str, opening: Transport, begin: ReaderPosition) -> Stream:
        """Open a stream of a subscription at `begin`, else at its cursor; rows of its snapshot come first."""
        self.readers.check_room()
        subscription = await allowed(self._registry.get(who, id), who, self._queries)
        database = self.databases.database(subscription.db)
        caught_up = await self._heads.caught_up(subscription.db, database)
        offset = begin.cursor
        if offset is not None:
            check_reached(database.log, offset, "offset", caught_up)
        consumer = await self._consumer(who, database, subscription, caught_up)
        await self.run(consumer.view.warm, database.source)
        cursor = subscription.cursor if offset is None else subscription.resume(offset)
        state, reader = subscription.snapshot, None
        await self._note_rows_received(subscription, offset)
        if state is not None and owes_rows(state, begin.snapshot_cursor, offset):
            reader = self._rows(consumer, subscription, state, begin.snapshot_cursor or state.confirmed)
        stream = self._opened(who, consumer, opening, cursor, reader)
        self._add_reader(who, id, stream)
        return stream

    def _add_reader(self, who: Principal, id: str, reader: Stream | Poll) -> None:
        """Report changes of the subscription to `reader`, also a close that happened while it was opened."""
        self.readers.add(id, reader)
        try:
            self.databases.database(self._registry.get(who, id).db)
        except NotFound:
            reader.consumer.closed = True
            reader.changed()

    async def _note_rows_received(self, subscription: Subscription, offset: int | None) -> None:
        """A reader that names an offset after the rows of its snapshot has received them: do not send them again."""
        if subscription.snapshot is not None and offset is not None:
            await self.run(self.subscriptions.note_rows_received, subscription, offset)

    async def _asked(self, who: Principal, params: SubscribeTable) -> tuple[str, Database, Request]:
        self.readers.check_room()
        name = real_name(params.db)
        who.check(name, named_tables(params))
        database = self.databases.database(name)
        return name, database, await self.run(check, params, database.source, who)

    async def open_changes(
        self,
        who: Principal,
        params: SubscribeTable,
        opening: Transport,
        begin: ReaderPosition,
        *,
        upto: int | None = None,
    ) -> Stream:
        """Open a stream of changes of tables, with rows first if requested, without a stored subscription."""
        name, database, request = await self._asked(who, params)
        caught_up = await self._heads.caught_up(name, database)
        hub = self._hub(name, database)
        view = hub.view(opening.shaped(request.options), allowed_tables=who.tables(name))
        consumer = Consumer(database, hub, view, self.run, self._registry)
        await self.run(consumer.view.warm, database.source)
        offset, reader = begin.cursor, None
        if request.start.kind == SNAPSHOT and offset is None:
            tables = await self.run(tables_of, request.options, database)
            reader = self._loose_rows(consumer, SnapshotState(tables=tables), restarted=bool(begin.snapshot_cursor))
        if offset is not None:
            check_reached(database.log, offset, "from_offset", caught_up)
        cursor = await self.run(self._start, database, request) if offset is None else offset
        stream = self._opened(who, consumer, opening, cursor, reader, upto=upto)
        if name not in self.databases.names():  # dropped while the stream was opened
            consumer.closed = True
        return stream

    async def open_batches(
        self, who: Principal, params: SubscribeTable, begin: ReaderPosition, *, upto: int | None = None
    ) -> Batches:
        """Open a stream of one table's changes as Arrow, without a stored subscription."""
        if params.table is None or params.start == SNAPSHOT:
            raise InvalidRequest(
                "Arrow carries the changes of one table",
                hint="Name a table; its rows are at /api/v1/snapshot/{db}/{table}.",
            )
        name, database, request = await self._asked(who, params)
        await self._heads.caught_up(name, database)
        offset = begin.cursor
        cursor = await self.run(self._start, database, request) if offset is None else offset
        check_cursor(database.log, cursor, "from_offset")
        hub = self._hub(name, database)
        view = hub.view(request.options, allowed_tables=who.tables(name))
        consumer = Consumer(database, hub, view, self.run, self._registry)
        await self.run(consumer.view.warm, database.source)
        batches = Batches(consumer, cursor=cursor, upto=upto)
        self._add_stream(who, batches, Transport("arrow", silent))
        return batches

    def _start(self, database: Database, request: Request) -> int:
        return cursor_of(database.log, request.start, whole=bool(request.options.txn))

    def close_stream(self, stream: Stream | Batches) -> None:
        """Release a stream whose reader is gone."""
        stream.close()
        if self._watching is not None:
            self._watching.remove(stream)
        self.readers.remove_stream(stream)
        if stream in self._counted:
            self._option_bytes.remove(*self._counted.pop(stream))

    # --- making ------------------------------------------------------------------------------------------------------

    def _hub(self, name: str, database: Database) -> Hub:
        hub = self._hubs.get(name)
        if hub is None:
            groups = None if self._watching is None else self._watching.groups(name)
            hub = self._hubs[name] = Hub(database.log, database.source, self.run, groups)
        return hub

    async def _consumer(
        self, who: Principal, database: Database, subscription: Subscription, caught_up: bool
    ) -> Consumer:
        view = await self._view(who, subscription.db, database, subscription.options)
        hub, forecast = self._hub(subscription.db, database), self.subscriptions.forecast(subscription.id)
        consumer = Consumer(database, hub, view, self.run, self._registry, subscription, forecast, self._refresh)
        consumer.is_current = caught_up
        return consumer

    def _rows(
        self,
        consumer: Consumer,
        subscription: Subscription,
        state: SnapshotState,
        cursor: str,
        *,
        rows: int | None = None,
    ) -> SnapshotReader:
        known = state

        def save(new: SnapshotState) -> None:
            nonlocal known
            known = self.subscriptions.read_on(subscription, known, new)
            if new.done:
                consumer.finished(new)

        lease = Lease(subscription.id, self.config.lease_seconds, self.config.lease_bytes)
        return SnapshotReader(consumer.database, consumer.view, state, lease, save=save, cursor=cursor, rows=rows)

    def _loose_rows(self, consumer: Consumer, state: SnapshotState, *, restarted: bool) -> SnapshotReader:
        """Read rows for a stream without a subscription: no state outlives the stream."""

        def save(new: SnapshotState) -> None:
            if new.done:
                consumer.finished(new)

        self._unsubscribed += 1
        lease = Lease(f"stream-{self._unsubscribed}", self.config.lease_seconds, self.config.lease_bytes)
        reason = SNAPSHOT_EXPIRED if restarted else ""
        return SnapshotReader(consumer.database, consumer.view, state, lease, save=save, reason=reason)

    def _opened(
        self,
        who: Principal,
        consumer: Consumer,
        opening: Transport,
        cursor: int,
        reader: SnapshotReader | None,
        *,
        upto: int | None = None,
    ) -> Stream:
        seconds = self.config.checkpoint_seconds
        stream = Stream(consumer, opening, cursor=cursor, snapshot=reader, upto=upto, checkpoint_seconds=seconds)
        self._add_stream(who, stream, opening)
        return stream

    def _add_stream(self, who: Principal, stream: Stream | Batches, opening: Transport) -> None:
        """Register an open stream; close it and raise LimitExceeded if the caller's streams have too long options."""
        self.readers.streams[stream] = opening
        size = len(stream.consumer.view.signature)
        if who.role == OWNER or size <= SHORT_OPTIONS:
            return
        self._counted[stream] = who.account, size
        if self._option_bytes.add(who.account, size) > MOST_OPTIONS:
            self.close_stream(stream)
            raise LimitExceeded(
                f"the options of your open streams have more than {MOST_OPTIONS} bytes together",
                hint="Close some streams, or use shorter filters.",
            )
