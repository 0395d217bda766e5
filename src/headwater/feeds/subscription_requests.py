"""Subscriptions: making, moving, pausing and closing them, and what they look like in numbers. All calls may block."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from headwater.database import CATCH_UP_SECONDS, Database, Databases
from headwater.errors import Conflict, HeadwaterError, InvalidRequest, LimitExceeded
from headwater.feeds.backtest import backtest
from headwater.feeds.deliver.backpressure import Forecast, Limits, Pressure, counters, forecasted, why_lost
from headwater.feeds.deliver.start_position import at_time, check_cursor, check_reached, cursor_of
from headwater.feeds.groups.log_reader import View
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_instances import Args, Question
from headwater.feeds.snapshot import Position, highest, lowest
from headwater.feeds.subscription import SnapshotState, Subscription
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.subscribe_query import SubscribeQuery, check_query
from headwater.feeds.subscriptions.subscribe_table import (
    EARLIEST,
    SNAPSHOT,
    Request,
    Start,
    SubscribeTable,
    check,
    named_tables,
)
from headwater.model.clock import parse_ts, ts_of_ms, wall_ms
from headwater.model.database_name import real_name
from headwater.model.principal import Principal

PAGE, LARGEST_PAGE = 1000, 10_000  # subscriptions in one answer
_ID = re.compile(r"sub_[0-9a-f]{16}")

BEGIN_SECONDS = 2.0  # a subscription is made once: it begins behind what its maker has seen, also on a busy machine


class Subscriptions:
    """What the wire calls, from any thread. `changed(id, closed)` is told after each change of a subscription."""

    def __init__(
        self, databases: Databases, registry: Registry, changed: Callable[[str, bool], None] = lambda id, closed: None
    ) -> None:
        self._databases, self._registry, self._changed = databases, registry, changed
        self._forecasts: dict[str, Forecast] = {}
        self._backtesting = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # by subscription: held while its snapshot is looked at and kept

    def subscribe(self, who: Principal, params: SubscribeTable) -> dict[str, Any]:
        """cdc.subscribe_table."""
        name = real_name(params.db)
        who.check(name, named_tables(params))
        database = self._databases.database(name)
        request = check(params, database.source, who)
        return _subscribed(*self._found_or_made(who, database, request))

    def subscribe_query(
        self, who: Principal, params: SubscribeQuery, args: Args, question: Question
    ) -> tuple[Subscription, dict[str, Any]]:
        """cdc.subscribe_query, whose question was found."""
        database = self._databases.database(question.db)
        request = check_query(params, args, question, question.db, database.source, who)
        held, created = self._found_or_made(who, database, request)
        return held, _subscribed(held, created)

    def _found_or_made(self, who: Principal, database: Database, request: Request) -> tuple[Subscription, bool]:
        """By its name first: where it began may be long gone when it is asked for again."""
        options, name, names_images = request.options, request.name, request.names_images
        held = None if name is None else self._registry.named(who, options, name, names_images=names_images)
        if held is not None:
            return held, False
        database.catch_up(BEGIN_SECONDS)
        cursor, snapshot = self._begin(database, request)
        return self._registry.create(
            who, options, acked=cursor, name=name, snapshot=snapshot, names_images=names_images
        )

    def _begin(self, database: Database, request: Request) -> tuple[int, SnapshotState | None]:
        cursor = cursor_of(database.log, request.start, whole=bool(request.options.txn))
        if request.start.kind != SNAPSHOT:
            return cursor, None
        return cursor, SnapshotState(tables=tables_of(request.options, database))

    def ack(self, who: Principal, id: str, offset: int | None, cursor: str | None) -> dict[str, Any]:
        """cdc.ack: an offset, or the cursor of a snapshot."""
        held = self._registry.get(who, id)
        log = self._databases.database(held.db).log
        if (offset is None) == (cursor is None):
            raise InvalidRequest(
                "an ack has either an offset or a cursor", hint="Send next_offset, or snapshot.cursor."
            )
        if cursor is not None:
            return self._ack_rows(held, cursor)
        assert offset is not None
        if offset > log.latest:
            caught_up = self._databases.database(held.db).catch_up(CATCH_UP_SECONDS)
            check_reached(log, offset, "offset", caught_up)
        with self._lock(id):
            held = self._registry.ack(id, offset)
            if held.snapshot is not None and held.snapshot.done and held.acked >= highest(held.snapshot):
                log.release(held.id)
                held = self._registry.save_snapshot(id, None)
            elif held.snapshot is not None and held.snapshot.done and offset >= held.snapshot.lowest:
                held = self._registry.save_snapshot(id, replace(held.snapshot, told=True))
        self._changed(id, False)
        return {"sub_id": id, "acked_offset": held.acked}

    def _ack_rows(self, held: Subscription, cursor: str) -> dict[str, Any]:
        position = Position.parse(cursor)
        with self._lock(held.id):
            state = held.snapshot
            if state is None:
                raise InvalidRequest("this subscription reads no snapshot", hint="Ack an offset.")
            if position.run == state.run:
                told = state.done and position.table >= len(state.tables)
                self._registry.save_snapshot(held.id, replace(state, confirmed=cursor, told=told))
        return {"sub_id": held.id, "acked_offset": held.acked, "cursor": cursor}

    def note_told(self, held: Subscription, offset: int) -> None:
        """A reader names an offset behind the rows of its snapshot: it has them, and nobody needs them again."""
        with self._lock(held.id):
            state = held.snapshot
            if state is not None and state.done and not state.told and offset >= lowest(state):
                self._registry.save_snapshot(held.id, replace(state, told=True))

    def note_page(self, held: Subscription, *, done: bool) -> None:
        """A poll got a page of rows, the last one if `done`."""
        with self._lock(held.id):
            state = held.snapshot
            if state is not None and not state.told and state.partial == done:
                self._registry.save_snapshot(held.id, replace(state, partial=not done))

    def read_on(self, held: Subscription, known: SnapshotState, new: SnapshotState) -> SnapshotState:
        """Keep `new`, to which a reader of the snapshot came from `known`.

        Conflict where that is not how it stands: what another reader has delivered must keep its offsets.
        """
        with self._lock(held.id):
            now = held.snapshot
            if now is None or now.run != known.run or now.chunks is not known.chunks:
                raise Conflict(
                    "another reader went on with this snapshot, or the subscription was moved",
                    hint="Connect again: it goes on where it stands now.",
                )
            if new.run == now.run:
                new = replace(new, confirmed=now.confirmed, partial=now.partial and not new.done, told=now.told)
            self._registry.save_snapshot(held.id, new, acked=lowest(new) if new.done else None)
            return new

    def _lock(self, id: str) -> threading.Lock:
        return self._locks.setdefault(id, threading.Lock())

    def database_of(self, id: str) -> str | None:
        """The database of a subscription, whosever it is; None if there is none."""
        return self._registry.database_of(id)

    def pause(self, who: Principal, id: str, paused: bool) -> dict[str, Any]:
        """cdc.pause and cdc.resume."""
        held = self._registry.get(who, id)
        held = self._registry.pause(id) if paused else self._registry.resume(id)
        self._changed(id, False)
        return {
            "sub_id": id,
            "paused": held.paused,
            "acked_offset": held.acked,
            "backpressure": self._pressure(held),
        }

    def seek(self, who: Principal, id: str, offset: int | None, ts: str | int | None) -> dict[str, Any]:
        """cdc.seek: go on after an offset or a time, forwards or back."""
        held = self._registry.get(who, id)
        database = self._databases.database(held.db)
        if (offset is None) == (ts is None):
            raise InvalidRequest(
                "seek takes either an offset or a ts",
                hint="Send the one after which it shall go on, and not the other.",
            )
        database.catch_up(CATCH_UP_SECONDS)
        log = database.log
        if offset is not None:
            target = check_cursor(log, offset, "offset")
        else:
            target = at_time(log, parse_ts(ts) if isinstance(ts, str) else ts_of_ms(ts or 0))
        with self._lock(id):
            if held.snapshot is not None:
                log.release(held.id)
                held = self._registry.save_snapshot(id, None, acked=target)
            else:
                held = self._registry.seek(id, target)
        self._changed(id, False)
        return {"sub_id": id, "acked_offset": held.acked}

    def close(self, who: Principal, id: str) -> dict[str, Any]:
        """cdc.close."""
        held = self._registry.get(who, id)
        self._registry.remove(id)
        with contextlib.suppress(HeadwaterError):
            self._databases.database(held.db).log.release(id)
        self._forecasts.pop(id, None)
        self._locks.pop(id, None)
        self._changed(id, True)
        return {"sub_id": id, "closed": True}

    def list(
        self, who: Principal, db: str | None, id: str | None = None, limit: int = PAGE, after: str | None = None
    ) -> dict[str, Any]:
        """cdc.list: a page of `limit`, oldest first; `next` is the `after` of the next page, where there is one."""
        _check_page(limit, after)
        name = None if db is None else real_name(db)
        if name is not None:
            who.glimpse(name)
            self._databases.database(name)  # NotFound for one that is not there
        found = [self._registry.get(who, id)] if id is not None else self._registry.visible_to(who, name)
        found = sorted((held for held in found if held.id > (after or "")), key=lambda held: held.id)
        page = found[:limit]
        body: dict[str, Any] = {"subscriptions": [self._described(held) for held in page]}
        return body if len(found) == len(page) else {**body, "next": page[-1].id}

    def _described(self, held: Subscription) -> dict[str, Any]:
        found = self._pressure(held)
        options = held.options
        body: dict[str, Any] = {
            "sub_id": held.id,
            "name": held.name,
            "db": held.db,
            "tables": list(options.tables),
            "acked_offset": held.acked,
            "paused": held.paused,
            "lag": found.lag,
            "state": found.state,
            "remaining_until_resnapshot": found.remaining_until_resnapshot,
            "format": options.format,
            "options": options,
            "created_ms": held.created_ms,
        }
        if found.will_expire_at_ms is not None:
            body["will_expire_at_ms"] = found.will_expire_at_ms
        if options.query_id:
            body |= {"query_id": options.query_id, "args": options.args or []}
        if held.snapshot is not None:
            body["snapshot"] = {"done": held.snapshot.done, "tables": list(held.snapshot.tables)}
        return body

    def backtest(self, who: Principal, params: SubscribeTable) -> dict[str, Any]:
        """cdc.backtest."""
        name = real_name(params.db)
        who.check(name, named_tables(params))
        database = self._databases.database(name)
        request = check(params, database.source, who)
        start = Start(EARLIEST) if params.start is None else request.start
        if request.start.kind == SNAPSHOT:
            raise InvalidRequest("a backtest looks at changes, not at a snapshot", hint='Leave out start:"snapshot".')
        database.catch_up(CATCH_UP_SECONDS)
        end = database.log.latest
        after = cursor_of(database.log, start, whole=False)
        view = View(request.options, database.source)
        if after >= end:
            return backtest(database.log, view, after=after, end=after)
        if not self._backtesting.acquire(blocking=False):
            raise LimitExceeded("another backtest is running, and one runs at a time", hint="Try again in a moment.")
        try:
            return backtest(database.log, view, after=after, end=end)
        finally:
            self._backtesting.release()

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _pressure(self, held: Subscription) -> Pressure:
        database = self._databases.database(held.db)
        log = database.log
        reading = held.snapshot is not None and not held.snapshot.done
        reason = why_lost(held.cursor, horizon=log.horizon, generation_first=log.generation_first)
        return forecasted(
            self.forecast(held.id),
            wall_ms(),
            cursor=held.cursor,
            latest=log.latest,
            limits=Limits.of(database.retention.changes),
            paused=held.paused,
            lost=bool(reason) and not reading,
            spent=log.spent(held.cursor),
        )

    def counters(self, db: str) -> dict[str, int]:
        """The numbers of one database for stats.snapshot."""
        database = self._databases.database(db)
        log = database.log
        every = self._registry.for_db(db)
        found, queries = [self._pressure(held) for held in every], sum(bool(held.options.query_id) for held in every)
        limits = Limits.of(database.retention.changes)
        return counters(found, horizon=log.horizon, latest=log.latest, limits=limits, queries=queries)

    def forecast(self, id: str) -> Forecast:
        """When the log will outrun a subscription."""
        return self._forecasts.setdefault(id, Forecast())

    def forget(self, db: str) -> None:
        """A database is no more, and neither are its subscriptions."""
        ids = [held.id for held in self._registry.for_db(db)]
        self._registry.close_db(db)
        for id in ids:
            self._changed(id, True)


def _subscribed(held: Subscription, created: bool) -> dict[str, Any]:
    return {
        "sub_id": held.id,
        "offset": held.acked,
        "sse_url": f"/api/v1/cdc/sse/{held.id}",
        "ws_url": f"/api/v1/cdc/ws/{held.id}",
        "created": created,
    }


def _check_page(limit: int, after: str | None) -> None:
    if not 1 <= limit <= LARGEST_PAGE:
        raise InvalidRequest(f"`limit` {limit} is out of range", hint=f"Send 1 to {LARGEST_PAGE}.")
    if after is not None and not _ID.fullmatch(after):
        raise InvalidRequest(f"`after` {after[:40]!r} is no sub_id", hint="Send `next` of the page before.")


def tables_of(options: Options, database: Database) -> tuple[str, ...]:
    """The tables that a snapshot reads."""
    return options.tables or tuple(sorted(database.source.describe()))
