"""Backpressure: how far behind a subscriber is, what that means for it, and when the log will outrun it. All pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headwater.log.disk.retention import Spent
from headwater.model.clock import MAX_MS

NO_LIMIT = 2**63 - 1  # retention without a count
WARN_SHARE, THROTTLE_SHARE = 0.5, 0.75  # of a limit by bytes or age
NOTHING_SPENT = Spent()
SMOOTH_MS = 10_000  # what happened this long ago counts for a third of what happens now

HEALTHY, PRESSURE, THROTTLE = "healthy", "pressure", "throttle"
PAUSED, RESNAPSHOT_REQUIRED = "paused", "resnapshot_required"
WAL_HORIZON_EXCEEDED, LOG_GENERATION_CHANGED = "wal_horizon_exceeded", "log_generation_changed"


class Limits(msgspec.Struct, frozen=True):
    """From which lag on a subscriber is warned, asked to slow its writers down, and lost."""

    retention: int
    warn_lag: int
    throttle_lag: int

    @classmethod
    def of(cls, retention: int | None) -> Limits:
        """Those of a log that retains that many changes; None is no limit by count."""
        kept = NO_LIMIT if retention is None else retention
        return cls(kept, max(kept // 2, 1), -(-3 * kept // 4))


class Pressure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a subscriber stands, as it goes out in `backpressure`."""

    state: str
    lag: int
    remaining_until_resnapshot: int
    paused: bool
    will_expire_at_ms: int | None = None


def pressure(
    *,
    cursor: int,
    latest: int,
    limits: Limits,
    paused: bool,
    lost: bool,
    will_expire_at_ms: int | None = None,
    spent: Spent = NOTHING_SPENT,
) -> Pressure:
    """The pressure on a subscriber at `cursor`, by the strictest limit. `lost` is whether `why_lost` gave a reason."""
    lag = max(latest - cursor, 0)
    state = _state(lag, limits, paused, lost, spent.share)
    if lost:
        return Pressure(state, lag, 0, paused)
    expires = _earliest(will_expire_at_ms, spent.expires_at_ms)
    return Pressure(state, lag, _remaining(lag, limits, spent), paused, expires)


def _remaining(lag: int, limits: Limits, spent: Spent) -> int:
    by_count = max(limits.retention - lag, 0)
    return by_count if spent.remaining is None else min(by_count, spent.remaining)


def _earliest(*times: int | None) -> int | None:
    return min((time for time in times if time is not None), default=None)


def _state(lag: int, limits: Limits, paused: bool, lost: bool, share: float) -> str:
    if lost:
        return RESNAPSHOT_REQUIRED
    if paused:
        return PAUSED
    if lag >= limits.throttle_lag or share >= THROTTLE_SHARE:
        return THROTTLE
    return PRESSURE if lag >= limits.warn_lag or share >= WARN_SHARE else HEALTHY


def states_between(known: str | None, found: Pressure, limits: Limits) -> list[Pressure]:
    """Return the states that a growing lag went through since `known`, before it came to `found`."""
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
    """Why the changes after `cursor` are gone; "" if they are not.

    A log that retains nothing has its horizon one beyond its newest change: who has seen that one is not lost.
    """
    if cursor + 1 < generation_first:
        return LOG_GENERATION_CHANGED
    return WAL_HORIZON_EXCEEDED if cursor + 1 < horizon else ""


class Forecast:
    """When the log will outrun one cursor, from how fast both have moved lately. Not for two threads."""

    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._latest = self._cursor = 0
        self._grows: float | None = None  # changes per millisecond
        self._moves: float | None = None

    def observe(self, now_ms: int, latest: int, cursor: int) -> None:
        """Take one sample. Samples of one millisecond count as one."""
        if self._at_ms is None or now_ms < self._at_ms:  # the first, or the clock was set back
            self._at_ms, self._latest, self._cursor = now_ms, latest, cursor
            return
        passed = now_ms - self._at_ms
        if not passed:
            return
        # A step back is a seek, or staged changes withdrawn: it says nothing about speed.
        self._grows = _smoothed(self._grows, max(latest - self._latest, 0), passed)
        self._moves = _smoothed(self._moves, max(cursor - self._cursor, 0), passed)
        self._at_ms, self._latest, self._cursor = now_ms, latest, cursor

    def expires_at(self, now_ms: int, *, remaining: int) -> int | None:
        """When `remaining` will be used up; None when it is not shrinking, or lasts beyond all clocks."""
        closing = (self._grows or 0.0) - (self._moves or 0.0)
        if closing <= 0.0:
            return None
        left = remaining / closing
        return now_ms + math.ceil(left) if now_ms + left <= MAX_MS else None


def forecasted(
    forecast: Forecast,
    now_ms: int,
    *,
    cursor: int,
    latest: int,
    limits: Limits,
    paused: bool,
    lost: bool,
    spent: Spent = NOTHING_SPENT,
) -> Pressure:
    """The pressure at this moment, which is also a sample for the forecast that goes with it."""
    forecast.observe(now_ms, latest, cursor)
    expires = forecast.expires_at(now_ms, remaining=_remaining(max(latest - cursor, 0), limits, spent))
    return pressure(
        cursor=cursor, latest=latest, limits=limits, paused=paused, lost=lost, will_expire_at_ms=expires, spent=spent
    )


def _smoothed(rate: float | None, moved: int, passed: int) -> float:
    """The rate after it was `moved / passed` for `passed` milliseconds."""
    now = moved / passed
    return now if rate is None else now + (rate - now) * math.exp(-passed / SMOOTH_MS)


def counters(
    pressures: Sequence[Pressure], *, horizon: int, latest: int, limits: Limits, queries: int = 0
) -> dict[str, int]:
    """The 17 numbers of `stats.snapshot.cdc`. `queries` of the subscriptions are on queries, the others on tables."""
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
