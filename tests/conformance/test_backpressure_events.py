"""Backpressure over every transport: once per change of an unhealthy state, nothing on the return to healthy.

WIRE §4, §5, §11.15. F67, F115, F117, F118, F122, F123, F171.
"""

from collections.abc import Callable
from typing import Any

import pytest
from tests.conformance.live_server import Live

from headwater.capture import capture
from headwater.model.clock import wall_ms

RETAINED = 8  # so a lag of 4 is pressure, and one of 6 is time to throttle


@pytest.fixture
def live(start: Callable[..., Live]) -> Live:
    made = start(log={"retention_events": RETAINED})
    made.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    return made


def write(live: Live, count: int) -> None:
    for _ in range(count):
        live.sql("INSERT INTO t(v) VALUES('x')")


def test_poll_reports_each_backpressure_state(live: Live) -> None:
    sub = live.subscribe("t")
    base, id = sub["offset"], sub["sub_id"]

    def stands() -> tuple[Any, ...]:
        found = live.poll(sub)["backpressure"]
        return found["state"], found["lag"], found["remaining_until_resnapshot"], found["paused"]

    assert stands() == ("healthy", 0, 8, False)
    write(live, 3)
    assert stands() == ("healthy", 3, 5, False)
    write(live, 1)
    assert stands() == ("pressure", 4, 4, False)
    write(live, 2)
    assert stands() == ("throttle", 6, 2, False)
    live.ok("cdc.pause", sub_id=id)
    assert stands() == ("paused", 6, 2, True)
    live.ok("cdc.resume", sub_id=id)
    live.ok("cdc.ack", sub_id=id, offset=base + 1)
    assert stands() == ("pressure", 5, 3, False)
    live.ok("cdc.ack", sub_id=id, offset=base + 6)
    assert stands() == ("healthy", 0, 8, False)
    live.ok("cdc.pause", sub_id=id)
    write(live, 9)
    live.until(lambda: stands()[0] == "resnapshot_required")
    assert stands() == ("resnapshot_required", 9, 0, True)


def test_changes_dropped_from_the_log_are_counted(live: Live) -> None:
    write(live, 30)
    live.until(lambda: live.ok("stats.snapshot")["databases"]["main"]["latest"] == 31)
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["dropped_events_total"] == 31 - RETAINED)


def test_stream_reports_each_worse_backpressure_state_once(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    base = sub["offset"]
    for _ in range(2):  # the second time after a return to healthy, of which nothing is said
        write(live, 4)
        frame = stream.next("backpressure")
        assert (frame.data["state"], frame.data["paused"]) == ("pressure", False)
        assert frame.data["sub_id"] == sub["sub_id"] and frame.data["lag"] >= 4
        write(live, 1)
        write(live, 1)
        frame = stream.next("backpressure")
        assert (frame.data["state"], frame.data["lag"]) == ("throttle", 6)
        assert frame.data["remaining_until_resnapshot"] == 2
        base += 6
        live.ok("cdc.ack", sub_id=sub["sub_id"], offset=base)


def test_stream_reports_return_to_pressure_but_not_an_unchanged_state(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    write(live, 7)
    stream = live.stream(transport, sub)
    assert stream.next("backpressure").data["state"] == "throttle"
    for offset in (1, 2):  # a lag of 6 is still throttle, one of 5 is not
        live.ok("cdc.ack", sub_id=sub["sub_id"], offset=sub["offset"] + offset)
        live.poll(sub)  # answered by the same loop: the stream has looked by then
    found = stream.next("backpressure").data
    assert (found["state"], found["lag"], found["latest_offset"]) == ("pressure", 5, sub["offset"] + 7)


def test_stream_without_acks_reports_backpressure_but_is_not_ended(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    frames = []
    for _ in range(3 * RETAINED):
        write(live, 1)
        frames += stream.upto("insert")
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    write(live, 1)
    frames += stream.upto("insert")
    states = [frame.data["state"] for frame in frames if frame.word == "backpressure"]
    assert "resnapshot" not in [frame.word for frame in frames], "it has seen everything"
    while "resnapshot_required" not in states:
        states.append(stream.next("backpressure").data["state"])
    assert states == ["pressure", "throttle", "resnapshot_required"], "its acks are lost, and it hears of it"


def test_stream_reports_each_backpressure_state_that_one_commit_passes(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    write(live, 1)
    stream.changes(1)
    live.sql("INSERT INTO t(v) VALUES ('x'), ('x'), ('x'), ('x'), ('x'), ('x')")
    first, second = stream.next("backpressure").data, stream.next("backpressure").data
    assert [(each["state"], each["lag"]) for each in (first, second)] == [("pressure", 4), ("throttle", 7)]


def test_stream_reports_a_backpressure_state_that_an_ack_ends_at_once(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    write(live, 1)
    stream.changes(1)
    live.ok("cdc.ack", sub_id=sub["sub_id"], offset=sub["offset"] + 1)
    for count in range(1, 6):
        write(live, 4)
        live.ok("cdc.ack", sub_id=sub["sub_id"], offset=sub["offset"] + 1 + 4 * count)
        assert stream.next("backpressure").data["state"] == "pressure"


def test_paused_stream_past_the_horizon_reports_resnapshot_and_ends(live: Live, transport: str) -> None:
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    live.ok("cdc.pause", sub_id=sub["sub_id"])
    assert stream.next("backpressure").data["state"] == "paused"
    write(live, RETAINED + 2)
    *_, before, last = stream.rest()
    assert last.word == "resnapshot" and last.data["reason"] == "wal_horizon_exceeded"
    assert (before.word, before.data["state"]) == ("backpressure", "resnapshot_required")


def test_poll_forecasts_when_the_subscription_will_expire(live: Live) -> None:
    sub = live.subscribe("t")
    live.poll(sub)
    write(live, 2)
    live.until(lambda: "will_expire_at_ms" in live.poll(sub)["backpressure"])
    (listed,) = live.ok("cdc.list", sub_id=sub["sub_id"])["subscriptions"]
    assert listed["will_expire_at_ms"] > listed["created_ms"]


@pytest.mark.slow
def test_stream_without_acks_reports_every_state_under_the_age_limit(
    start: Callable[..., Live], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_ms = 0

    def now_ms() -> int:
        return wall_ms() + passed_ms

    monkeypatch.setattr(capture, "wall_ms", now_ms)
    live = start(log={"retention_age": 3600.0})
    monkeypatch.setattr(live.app.database("main").log._retention, "_now_ms", now_ms)
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    write(live, 1)
    stream.changes(1)
    live.until(lambda: "will_expire_at_ms" in live.poll(sub)["backpressure"])
    for share, state in ((0.6, "pressure"), (0.8, "throttle"), (1.1, "resnapshot_required")):
        passed_ms = int(share * 3_600_000)
        assert stream.next("backpressure").data["state"] == state


@pytest.mark.slow
def test_subscription_without_acks_is_pressured_by_the_byte_limit(start: Callable[..., Live]) -> None:
    live = start(log={"retention_bytes": 1_000_000})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    sub = live.subscribe("t")
    for _ in range(7):
        live.sql("INSERT INTO t(v) VALUES(hex(randomblob(100000)))")
    live.until(lambda: live.poll(sub)["backpressure"]["state"] != "healthy")
    assert live.poll(sub)["backpressure"]["remaining_until_resnapshot"] < 100


# --- the counters ----------------------------------------------------------------------------------------

NAMES = (
    "active_subscriptions",
    "table_subscriptions",
    "query_subscriptions",
    "total_lag",
    "max_lag",
    "resnapshot_subscriptions",
    "paused_subscriptions",
    "pressured_subscriptions",
    "throttle_recommended_subscriptions",
    "earliest_offset",
    "latest_offset",
    "retained_events",
    "retention_limit",
    "dropped_events_total",
    "warn_lag",
    "throttle_lag",
    "min_remaining_until_resnapshot",
)


def test_counters_of_an_empty_server_are_zero_except_offsets_and_limits(live: Live) -> None:
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["latest_offset"] == 1)
    found = live.ok("stats.snapshot")["cdc"]
    assert tuple(found) == NAMES
    expected = dict.fromkeys(NAMES, 0) | {
        "earliest_offset": 1,
        "latest_offset": 1,
        "retained_events": 1,
        "retention_limit": 8,
        "warn_lag": 4,
        "throttle_lag": 6,
        "min_remaining_until_resnapshot": 8,
    }
    assert found == expected


def test_counters_and_metrics_count_the_subscriptions_in_each_state(live: Live) -> None:
    lost, paused, throttled, pressed, healthy = (live.subscribe("t") for _ in range(5))
    write(live, 10)  # offsets 2 to 11 of which 4 to 11 are retained
    for sub, offset in ((paused, 3), (throttled, 5), (pressed, 7), (healthy, 11)):
        live.ok("cdc.ack", sub_id=sub["sub_id"], offset=offset)
    live.ok("cdc.pause", sub_id=paused["sub_id"])
    live.until(lambda: live.poll(lost)["resnapshot_required"])
    found = live.ok("stats.snapshot")["cdc"]
    assert found == dict(
        zip(NAMES, (5, 5, 0, 10 + 8 + 6 + 4 + 0, 10, 1, 1, 2, 1, 4, 11, 8, 8, 3, 4, 6, 0), strict=True)
    )
    for metric, value in {
        "headwater_subscriptions": 5,
        "headwater_subscriptions_paused": 1,
        "headwater_subscriptions_pressured": 2,
        "headwater_subscriptions_lost": 1,
        "headwater_subscription_lag_changes_max": 10,
        "headwater_subscription_lag_changes_sum": 28,
        "headwater_log_latest_offset": 11,
        "headwater_log_horizon_offset": 4,
    }.items():
        assert live.metric(metric, db="main") == value, metric
    live.ok("cdc.close", sub_id=lost["sub_id"])
    found = live.ok("stats.snapshot")["cdc"]
    assert (found["active_subscriptions"], found["resnapshot_subscriptions"]) == (4, 0)
    assert found["min_remaining_until_resnapshot"] == 0, "the paused one has none left either"


def test_deliveries_and_open_streams_are_counted_by_transport(live: Live) -> None:
    sub = live.subscribe("t")
    streams = [live.sse(sub), live.ws(sub), live.get("/api/v1/changes/main/t", accept="application/x-ndjson")]
    write(live, 2)
    for stream in streams:
        stream.changes(2)
    for transport, stream in zip(("sse", "websocket", "ndjson"), streams, strict=True):
        assert live.metric("headwater_streams", transport=transport) == 1
        assert live.metric("headwater_delivered_changes_total", transport=transport) == 2
        stream.close()
        live.until(lambda transport=transport: live.metric("headwater_streams", transport=transport) == 0)
        assert live.metric("headwater_delivered_changes_total", transport=transport) == 2, "also when they are over"
