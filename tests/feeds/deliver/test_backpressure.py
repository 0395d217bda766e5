"""Backpressure: thresholds, states and their precedence, what counts as lost, the forecast, the 17 counters."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.feeds.feed_database import Fed, insert

from headwater.feeds.deliver.backpressure import (
    NO_LIMIT,
    Forecast,
    Limits,
    Pressure,
    counters,
    pressure,
    states_between,
    why_lost,
)
from headwater.log.disk.retention import Spent
from headwater.log.memory import MemoryLog


def at(lag: int, *, retention: int | None = 4096, paused: bool = False, lost: bool = False) -> Pressure:
    return pressure(cursor=100, latest=100 + lag, limits=Limits.of(retention), paused=paused, lost=lost)


@pytest.mark.parametrize(
    ("retention", "warn", "throttle"),
    [(4096, 2048, 3072), (1, 1, 1), (2, 1, 2), (3, 1, 3), (5, 2, 4), (1_000_000, 500_000, 750_000)],
)
def test_one_is_warned_at_half_and_throttled_at_three_quarters_of_the_retention(
    retention: int, warn: int, throttle: int
) -> None:
    limits = Limits.of(retention)
    assert (limits.retention, limits.warn_lag, limits.throttle_lag) == (retention, warn, throttle)


def test_without_a_limit_by_count_nobody_is_ever_under_pressure() -> None:
    assert Limits.of(None).retention == NO_LIMIT
    assert at(10**12, retention=None).state == "healthy"


@pytest.mark.parametrize(
    ("lag", "state"),
    [(0, "healthy"), (2047, "healthy"), (2048, "pressure"), (3071, "pressure"), (3072, "throttle"), (9999, "throttle")],
)
def test_the_lag_decides_the_state(lag: int, state: str) -> None:
    assert at(lag).state == state


def test_being_lost_comes_before_being_paused_and_that_before_any_lag() -> None:
    assert at(4000, paused=True, lost=True).state == "resnapshot_required"
    assert at(4000, paused=True).state == "paused"
    assert at(0, paused=True).state == "paused"


def test_what_remains_is_the_retention_less_the_lag_and_nothing_for_the_lost() -> None:
    assert at(1).remaining_until_resnapshot == 4095
    assert at(0, paused=True).remaining_until_resnapshot == 4096
    assert at(5000).remaining_until_resnapshot == 0
    assert at(1, lost=True).remaining_until_resnapshot == 0
    assert at(1, lost=True).lag == 1


def test_a_cursor_ahead_of_the_log_has_no_lag() -> None:
    assert at(-5).lag == 0


def test_the_forecast_is_left_out_when_there_is_none_and_zeros_are_not() -> None:
    body = msgspec.json.decode(msgspec.json.encode(at(0)))
    assert list(body.items()) == [
        ("state", "healthy"),
        ("lag", 0),
        ("remaining_until_resnapshot", 4096),
        ("paused", False),
    ]
    told = pressure(cursor=0, latest=1, limits=Limits.of(9), paused=False, lost=False, will_expire_at_ms=7)
    assert msgspec.json.decode(msgspec.json.encode(told))["will_expire_at_ms"] == 7


# --- being lost ------------------------------------------------------------------------------------------


def why(cursor: int, horizon: int, generation_first: int = 1) -> str:
    return why_lost(cursor, horizon=horizon, generation_first=generation_first)


def test_a_cursor_is_lost_exactly_when_the_change_after_it_is_gone() -> None:
    assert why(9, horizon=11) == "wal_horizon_exceeded"
    assert why(10, horizon=11) == ""
    assert why(11, horizon=11) == ""


def test_nobody_is_lost_at_a_new_log() -> None:
    log = MemoryLog()
    assert (log.horizon, log.latest) == (1, 0)
    assert why(0, horizon=log.horizon, generation_first=log.generation_first) == ""


def test_a_log_that_retains_nothing_loses_those_only_who_have_not_seen_its_newest_change() -> None:
    latest = 20
    assert why(latest, horizon=latest + 1) == ""
    assert why(latest - 1, horizon=latest + 1) == "wal_horizon_exceeded"


def test_a_cursor_of_an_earlier_generation_is_told_so_even_when_the_new_one_is_empty() -> None:
    assert why(20, horizon=31, generation_first=31) == "log_generation_changed"
    assert why(20, horizon=50, generation_first=31) == "log_generation_changed"
    assert why(30, horizon=31, generation_first=31) == ""
    assert why(35, horizon=50, generation_first=31) == "wal_horizon_exceeded"


# --- the forecast ----------------------------------------------------------------------------------------


def driven(grows: int, moves: int, *, seconds: int = 5) -> Forecast:
    """A forecast that saw the log grow and the cursor move by so many changes per second."""
    forecast = Forecast()
    for second in range(seconds + 1):
        forecast.observe(second * 1000, second * grows, second * moves)
    return forecast


def test_steady_rates_give_the_exact_time() -> None:
    assert driven(100, 0).expires_at(5000, remaining=1000) == 15_000
    assert driven(100, 60).expires_at(5000, remaining=1000) == 30_000
    assert driven(100, 0).expires_at(5000, remaining=0) == 5000


def test_there_is_no_forecast_when_nothing_moves_or_the_reader_keeps_up_or_catches_up() -> None:
    assert Forecast().expires_at(0, remaining=10) is None
    assert driven(100, 0, seconds=0).expires_at(0, remaining=10) is None
    assert driven(0, 0).expires_at(5000, remaining=10) is None
    assert driven(100, 100).expires_at(5000, remaining=10) is None
    assert driven(100, 500).expires_at(5000, remaining=10) is None


def test_a_log_without_limit_never_runs_out() -> None:
    assert driven(1, 0).expires_at(5000, remaining=NO_LIMIT) is None


def test_a_reader_that_stops_is_noticed_within_seconds() -> None:
    forecast = driven(100, 100)
    for second in range(6, 60):
        forecast.observe(second * 1000, second * 100, 500)
        soon = forecast.expires_at(second * 1000, remaining=10_000)
    assert soon is not None
    assert soon - 59_000 == pytest.approx(100_000, rel=0.02)


def test_one_second_of_rest_counts_little_against_many_of_work() -> None:
    forecast = driven(100, 0)
    forecast.observe(6000, 500, 0)
    found = forecast.expires_at(6000, remaining=1000)
    assert found is not None
    assert 16_500 < found < 17_500


def test_many_samples_in_one_millisecond_and_steps_back_do_no_harm() -> None:
    forecast = driven(100, 0)
    for latest in range(500, 900):
        forecast.observe(5000, latest, 0)
    forecast.observe(4000, 10, 0)  # the clock was set back
    assert forecast.expires_at(5000, remaining=1000) == 15_000
    forecast.observe(6000, 550, -500)  # a seek back: no speed
    assert forecast.expires_at(6000, remaining=1000) is not None


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500), st.integers(-50, 500)), max_size=20))
def test_a_forecast_lies_never_in_the_past(steps: list[tuple[int, int, int]]) -> None:
    forecast, now, latest, cursor = Forecast(), 0, 0, 0
    for passed, grown, moved in steps:
        now, latest, cursor = now + passed, latest + grown, min(max(cursor + moved, 0), latest + grown)
        forecast.observe(now, latest, cursor)
        found = forecast.expires_at(now, remaining=1000 - min(latest - cursor, 1000))
        assert found is None or found >= now


# --- the counters ----------------------------------------------------------------------------------------


def test_the_seventeen_counters_in_their_order() -> None:
    limits = Limits.of(100)

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


def test_without_subscriptions_everything_remains() -> None:
    found = counters([], horizon=1, latest=0, limits=Limits.of(4096))
    assert found["min_remaining_until_resnapshot"] == 4096
    assert found["earliest_offset"] == found["dropped_events_total"] == found["retained_events"] == 0
    assert counters([], horizon=9, latest=8, limits=Limits.of(4))["earliest_offset"] == 0


def test_what_is_dropped_is_every_offset_before_the_horizon_also_while_nothing_is_kept() -> None:
    """One less than the earliest; a total never falls, so a log that was emptied goes on counting."""
    limits = Limits.of(4)
    assert counters([], horizon=1, latest=0, limits=limits)["dropped_events_total"] == 0
    assert counters([], horizon=9, latest=8, limits=limits)["dropped_events_total"] == 8


def test_a_new_generation_has_dropped_what_came_before_it_from_its_beginning_on() -> None:
    fed = Fed()

    def dropped() -> int:
        found = counters([], horizon=fed.log.horizon, latest=fed.log.latest, limits=Limits.of(None))
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
        (None, "throttle", 7, []),  # nobody looked before
    ],
)
def test_states_between_two_looks_are_those_of_a_growing_lag(
    known: str | None, state: str, lag: int, between: list[str]
) -> None:
    found = states_between(known, Pressure(state, lag, 0, False), Limits.of(8))
    assert [each.state for each in found] == between
    assert [each.lag for each in found] == [{"pressure": 4, "throttle": 6}[name] for name in between]


def test_pressure_is_not_between_where_it_begins_with_throttle() -> None:
    assert states_between("healthy", Pressure("throttle", 1, 0, False), Limits.of(1)) == []


SHARES = [(0.49, "healthy"), (0.5, "pressure"), (0.74, "pressure"), (0.75, "throttle")]


@pytest.mark.parametrize(("share", "state"), SHARES)
def test_limit_by_bytes_or_age_counts_where_it_is_stricter(share: float, state: str) -> None:
    found = pressure(cursor=0, latest=1, limits=Limits.of(1000), paused=False, lost=False, spent=Spent(share, 7, 5_000))
    assert (found.state, found.remaining_until_resnapshot, found.will_expire_at_ms) == (state, 7, 5_000)


def test_limit_by_count_counts_where_it_is_stricter() -> None:
    found = pressure(
        cursor=0,
        latest=8,
        limits=Limits.of(10),
        paused=False,
        lost=False,
        will_expire_at_ms=4_000,
        spent=Spent(0.1, 50, 5_000),
    )
    assert (found.state, found.remaining_until_resnapshot, found.will_expire_at_ms) == ("throttle", 2, 4_000)
