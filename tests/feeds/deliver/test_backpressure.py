"""Backpressure: thresholds, states and their precedence, lost cursors, the forecast, the 17 counters."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feeds.feed_database import Fed, insert
from tests.log.memory_log import MemoryLog

from headwater.feeds.deliver.backpressure import (
    NO_LIMIT,
    Forecast,
    LagLimits,
    Pressure,
    counters,
    pressure,
    states_between,
    why_lost,
)
from headwater.log.disk.retention import EvictionProgress


def at(lag: int, *, retention: int | None = 4096, paused: bool = False, lost: bool = False) -> Pressure:
    return pressure(cursor=100, latest=100 + lag, limits=LagLimits.of(retention), paused=paused, lost=lost)


@pytest.mark.parametrize(
    ("retention", "warn", "throttle"),
    [(4096, 2048, 3072), (1, 1, 1), (2, 1, 2), (3, 1, 3), (5, 2, 4), (1_000_000, 500_000, 750_000)],
)
def test_lag_limits_are_half_and_three_quarters_of_the_retention(retention: int, warn: int, throttle: int) -> None:
    limits = LagLimits.of(retention)
    assert (limits.retention, limits.warn_lag, limits.throttle_lag) == (retention, warn, throttle)


def test_unlimited_retention_has_no_pressure() -> None:
    assert LagLimits.of(None).retention == NO_LIMIT
    assert at(10**12, retention=None).state == "healthy"


@pytest.mark.parametrize(
    ("lag", "state"),
    [(0, "healthy"), (2047, "healthy"), (2048, "pressure"), (3071, "pressure"), (3072, "throttle"), (9999, "throttle")],
)
def test_lag_determines_the_state(lag: int, state: str) -> None:
    assert at(lag).state == state


def test_lost_state_hides_paused_and_paused_state_hides_lag() -> None:
    assert at(4000, paused=True, lost=True).state == "resnapshot_required"
    assert at(4000, paused=True).state == "paused"
    assert at(0, paused=True).state == "paused"


def test_remaining_changes_are_retention_minus_lag_and_zero_if_lost() -> None:
    assert at(1).remaining_until_resnapshot == 4095
    assert at(0, paused=True).remaining_until_resnapshot == 4096
    assert at(5000).remaining_until_resnapshot == 0
    assert at(1, lost=True).remaining_until_resnapshot == 0
    assert at(1, lost=True).lag == 1


def test_cursor_ahead_of_the_log_has_no_lag() -> None:
    assert at(-5).lag == 0


def test_missing_forecast_is_omitted_and_zeros_are_sent() -> None:
    body = msgspec.json.decode(msgspec.json.encode(at(0)))
    assert list(body.items()) == [
        ("state", "healthy"),
        ("lag", 0),
        ("remaining_until_resnapshot", 4096),
        ("paused", False),
    ]
    found = pressure(cursor=0, latest=1, limits=LagLimits.of(9), paused=False, lost=False, will_expire_at_ms=7)
    assert msgspec.json.decode(msgspec.json.encode(found))["will_expire_at_ms"] == 7


# --- lost cursors ----------------------------------------------------------------------------------------


def why(cursor: int, horizon: int, generation_first: int = 1) -> str:
    return why_lost(cursor, horizon=horizon, generation_first=generation_first)


def test_cursor_is_lost_exactly_if_the_next_change_was_evicted() -> None:
    assert why(9, horizon=11) == "wal_horizon_exceeded"
    assert why(10, horizon=11) == ""
    assert why(11, horizon=11) == ""


def test_no_cursor_is_lost_in_a_new_log() -> None:
    log = MemoryLog()
    assert (log.horizon, log.latest) == (1, 0)
    assert why(0, horizon=log.horizon, generation_first=log.generation_first) == ""


def test_log_without_retention_loses_only_cursors_before_its_newest_change() -> None:
    latest = 20
    assert why(latest, horizon=latest + 1) == ""
    assert why(latest - 1, horizon=latest + 1) == "wal_horizon_exceeded"


def test_cursor_of_an_earlier_generation_is_lost_by_generation() -> None:
    assert why(20, horizon=31, generation_first=31) == "log_generation_changed"
    assert why(20, horizon=50, generation_first=31) == "log_generation_changed"
    assert why(30, horizon=31, generation_first=31) == ""
    assert why(35, horizon=50, generation_first=31) == "wal_horizon_exceeded"


# --- the forecast ----------------------------------------------------------------------------------------


def driven(grows: int, moves: int, *, seconds: int = 5) -> Forecast:
    """Return a forecast that observed the log and the cursor move by so many changes per second."""
    forecast = Forecast()
    for second in range(seconds + 1):
        forecast.observe(second * 1000, second * grows, second * moves)
    return forecast


def test_steady_rates_forecast_the_exact_time() -> None:
    assert driven(100, 0).expires_at(5000, remaining=1000) == 15_000
    assert driven(100, 60).expires_at(5000, remaining=1000) == 30_000
    assert driven(100, 0).expires_at(5000, remaining=0) == 5000


def test_forecast_is_none_unless_the_reader_falls_behind() -> None:
    assert Forecast().expires_at(0, remaining=10) is None
    assert driven(100, 0, seconds=0).expires_at(0, remaining=10) is None
    assert driven(0, 0).expires_at(5000, remaining=10) is None
    assert driven(100, 100).expires_at(5000, remaining=10) is None
    assert driven(100, 500).expires_at(5000, remaining=10) is None


def test_unlimited_log_has_no_forecast() -> None:
    assert driven(1, 0).expires_at(5000, remaining=NO_LIMIT) is None


def test_forecast_follows_a_stopped_reader_within_a_minute() -> None:
    forecast = driven(100, 100)
    for second in range(6, 60):
        forecast.observe(second * 1000, second * 100, 500)
        soon = forecast.expires_at(second * 1000, remaining=10_000)
    assert soon is not None
    assert soon - 59_000 == pytest.approx(100_000, rel=0.02)


def test_one_second_without_commits_changes_the_forecast_little() -> None:
    forecast = driven(100, 0)
    forecast.observe(6000, 500, 0)
    found = forecast.expires_at(6000, remaining=1000)
    assert found is not None
    assert 16_500 < found < 17_500


def test_repeated_samples_and_steps_back_are_ignored() -> None:
    forecast = driven(100, 0)
    for latest in range(500, 900):
        forecast.observe(5000, latest, 0)
    forecast.observe(4000, 10, 0)  # the clock was set back
    assert forecast.expires_at(5000, remaining=1000) == 15_000
    forecast.observe(6000, 550, -500)  # a seek back is not a rate
    assert forecast.expires_at(6000, remaining=1000) is not None


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500), st.integers(-50, 500)), max_size=20))
def test_forecast_is_never_in_the_past(steps: list[tuple[int, int, int]]) -> None:
    forecast, now, latest, cursor = Forecast(), 0, 0, 0
    for passed, grown, moved in steps:
        now, latest, cursor = now + passed, latest + grown, min(max(cursor + moved, 0), latest + grown)
        forecast.observe(now, latest, cursor)
        found = forecast.expires_at(now, remaining=1000 - min(latest - cursor, 1000))
        assert found is None or found >= now


# --- the counters ----------------------------------------------------------------------------------------


def test_seventeen_counters_are_in_order() -> None:
    limits = LagLimits.of(100)

    def one(cursor: int, *, paused: bool = False, lost: bool = False) -> Pressure:
        return pressure(cursor=cursor, latest=300, limits=limits, paused=paused, lost=lost)

    standing = [one(300), one(245), one(220), one(290, paused=True), one(150, paused=True, lost=True)]
    found = counters(standing, horizon=201, latest=300, limits=limits, queries=2)
    expected = {
        "active_subscriptions": 5,
        "table_subscriptions": 3,
        "query_subscriptions": 2,
        "total_lag": 295,
        "max_lag": 150,
        "resnapshot_subscriptions": 1,
        "paused_subscriptions": 2,
        "pressured_subscriptions": 2,
        "throttle_recommended_subscriptions": 1,
        "earliest_offset": 201,
        "latest_offset": 300,
        "retained_events": 100,
        "retention_limit": 100,
        "dropped_events_total": 200,
        "warn_lag": 50,
        "throttle_lag": 75,
        "min_remaining_until_resnapshot": 0,
    }
    assert list(found.items()) == list(expected.items())


def test_without_subscriptions_remaining_is_the_retention() -> None:
    found = counters([], horizon=1, latest=0, limits=LagLimits.of(4096))
    assert found["min_remaining_until_resnapshot"] == 4096
    assert found["earliest_offset"] == found["dropped_events_total"] == found["retained_events"] == 0
    assert counters([], horizon=9, latest=8, limits=LagLimits.of(4))["earliest_offset"] == 0


def test_dropped_events_total_counts_all_offsets_before_the_horizon() -> None:
    """The total is one less than the earliest offset and never falls, also for an emptied log."""
    limits = LagLimits.of(4)
    assert counters([], horizon=1, latest=0, limits=limits)["dropped_events_total"] == 0
    assert counters([], horizon=9, latest=8, limits=limits)["dropped_events_total"] == 8


def test_dropped_events_total_counts_all_offsets_before_a_new_generation() -> None:
    fed = Fed()

    def dropped() -> int:
        found = counters([], horizon=fed.log.horizon, latest=fed.log.latest, limits=LagLimits.of(None))
        return found["dropped_events_total"]

    assert dropped() == 0
    fed.commit(insert(1), insert(2))
    assert dropped() == 0
    fed.new_generation()
    empty = dropped()
    fed.commit(insert(3))
    assert empty == dropped() == fed.log.generation_first - 1 == fed.log.horizon - 1


@pytest.mark.parametrize(
    ("known", "state", "lag", "between"),
    [
        ("healthy", "throttle", 7, ["pressure"]),
        ("healthy", "resnapshot_required", 9, ["pressure", "throttle"]),
        ("healthy", "resnapshot_required", 5, ["pressure"]),  # lost by age
        ("healthy", "resnapshot_required", 1, []),
        ("pressure", "resnapshot_required", 9, ["throttle"]),
        ("healthy", "pressure", 4, []),
        ("throttle", "pressure", 5, []),
        ("paused", "throttle", 7, []),
        ("healthy", "paused", 7, []),
        (None, "throttle", 7, []),  # no check before
    ],
)
def test_states_skipped_between_two_checks_are_reported_in_order_of_lag(
    known: str | None, state: str, lag: int, between: list[str]
) -> None:
    found = states_between(known, Pressure(state, lag, 0, False), LagLimits.of(8))
    assert [each.state for each in found] == between
    assert [each.lag for each in found] == [{"pressure": 4, "throttle": 6}[name] for name in between]


def test_pressure_state_is_skipped_if_throttle_begins_at_the_same_lag() -> None:
    assert states_between("healthy", Pressure("throttle", 1, 0, False), LagLimits.of(1)) == []


SHARES = [(0.49, "healthy"), (0.5, "pressure"), (0.74, "pressure"), (0.75, "throttle")]


@pytest.mark.parametrize(("share", "state"), SHARES)
def test_limit_by_bytes_or_age_applies_if_stricter(share: float, state: str) -> None:
    found = pressure(
        cursor=0, latest=1, limits=LagLimits.of(1000), paused=False, lost=False, spent=EvictionProgress(share, 7, 5_000)
    )
    assert (found.state, found.remaining_until_resnapshot, found.will_expire_at_ms) == (state, 7, 5_000)


def test_limit_by_count_applies_if_stricter() -> None:
    found = pressure(
        cursor=0,
        latest=8,
        limits=LagLimits.of(10),
        paused=False,
        lost=False,
        will_expire_at_ms=4_000,
        spent=EvictionProgress(0.1, 50, 5_000),
    )
    assert (found.state, found.remaining_until_resnapshot, found.will_expire_at_ms) == ("throttle", 2, 4_000)
