"""Requests on subscriptions: create, acknowledge, seek, pause, close, list and measure them. All calls may block."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from headwater.database import CATCH_UP_SECONDS, Database, Databases
from headwater.errors import Conflict, HeadwaterError, InvalidRequest, LimitExceeded
from headwater.feeds.backtest import backtest
from headwater.feeds.deliver.backpressure import Forecast, LagLimits, Pressure, counters, pressure, why_lost
from headwater.feeds.deliver.start_position import at_time, check_cursor, check_reached, cursor_of
from headwater.feeds.groups.log_reader import View
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_instances import Args, QueryInstance
from headwater.feeds.snapshot import Position
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

PAGE, LARGEST_PAGE = 1000, 10_000  # subscriptions in one response
_ID = re.compile(r"sub_[0-9a-f]{16}")

# A new subscription waits this long for the log, so that it begins after every commit that its creator has seen.
BEGIN_SECONDS = 2.0


class Subscriptions:
    """Implements the cdc.* methods. Thread-safe. Calls `changed(id, closed)` after each change of a subscription."""

    def __init__(
        self, databases: Databases, registry: Registry, changed: Callable[[str, bool], None] = lambda id, closed: None
    ) -> None:
        self._databases, self._registry, self._changed = databases, registry, changed
        self.database_of = registry.database_of
        self._forecasts: dict[str, Forecast] = {}
        self._backtesting = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}  # by subscription: held while its snapshot state is changed

    def subscribe(self, who: Principal, params: SubscribeTable) -> dict[str, Any]:
        """Create a subscription to tables, or find it by its name (cdc.subscribe_table)."""
        database, request = self._checked(who, params)
        return _subscribed(*self._found_or_made(who, database, request))

    def _checked(self, who: Principal, params: SubscribeTable) -> tuple[Database, Request]:
        name = real_name(params.db)
        who.check(name, named_tables(params))
        database = self._databases.database(name)
        return database, check(params, database.source, who)

    def subscribe_query(
        self, who: Principal, params: SubscribeQuery, args: Args, instance: QueryInstance
    ) -> tuple[Subscription, dict[str, Any]]:
        """Create a subscription to `instance`, or find it by its name; return it with the result of the method."""
        database = self._databases.database(instance.db)
        request = check_query(params, args, instance, instance.db, database.source, who)
        subscription, created = self._found_or_made(who, database, request)
        return subscription, _subscribed(subscription, created)

    def _found_or_made(self, who: Principal, database: Database, request: Request) -> tuple[Subscription, bool]:
        """Return an existing subscription by its name, else a new one, and whether it is new.

        The name comes first: the start of an existing subscription may already be evicted.
        """
        options, name, names_images = request.options, request.name, request.names_images
        subscription = None if name is None else self._registry.named(who, options, name, names_images=names_images)
        if subscription is not None:
            return subscription, False
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
        """Acknowledge changes up to `offset`, or snapshot rows up to `cursor` (cdc.ack); exactly one must be given."""
        subscription = self._registry.get(who, id)
        log = self._databases.database(subscription.db).log
        if (offset is None) == (cursor is None):
            raise InvalidRequest(
                "an ack has either an offset or a cursor", hint="Send next_offset, or snapshot.cursor."
            )
        if cursor is not None:
            return self._ack_rows(subscription, cursor)
        assert offset is not None
        if offset > log.latest:
            caught_up = self._databases.database(subscription.db).catch_up(CATCH_UP_SECONDS)
            check_reached(log, offset, "offset", caught_up)
        with self._lock(id):
            subscription = self._registry.ack(id, offset)
            state = subscription.snapshot
            if state is not None and state.done and subscription.acked >= state.highest:
                log.release(subscription.id)
                subscription = self._registry.save_snapshot(id, None)
            elif state is not None and state.done and offset >= state.lowest:
                subscription = self._registry.save_snapshot(id, replace(state, rows_received=True))
        self._changed(id, False)
        return {"sub_id": id, "acked_offset": subscription.acked}

    def _ack_rows(self, subscription: Subscription, cursor: str) -> dict[str, Any]:
        position = Position.parse(cursor)
        with self._lock(subscription.id):
            state = subscription.snapshot
            if state is None:
                raise InvalidRequest("this subscription reads no snapshot", hint="Ack an offset.")
            if position.run == state.run:
                rows_received = state.done and position.table >= len(state.tables)
                self._registry.save_snapshot(
                    subscription.id, replace(state, confirmed=cursor, rows_received=rows_received)
                )
        return {"sub_id": subscription.id, "acked_offset": subscription.acked, "cursor": cursor}

    def note_rows_received(self, subscription: Subscription, offset: int) -> None:
        """Save that the client has all rows of its snapshot, because it named an offset after them."""
        with self._lock(subscription.id):
            state = subscription.snapshot
            if state is not None and state.done and not state.rows_received and offset >= state.lowest:
                self._registry.save_snapshot(subscription.id, replace(state, rows_received=True))

    def note_page(self, subscription: Subscription, *, done: bool) -> None:
        """Save that a poll received a page of rows, the last page if `done`."""
        with self._lock(subscription.id):
            state = subscription.snapshot
            if state is not None and not state.rows_received and state.partial == done:
                self._registry.save_snapshot(subscription.id, replace(state, partial=not done))

    def read_on(self, subscription: Subscription, known: SnapshotState, new: SnapshotState) -> SnapshotState:
        """Save the state `new`, which a reader of the snapshot reached from `known`.

        Raises Conflict if the stored state is not `known`: rows delivered by another reader must keep their offsets.
        """
        with self._lock(subscription.id):
            now = subscription.snapshot
            if now is None or now.run != known.run or now.chunks is not known.chunks:
                raise Conflict(
                    "another reader continued this snapshot, or the subscription was moved",
                    hint="Connect again; the snapshot continues at its current position.",
                )
            if new.run == now.run:
                new = replace(
                    new, confirmed=now.confirmed, partial=now.partial and not new.done, rows_received=now.rows_received
                )
            self._registry.save_snapshot(subscription.id, new, acked=new.lowest if new.done else None)
            return new

    def _lock(self, id: str) -> threading.Lock:
        return self._locks.setdefault(id, threading.Lock())

    def pause(self, who: Principal, id: str, paused: bool) -> dict[str, Any]:
        """Pause the subscription, or resume it if `paused` is False (cdc.pause, cdc.resume)."""
        self._registry.get(who, id)  # raises NotFound if `who` may not see it
        subscription = self._registry.set_paused(id, paused)
        self._changed(id, False)
        return {
            "sub_id": id,
            "paused": subscription.paused,
            "acked_offset": subscription.acked,
            "backpressure": self._pressure(subscription),
        }

    def seek(self, who: Principal, id: str, offset: int | None, ts: str | int | None) -> dict[str, Any]:
        """Continue after `offset` or the time `ts`, forwards or backwards (cdc.seek); ends an unfinished snapshot."""
        subscription = self._registry.get(who, id)
        database = self._databases.database(subscription.db)
        if (offset is None) == (ts is None):
            raise InvalidRequest(
                "seek takes either an offset or a ts",
                hint="Send the `offset` or the `ts` after which delivery continues, not both.",
            )
        database.catch_up(CATCH_UP_SECONDS)
        log = database.log
        if offset is not None:
            target = check_cursor(log, offset, "offset")
        else:
            target = at_time(log, parse_ts(ts) if isinstance(ts, str) else ts_of_ms(ts or 0))
        with self._lock(id):
            if subscription.snapshot is not None:
                log.release(subscription.id)
                subscription = self._registry.save_snapshot(id, None, acked=target)
            else:
                subscription = self._registry.seek(id, target)
        self._changed(id, False)
        return {"sub_id": id, "acked_offset": subscription.acked}

    def close(self, who: Principal, id: str) -> dict[str, Any]:
        """Delete the subscription, release its lease and end its streams (cdc.close)."""
        subscription = self._registry.get(who, id)
        self._registry.remove(id)
        with contextlib.suppress(HeadwaterError):
            self._databases.database(subscription.db).log.release(id)
        self._forecasts.pop(id, None)
        self._locks.pop(id, None)
        self._changed(id, True)
        return {"sub_id": id, "closed": True}

    def list(
        self,
        who: Principal,
        db: str | None,
        id: str | None = None,
        limit: int = PAGE,
        after: str | None = None,
        hidden: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return `limit` subscriptions, oldest first (cdc.list); `next`, if present, is `after` of the next page.

        Leaves out the subscriptions to the queries `hidden`.
        """
        _check_page(limit, after)
        name = None if db is None else real_name(db)
        if name is not None:
            who.check_any_scope(name)
            self._databases.database(name)  # raises NotFound for an unknown database
        found = [self._registry.get(who, id)] if id is not None else self._registry.visible_to(who, name)
        found = sorted(
            (each for each in found if each.id > (after or "") and each.options.query_id not in hidden),
            key=lambda subscription: subscription.id,
        )
        page = found[:limit]
        body: dict[str, Any] = {"subscriptions": [self._described(subscription) for subscription in page]}
        return body if len(found) == len(page) else {**body, "next": page[-1].id}

    def _described(self, subscription: Subscription) -> dict[str, Any]:
        found = self._pressure(subscription)
        options = subscription.options
        body: dict[str, Any] = {
            "sub_id": subscription.id,
            "name": subscription.name,
            "db": subscription.db,
            "tables": list(options.tables),
            "acked_offset": subscription.acked,
            "paused": subscription.paused,
            "lag": found.lag,
            "state": found.state,
            "remaining_until_resnapshot": found.remaining_until_resnapshot,
            "format": options.format,
            "options": options,
            "created_ms": subscription.created_ms,
        }
        if found.will_expire_at_ms is not None:
            body["will_expire_at_ms"] = found.will_expire_at_ms
        if options.query_id:
            body |= {"query_id": options.query_id, "args": options.args or []}
        if subscription.snapshot is not None:
            body["snapshot"] = {"done": subscription.snapshot.done, "tables": list(subscription.snapshot.tables)}
        return body

    def backtest(self, who: Principal, params: SubscribeTable) -> dict[str, Any]:
        """Return what such a subscription would have delivered (cdc.backtest); LimitExceeded while another one runs."""
        database, request = self._checked(who, params)
        start = Start(EARLIEST) if params.start is None else request.start
        if request.start.kind == SNAPSHOT:
            raise InvalidRequest("a backtest reads changes, not a snapshot", hint='Leave out start:"snapshot".')
        database.catch_up(CATCH_UP_SECONDS)
        end = database.log.latest
        after = cursor_of(database.log, start, whole=False)
        view = View(request.options, database.source, is_restricted=who.tables(request.options.db) is not None)
        if after >= end:
            return backtest(database.log, view, after=after, end=after)
        if not self._backtesting.acquire(blocking=False):
            raise LimitExceeded("another backtest is running, and one runs at a time", hint="Try again in a moment.")
        try:
            return backtest(database.log, view, after=after, end=end)
        finally:
            self._backtesting.release()

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _pressure(self, subscription: Subscription) -> Pressure:
        database = self._databases.database(subscription.db)
        log = database.log
        reading = subscription.snapshot is not None and not subscription.snapshot.done
        reason = why_lost(subscription.cursor, horizon=log.horizon, generation_first=log.generation_first)
        return pressure(
            forecast=self.forecast(subscription.id),
            now_ms=wall_ms(),
            cursor=subscription.cursor,
            latest=log.latest,
            limits=LagLimits.of(database.retention.changes),
            paused=subscription.paused,
            lost=bool(reason) and not reading,
            spent=log.spent(subscription.cursor),
        )

    def counters(self, db: str) -> dict[str, int]:
        """Return the counters of one database for stats.snapshot."""
        database = self._databases.database(db)
        log = database.log
        every = self._registry.for_db(db)
        found = [self._pressure(subscription) for subscription in every]
        queries = sum(bool(subscription.options.query_id) for subscription in every)
        limits = LagLimits.of(database.retention.changes)
        return counters(found, horizon=log.horizon, latest=log.latest, limits=limits, queries=queries)

    def forecast(self, id: str) -> Forecast:
        """Return the forecast of the subscription `id`, one object for all its readers."""
        return self._forecasts.setdefault(id, Forecast())

    def forget(self, db: str) -> None:
        """Close all subscriptions of a dropped database."""
        ids = [subscription.id for subscription in self._registry.for_db(db)]
        self._registry.close_db(db)
        for id in ids:
            self._changed(id, True)


def _subscribed(subscription: Subscription, created: bool) -> dict[str, Any]:
    return {
        "sub_id": subscription.id,
        "offset": subscription.acked,
        "sse_url": f"/api/v1/cdc/sse/{subscription.id}",
        "ws_url": f"/api/v1/cdc/ws/{subscription.id}",
        "created": created,
    }


def _check_page(limit: int, after: str | None) -> None:
    if not 1 <= limit <= LARGEST_PAGE:
        raise InvalidRequest(f"`limit` {limit} is out of range", hint=f"Send 1 to {LARGEST_PAGE}.")
    if after is not None and not _ID.fullmatch(after):
        raise InvalidRequest(f"`after` {after[:40]!r} is not a sub_id", hint="Send `next` of the previous page.")


def tables_of(options: Options, database: Database) -> tuple[str, ...]:
    """Return the tables that a snapshot with these options reads."""
    return options.tables or tuple(sorted(database.source.describe()))
