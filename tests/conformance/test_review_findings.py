"""Defects that a hostile reviewer found once: ids of control frames, a seek under an open stream, races, slow
predicates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.feeds.groups import hub_batch
from headwater.feeds.groups.group import Group


def fill(server: Live, table: str, count: int) -> None:
    rows = ", ".join(f"({number}, 'x', {number})" for number in range(1, count + 1))
    server.sql(f"INSERT INTO {table} VALUES{rows}")


def test_control_frame_inside_a_snapshot_has_an_id_that_resumes_the_snapshot(
    server: Live, table: str, transport: str
) -> None:
    fill(server, table, 3000)
    sub = server.subscribe(table, start="snapshot")
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    first = server.stream(transport, sub)
    frame = first.next("backpressure")
    assert str(frame.id).startswith("s:"), frame
    first.close()
    server.ok("cdc.resume", sub_id=sub["sub_id"])
    second = server.stream(transport, sub, last_event_id=str(frame.id))
    seen = [frame.data["pk"][0] for frame in second.upto("snapshot_end") if frame.word == "insert"]
    assert seen == list(range(1, 3001)), "every row, and none twice"


def test_two_readers_of_the_same_snapshot_each_receive_every_row(server: Live, table: str) -> None:
    fill(server, table, 3000)
    sub = server.subscribe(table, start="snapshot")
    readers = [server.sse(sub), server.sse(sub)]
    rows: list[set[int]] = [set(), set()]
    for place, reader in enumerate(readers):
        last = ""
        while True:
            frame = reader.frame()
            if frame is None:  # told to come again: as an EventSource does, with the last id
                reader = server.sse(sub, last_event_id=last)
                continue
            last = str(frame.id)
            if frame.word == "insert":
                rows[place].add(frame.data["pk"][0])
            if frame.word == "snapshot_end":
                break
    assert rows == [set(range(1, 3001))] * 2


def test_seek_back_under_an_open_stream_makes_acknowledged_changes_pollable_again(
    server: Live, table: str, transport: str
) -> None:
    sub = server.subscribe(table)
    stream = server.stream(transport, sub)
    id = sub["sub_id"]
    server.ok("cdc.pause", sub_id=id)
    stream.next("backpressure")
    fill(server, table, 3)
    latest = server.poll(sub)["latest_offset"]
    server.ok("cdc.ack", sub_id=id, offset=latest)
    server.ok("cdc.resume", sub_id=id)
    server.sql(f"INSERT INTO {table} VALUES(9, 'x', 9)")
    assert stream.next("insert").data["pk"] == [9], "what was acked is skipped"
    server.ok("cdc.seek", sub_id=id, offset=sub["offset"])
    stream.close()
    server.until(lambda: sum(server.feeds.readers.count_streams().values()) == 0)
    assert [change["pk"] for change in server.changes(sub)] == [[1], [2], [3], [9]]


def test_close_concurrent_with_a_stream_open_leaves_no_open_stream(server: Live, table: str, transport: str) -> None:
    for _ in range(10):
        sub = server.subscribe(table)
        closing = threading.Thread(target=server.rpc, args=("cdc.close",), kwargs={"sub_id": sub["sub_id"]})
        closing.start()
        try:
            stream = server.stream(transport, sub)
        except Exception:
            stream = None  # refused: the close was first
        closing.join()
        if stream is not None and getattr(stream, "status", 200) == 200:
            stream.rest()
    server.until(lambda: sum(server.feeds.readers.count_streams().values()) == 0)


@pytest.mark.parametrize("patience", [-1.0, 60.0], ids=["ejected", "live"])
def test_slow_predicate_delivers_the_same_changes_live_or_ejected(
    server: Live, table: str, transport: str, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_batch, "PATIENCE_SECONDS", patience)
    where = f"status LIKE 'x%' AND total > {abs(patience)} - {abs(patience)} AND id <> 0"  # one view per case
    slow = server.subscribe(table, where=where, include={"after": True})
    quick = server.subscribe(table)
    streams = [server.stream(transport, slow), server.stream(transport, quick)]
    fill(server, table, 200)
    server.sql(f"UPDATE {table} SET status = 'y' WHERE id <= 3")
    server.sql(f"INSERT INTO {table} VALUES(300, 'xyz', 1)")
    found = [(frame.word, frame.data["pk"][0]) for frame in streams[0].changes(204)]
    assert found == [("insert", number) for number in range(1, 201)] + [("delete", n) for n in (1, 2, 3)] + [
        ("insert", 300)
    ]
    assert [frame.data["pk"][0] for frame in streams[1].changes(204)][-1] == 300
    waiting = server.poll(slow, from_offset=streams_last(server, slow), wait_ms=100)
    assert waiting["events"] == [] and not waiting["resnapshot_required"]


def streams_last(server: Live, sub: dict[str, str]) -> int:
    return int(server.poll(sub)["latest_offset"])


def test_reader_with_a_slow_predicate_receives_checkpoints(
    start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_batch, "PATIENCE_SECONDS", -1.0)
    live = start(feeds={"checkpoint_seconds": 0.1})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT)")
    stream = live.sse(live.subscribe("t", where="status LIKE 'x%'"))
    live.sql("INSERT INTO t VALUES(1, 'x')")
    change = stream.next("insert").data
    checkpoint = stream.next("checkpoint").data
    while checkpoint["offset"] < change["offset"]:
        checkpoint = stream.next("checkpoint").data
    assert checkpoint["offset"] >= change["offset"]


def test_hanging_predicate_does_not_delay_another_subscription(
    server: Live, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = server.subscribe(table, where="status LIKE 'x%' AND id <> 17", include={"after": True})
    quick = server.subscribe(table, where="status LIKE 'x%'")
    streams = [server.stream("sse", slow), server.stream("sse", quick)]
    released, hung, decide = threading.Event(), threading.Event(), hub_batch.Batch.decide

    def hang(self: hub_batch.Batch, group: Group, places: list[int]) -> hub_batch.Found | HeadwaterError:
        if "17" in str(group.view.options.where) and not released.is_set():
            hung.set()
            released.wait(PATIENCE)
        return decide(self, group, places)

    monkeypatch.setattr(hub_batch.Batch, "decide", hang)
    try:
        server.sql(f"INSERT INTO {table} VALUES(1, 'xy', 1)")
        assert streams[1].changes(1)[0].data["pk"] == [1]
        assert hung.wait(PATIENCE)
        server.sql(f"INSERT INTO {table} VALUES(2, 'xz', 1)")
        assert streams[1].changes(1)[0].data["pk"] == [2]
    finally:
        released.set()
    assert [frame.data["pk"] for frame in streams[0].changes(2)] == [[1], [2]]
