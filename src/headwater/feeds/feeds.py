"""Feeds: every open reader of this server, streams and polls, in the loop that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from headwater.config import FeedsConfig
from headwater.database import Database, Databases
from headwater.errors import HeadwaterError, InvalidRequest, LimitExceeded, NotFound, Unavailable
from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.hub import Hub
from headwater.feeds.deliver.hub_wait import silent
from headwater.feeds.deliver.poll import Asked, Poll
from headwater.feeds.deliver.reader_state import Seat
from headwater.feeds.deliver.source_head import Heads
from headwater.feeds.deliver.start_position import check_cursor, check_reached, cursor_of
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import From, Opening
from headwater.feeds.delivery_counts import Tally
from headwater.feeds.fair_threads import Threads
from headwater.feeds.groups.log_reader import View
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.invalidation import BRIEF
from headwater.feeds.query_feeds.query_instances import Args, Questions
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.snapshot import SNAPSHOT_EXPIRED, Lease, Position, SnapshotReader
from headwater.feeds.subscription import SnapshotState, Subscription, check_has_rows, owes_rows
from headwater.feeds.subscription_requests import Subscriptions, tables_of
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.subscribe_query import SubscribeQuery, lits_of
from headwater.feeds.subscriptions.subscribe_table import SNAPSHOT, Request, SubscribeTable, check, named_tables
from headwater.feeds.watched_instances import Watching, allowed
from headwater.model.database_name import real_name
from headwater.model.principal import Principal

THREADS = 4  # reading back, snapshots and backtests; more would only share the interpreter
TICK_SECONDS = 0.25
FLUSH_SECONDS = 5.0  # between two writes of how far quiet subscriptions have come


class Feeds:
    """Make, start and stop it in one loop. Blocking calls go to threads of its own."""

    def __init__(self, databases: Databases, registry: Registry, config: FeedsConfig, *, max_streams: int) -> None:
        self.databases, self._registry, self.config = databases, registry, config
        self._max_streams = max_streams
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(THREADS, "headwater-feeds")
        self._hubs: dict[str, Hub] = {}
        self._readers: dict[str, set[Stream | Poll]] = {}  # by subscription
        self._streams: dict[Stream | Batches, Opening] = {}
        self.beside = 0  # streams of others, under the same limit
        self._stopping = False
        self._numbered = 0  # streams without a subscription, for the names of their leases
        self._tally = Tally()
        self._heads = Heads(self.run)
        self._watching: Watching | None = None
        self.subscriptions = Subscriptions(databases, registry, self._tell)
        self._ticking = self._loop.create_task(self._tick())

    # --- life --------------------------------------------------------------------------------------------------------

    def ask(self, questions: Questions) -> None:
        """Serve feeds of queries too, which come from `questions`. Before the first reader."""
        self._watching = Watching(questions, self._registry, self.run)

    def _asking(self) -> Watching:
        if self._watching is None:
            raise Unavailable("no queries are served here")
        return self._watching

    def drain(self) -> None:
        """Let every reader say good-bye; new ones are refused."""
        self._stopping = True
        for stream in list(self._streams):
            stream.stop()
        for readers in list(self._readers.values()):
            for reader in list(readers):
                if isinstance(reader, Poll):
                    reader.stop()

    async def close(self) -> None:
        """After the last reader."""
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
            for stream in [stream for stream in self._streams if stream.is_due(now)]:
                stream.tick(now)
            if now - flushed >= FLUSH_SECONDS:
                flushed = now
                await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(HeadwaterError):
            await self.run(self._registry.flush_quiet)
            if self._watching is not None:
                await self._watching.flush()

    async def run(self, call: Any, *args: Any) -> Any:
        """The value of `call(*args)`, which may block."""
        return await self._threads.run(call, *args)

    def _tell(self, id: str, closed: bool) -> None:
        """From any thread: a subscription is not what it was."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._changed, id, closed)

    def _changed(self, id: str, closed: bool) -> None:
        if closed and self._watching is not None:
            self._watching.remove(id)
        for reader in list(self._readers.get(id, ())):
            reader.seat.closed = reader.seat.closed or closed
            reader.changed()

    def dropped(self, db: str) -> None:
        """From any thread: a database is no more, and neither are its subscriptions."""
        self.subscriptions.forget(db)
        asyncio.run_coroutine_threadsafe(self._forget(db), self._loop)

    async def _forget(self, db: str) -> None:
        for stream in [stream for stream in self._streams if stream.seat.view.options.db == db]:
            stream.seat.closed = True
            stream.changed()
        if (hub := self._hubs.pop(db, None)) is not None:
            await hub.close()
        if self._watching is not None:
            self._watching.forget(db)

    def open_streams(self) -> dict[str, int]:
        """How many, by transport."""
        return self._tally.streams(list(self._streams.values()))

    def open_polls(self) -> int:
        """How many polls are being answered, or wait."""
        return sum(isinstance(reader, Poll) for readers in list(self._readers.values()) for reader in list(readers))

    def deliveries(self) -> dict[str, int]:
        """How many changes and rows went out on streams, by transport."""
        return self._tally.by_transport(list(self._streams.items()))

    def deliveries_of(self) -> dict[str, int]:
        """The same by database."""
        return self._tally.by_database(list(self._streams.items()), self.databases.names())

    # --- queries -----------------------------------------------------------------------------------------------------

    async def subscribe_query(self, who: Principal, params: SubscribeQuery) -> dict[str, Any]:
        """cdc.subscribe_query."""
        watching, args = self._asking(), lits_of(params.args)
        question = await watching.ask(who, params.query_id, args)
        held, answer = await self.run(self.subscriptions.subscribe_query, who, params, args, question)
        await watching.add(held.id, held.options, question)
        hub = self._hub(question.db, self.databases.database(question.db))
        view = hub.view(held.options, question, who.tables(question.db))
        if isinstance(view, QueryView) and view.confirming is not None:
            await self.run(view.confirming.prime, question)
        return {**answer}

    async def open_query(self, who: Principal, query_id: str, args: Args, opening: Opening, begin: From) -> Stream:
        """The invalidations of a query, without a stored subscription."""
        self.check_room()
        question = await self._asking().ask(who, query_id, args)
        options = Options(db=question.db, query_id=query_id, args=args or None, format=BRIEF)
        database = self.databases.database(question.db)
        caught_up = await self._heads.caught_up(question.db, database)
        hub = self._hub(question.db, database)
        view = hub.view(options, question, who.tables(question.db))
        seat = Seat(database, hub, view, self.run, self._registry, refresh=self._refresh)
        asked = begin.cursor
        if asked is not None:
            check_reached(database.log, asked, "from_offset", caught_up)
        stream = self._opened(seat, opening, database.log.latest if asked is None else asked, None)
        try:
            await self._asking().add(stream, options, question)
        except BaseException:
            self.left(stream)
            raise
        return stream

    async def _view(self, who: Principal, name: str, database: Database, options: Options) -> View:
        hub = self._hub(name, database)
        if not options.query_id:
            return hub.view(options)
        return hub.view(options, await self._asking().find(options), who.tables(name))

    async def _refresh(self, view: View) -> None:
        """The schema moved: what `view` shows is understood anew."""
        name = view.options.db
        if isinstance(view, QueryView):
            question = await self._asking().find(view.options)
            self._hub(name, self.databases.database(name)).view(view.options, question, view.held)
            view.understood(question)
            view.check_scope()

    # --- reading -----------------------------------------------------------------------------------------------------

    async def poll(self, who: Principal, id: str, asked: Asked) -> dict[str, Any]:
        """cdc.poll."""
        held = await allowed(self._registry.get(who, id), who, self._asking)
        database = self.databases.database(held.db)
        caught_up = await self._heads.caught_up(held.db, database)
        poll = Poll(await self._seat(who, database, held, caught_up), asked, caught_up=caught_up)
        self._enrol(who, id, poll)
        try:
            if asked.wait_ms:
                await self.run(poll.seat.view.warm, database.source)
            state = held.snapshot
            if asked.cursor is not None:
                Position.parse(asked.cursor)
                if state is None:
                    raise InvalidRequest("this subscription reads no snapshot", hint="Leave out `cursor`.")
            if state is not None and asked.cursor is None and asked.from_offset is not None:
                check_has_rows(state, asked.from_offset)
            await self._note_told(held, asked.from_offset)
            if state is not None and owes_rows(state, asked.cursor, asked.from_offset):
                place = asked.cursor or state.confirmed
                page = await poll.rows(self._rows(poll.seat, held, state, place, rows=asked.limit))
                if "snapshot" in page:
                    await self.run(lambda: self.subscriptions.note_page(held, done=page["snapshot"]["done"]))
                return page
            return await poll.answer()
        finally:
            self._left(id, poll)

    async def open(self, who: Principal, id: str, opening: Opening, begin: From) -> Stream:
        """The stream of a subscription."""
        self.check_room()
        held = await allowed(self._registry.get(who, id), who, self._asking)
        database = self.databases.database(held.db)
        caught_up = await self._heads.caught_up(held.db, database)
        asked = begin.cursor
        if asked is not None:
            check_reached(database.log, asked, "offset", caught_up)
        seat = await self._seat(who, database, held, caught_up)
        await self.run(seat.view.warm, database.source)
        cursor = held.cursor if asked is None else held.resume(asked)
        state, reader = held.snapshot, None
        await self._note_told(held, asked)
        if state is not None and owes_rows(state, begin.place, asked):
            reader = self._rows(seat, held, state, begin.place or state.confirmed)
        stream = self._opened(seat, opening, cursor, reader)
        self._enrol(who, id, stream)
        return stream

    def _enrol(self, who: Principal, id: str, reader: Stream | Poll) -> None:
        """From here on it is told of changes of its subscription, also of those that came while it was opened."""
        self._readers.setdefault(id, set()).add(reader)
        try:
            self.databases.database(self._registry.get(who, id).db)
        except NotFound:
            reader.seat.closed = True
            reader.changed()

    async def _note_told(self, held: Subscription, offset: int | None) -> None:
        """A reader that names an offset behind the rows of its snapshot has them: nobody needs them again."""
        if held.snapshot is not None and offset is not None:
            await self.run(self.subscriptions.note_told, held, offset)

    async def _asked(self, who: Principal, params: SubscribeTable) -> tuple[str, Database, Request]:
        self.check_room()
        name = real_name(params.db)
        who.check(name, named_tables(params))
        database = self.databases.database(name)
        return name, database, await self.run(check, params, database.source, who)

    async def open_changes(
        self, who: Principal, params: SubscribeTable, opening: Opening, begin: From, *, upto: int | None = None
    ) -> Stream:
        """A stream without a stored subscription."""
        name, database, request = await self._asked(who, params)
        caught_up = await self._heads.caught_up(name, database)
        hub = self._hub(name, database)
        seat = Seat(database, hub, hub.view(opening.shaped(request.options)), self.run, self._registry)
        await self.run(seat.view.warm, database.source)
        asked, reader = begin.cursor, None
        if request.start.kind == SNAPSHOT and asked is None:
            tables = await self.run(tables_of, request.options, database)
            reader = self._loose_rows(seat, SnapshotState(tables=tables), restarted=bool(begin.place))
        if asked is not None:
            check_reached(database.log, asked, "from_offset", caught_up)
        cursor = await self.run(self._start, database, request) if asked is None else asked
        stream = self._opened(seat, opening, cursor, reader, upto=upto)
        if name not in self.databases.names():  # dropped meanwhile
            seat.closed = True
        return stream

    async def open_batches(
        self, who: Principal, params: SubscribeTable, begin: From, *, upto: int | None = None
    ) -> Batches:
        """Changes of one table as Arrow, without a stored subscription."""
        if params.table is None or params.start == SNAPSHOT:
            raise InvalidRequest(
                "Arrow carries the changes of one table",
                hint="Name a table; its rows are at /api/v1/snapshot/{db}/{table}.",
            )
        name, database, request = await self._asked(who, params)
        await self._heads.caught_up(name, database)
        asked = begin.cursor
        cursor = await self.run(self._start, database, request) if asked is None else asked
        check_cursor(database.log, cursor, "from_offset")
        hub = self._hub(name, database)
        seat = Seat(database, hub, hub.view(request.options), self.run, self._registry)
        await self.run(seat.view.warm, database.source)
        batches = Batches(seat, cursor=cursor, upto=upto)
        self._streams[batches] = Opening("arrow", silent)
        return batches

    def _start(self, database: Database, request: Request) -> int:
        return cursor_of(database.log, request.start, whole=bool(request.options.txn))

    def left(self, stream: Stream | Batches) -> None:
        """The reader of `stream` is gone."""
        stream.close()
        if self._watching is not None:
            self._watching.remove(stream)
        opening = self._streams.pop(stream)
        self._tally.ended(stream, opening)
        if isinstance(stream, Stream) and stream.seat.subscription is not None:
            self._left(stream.seat.subscription.id, stream)

    def _left(self, id: str, reader: Stream | Poll) -> None:
        readers = self._readers.get(id)
        if readers is not None:
            readers.discard(reader)
            if not readers:
                del self._readers[id]

    # --- making ------------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """LimitExceeded when there is no place for one more stream."""
        if self._stopping:
            raise Unavailable("the server is stopping", hint="Connect again in a moment.")
        if len(self._streams) + self.beside >= self._max_streams:
            raise LimitExceeded(
                f"{self._max_streams} streams are open, and no more are granted",
                hint="Close streams that nobody reads, poll instead, or raise serve.max_streams.",
            )

    def _hub(self, name: str, database: Database) -> Hub:
        hub = self._hubs.get(name)
        if hub is None:
            asked = None if self._watching is None else self._watching.groups(name)
            hub = self._hubs[name] = Hub(database.log, database.source, self.run, asked)
        return hub

    async def _seat(self, who: Principal, database: Database, held: Subscription, caught_up: bool) -> Seat:
        view = await self._view(who, held.db, database, held.options)
        hub, forecast = self._hub(held.db, database), self.subscriptions.forecast(held.id)
        seat = Seat(database, hub, view, self.run, self._registry, held, forecast, self._refresh)
        seat.is_current = caught_up
        return seat

    def _rows(
        self, seat: Seat, held: Subscription, state: SnapshotState, place: str, *, rows: int | None = None
    ) -> SnapshotReader:
        known = state

        def save(new: SnapshotState) -> None:
            nonlocal known
            known = self.subscriptions.read_on(held, known, new)
            if new.done:
                seat.finished(new)

        lease = Lease(held.id, self.config.lease_seconds, self.config.lease_bytes)
        return SnapshotReader(seat.database, seat.view, state, lease, save=save, place=place, rows=rows)

    def _loose_rows(self, seat: Seat, state: SnapshotState, *, restarted: bool) -> SnapshotReader:
        """Rows for a stream without a subscription: nothing of it outlives the stream."""

        def save(new: SnapshotState) -> None:
            if new.done:
                seat.finished(new)

        self._numbered += 1
        lease = Lease(f"stream-{self._numbered}", self.config.lease_seconds, self.config.lease_bytes)
        reason = SNAPSHOT_EXPIRED if restarted else ""
        return SnapshotReader(seat.database, seat.view, state, lease, save=save, reason=reason)

    def _opened(
        self, seat: Seat, opening: Opening, cursor: int, reader: SnapshotReader | None, *, upto: int | None = None
    ) -> Stream:
        stream = Stream(
            seat,
            opening.frame,
            cursor=cursor,
            snapshot=reader,
            upto=upto,
            ping=opening.ping,
            farewell=opening.farewell,
            checkpoint_seconds=self.config.checkpoint_seconds,
        )
        self._streams[stream] = opening
        return stream
