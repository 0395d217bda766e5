"""Hybrid time: strictly forward whatever the wall clock does."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.model.clock import MAX_MS, parse_ts, ts_of_ms, ts_text

TS = st.integers(0, (1 << 64) - 1)


@given(TS)
def test_timestamp_text_round_trips(ts: int) -> None:
    assert parse_ts(ts_text(ts)) == ts


@given(TS, TS)
def test_timestamps_order_by_milliseconds_then_counter(a: int, b: int) -> None:
    parts = [tuple(map(int, ts_text(ts).split("."))) for ts in (a, b)]
    assert (a < b) == (parts[0] < parts[1])


def test_milliseconds_without_a_counter_are_their_first_timestamp() -> None:
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
def test_malformed_timestamp_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a timestamp"):
        parse_ts(text)


@given(st.text())
def test_random_text_is_a_timestamp_or_an_invalid_request(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert 0 <= parse_ts(text) < 1 << 64


@pytest.mark.parametrize("ms", [-1, MAX_MS + 1])
def test_milliseconds_outside_48_bits_are_refused(ms: int) -> None:
    with pytest.raises(InvalidRequest):
        ts_of_ms(ms)
