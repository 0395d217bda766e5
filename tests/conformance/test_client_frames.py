"""Frames that a WebSocket client may send, and the close of a socket that sends others.

WIRE §5, "Bad input". F70, F83, F84, F86.
"""

import json
from typing import Any

import pytest
from tests.conformance.live_server import Live


def acked(server: Live, sub: dict[str, Any]) -> int:
    (found,) = server.ok("cdc.list", sub_id=sub["sub_id"])["subscriptions"]
    return found["acked_offset"]


def test_ack_frame_moves_the_durable_cursor(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.ws(sub)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1), (2, 'a', 1)")
    one, _ = stream.changes(2)
    stream.say({"ack": one.id})
    server.until(lambda: acked(server, sub) == one.id)
    assert [change["pk"] for change in server.changes(sub)] == [[2]]


def test_pause_frame_withholds_changes_until_the_resume_frame(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.ws(sub)
    stream.say({"pause": True})
    assert stream.next("backpressure").data["state"] == "paused"
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert server.poll(sub)["events"] == []
    stream.say({"pause": False})
    assert stream.next("insert", "backpressure").data["pk"] == [1]


def test_frame_with_ack_and_pause_applies_both(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.ws(sub)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    (frame,) = stream.changes(1)
    stream.say({"ack": frame.id, "pause": True})
    said = stream.next("backpressure").data
    assert (said["state"], said["lag"]) == ("paused", 0) and acked(server, sub) == frame.id


BAD = {
    "not JSON": "ack 5",
    "an empty text": "",
    "a list": "[1]",
    "a number": "5",
    "null": "null",
    "nothing said": "{}",
    "binary": b'{"ack": 1}',
    "an unknown field": '{"ack": 1, "acks": 2}',
    "a negative ack": '{"ack": -1}',
    "an ack of a fraction": '{"ack": 1.5}',
    "an ack of a truth": '{"ack": true}',
    "an ack of a text": '{"ack": "5"}',
    "an ack of a place that is none": '{"ack": "s:!!"}',
    "an ack of a place in no snapshot": '{"ack": "s:kwEAxAKRAQ"}',
    "an ack beyond everything": '{"ack": 99999999}',
    "an ack beyond all integers": '{"ack": 1' + "0" * 400 + "}",
    "a pause of a number": '{"pause": 1}',
    "deep nesting": "[" * 20_000,
    "a lone surrogate": '{"ack": "\\ud800"}',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_frame_closes_only_its_own_socket_with_a_reason(server: Live, table: str, bad: str | bytes) -> None:
    sub = server.subscribe(table)
    others = [server.ws(sub), server.sse(sub)]
    stream = server.ws(sub)
    stream.say(bad)
    assert stream.rest() == []
    code, reason = stream.closed_with
    assert code == 1008 and reason.startswith("bad_frame: ") and len(reason.encode()) <= 123
    assert acked(server, sub) == sub["offset"], "nothing of it was carried out"
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    for other in others:
        assert other.changes(1)[0].data["pk"] == [1]


def test_frame_over_the_size_limit_closes_only_its_own_socket(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    other, stream = server.ws(sub), server.ws(sub)
    stream.say(json.dumps({"ack": "x" * (128 << 10)}))
    assert stream.rest() == [] and stream.closed_with[0] == 1009
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert other.changes(1)
    server.until(lambda: server.metric("headwater_streams", transport="websocket") == 1)


def test_websocket_close_by_the_client_is_answered_with_code_1000(server: Live, table: str) -> None:
    stream = server.ws(server.subscribe(table))
    stream.socket.close(1000, "done")
    assert stream.closed_with[0] == 1000
    server.until(lambda: server.metric("headwater_streams", transport="websocket") == 0)


def test_cdc_close_of_a_subscription_ends_its_websocket(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.ws(sub)
    server.ok("cdc.close", sub_id=sub["sub_id"])
    assert stream.rest() == [] and stream.closed_with[0] == 1000
