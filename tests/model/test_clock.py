"""Hybrid time: strictly forward whatever the wall clock does."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.model.clock import MAX_COUNTER, MAX_MS, HybridClock, parse_ts, ts_ms, ts_of_ms, ts_text

MS = st.integers(0, MAX_MS - 1)
TS = st.integers(0, (1 << 64) - 1)


@given(MS, st.lists(MS, min_size=2, max_size=50))
def test_every_tick_is_above_all_that_was_seen_whatever_the_wall_clock_does(start: int, steps: list[int]) -> None:
    seen = ts_of_ms(start)
    clock = HybridClock(seen)
    for ms in steps:
        ticked = clock.tick(ms)
        assert ticked > seen
        assert ts_ms(ticked) >= ms
        seen = ticked


def test_hybrid_clock_follows_wall_time_and_counts_up_when_it_stalls_or_goes_back() -> None:
    clock = HybridClock()
    assert [ts_text(clock.tick(ms)) for ms in (5, 5, 7, 6, 8)] == ["5.0", "5.1", "7.0", "7.1", "8.0"]


def test_hybrid_clock_with_a_full_counter_advances_one_millisecond() -> None:
    clock = HybridClock(ts_of_ms(5) | MAX_COUNTER)
    assert ts_text(clock.tick(5)) == "6.0"


def test_clock_starts_after_its_last_timestamp() -> None:
    assert HybridClock(ts_of_ms(100)).tick(3) == ts_of_ms(100) + 1


@given(TS)
def test_timestamp_text_round_trips(ts: int) -> None:
    assert parse_ts(ts_text(ts)) == ts


@given(TS, TS)
def test_times_order_by_milliseconds_then_counter(a: int, b: int) -> None:
    parts = [tuple(map(int, ts_text(ts).split("."))) for ts in (a, b)]
    assert (a < b) == (parts[0] < parts[1])


def test_bare_milliseconds_are_their_first_timestamp() -> None:
    assert parse_ts("1763172000000") == ts_of_ms(1763172000000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "1.",
        ".1",
        "-1.0",
        "1.65536",
        "1.0.0",
        " 1.0",
        "1.0\n",
        "x",
        "1e3",
        "٣.0",
        str(MAX_MS + 1),
        "9" * 5000,
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a timestamp"):
        parse_ts(text)


@given(st.text())
def test_any_text_is_a_timestamp_or_an_invalid_request(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert 0 <= parse_ts(text) < 1 << 64


@pytest.mark.parametrize("ms", [-1, MAX_MS + 1])
def test_milliseconds_outside_48_bits_are_refused(ms: int) -> None:
    with pytest.raises(InvalidRequest):
        ts_of_ms(ms)
