"""Backpressure: the lag of a subscriber, its state, and the forecast when the log evicts unread changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headwater.log.disk.retention import EvictionProgress
from headwater.model.clock import MAX_MS

NO_LIMIT = 2**63 - 1  # retention without a limit by count
WARN_SHARE, THROTTLE_SHARE = 0.5, 0.75  # shares of a limit by count, bytes or age
NOTHING_SPENT = EvictionProgress()
SMOOTH_MS = 10_000  # a rate this long ago has about a third of the weight of the current rate

HEALTHY, PRESSURE, THROTTLE = "healthy", "pressure", "throttle"
PAUSED, RESNAPSHOT_REQUIRED = "paused", "resnapshot_required"
WAL_HORIZON_EXCEEDED, LOG_GENERATION_CHANGED = "wal_horizon_exceeded", "log_generation_changed"


class LagLimits(msgspec.Struct, frozen=True):
    """The lags at which a subscriber is warned, advised to throttle its writers, or must resnapshot."""

    retention: int
    warn_lag: int
    throttle_lag: int

    @classmethod
    def of(cls, retention: int | None) -> LagLimits:
        """Return the limits of a log that retains `retention` changes; None: no limit by count."""
        kept = NO_LIMIT if retention is None else retention
        warn, throttle = WARN_SHARE.as_integer_ratio(), THROTTLE_SHARE.as_integer_ratio()  # floats cannot hold NO_LIMIT
        return cls(kept, max(kept * warn[0] // warn[1], 1), -(-kept * throttle[0] // throttle[1]))


class Pressure(msgspec.Struct, frozen=True, omit_defaults=True):
    """The backpressure of a subscriber, as clients receive it in `backpressure`."""

    state: str
    lag: int
    remaining_until_resnapshot: int
    paused: bool
    will_expire_at_ms: int | None = None


def pressure(
    *,
    cursor: int,
    latest: int,
    limits: LagLimits,
    paused: bool,
    lost: bool,
    will_expire_at_ms: int | None = None,
    spent: EvictionProgress = NOTHING_SPENT,
    forecast: Forecast | None = None,
    now_ms: int = 0,
) -> Pressure:
    """Return the pressure on a subscriber at `cursor` by the strictest limit; `lost`: `why_lost` gave a reason.

    Adds `latest` and `cursor` as a sample at `now_ms` to `forecast`, which then gives `will_expire_at_ms`.
    """
    lag = max(latest - cursor, 0)
    by_count = max(limits.retention - lag, 0)
    remaining = by_count if spent.remaining is None else min(by_count, spent.remaining)
    if forecast is not None:
        forecast.observe(now_ms, latest, cursor)
        will_expire_at_ms = forecast.expires_at(now_ms, remaining=remaining)
    state = _state(lag, limits, paused, lost, spent.share)
    if lost:
        return Pressure(state, lag, 0, paused)
    expiries = [time for time in (will_expire_at_ms, spent.expires_at_ms) if time is not None]
    return Pressure(state, lag, remaining, paused, min(expiries, default=None))


def _state(lag: int, limits: LagLimits, paused: bool, lost: bool, share: float) -> str:
    if lost:
        return RESNAPSHOT_REQUIRED
    if paused:
        return PAUSED
    if lag >= limits.throttle_lag or share >= THROTTLE_SHARE:
        return THROTTLE
    return PRESSURE if lag >= limits.warn_lag or share >= WARN_SHARE else HEALTHY


def states_between(known: str | None, found: Pressure, limits: LagLimits) -> list[Pressure]:
    """Return the pressure at each state that a growing lag passed after `known` and before `found`."""
    order = (HEALTHY, PRESSURE, THROTTLE, RESNAPSHOT_REQUIRED)
    if known not in order or found.state not in order:
        return []
    between = order[order.index(known) + 1 : order.index(found.state)]
    lags = {PRESSURE: limits.warn_lag, THROTTLE: limits.throttle_lag}
    return [
        Pressure(state, lags[state], max(limits.retention - lags[state], 0), found.paused)
        for state in between
        if lags[state] <= found.lag and (state == THROTTLE or lags[PRESSURE] < lags[THROTTLE])
    ]


def why_lost(cursor: int, *, horizon: int, generation_first: int) -> str:
    """Return why the changes after `cursor` are no longer in the log; "" if they are.

    A log that retains nothing has its horizon one after its newest change: a reader of that change is not lost.
    """
    if cursor + 1 < generation_first:
        return LOG_GENERATION_CHANGED
    return WAL_HORIZON_EXCEEDED if cursor + 1 < horizon else ""


class Forecast:
    """Forecasts when the log evicts unread changes of one cursor, from the recent rates of both. Not thread-safe."""

    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._latest = self._cursor = 0
        self._grows: float | None = None  # changes per millisecond
        self._moves: float | None = None

    def observe(self, now_ms: int, latest: int, cursor: int) -> None:
        """Add a sample of the log's newest offset and the cursor; a second sample in one millisecond is ignored."""
        if self._at_ms is None or now_ms < self._at_ms:  # the first, or the clock was set back
            self._at_ms, self._latest, self._cursor = now_ms, latest, cursor
            return
        passed = now_ms - self._at_ms
        if not passed:
            return
        # A step back is a seek, or a withdrawal of staged changes, and no measure of a rate.
        self._grows = _smoothed(self._grows, max(latest - self._latest, 0), passed)
        self._moves = _smoothed(self._moves, max(cursor - self._cursor, 0), passed)
        self._at_ms, self._latest, self._cursor = now_ms, latest, cursor

    def expires_at(self, now_ms: int, *, remaining: int) -> int | None:
        """Return when `remaining` will be used up; None if it does not shrink or lasts beyond the largest timestamp."""
        closing = (self._grows or 0.0) - (self._moves or 0.0)
        if closing <= 0.0:
            return None
        left = remaining / closing
        return now_ms + math.ceil(left) if now_ms + left <= MAX_MS else None


def _smoothed(rate: float | None, moved: int, passed: int) -> float:
    """Return the smoothed rate after a rate of `moved / passed` during `passed` milliseconds."""
    now = moved / passed
    return now if rate is None else now + (rate - now) * math.exp(-passed / SMOOTH_MS)


def counters(
    pressures: Sequence[Pressure], *, horizon: int, latest: int, limits: LagLimits, queries: int = 0
) -> dict[str, int]:
    """Return the 17 counters of `stats.snapshot.cdc`; `queries` is the number of subscriptions to queries."""
    states = [one.state for one in pressures]
    retained = latest - horizon + 1
    return {
        "active_subscriptions": len(pressures),
        "table_subscriptions": len(pressures) - queries,
        "query_subscriptions": queries,
        "total_lag": sum(one.lag for one in pressures),
        "max_lag": max((one.lag for one in pressures), default=0),
        "resnapshot_subscriptions": states.count(RESNAPSHOT_REQUIRED),
        "paused_subscriptions": sum(one.paused for one in pressures),
        "pressured_subscriptions": states.count(PRESSURE) + states.count(THROTTLE),
        "throttle_recommended_subscriptions": states.count(THROTTLE),
        "earliest_offset": horizon if retained else 0,
        "latest_offset": latest,
        "retained_events": retained,
        "retention_limit": limits.retention,
        "dropped_events_total": horizon - 1,
        "warn_lag": limits.warn_lag,
        "throttle_lag": limits.throttle_lag,
        "min_remaining_until_resnapshot": min(
            (one.remaining_until_resnapshot for one in pressures), default=limits.retention
        ),
    }
