"""Uses of checkpoints by readers (F91, F93, F94, F96, F97): resuming, a common checkpoint of shards, sorted output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.conformance.live_server import Live
from tests.conformance.readers import CHANGES, Frame

from headwater.model.clock import parse_ts

SHARES = 3


def quick(start: Callable[..., Live]) -> Live:
    live = start(feeds={"checkpoint_seconds": 0.1})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    return live


def upto_checkpoint_after(reader: Any, last: int) -> list[Frame]:
    """Return the frames up to the first checkpoint at or after offset `last`."""
    found = [reader.next()]
    while found[-1].word != "checkpoint" or found[-1].data["offset"] < last:
        found.append(reader.next())
    return found


def test_reader_resumes_from_its_latest_checkpoint(start: Callable[..., Live], transport: str) -> None:
    live = quick(start)
    sub = live.subscribe("t")
    first = live.stream(transport, sub)
    live.sql("INSERT INTO t VALUES(1, 1)")
    frames = upto_checkpoint_after(first, int(latest(live)))
    first.close()
    checkpoint = frames[-1].data
    live.together("INSERT INTO t VALUES(2, 2)", "INSERT INTO t VALUES(3, 3)")
    second = live.stream(transport, sub, f"?from_offset={checkpoint['offset']}")
    changes = second.changes(2)
    assert [frame.data["pk"] for frame in changes] == [[2], [3]]
    assert all(parse_ts(frame.data["ts"]) > parse_ts(checkpoint["ts"]) for frame in changes)


def latest(live: Live) -> int:
    sub = live.subscribe()  # unlike stats.snapshot it waits for the log
    live.ok("cdc.close", sub_id=sub["sub_id"])
    return int(sub["offset"])


def test_checkpoint_repeated_after_a_reconnect_is_recognized_as_stale_by_its_timestamp(
    start: Callable[..., Live], transport: str
) -> None:
    live = quick(start)
    sub = live.subscribe("t")
    begin = sub["offset"]
    first = live.stream(transport, sub)
    live.sql("INSERT INTO t VALUES(1, 1)")
    seen = upto_checkpoint_after(first, latest(live))[-1].data
    first.close()
    again = live.stream(transport, sub, f"?from_offset={begin}")  # an older place: what came then comes again
    repeated = upto_checkpoint_after(again, latest(live))
    known = parse_ts(seen["ts"])
    stale = [frame for frame in repeated if frame.word == "checkpoint" and parse_ts(frame.data["ts"]) <= known]
    changes = [frame for frame in repeated if frame.word in CHANGES]
    assert all(parse_ts(frame.data["ts"]) <= known for frame in changes), "it was under the checkpoint before"
    assert all(frame.data["offset"] <= seen["offset"] for frame in stale)


def test_lowest_checkpoint_of_all_shards_covers_all_of_them_and_orders_their_output(
    start: Callable[..., Live], transport: str
) -> None:
    live = quick(start)
    subs = [live.subscribe("t", shard={"index": place, "of": SHARES}, ops=["insert"]) for place in range(SHARES)]
    readers = [live.stream(transport, sub) for sub in subs]
    for low in range(0, 30, 3):
        live.together(*(f"INSERT INTO t VALUES({low + step}, 0)" for step in range(3)))
    last = latest(live)
    buffered: list[tuple[int, int]] = []
    checkpoints = []
    for reader in readers:
        frames = upto_checkpoint_after(reader, last)
        buffered += [(parse_ts(f.data["ts"]), f.data["offset"]) for f in frames if f.word in CHANGES]
        checkpoints.append(parse_ts(frames[-1].data["ts"]))
    common = min(checkpoints)
    released = sorted(change for change in buffered if change[0] <= common)
    offsets = [offset for _, offset in released]
    assert offsets == list(range(last - 29, last + 1)), "the whole, in the order of the log"
    assert [ts for ts, _ in released] == sorted(ts for ts, _ in released)
    live.sql("INSERT INTO t VALUES(99, 0)")
    late = find_insert(readers)
    assert parse_ts(late.data["ts"]) > common


def find_insert(readers: list[Any]) -> Frame:
    """Return the next insert on any of the readers."""
    while True:
        for reader in readers:
            frame = reader.next("insert", "checkpoint")
            if frame.word == "insert":
                return frame


def test_every_change_is_followed_by_a_checkpoint_at_or_above_its_time(
    start: Callable[..., Live], transport: str
) -> None:
    live = quick(start)
    reader = live.stream(transport, live.subscribe("t"))
    for number in range(5):
        live.sql(f"INSERT INTO t VALUES({number}, 0)")
        frames = upto_checkpoint_after(reader, latest(live))
        newest = max(parse_ts(frame.data["ts"]) for frame in frames if frame.word in CHANGES)
        assert parse_ts(frames[-1].data["ts"]) >= newest


def test_subscription_in_the_middle_of_its_snapshot_resumes_after_a_restart(start: Callable[..., Live]) -> None:
    """F88, F89: its progress is stored in our file, and a restart resumes there."""
    live = quick(start)
    live.sql("INSERT INTO t VALUES(1, 1), (2, 2), (3, 3)")
    sub = live.subscribe("t", start="snapshot", name="loader")
    page = live.poll(sub, limit=1)
    live.ok("cdc.ack", sub_id=sub["sub_id"], cursor=page["snapshot"]["cursor"])
    live.restart()
    listed = live.ok("cdc.list")["subscriptions"]
    assert [(one["sub_id"], one["name"], one["snapshot"]["done"]) for one in listed] == [
        (sub["sub_id"], "loader", False)
    ]
    rest = live.poll(sub)
    assert [row["pk"] for row in rest["events"]] == [[2], [3]]
    assert rest["snapshot"]["done"]
