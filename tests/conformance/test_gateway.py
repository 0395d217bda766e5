"""The JSON gateway: SochDB's messages, answered from our databases. WIRE §5, seed systems §2.6. F78, F79."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.serve.gateway import messages


@pytest.fixture
def gateway(server: Live) -> Iterator[GatewayClient]:
    client = GatewayClient(server.url)
    yield client
    client.close()


def payloads(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["payload"] for event in events]


# --- requests --------------------------------------------------------------------------------------------


def test_ping_is_answered_with_the_server_time(gateway: GatewayClient) -> None:
    before = time.time_ns() // 1_000_000
    found = gateway.ask("ping", id="p1")
    assert found["type"] == "pong" and found["id"] == "p1" and list(found["payload"]) == ["ts"]
    assert before <= found["payload"]["ts"] <= time.time_ns() // 1_000_000
    assert gateway.ask("ping", {}, id=7)["id"] == 7, "a number is as good"


def test_sql_reads_and_writes_with_parameters(server: Live, gateway: GatewayClient, table: str) -> None:
    written = gateway.ok("sql", {"query": f"INSERT INTO {table} VALUES(?, ?, ?)", "params": [1, "ä", 2.5]})
    assert (written["columns"], written["rows"], written["affected"]) == ([], [], 1)
    assert written["causality"], "as every write returns it"
    read = gateway.ok("sql", {"query": f"SELECT id, status, total, NULL AS n FROM {table}"})
    assert read["columns"] == ["id", "status", "total", "n"] and read["rows"] == [[1, "ä", 2.5, None]]
    named = gateway.ok("sql", {"query": f"SELECT id FROM {table} WHERE id = :id", "params": {"id": 1}})
    assert named["rows"] == [[1]]
    assert gateway.ok("sql", {"query": "SELECT 9007199254740993, x'00ff'"})["rows"] == [["9007199254740993", "AP8="]]
    tagged = {"query": "SELECT ?", "params": [{"t": "bytes", "b64": "AP8="}]}
    assert gateway.ok("sql", tagged)["rows"] == [["AP8="]]


def test_sql_with_a_namespace_runs_in_that_database(server: Live, gateway: GatewayClient) -> None:
    server.ok("schema.create_database", db="elsewhere")
    gateway.ok("sql", {"query": "CREATE TABLE only_here(id INTEGER PRIMARY KEY)", "namespace": "elsewhere"})
    assert gateway.ok("sql", {"query": "SELECT * FROM only_here", "namespace": "elsewhere"})["rows"] == []
    assert gateway.error("sql", {"query": "SELECT * FROM only_here", "namespace": "default"})["code"]
    server.ok("schema.drop_database", db="elsewhere")


def test_kv_messages_put_get_and_delete_a_key(server: Live, gateway: GatewayClient) -> None:
    assert gateway.ok("kv_get", {"key": "gw.a"}) == {"found": False}
    assert gateway.ok("kv_put", {"key": "gw.a", "value": "1"}) == {"ok": True}
    assert gateway.ok("kv_get", {"key": "gw.a"}) == {"found": True, "value": "1"}
    assert gateway.ok("kv_get", {"key": "gw.a", "namespace": "main"}) == {"found": True, "value": "1"}
    assert gateway.ok("kv_delete", {"key": "gw.a"}) == {"deleted": True}
    assert gateway.ok("kv_delete", {"key": "gw.a"}) == {"deleted": False}
    assert gateway.ok("kv_put", {"key": "", "value": ""}) == {"ok": True}
    assert gateway.ok("kv_get", {"key": ""}) == {"found": True, "value": ""}
    assert server.sql("SELECT count(*) FROM kv WHERE key = x''") == [[1]], "it is an ordinary table"


def test_non_text_keys_and_values_are_encoded_as_base64(gateway: GatewayClient) -> None:
    raw = base64.b64encode(b"\xff\0").decode()
    gateway.ok("kv_put", {"key_base64": raw, "value_base64": raw})
    assert gateway.ok("kv_get", {"key_base64": raw}) == {"found": True, "value_base64": raw}
    gateway.ok("kv_put", {"key": "text", "value_base64": base64.b64encode("ä".encode()).decode()})
    assert gateway.ok("kv_get", {"key": "text"}) == {"found": True, "value": "ä"}
    assert gateway.ok("kv_delete", {"key_base64": raw}) == {"deleted": True}


def test_value_with_an_expired_ttl_is_not_found(server: Live, gateway: GatewayClient) -> None:
    gateway.ok("kv_put", {"key": "gw.ttl", "value": "x", "ttl_seconds": 3600})
    ((end,),) = server.sql("SELECT expires_at_ms FROM kv WHERE key = CAST('gw.ttl' AS BLOB)")
    assert 3500 < end / 1000 - time.time() < 3700
    server.sql("UPDATE kv SET expires_at_ms = 1 WHERE key = CAST('gw.ttl' AS BLOB)")
    assert gateway.ok("kv_get", {"key": "gw.ttl"}) == {"found": False}


def test_gateway_answers_requests_in_the_order_sent(gateway: GatewayClient) -> None:
    asked = [gateway.send("kv_put", {"key": "gw.order", "value": str(number)}) for number in range(200)]
    assert [gateway.answer()["id"] for _ in asked] == asked
    assert gateway.ok("kv_get", {"key": "gw.order"})["value"] == "199"


def test_message_over_the_body_limit_closes_the_socket_with_1009(start: Callable[..., Live]) -> None:
    live = start(serve={"max_body_bytes": 300_000})
    client = GatewayClient(live.url)
    client.ok("kv_put", {"key": "large", "value": "x" * 250_000})
    assert len(client.ok("kv_get", {"key": "large"})["value"]) == 250_000
    client.send("kv_put", {"key": "larger", "value": "x" * 300_000})
    assert client.closed()[0] == 1009
    client.close()


# --- what cannot be -------------------------------------------------------------------------------------

RAW: dict[str, tuple[str | bytes, Any, str]] = {  # what is sent, the id of the answer, a part of the message
    "no JSON": ("sql please", "", "Invalid JSON"),
    "nothing": ("", "", "Invalid JSON"),
    "a list": ("[1]", "", "Invalid JSON"),
    "null": ("null", "", "Invalid JSON"),
    "deep nesting": ("[" * 20_000, "", "Invalid JSON"),
    "binary": (b'{"id": "1", "type": "ping"}', "", "binary"),
    "half a character": (r'{"id": "\ud800", "type": "ping"}', "", "Invalid JSON"),
    "no id": ('{"type": "ping"}', "", "id"),
    "an id of a list": ('{"id": [], "type": "ping"}', "", "id"),
    "an id beyond all integers": ('{"id": 1' + "0" * 400 + ', "type": "ping"}', "", "id"),
    "a long id": (json.dumps({"id": "x" * 201, "type": "ping"}), "", "id"),
    "no type": ('{"id": "a"}', "a", "type"),
    "an unknown field": ('{"id": "a", "type": "ping", "version": 2}', "a", "version"),
}
ASKED: dict[str, tuple[str, Any, str]] = {  # type, payload, a part of the message
    "a type that is none": ("quit", {}, "Unknown message type: quit"),
    "an unknown field": ("ping", {"x": 1}, "x"),
    "a payload of a list": ("sql", [], "payload"),
    "no payload": ("sql", None, "query"),
    "a query of a number": ("sql", {"query": 1}, "query"),
    "bad SQL": ("sql", {"query": "SELEC"}, "syntax"),
    "no SQL": ("sql", {"query": ""}, ""),
    "a NUL": ("sql", {"query": "SELECT 1\0"}, "NUL"),
    "two statements": ("sql", {"query": "SELECT 1; SELECT 2"}, ""),
    "a nested parameter": ("sql", {"query": "SELECT ?", "params": [[]]}, "params[0]"),
    "too few parameters": ("sql", {"query": "SELECT ?"}, ""),
    "no key": ("kv_get", {}, "key"),
    "two keys": ("kv_get", {"key": "", "key_base64": ""}, "key"),
    "no base64": ("kv_get", {"key_base64": "x"}, "base64"),
    "base64 of no bytes": ("kv_get", {"key_base64": "ä"}, "base64"),
    "no value": ("kv_put", {"key": ""}, "value"),
    "a negative end": ("kv_put", {"key": "", "value": "", "ttl_seconds": -1}, "ttl_seconds"),
    "a far end": ("kv_put", {"key": "", "value": "", "ttl_seconds": 3_000_000_000}, "ttl_seconds"),
    "a namespace that is none": ("kv_get", {"key": "", "namespace": "nope"}, "nope"),
    "a table that is none": ("subscribe", {"tables": ["nope"]}, "nope"),
    "an operation that is none": ("subscribe", {"operations": ["x"]}, "operations"),
    "a start beyond all": ("subscribe", {"start_sequence": 99_999_999}, "start_sequence 99999999"),
    "a negative start": ("subscribe", {"start_sequence": -1}, "start_sequence"),
    "a condition on many tables": ("subscribe", {"where": "1"}, "where"),
    "a subscription that is none": ("unsubscribe", {"id": "b"}, "subscription"),
}


@pytest.mark.parametrize(("sent", "id", "part"), RAW.values(), ids=RAW.keys())
def test_malformed_message_is_answered_with_an_error_and_the_socket_stays_open(
    gateway: GatewayClient, sent: str | bytes, id: Any, part: str
) -> None:
    gateway.socket.send(sent)
    found = gateway.frame()
    assert (found["type"], found["id"], found["payload"]["code"]) == ("error", id, "invalid_request")
    assert part in found["payload"]["message"] and found["payload"]["details"]["hint"], found
    assert gateway.ok("ping")


@pytest.mark.parametrize(("type", "payload", "part"), ASKED.values(), ids=ASKED.keys())
def test_refused_request_is_answered_with_its_code_and_the_socket_stays_open(
    gateway: GatewayClient, type: str, payload: Any, part: str
) -> None:
    found = gateway.error(type, payload)
    assert part in found["message"] and found["code"] in ("invalid_request", "not_found"), found
    assert gateway.ok("ping")


def test_hint_uses_the_gateway_terms_and_lists_each_type_once(gateway: GatewayClient) -> None:
    hint = gateway.error("quit", {})["details"]["hint"]
    assert all(hint.count(type) == 1 for type in ("sql", "kv_get", "ping", "unsubscribe"))
    assert gateway.error("pong", {})["details"]["hint"] == "Did you mean 'ping'?"
    assert "`tables`" in gateway.error("subscribe", {"where": "1"})["details"]["hint"]
    beyond = gateway.error("subscribe", {"start_sequence": 99_999_999})
    assert "latest sequence" in beyond["message"] and "offset" not in str(beyond).lower()


def test_text_frame_with_invalid_utf8_closes_the_socket_with_1007(gateway: GatewayClient) -> None:
    gateway.socket.send(b'{"id": "\xff"}', text=True)
    assert gateway.closed()[0] == 1007


# --- subscriptions ---------------------------------------------------------------------------------------


def test_gateway_event_has_the_key_and_both_row_images(server: Live, gateway: GatewayClient, table: str) -> None:
    assert gateway.ok("subscribe", {"tables": [table]}, id="s") == {"subscribed": True}
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1.5)")
    server.sql(f"UPDATE {table} SET status = 'b' WHERE id = 1")
    server.sql(f"UPDATE {table} SET id = 2")
    server.sql(f"DELETE FROM {table}")
    events = gateway.events(4)
    assert [(event["id"], event["type"]) for event in events] == [("s", "event")] * 4
    one, two, three, four = payloads(events)
    a, b = ({"id": 1, "status": word, "total": 1.5} for word in "ab")
    assert list(one) == ["sequence", "timestamp_us", "txn_id", "table", "operation", "key", "after"]
    assert (one["table"], one["operation"], one["key"], one["after"]) == (table, "insert", [1], a)
    assert (two["operation"], two["key"], two["before"], two["after"]) == ("update", [1], a, b)
    assert (three["operation"], three["key"], three["key_before"]) == ("update", [2], [1])
    assert (four["operation"], four["key"], four["before"]) == ("delete", [2], {**b, "id": 2})
    assert "after" not in four
    found = payloads(events)
    assert [each["sequence"] for each in found] == list(range(one["sequence"], one["sequence"] + 4))
    times = [each["timestamp_us"] for each in found]
    assert times == sorted(times) and abs(times[0] / 1e6 - time.time()) < 60
    assert len({each["txn_id"] for each in found}) == 4 and all(type(each["txn_id"]) is int for each in found)


def test_kv_events_contain_keys_and_values_in_their_written_form(server: Live, gateway: GatewayClient) -> None:
    gateway.ok("kv_put", {"key": "gw.before", "value": "the table is there now"})
    gateway.ok("subscribe", {"tables": ["kv"]}, id="s")
    gateway.ok("kv_put", {"key": "gw.e", "value": "1", "ttl_seconds": 60})
    gateway.ok("kv_put", {"key": "gw.e", "value_base64": "/w=="})
    gateway.ok("kv_delete", {"key": "gw.e"})
    one, two, three = payloads(gateway.events(3))
    assert (one["operation"], one["key"], one["after"]) == ("insert", "gw.e", "1") and "before" not in one
    assert (two["operation"], two["key"], two["before"], two["after_base64"]) == ("update", "gw.e", "1", "/w==")
    assert (three["operation"], three["key"], three["before_base64"]) == ("delete", "gw.e", "/w==")


def test_schema_change_event_contains_the_ddl(server: Live, gateway: GatewayClient, table: str) -> None:
    gateway.ok("subscribe", {"tables": [table], "operations": ["SCHEMA_CHANGE"]})
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    server.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
    (found,) = payloads(gateway.events(1))
    assert found["operation"] == "schema_change" and "more TEXT" in found["ddl"] and "key" not in found


def test_gateway_subscription_filters_by_table_operation_and_where(
    server: Live, gateway: GatewayClient, table: str
) -> None:
    server.sql(f"CREATE TABLE {table}_b(id INTEGER PRIMARY KEY)")
    gateway.ok("subscribe", {"tables": [table], "operations": ["Insert", "delete"]}, id="ops")
    gateway.ok("subscribe", {"tables": [table], "where": "total > 5"}, id="where")
    gateway.ok("subscribe", {"tables": [f"{table}_b"]}, id="other")
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    server.sql(f"UPDATE {table} SET total = 9")
    server.sql(f"DELETE FROM {table}")
    server.sql(f"INSERT INTO {table}_b VALUES(1)")
    found: dict[str, list[str]] = {}
    for event in gateway.events(5):
        found.setdefault(event["id"], []).append(event["payload"]["operation"])
    assert found == {"ops": ["insert", "delete"], "where": ["insert", "delete"], "other": ["insert"]}


def test_subscription_without_tables_receives_changes_of_a_new_table(
    server: Live, gateway: GatewayClient, table: str
) -> None:
    gateway.ok("subscribe", {}, id="all")
    server.sql(f"CREATE TABLE {table}_new(id INTEGER PRIMARY KEY)")
    server.sql(f"INSERT INTO {table}_new VALUES(1)")
    found = payloads(gateway.events(2))
    assert [(each["table"], each["operation"]) for each in found] == [
        (f"{table}_new", "schema_change"),
        (f"{table}_new", "insert"),
    ]


def test_start_sequence_is_inclusive_and_zero_delivers_only_new_changes(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1), (2, 'a', 1), (3, 'a', 1)")
    first = server.changes(sub)[0]["offset"]
    client = GatewayClient(server.url)
    client.ok("subscribe", {"tables": [table], "start_sequence": first + 1}, id="from")
    assert [each["sequence"] for each in payloads(client.events(2))] == [first + 1, first + 2]
    client.ok("subscribe", {"tables": [table], "start_sequence": 0}, id="new")
    latest = server.poll(sub)["latest_offset"]
    client.ok("subscribe", {"tables": [table], "start_sequence": latest + 1}, id="next")
    server.sql(f"INSERT INTO {table} VALUES(4, 'a', 1)")
    assert {(event["id"], event["payload"]["key"][0]) for event in client.events(3)} == {
        ("from", 4),
        ("new", 4),
        ("next", 4),
    }
    assert "start_sequence" in client.error("subscribe", {"start_sequence": latest + 9})["message"]
    client.close()


def test_start_sequence_before_the_horizon_is_refused_as_overrun(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 3})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    for number in range(9):
        live.sql("INSERT INTO t VALUES(?)", number)
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["earliest_offset"] == 8)
    client = GatewayClient(live.url)
    told = client.error("subscribe", {"start_sequence": 1})
    assert told["code"] == "resnapshot_required"
    oldest = told["details"]["earliest_offset"]
    assert told["message"] == f"CDC overrun: requested seq 1 but oldest available is {oldest}"
    client.ok("subscribe", {"tables": ["t"], "start_sequence": oldest}, id="s")
    assert payloads(client.events(1))[0]["sequence"] == oldest
    live.until(lambda: live.feeds.readers.count_streams()["gateway"] == 1)  # nothing is left of the refused one
    client.close()


def test_subscriptions_of_a_socket_are_separated_by_id_and_ended_separately(
    server: Live, gateway: GatewayClient, table: str
) -> None:
    gateway.ok("subscribe", {"tables": [table]}, id="a")
    gateway.ok("subscribe", {"tables": [table]}, id=1)
    assert "is open" in gateway.error("subscribe", {"tables": [table]}, id="a")["message"]
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert {event["id"] for event in gateway.events(2)} == {"a", 1}
    assert gateway.ok("unsubscribe", {"id": "a"}) == {"unsubscribed": True}
    server.sql(f"INSERT INTO {table} VALUES(2, 'a', 1)")
    assert [event["id"] for event in gateway.events(1)] == [1]
    gateway.ok("subscribe", {"tables": [table]}, id="a")
    server.until(lambda: server.metric("headwater_streams", transport="gateway") == 2)


def test_subscription_beyond_the_limit_of_a_socket_is_refused(gateway: GatewayClient, table: str) -> None:
    for number in range(64):
        gateway.ok("subscribe", {"tables": [table]}, id=number)
    assert gateway.error("subscribe", {"tables": [table]})["code"] == "limit_exceeded"
    gateway.ok("unsubscribe", {"id": 3})
    gateway.ok("subscribe", {"tables": [table]})


def test_gateway_subscriptions_count_toward_the_stream_limit_of_a_client(start: Callable[..., Live]) -> None:
    live = start(serve={"max_streams_per_client": 3})
    client = GatewayClient(live.url)
    client.ok("subscribe", {}, id="a")
    client.ok("subscribe", {}, id="b")
    assert client.error("subscribe", {})["code"] == "limit_exceeded"
    client.ok("unsubscribe", {"id": "a"})
    live.until(lambda: live.feeds.readers.count_streams()["gateway"] == 1)
    client.ok("subscribe", {}, id="c")
    client.close()
    live.until(lambda: live.feeds.readers.count_streams()["gateway"] == 0)


def test_dropping_the_database_ends_its_subscription_but_not_the_socket(server: Live, gateway: GatewayClient) -> None:
    server.ok("schema.create_database", db="brief")
    gateway.ok("subscribe", {"namespace": "brief"}, id="s")
    server.ok("schema.drop_database", db="brief")
    found = gateway.answer()
    assert (found["id"], found["type"], found["payload"]["code"]) == ("s", "error", "not_found")
    assert gateway.ok("ping")


def test_failing_predicate_ends_only_its_own_subscription(server: Live, gateway: GatewayClient, table: str) -> None:
    gateway.ok("subscribe", {"tables": [table], "where": "status = 'a'"}, id="s")
    gateway.ok("subscribe", {"tables": [table]}, id="other")
    server.sql(f"ALTER TABLE {table} RENAME COLUMN status TO state")
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    found = [gateway.frame() for _ in range(4)]
    ended = [each for each in found if each["type"] == "error"]
    assert [each["id"] for each in ended] == ["s"] and "status" in ended[0]["payload"]["message"], found
    assert gateway.ok("ping")


def test_events_for_a_slow_client_are_not_buffered_and_are_delivered_later(start: Callable[..., Live]) -> None:
    """The server holds only a few pieces for a slow reader, which reads all changes later from its cursor."""
    live = start(log={"retention_events": 100_000})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    slow, quick = GatewayClient(live.url, max_queue=1), GatewayClient(live.url)
    for each in (slow, quick):
        for number in range(4):
            each.ok("subscribe", {"tables": ["t"]}, id=number)
    rounds, rows = 40, 100
    for place in range(rounds):  # 40 × 100 × 5 kB × 4 subscriptions: 80 MB for each client
        values = ", ".join(f"({place * rows + number}, '{'x' * 5000}')" for number in range(rows))
        live.sql(f"INSERT INTO t VALUES{values}")
        assert len(quick.events(4 * rows)) == 4 * rows
    assert live.feeds.readers.deliveries_by_transport()["gateway"] < 4 * rounds * rows * 2, (
        "the slow one has not been sent everything"
    )
    seen: dict[int, list[int]] = {}
    for event in slow.events(4 * rounds * rows):
        seen.setdefault(event["id"], []).append(event["payload"]["key"][0])
    assert seen == {number: list(range(rounds * rows)) for number in range(4)}
    for each in (slow, quick):
        each.close()


# --- coming and going --------------------------------------------------------------------------------------


def test_gateway_subscription_is_released_when_its_client_disconnects(server: Live, table: str) -> None:
    before = server.feeds.readers.count_streams()["gateway"]
    for properly in (True, False):
        client = GatewayClient(server.url)
        client.ok("subscribe", {"tables": [table]})
        if properly:
            client.close()
        else:
            client.socket.socket.close()
        server.until(lambda: server.feeds.readers.count_streams()["gateway"] == before)


def test_stopping_server_closes_gateway_sockets_with_1012(start: Callable[..., Live]) -> None:
    live = start()
    clients = [GatewayClient(live.url) for _ in range(2)]
    clients[0].ok("subscribe", {})
    live.ask_to_stop()
    assert [client.closed()[0] for client in clients] == [1012, 1012]
    for client in clients:
        client.close()


def test_stopping_server_finishes_the_running_gateway_request(
    start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start(serve={"drain_seconds": PATIENCE})
    go_on, rows = threading.Event(), messages.rows_payload

    def held(*args: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return rows(*args)

    client = GatewayClient(live.url)
    client.ok("sql", {"query": "CREATE TABLE t(id INTEGER PRIMARY KEY)"})
    monkeypatch.setattr(messages, "rows_payload", held)
    asked = client.send("sql", {"query": "SELECT 1"})
    later = client.send("sql", {"query": "INSERT INTO t VALUES(1)"})
    gateway = live._server._gateway
    assert gateway is not None
    live.until(lambda: any(each._is_answering for each in list(gateway._open)))
    live.ask_to_stop()
    live.until(lambda: gateway._is_stopping)
    go_on.set()
    found = [client.answer()]
    code, reason = client.closed()
    assert found[0]["id"] == asked and found[0]["payload"]["rows"] == [[1]]
    assert code == 1012 and reason == "stopping: the server is stopping", later
    client.close()


def test_gateway_messages_are_counted_by_type_and_code(start: Callable[..., Live]) -> None:
    live = start()
    client = GatewayClient(live.url)
    client.ok("ping")
    client.error("sql", {"query": "SELEC"})
    client.error("nothing")
    client.close()
    name = "headwater_gateway_messages_total"
    live.until(lambda: live.metric(name, type="unknown", code="invalid_request") == 1)
    assert live.metric(name, type="ping", code="ok") == 1
    assert live.metric(name, type="sql", code="invalid_request") == 1
