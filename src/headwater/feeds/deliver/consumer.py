"""The consumer behind a stream or a poll: its view of one database, its subscription, its lag and backpressure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from headwater.database import Database
from headwater.feeds.deliver.backpressure import (
    LOG_GENERATION_CHANGED,
    RESNAPSHOT_REQUIRED,
    WAL_HORIZON_EXCEEDED,
    Forecast,
    LagLimits,
    Pressure,
    pressure,
    why_lost,
)
from headwater.feeds.deliver.hub import Hub, Run
from headwater.feeds.filters.filter import NewerThanSnapshot
from headwater.feeds.groups.log_reader import View
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.feeds.snapshot import SNAPSHOT_EXPIRED, newer_than_snapshot
from headwater.feeds.subscription import SnapshotState, Subscription
from headwater.feeds.subscriptions.registry import Registry
from headwater.log.live.live_log import LiveLog
from headwater.model.clock import wall_ms

NEVER = 2**63 - 1
Refresh = Callable[[View], Awaitable[None]]  # analyses the query of a view again, after a schema change


class Consumer:
    """The database, view, subscription and backpressure of one stream or poll; it decides when to check them."""

    def __init__(
        self,
        database: Database,
        hub: Hub,
        view: View,
        run: Run,
        registry: Registry,
        subscription: Subscription | None = None,
        forecast: Forecast | None = None,
        refresh: Refresh | None = None,
    ) -> None:
        self.database, self.hub, self.view, self.run = database, hub, view, run
        self.log: LiveLog = database.log
        self.subscription = subscription
        self.closed = False  # the subscription or its database was closed
        self.is_current = False  # the log has caught up with the source once
        self._registry, self._forecast = registry, forecast or Forecast()
        self._refresh = refresh
        self.limits = LagLimits.of(database.retention.changes)
        self._finished: SnapshotState | None = None
        self._newer: NewerThanSnapshot | None = None
        if subscription is not None and subscription.snapshot is not None and subscription.snapshot.done:
            self.finished(subscription.snapshot)

    @property
    def paused(self) -> bool:
        """Return whether the subscription is paused."""
        return self.subscription is not None and self.subscription.paused

    @property
    def _is_reading(self) -> bool:
        """Return whether rows of the snapshot are still unread: they include changes that the log evicted."""
        state = None if self.subscription is None else self.subscription.snapshot
        return state is not None and not state.done

    @property
    def published(self) -> int:
        """Return the highest offset that the hub has published for this view."""
        return self.hub.reached(self.view)

    @property
    def readable(self) -> int:
        """Return the highest offset to read from the log: its head for whole transactions, else the hub's offset."""
        return self.log.latest if self.view.is_whole else self.hub.upto

    async def read(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run `call(*args)` in a thread and return its page; if the view is outdated then, refresh it."""
        found = await self.run(call, *args)
        if self.view.is_outdated and self._refresh is not None:
            await self._refresh(self.view)
        return found

    # --- after a snapshot --------------------------------------------------------------------------------------------

    def finished(self, state: SnapshotState) -> None:
        """Note that all rows of the snapshot were sent: changes older than its rows are not delivered any more."""
        self._finished, self._newer = state, newer_than_snapshot(state, self.database.source)

    def overlaps_snapshot(self, cursor: int) -> bool:
        """Return whether changes after `cursor` may be older than the rows of the snapshot."""
        return self._finished is not None and cursor < self._finished.highest

    @property
    def reach(self) -> int:
        """Return the offset at which the consumer is up to date: the log's head, or that of newer snapshot rows."""
        return max(self.log.latest, 0 if self._finished is None else self._finished.highest)

    def snapshot_filter(self, cursor: int) -> NewerThanSnapshot | None:
        """Return the filter that drops changes older than the snapshot's rows; None where none can follow `cursor`."""
        return self._newer if self.overlaps_snapshot(cursor) else None

    # --- lag and backpressure ----------------------------------------------------------------------------------------

    def why_lost(self, cursor: int) -> str:
        """Return why the changes after `cursor` are no longer in the log; "" if they are."""
        if self.is_current and cursor > self.log.latest:
            return LOG_GENERATION_CHANGED  # the cursor is from a log that was deleted
        reason = why_lost(cursor, horizon=self.log.horizon, generation_first=self.log.generation_first)
        return SNAPSHOT_EXPIRED if reason == WAL_HORIZON_EXCEEDED and self.overlaps_snapshot(cursor) else reason

    def pressure(self, cursor: int) -> Pressure:
        """Return the backpressure by what was acknowledged, not sent, and add a sample to the forecast."""
        at = self.acked(cursor)
        return pressure(
            forecast=self._forecast,
            now_ms=wall_ms(),
            cursor=at,
            latest=self.log.latest,
            limits=self.limits,
            paused=self.paused,
            lost=not self._is_reading and bool(self.why_lost(max(cursor, at))),
            spent=self.log.spent(at),
        )

    def pressure_of_acks(self, cursor: int) -> Pressure:
        """Return `pressure`, or resnapshot_required if changes that were not acknowledged are evicted, though sent."""
        return self._with_loss(self.pressure(cursor), self.acked(cursor))

    def pressure_at(self, acked: int) -> Pressure:
        """Return the backpressure as if the subscriber had acknowledged no more than `acked`."""
        log, limits = self.log, self.limits
        spent = log.spent(acked)
        now = pressure(cursor=acked, latest=log.latest, limits=limits, paused=self.paused, lost=False, spent=spent)
        return self._with_loss(now, acked)

    def _with_loss(self, found: Pressure, acked: int) -> Pressure:
        if self._is_reading or not self.why_lost(acked):
            return found
        return Pressure(RESNAPSHOT_REQUIRED, found.lag, 0, found.paused)

    def acked(self, cursor: int) -> int:
        """Return what the subscriber acknowledged; without a subscription, what was sent."""
        return cursor if self.subscription is None else self.subscription.cursor

    def alarm(self) -> int:
        """Return the log offset at which the backpressure state changes next; NEVER if new changes cannot change it."""
        if self.subscription is None:
            return NEVER
        at, latest, limits = self.subscription.cursor, self.log.latest, self.limits
        if self.why_lost(at):
            return NEVER
        lost = at + limits.retention + 1  # evicted by the next run of retention
        return next((step for step in (at + limits.warn_lag, at + limits.throttle_lag, lost) if step > latest), latest)

    @property
    def changes_with_time(self) -> bool:
        """Return whether the state must be checked by the clock: while paused, or while unread changes may grow old."""
        subscription = self.subscription
        return self.paused or (
            subscription is not None and self.log.forgets_by_time and subscription.cursor < self.log.latest
        )

    def note_quiet(self, began: int, delivered: int, cursor: int) -> None:
        """Move the quiet position to `cursor`: no change passed the filter after `began` and after `delivered`."""
        subscription = self.subscription
        if subscription is None or cursor <= subscription.cursor:
            return
        self._registry.quiet(subscription.id, cursor, after=max(began, delivered))

    # --- control events ----------------------------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """Return the first retained offset; 0 if the log is empty."""
        horizon = self.log.horizon
        return horizon if horizon <= self.log.latest else 0

    def named(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return `body` with the id of the subscription first."""
        return body if self.subscription is None else {"sub_id": self.subscription.id, **body}

    def backpressure(self, found: Pressure) -> dict[str, Any]:
        """Return the data of the control event `backpressure`."""
        body = {
            "state": found.state,
            "lag": found.lag,
            "remaining_until_resnapshot": found.remaining_until_resnapshot,
            "paused": found.paused,
            "earliest_offset": self.earliest,
            "latest_offset": self.log.latest,
        }
        if found.will_expire_at_ms is not None:
            body["will_expire_at_ms"] = found.will_expire_at_ms
        return self.named(body)

    def resnapshot(self, reason: str) -> dict[str, Any]:
        """Return the data of the control event `resnapshot`, which ends a stream."""
        body = {
            "earliest_offset": self.earliest,
            "latest_offset": self.log.latest,
            "resnapshot_from_offset": self.log.horizon - 1,
            "reason": reason,
        }
        return self.named({**body, **self.snapshot_urls()})

    def snapshot_urls(self) -> dict[str, Any]:
        """Return the fields `snapshot_url`, and for several tables `snapshot_urls`, of rows as of the log's head."""
        options = self.view.options
        if isinstance(self.view, QueryView):
            return {"snapshot_url": self.view.instance.url}
        tables = options.tables or tuple(sorted(self.database.source.describe()))
        version = f"{self.log.generation}.{self.log.latest}"
        found = {table: snapshot_url(options.db, table, version) for table in tables}
        if len(found) == 1:
            return {"snapshot_url": next(iter(found.values()))}
        return {"snapshot_url": next(iter(found.values()), ""), "snapshot_urls": found}


def snapshot_url(db: str, table: str, version: str) -> str:
    """Return the URL of a table's rows as of `version`."""
    return f"/api/v1/snapshot/{quote(db, safe='')}/{quote(table, safe='', errors='surrogateescape')}?version={version}"
