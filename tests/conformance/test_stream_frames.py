"""The exact frames of streams, their start positions, and their refusals.

WIRE §5. F64–F70, F90–F95, F112, F113, F171–F173, F175.
"""

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.conformance.live_server import Live
from tests.conformance.readers import Frame, SseReader
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import InvalidStatus

from headwater.serve.http.routes import FILTERS


def fill(server: Live, table: str, *ids: int) -> None:
    for id in ids:
        server.sql(f"INSERT INTO {table} VALUES({id}, 'a', 1)")


# --- frames ----------------------------------------------------------------------------------------------


def test_sse_stream_has_the_documented_bytes(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    fill(server, table, 1)
    (polled,) = server.changes(sub)
    with server.http.stream("GET", sub["sse_url"]) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if "caught_up" in text and text.endswith("\n\n"):
                break
    blocks = text.removeprefix("retry: 2000\n").split("\n\n")
    assert text.startswith("retry: ")
    at = polled["offset"]
    assert re.fullmatch(rf'id: {at}\nevent: insert\ndata: (\{{"seq":{at},.*\}})', blocks[0])
    said = f'{{"sub_id":"{sub["sub_id"]}","offset":{at},"latest_offset":{at}}}'
    assert blocks[1] == f"id: {at}\nevent: caught_up\ndata: {said}" and blocks[2:] == [""]


def test_stream_headers_disable_buffering_and_caching(server: Live, table: str) -> None:
    stream = server.sse(server.subscribe(table))
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["cache-control"] == "no-store, no-transform"
    assert "content-length" not in stream.headers and "content-encoding" not in stream.headers


def test_websocket_frame_has_a_numeric_id(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    fill(server, table, 1)
    stream = server.ws(sub)
    change, caught_up = stream.next(), stream.next()
    (polled,) = server.changes(sub)
    at = polled["offset"]
    assert change == Frame(at, "insert", polled)
    assert caught_up == Frame(at, "caught_up", {"sub_id": sub["sub_id"], "offset": at, "latest_offset": at})


def test_caught_up_frame_is_sent_once_per_catch_up(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    fill(server, table, 1, 2)
    stream = server.stream(transport, sub)
    assert [frame.word for frame in stream.upto("caught_up")] == ["insert", "insert", "caught_up"]
    fill(server, table, 3, 4)
    stream.changes(1)
    assert stream.next("insert", "caught_up").word == "insert"


def test_stream_without_a_backlog_sends_no_caught_up_frame(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    stream = server.stream(transport, sub)
    fill(server, table, 1)
    assert stream.next("insert", "caught_up").word == "insert"


def test_idle_stream_receives_checkpoints_and_no_later_change_is_older(
    start: Callable[..., Live], transport: str
) -> None:
    live = start(feeds={"checkpoint_seconds": 0.05})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    sub = live.subscribe("t")
    stream = live.stream(transport, sub)
    idle = [stream.next() for _ in range(2)]
    assert [frame.word for frame in idle] == ["checkpoint"] * 2
    for frame in idle:
        assert list(frame.data) == ["ts", "offset"] and str(frame.id) == str(frame.data["offset"]) == "1"
        assert re.fullmatch(r"\d+\.\d+", frame.data["ts"])
    seen = list(idle)
    for id in range(1, 6):
        live.together(f"INSERT INTO t VALUES({id}, 'x')", f"UPDATE t SET v = 'y' WHERE id = {id}")
        while seen[-1].word != "checkpoint" or seen[-1].data["offset"] < 1 + 2 * id:
            seen.append(stream.next())
    highest, ended = (0, 0), True
    for frame in seen:
        when = tuple(map(int, frame.data["ts"].split(".")))
        if frame.word == "checkpoint":
            assert ended, "a checkpoint never splits a transaction"
            assert when >= highest
            highest = when
        else:
            assert when > highest, "nothing comes later that is not newer"
            ended = frame.data["txn"]["last"]


def test_schema_change_is_delivered_as_its_own_event(server: Live, table: str, transport: str) -> None:
    stream = server.stream(transport, server.subscribe(table))
    server.sql(f"ALTER TABLE {table} RENAME COLUMN status TO state")
    frame = stream.next()
    assert frame.word == "schema_change" and frame.data["op"] == "schema_change"
    assert frame.data["ddl"] == f"ALTER TABLE {table} RENAME COLUMN status TO state"


# --- where a stream begins ---------------------------------------------------------------------------------


def first(server: Live, transport: str, sub: dict[str, Any], query: str = "", **headers: str) -> int:
    stream = server.stream(transport, sub, query, **headers)
    found = stream.changes(1)[0].data["pk"][0]
    stream.close()
    return found


def test_from_offset_overrides_last_event_id_which_overrides_the_cursor(
    server: Live, table: str, transport: str
) -> None:
    sub = server.subscribe(table)
    fill(server, table, 1, 2, 3, 4)
    base = sub["offset"]
    assert first(server, transport, sub) == 1
    assert first(server, transport, sub, last_event_id=str(base + 1)) == 2
    assert first(server, transport, sub, f"?from_offset={base + 2}", last_event_id=str(base + 1)) == 3
    assert first(server, transport, sub, f"?from_offset={base}", last_event_id=str(base + 3)) == 1
    assert first(server, transport, sub, last_event_id="") == 1, "an empty header is none"
    server.ok("cdc.ack", sub_id=sub["sub_id"], offset=base + 2)
    assert first(server, transport, sub) == 3
    assert first(server, transport, sub, "?from_offset=0") == 3, "what was acked is not repeated"
    assert first(server, transport, sub, last_event_id=str(base + 1)) == 3
    assert first(server, transport, sub, f"?from_offset={base + 3}") == 4


def test_invalid_last_event_id_is_refused(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    for bad in ("x", "-1", "1.5", "1 2", "9" * 30, "s:", "s:!", "s:AAAA", "é", "0x10", "99999999"):
        refused = server.sse(sub, last_event_id=bad)
        assert refused.status == 400, bad
        body = refused.problem()
        assert (body["code"], body["status"]) == ("invalid_request", 400)
        assert refused.headers["content-type"] == "application/problem+json"
    assert server.sse(sub, last_event_id="x").problem()["title"] == "invalid Last-Event-ID header"


@pytest.mark.parametrize(
    "query", ["from_offset=-1", "from_offset=x", "from_offset=", "from_offset=1e3", "from_offset=99999999999999999999"]
)
def test_invalid_from_offset_is_refused(server: Live, table: str, query: str) -> None:
    assert server.sse(server.subscribe(table), f"?{query}").status == 400


def test_stream_from_a_future_offset_or_of_an_unknown_subscription_is_refused(
    server: Live, table: str, transport: str
) -> None:
    sub = server.subscribe(table)
    beyond = server.poll(sub)["latest_offset"] + 1
    cases = [
        (sub, f"?from_offset={beyond}", {}, 400, "invalid_request"),
        (sub, "", {"last_event_id": str(beyond)}, 400, "invalid_request"),
        (sub, "?from_ofset=1", {}, 400, "invalid_request"),
        (sub, "?from_offset=1&from_offset=2", {}, 400, "invalid_request"),
    ]
    nobody = {"sse_url": "/api/v1/cdc/sse/sub_00", "ws_url": "/api/v1/cdc/ws/sub_00"}
    for given, query, headers, status, code in (*cases, (nobody, "", {}, 404, "not_found")):
        if transport == "sse":
            refused = server.sse(given, query, **headers)
            found = refused.status, refused.problem()
        else:
            with pytest.raises(InvalidStatus) as refusal:
                server.ws(given, query, **headers)
            response = refusal.value.response
            found = response.status_code, __import__("json").loads(response.body)
        assert found[0] == status and found[1]["code"] == code, (query, headers)
    assert "unknown sub_id" in server.sse(nobody).problem()["title"]


def test_websocket_route_without_upgrade_returns_426_and_sse_route_with_upgrade_returns_400(
    server: Live, table: str
) -> None:
    sub = server.subscribe(table)
    refused = server.get(sub["ws_url"])
    assert refused.status == 426 and refused.headers["upgrade"] == "websocket"
    with pytest.raises(InvalidStatus) as refusal:
        server.ws({"ws_url": sub["sse_url"]})
    assert refusal.value.response.status_code == 400


# --- how a stream ends -----------------------------------------------------------------------------------


def test_closing_a_subscription_ends_its_open_streams(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    events, socket = server.sse(sub), server.ws(sub)
    fill(server, table, 1)
    events.changes(1), socket.changes(1)
    server.ok("cdc.close", sub_id=sub["sub_id"])
    assert events.rest() == [] and events.whole
    assert socket.rest() == [] and socket.closed_with == (1000, "closed: the subscription was closed")


def test_closing_a_subscription_ends_its_paused_stream(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    stream = server.stream(transport, sub)
    stream.next("backpressure")
    server.ok("cdc.close", sub_id=sub["sub_id"])
    assert stream.rest() == []


def test_dropping_a_database_ends_its_streams(server: Live) -> None:
    server.ok("schema.create_database", db="shortlived")
    server.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="shortlived")
    sub = server.subscribe("t", db="shortlived")
    stream, loose = server.sse(sub), server.get("/api/v1/changes/shortlived/t")
    server.sql("INSERT INTO t VALUES(1)", db="shortlived")
    stream.changes(1), loose.changes(1)
    server.ok("schema.drop_database", db="shortlived")
    assert stream.rest() == loose.rest() == []
    assert server.error("cdc.poll", sub_id=sub["sub_id"])["code"] == "not_found"


# --- streams without a subscription ------------------------------------------------------------------------


def test_get_of_changes_streams_new_rows_without_a_subscription(server: Live, table: str) -> None:
    fill(server, table, 1)
    stream = server.get(f"/api/v1/changes/main/{table}?format=plain_json")
    fill(server, table, 2)
    (frame,) = stream.changes(1)
    assert frame.word == "insert" and frame.data["after"] == {"id": 2, "status": "a", "total": 1.0}
    again = server.get(f"/api/v1/changes/default/{table}?start=earliest", last_event_id=frame.id)
    fill(server, table, 3)
    assert again.changes(1)[0].data["pk"] == [{"t": "i64", "v": 3}]


def test_ndjson_stream_has_plain_lines_for_changes_and_event_lines_for_caught_up(server: Live, table: str) -> None:
    base = server.subscribe(table)["offset"]
    fill(server, table, 1, 2)
    stream = server.get(f"/api/v1/changes/main/{table}?from_offset={base}", accept="application/x-ndjson")
    assert stream.headers["content-type"] == "application/x-ndjson"
    one, two, caught_up = (stream.next() for _ in range(3))
    assert [one.data["offset"], two.data["offset"]] == [base + 1, base + 2]
    assert caught_up == Frame(base + 2, "caught_up", {"offset": base + 2, "latest_offset": base + 2})


def test_stream_with_upto_ends_at_that_offset(server: Live, table: str) -> None:
    base = server.subscribe(table)["offset"]
    fill(server, table, 1, 2, 3)
    stream = server.get(f"/api/v1/changes/main/{table}?from_offset={base}&upto={base + 2}")
    assert [frame.data["pk"][0]["v"] for frame in stream.rest() if frame.word == "insert"] == [1, 2]
    assert stream.whole


def test_every_filter_is_accepted_in_a_url(server: Live, table: str) -> None:
    query = "where=total%20%3E%205&ops=insert,delete&columns=status,total&include=before,after&format=plain_json"
    keys = 'pk_range={"lower_bound":1}&spans=[{"upper_bound":[9]}]&shard=0/1&txn=atomic'.replace('"', "%22")
    stream = server.get(f"/api/v1/changes/main/{table}?{query}&{keys.replace('{', '%7B').replace('}', '%7D')}")
    assert stream.status == 200
    server.sql(f"INSERT INTO {table} VALUES(0, 'a', 9), (1, 'a', 9), (2, 'b', 3), (10, 'c', 9)")
    server.sql(f"UPDATE {table} SET total = 1")
    one, two = stream.changes(2)
    assert (one.word, one.data["pk"], one.data["after"]) == ("insert", [1], {"status": "a", "total": 9.0})
    assert (two.word, two.data["pk"], two.data["before"]) == ("delete", [1], {"status": "a", "total": 9.0})


@pytest.mark.parametrize(
    "query",
    [
        "where=nope",
        "where=",
        "where=total%20%3E",
        "ops=merge",
        "columns=nope",
        "format=xml",
        "include=during",
        "pk=1",
        "pk=[1,2]",
        "pk=[[",
        "pk_range=[]",
        "spans=[1]",
        "shard=3",
        "shard=3/3",
        "start=now",
        "ts=yesterday",
        "start=earliest&ts=1",
        "txn=some",
        "upto=x",
        "limit=5",
        "where=%ff",
    ],
)
def test_invalid_filter_in_a_url_is_refused(server: Live, table: str, query: str) -> None:
    refused = server.get(f"/api/v1/changes/main/{table}?{query}")
    assert refused.status == 400 and refused.problem()["code"] == "invalid_request"


def test_changes_of_an_unknown_table_or_database_return_404(server: Live) -> None:
    for path in ("/api/v1/changes/main/nowhere", "/api/v1/changes/nowhere", "/api/v1/changes/nowhere/t"):
        assert server.get(path).status == 404, path


def test_changes_stream_before_the_horizon_sends_resnapshot_and_ends(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    for id in range(5):
        live.sql(f"INSERT INTO t VALUES({id})")
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["earliest_offset"] == 5)
    stream = live.get("/api/v1/changes/main/t?from_offset=1")
    pressure, frame = stream.rest()
    assert (pressure.word, pressure.data["state"]) == ("backpressure", "resnapshot_required")
    assert (frame.id, frame.word, frame.data["reason"]) == ("4", "resnapshot", "wal_horizon_exceeded")


# --- methods, pages of other origins -------------------------------------------------------------------------


def test_head_of_a_stream_returns_only_the_headers(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    for path in (sub["sse_url"], f"/api/v1/changes/main/{table}"):
        response = server.http.head(path)
        assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream"
        assert response.content == b""
    server.until(lambda: server.metric("headwater_streams", transport="sse") == 0)


def test_post_to_an_sse_route_returns_405(server: Live, table: str) -> None:
    response = server.http.post(server.subscribe(table)["sse_url"])
    assert response.status_code == 405 and response.headers["allow"] == "GET, HEAD"


def test_stream_from_a_localhost_origin_is_allowed_and_from_a_foreign_origin_refused(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.sse(sub, origin="http://localhost:3000")
    assert stream.status == 200 and stream.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "origin" in stream.headers["vary"].lower()
    refused = server.sse(sub, origin="https://evil.example")
    assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    with pytest.raises(InvalidStatus) as refusal:
        server.ws(sub, origin="https://evil.example")
    assert refusal.value.response.status_code == 403


def test_cors_preflight_allows_the_stream_and_rpc_headers(server: Live, table: str) -> None:
    asked = {
        "access-control-request-method": "GET",
        "access-control-request-headers": "last-event-id,authorization",
    }
    sub = server.subscribe(table)
    for path in (sub["sse_url"], "/api/v1/rpc"):
        response = server.http.options(path, headers={"origin": "http://localhost:3000", **asked})
        assert response.status_code == 204
        allowed = response.headers["access-control-allow-headers"].lower()
        assert {"last-event-id", "authorization", "content-type"} <= {name.strip() for name in allowed.split(",")}
        assert {"GET", "POST"} <= {name.strip() for name in response.headers["access-control-allow-methods"].split(",")}
    other = server.http.options(sub["sse_url"], headers={"origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in other.headers


def test_server_with_a_token_allows_only_configured_origins(start: Callable[..., Live]) -> None:
    from headwater.config.setting_types import Secret

    live = start(serve={"token": Secret("let-me-in"), "cors_origins": ("https://app.example",)})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    sub = live.subscribe("t")
    ticket = live.ok("security.ticket.create")["ticket"]
    for origin, admitted in (("https://app.example", True), ("https://evil.example", False)):
        stream = SseReader(live.url, f"{sub['sse_url']}?ticket={ticket}", {"origin": origin})
        assert ("access-control-allow-origin" in stream.headers) == admitted
        stream.close()
    with pytest.raises(InvalidStatus) as refusal:
        live.ws(sub, origin="https://evil.example")
    assert refusal.value.response.status_code == 403
    assert live.ws(sub, origin="https://app.example").socket.response.status_code == 101


# --- odd requests ----------------------------------------------------------------------------------------

ODD = [
    "²",
    "٣",
    "٣/٤",
    "²/4",
    "0/²",
    "+1",
    "-1",
    "1_0",
    " 1",
    "\0",
    "1\0",
    "9" * 19,
    "9" * 400,
    "1e9",
    "[²]",
    "𝟙",
    "",
    ",",
]
ODD_JSON = [
    "[" * 2000,
    '[{"prefix": 1}]',
    '[{"a": 1}]',
    "[1e999]",
    '{"lower_bound": [1]}',
    '["\\u0000"]',
    '["\\ud800"]',
    "{}",
]


@pytest.mark.parametrize("name", [*FILTERS, "from_offset", "upto", "version", "format"])
def test_no_parameter_value_returns_500(server: Live, table: str, name: str) -> None:
    what = "snapshot" if name in ("version", "format") else "changes"
    for value in [*ODD, *ODD_JSON]:
        response = server.http.head(f"/api/v1/{what}/main/{table}", params={name: value})
        assert response.status_code in (200, 307, 400, 404, 410, 501), (name, value, response.headers)


@pytest.mark.parametrize("query", ["ts=%C2%B2", "shard=%C2%B2/4", "shard=%D9%A3/%D9%A4", "from_offset=%D9%A3"])
def test_number_with_non_ascii_digits_is_refused(server: Live, table: str, query: str) -> None:
    refused = server.get(f"/api/v1/changes/main/{table}?{query}")
    assert refused.status == 400 and refused.problem()["hint"]


@pytest.mark.parametrize("query", ["ops=insert&ops=insert", 'spans=[{"a":1}]', "spans=[1]", "start=now&ts=1"])
def test_refused_stream_parameter_has_a_hint(server: Live, table: str, query: str) -> None:
    problem = server.get(f"/api/v1/changes/main/{table}?{query}").problem()
    assert problem["status"] == 400 and problem["hint"]


def test_http_1_0_client_receives_an_unchunked_stream(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    fill(server, table, 1, 2)
    upto = server.changes(sub)[-1]["offset"]
    where = urlsplit(server.url)
    path = f"/api/v1/changes/main/{table}?start=earliest&ops=insert&format=plain_json&upto={upto}"
    with socket.create_connection((where.hostname, where.port), PATIENCE) as old:
        head = f"GET {path} HTTP/1.0\r\nhost: {where.netloc}\r\naccept: application/x-ndjson\r\n\r\n"
        old.sendall(head.encode())
        found = b""
        while piece := old.recv(65536):
            found += piece
    head, _, body = found.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ") and "transfer-encoding" not in head and "connection: close" in head
    lines = [json.loads(line) for line in body.splitlines() if line]
    assert [line["pk"] for line in lines if line.get("op") == "insert"] == [[1], [2]]


def test_oversized_request_after_an_open_stream_is_not_answered_inside_the_stream(server: Live, table: str) -> None:
    stream = server.sse(server.subscribe(table))
    fill(server, table, 1)
    stream.changes(1)
    stream._socket.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * (70 << 10) + b"\r\n\r\n")
    assert all(frame.word in ("caught_up", "checkpoint") for frame in stream.rest()) and not stream.whole


def test_invalid_utf8_frame_closes_the_websocket_with_1007_and_logs_no_error(
    server: Live, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = server.ws(server.subscribe(table))
    with contextlib.suppress(ssl.SSLZeroReturnError):  # the close may be read, by its own thread, before this returns
        stream.socket.socket.sendall(b"\x81\x82\0\0\0\0\xff\xfe" * 3)
    stream.rest()
    assert stream.closed_with[0] == 1007
    server.until(lambda: server.metric("headwater_streams", transport="websocket") == 0)
    assert [found.message for found in caplog.records if found.levelname == "ERROR"] == []
