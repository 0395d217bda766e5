"""Clients that disconnect, too many clients, and a server that stops: every stream ends, and others are not disturbed.

WIRE §5, §9, §10. F80, F95.
"""

import json
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import InvalidStatus


def streams(live: Live, transport: str) -> float:
    return live.metric("headwater_streams", transport={"ws": "websocket"}.get(transport, transport))


# --- leaving ---------------------------------------------------------------------------------------------


def test_idle_stream_is_closed_when_its_client_disconnects(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    stream = server.stream(transport, sub)
    server.until(lambda: streams(server, transport) == 1)
    stream.close()
    server.until(lambda: streams(server, transport) == 0)


def test_stream_is_closed_when_its_socket_breaks(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    stream = server.stream(transport, sub)
    server.until(lambda: streams(server, transport) == 1)
    broken = stream.socket.socket if transport == "ws" else stream._socket
    broken.shutdown(socket.SHUT_RDWR)
    server.until(lambda: streams(server, transport) == 0)


def test_paused_stream_is_closed_when_its_client_disconnects(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    stream = server.stream(transport, sub)
    stream.next("backpressure")
    stream.close()
    server.until(lambda: streams(server, transport) == 0)


def test_stalled_stream_is_closed_when_its_client_disconnects(server: Live, table: str) -> None:
    sub = server.subscribe(table, include={"after": True})
    before = server.metric("headwater_delivered_changes_total", transport="sse")
    stalled = server.sse(sub)
    for _ in range(3):
        server.sql(f"INSERT INTO {table}(status) VALUES(printf('%.*c', 8000000, 'x'))")
    server.until(lambda: server.metric("headwater_delivered_changes_total", transport="sse") > before)
    stalled.close()
    server.until(lambda: streams(server, "sse") == 0)


def test_long_poll_is_ended_when_its_client_disconnects(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    body = json.dumps({"id": 1, "method": "cdc.poll", "params": {"sub_id": sub["sub_id"], "wait_ms": 60_000}}).encode()
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as asking:
        head = f"POST /api/v1/rpc HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        asking.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        server.until(lambda: server.metric("headwater_polls") == 1)
    server.until(lambda: server.metric("headwater_polls") == 0)


def test_stalled_reader_does_not_delay_another_reader(server: Live, table: str) -> None:
    sub = server.subscribe(table, include={"after": True})
    stalled, reading = server.sse(sub), server.sse(sub)
    for _ in range(3):
        server.sql(f"INSERT INTO {table}(status) VALUES(printf('%.*c', 4000000, 'x'))")
        assert len(reading.changes(1)[0].data["after"]["status"]) == 4_000_000
    assert len(stalled.changes(3)) == 3, "and finds everything when it reads again"


# --- signs of life ---------------------------------------------------------------------------------------


def test_paused_sse_stream_sends_ping_comments(server: Live, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.feeds.deliver.stream.PING_SECONDS", 0.1)
    sub = server.subscribe(table)
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    stream = server.sse(sub)
    assert stream.next().word == "backpressure"
    deadline = time.monotonic() + PATIENCE
    while not stream.comments:
        with pytest.raises(TimeoutError):
            stream.frame(0.3)
        assert time.monotonic() < deadline
    assert set(stream.comments) == {"ping"} and stream.retry == [2000]
    server.ok("cdc.resume", sub_id=sub["sub_id"])
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert stream.next("insert").data["pk"] == [1], "a comment does not disturb the frame after it"


def test_silent_stream_is_not_closed_by_the_keep_alive_timeout(
    start: Callable[..., Live], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.serve.server.server.KEEP_ALIVE_SECONDS", 2.0)  # enough to ask on a busy machine
    monkeypatch.setattr("headwater.serve.server.http_protocol.BoundedHttp.head_seconds", 2.0)
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    stream = live.stream(transport, live.subscribe("t"))
    with pytest.raises(TimeoutError):
        stream.frame(2.5)


# --- too many --------------------------------------------------------------------------------------------


def test_streams_beyond_the_limit_per_client_are_refused_with_429(start: Callable[..., Live], transport: str) -> None:
    live = start(serve={"max_streams_per_client": 3})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    held = [live.sse(sub), live.ws(sub), live.get("/api/v1/changes/main/t")]
    for _ in range(3):
        if transport == "sse":
            refused = live.sse(sub)
            status, headers, body = refused.status, refused.headers, refused.problem()
        else:
            with pytest.raises(InvalidStatus) as refusal:
                live.ws(sub)
            response = refusal.value.response
            status, headers, body = response.status_code, response.headers, json.loads(response.body)
        assert (status, body["code"]) == (429, "limit_exceeded") and int(headers["retry-after"]) >= 1
    live.sql("INSERT INTO t VALUES(1)")
    for stream in held:
        assert stream.changes(1), "the others are undisturbed"
    held[0].close()
    live.until(lambda: streams(live, "sse") == 1)
    assert live.stream(transport, sub).changes(1), "a place that is free again is given away again"


def test_streams_and_subscriptions_beyond_the_server_limit_are_refused(start: Callable[..., Live]) -> None:
    live = start(serve={"max_streams": 2}, feeds={"max_subscriptions": 2})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub, _ = live.subscribe("t"), live.subscribe("t")
    held = [live.sse(sub), live.ws(sub)]
    refused = live.sse(sub)
    assert refused.status == 429 and "retry-after" in refused.headers and "max_streams" in refused.problem()["hint"]
    assert live.error("cdc.subscribe_table", table="t")["code"] == "limit_exceeded"
    live.sql("INSERT INTO t VALUES(1)")
    for stream in held:
        assert stream.changes(1)


def test_waiting_polls_count_toward_the_stream_limit_and_other_polls_do_not(start: Callable[..., Live]) -> None:
    live = start(serve={"max_streams_per_client": 2})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    held = live.sse(sub)
    body = json.dumps({"id": 1, "method": "cdc.poll", "params": {"sub_id": sub["sub_id"], "wait_ms": 60_000}}).encode()
    where = urlsplit(live.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as waiting:
        head = f"POST /api/v1/rpc HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        waiting.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        live.until(lambda: live.metric("headwater_polls") == 1)
        error = live.error("cdc.poll", sub_id=sub["sub_id"], wait_ms=1000)
        assert error["code"] == "limit_exceeded" and "max_streams_per_client" in error["details"]["hint"]
        assert live.sse(sub).status == 429
        assert live.poll(sub)["events"] == [], "a poll that does not wait takes no place"
        assert live.sql('SELECT 1 AS "wait_ms"') == [[1]]
        live.sql("INSERT INTO t VALUES(1)")
        assert held.changes(1)
        answer = b""
        while b'"pk":[1]' not in answer:
            answer += (piece := waiting.recv(65536))
            assert piece, answer
    assert live.poll(sub, wait_ms=1000)["events"], "its place is free again"


def test_stream_is_delivered_while_200_connections_are_idle(server: Live, table: str) -> None:
    where = urlsplit(server.url)
    idle = [socket.create_connection((where.hostname, where.port), PATIENCE) for _ in range(200)]
    try:
        sub = server.subscribe(table)
        stream = server.sse(sub)
        server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
        assert stream.changes(1)
    finally:
        for one in idle:
            one.close()


# --- the server stops --------------------------------------------------------------------------------------


def test_server_stop_sends_each_stream_a_last_checkpoint_and_ends_it(start: Callable[..., Live]) -> None:
    live = start(feeds={"checkpoint_seconds": 3600.0})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    events, sockets = live.sse(sub), live.ws(sub)
    lines = live.get("/api/v1/changes/main/t", accept="application/x-ndjson")
    live.sql("INSERT INTO t VALUES(1)")
    for stream in (events, sockets, lines):
        stream.changes(1)
    live.ask_to_stop()
    for stream in (events, sockets, lines):
        (last,) = stream.rest()
        assert last.word == "checkpoint" and int(last.id) == last.data["offset"] == 2
    assert events.whole and lines.whole
    assert events.retry[-1] == 2000, "an EventSource is told to come back"
    code, reason = sockets.closed_with
    assert code == 1012 and "stopping" in reason


def test_server_stop_answers_a_waiting_long_poll(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    body = json.dumps({"id": 1, "method": "cdc.poll", "params": {"sub_id": sub["sub_id"], "wait_ms": 60_000}})
    where = urlsplit(live.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as asking:
        head = f"POST /api/v1/rpc HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        asking.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        live.until(lambda: live.metric("headwater_polls") == 1)
        live.ask_to_stop()
        answer = b""
        while piece := asking.recv(65536):
            answer += piece
    page = json.loads(answer.split(b"\r\n\r\n", 1)[1])["result"]
    assert page["events"] == [] and page["next_offset"] == 1


def test_stream_resumes_after_a_restart_without_gaps_or_duplicates(start: Callable[..., Live], transport: str) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    live.sql("INSERT INTO t VALUES(1)")
    seen = stream.changes(1)
    live.ask_to_stop()
    seen += stream.rest()
    live.restart()
    live.sql("INSERT INTO t VALUES(2)")
    again = live.stream(transport, sub, last_event_id=str(seen[-1].id))
    live.sql("INSERT INTO t VALUES(3)")
    seen += again.changes(2)
    assert [frame.data["pk"][0] for frame in seen if frame.word == "insert"] == [1, 2, 3]
