"""Query feeds over the wire: poll, server-sent events, WebSocket and /q/{id}/events (WIRE §4, §5, §11.5, §11.17)."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.conformance.live_server import Live
from tests.guarantees.server_process import Asking, ServerProcess

Start = Callable[..., Live]


def prepared(server: Live, sql: str) -> str:
    return server.ok("query.prepare", sql=sql)["query_id"]


def subscribed(server: Live, query_id: str, *args: Any, **more: Any) -> dict[str, Any]:
    params = {"query_id": query_id, "args": list(args), "format": "plain_json", **more}
    return server.ok("cdc.subscribe_query", **params)


def answer_with_tag(server: Live, query_id: str, *args: Any, **headers: str) -> Any:
    """Repeat the query until its answer has a tag, which it lacks right after a schema change; return the answer."""
    path = f"/api/v1/q/{query_id}" + (f"?args={quote(json.dumps(args))}" if args else "")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    server.until(lambda: "etag" in server.http.get(path).headers)
    return server.http.get(path, headers=named)


def events_url(query_id: str, *args: Any) -> str:
    return f"/api/v1/q/{query_id}/events" + (f"?args={quote(json.dumps(args))}" if args else "")


def open_ones(table: str) -> str:
    return f"SELECT id, total FROM {table} WHERE status = ?1 ORDER BY id"


# --- what is told ---------------------------------------------------------------------------------------------


def test_invalidation_has_the_tag_of_all_answers_until_the_next_invalidation(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    sub = subscribed(server, query, "open")
    first = answer_with_tag(server, query, "open").headers["etag"]
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 2.5)")
    server.sql(f"INSERT INTO {table} VALUES (2, 'shut', 2.5)")
    (event,) = server.changes(sub)
    assert event["op"] == "invalidate" and event["table"] == table and event["query_id"] == query
    assert event["etag"] == event["new_etag"] != first
    assert event["seq"] == event["offset"] == event["lsn"] and event["pk"] == [1]
    assert event["reason"] == {"table": table, "columns": ["id", "status", "total"], "condition": "status = 'open'"}
    assert event["changed_keys"] == {table: [[1]]}
    for _ in range(3):
        assert answer_with_tag(server, query, "open").headers["etag"] == event["etag"]
        server.sql(f"UPDATE {table} SET total = total + 1 WHERE id = 2")
    assert answer_with_tag(server, query, "open", if_none_match=first).status_code == 200
    server.sql(f"UPDATE {table} SET total = 3 WHERE id = 1")
    assert server.changes(sub)[-1]["reason"]["columns"] == ["total"]


@pytest.mark.parametrize(
    ("definition", "key", "identity"),
    [
        ("(x, id INTEGER PRIMARY KEY)", [2], None),
        ("(a, x, PRIMARY KEY(x, a))", [2, 1], None),
        ("(a, x, PRIMARY KEY(x, a)) WITHOUT ROWID", [2, 1], None),
        ("(x, a TEXT PRIMARY KEY)", ["2"], None),
        ("(a, x)", {"rowid": 1}, {"rowid": 1}),
    ],
)
def test_invalidation_contains_the_changed_key_at_any_column_position(
    server: Live, table: str, definition: str, key: Any, identity: Any, transport: str
) -> None:
    server.sql(f"CREATE TABLE {table}_k {definition}")
    query = prepared(server, f"SELECT * FROM {table}_k")
    sub, objects = subscribed(server, query), subscribed(server, query, format="objects_json")
    cloud = subscribed(server, query, format="cloudevents_json")
    live = server.stream(transport, sub)
    server.sql(f"INSERT INTO {table}_k VALUES (1, 2)")
    (event,) = server.changes(sub)
    assert live.next("invalidate").data == event
    assert event["changed_keys"] == {f"{table}_k": [key]} and "changed_keys_cut" not in event
    assert event.get("pk") == (None if identity else key) and event.get("identity") == identity
    assert server.changes(cloud)[0]["data"] == event
    (tagged,) = server.changes(objects)[0]["changed_keys"][f"{table}_k"]
    lits = tagged.values() if identity else tagged
    assert [lit["v"] for lit in lits] == (list(key.values()) if identity else key)


def test_every_transport_delivers_the_same_invalidations(server: Live, table: str, transport: str) -> None:
    query = prepared(server, open_ones(table))
    sub = subscribed(server, query, "open", include={"before": True, "after": True})
    live = server.stream(transport, sub)
    server.together(f"INSERT INTO {table} VALUES (1, 'open', 1)", f"INSERT INTO {table} VALUES (2, 'open', 1)")
    server.sql(f"DELETE FROM {table} WHERE id = 1")
    heard = [live.next("invalidate").data for _ in range(2)]
    assert heard == server.changes(sub) == [server.stream(transport, sub).next("invalidate").data, heard[1]]
    assert heard[0]["after"] == {"id": 2, "status": "open", "total": 1.0}
    assert heard[0]["changed_keys"] == {table: [[1], [2]]}
    assert heard[1]["before"]["id"] == 1 and "after" not in heard[1]


def test_change_that_does_not_affect_the_query_is_skipped(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    sub = subscribed(server, query, "open")
    server.sql(f"INSERT INTO {table} VALUES (1, 'shut', 1)")
    page = server.poll(sub)
    assert page["events"] == [] and page["next_offset"] == page["latest_offset"] and page["caught_up"]


def test_stream_of_query_subscribe_delivers_invalidations_with_the_new_tag(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    doors = server.ok("query.subscribe", query_id=query, args=["open"])
    assert doors["table_keys"] == [f"main.{table}"]
    sse, ws = server.get(doors["sse_url"]), server.ws(doors)
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 1)")
    one, other = sse.next("invalidate"), ws.next("invalidate")
    assert one.data == other.data and int(one.id) == other.id == one.data["offset"]
    assert list(one.data) == ["query_id", "etag", "new_etag", "table", "offset"]
    assert answer_with_tag(server, query, "open").headers["etag"] == one.data["etag"] == one.data["new_etag"]


def test_query_stream_resumes_from_last_event_id_or_from_offset(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    first = server.get(events_url(query, "open"))
    for id in range(3):
        server.sql(f"INSERT INTO {table} VALUES ({id}, 'open', 1)")
    ids = [first.next("invalidate").id for _ in range(3)]
    again = server.get(events_url(query, "open"), last_event_id=ids[0])
    assert [again.next("invalidate").id for _ in range(2)] == ids[1:]
    assert again.next("caught_up")
    more = server.get(events_url(query, "open") + f"&from_offset={ids[1]}")
    assert more.next("invalidate").id == ids[2]


def test_change_of_a_table_under_a_view_join_or_union_invalidates(server: Live, table: str) -> None:
    server.sql(f"CREATE TABLE {table}_b(id INTEGER PRIMARY KEY, t INTEGER, name TEXT)")
    server.sql(f"CREATE VIEW {table}_v AS SELECT a.id, b.name FROM {table} a JOIN {table}_b b ON b.t = a.id")
    query = prepared(server, f"SELECT * FROM {table}_v UNION SELECT id, status FROM {table} WHERE total > 5")
    assert server.ok("query.subscribe", query_id=query)["table_keys"] == [f"main.{table}", f"main.{table}_b"]
    sub = subscribed(server, query)
    server.sql(f"INSERT INTO {table} VALUES (1, 'x', 1)")
    server.sql(f"INSERT INTO {table}_b VALUES (1, 1, 'n')")
    assert [event["table"] for event in server.changes(sub)] == [table, f"{table}_b"]


@pytest.mark.parametrize("operation", ["UNION", "UNION ALL", "EXCEPT", "INTERSECT"])
def test_change_in_either_branch_of_a_set_operation_invalidates(server: Live, table: str, operation: str) -> None:
    server.sql(f"CREATE TABLE {table}_b(id INTEGER PRIMARY KEY, n INTEGER)")
    sql = f"SELECT id FROM {table} WHERE status = 'open' {operation} SELECT id FROM {table}_b WHERE n = 5"
    sub = subscribed(server, prepared(server, sql))
    server.sql(f"INSERT INTO {table}_b VALUES (1, 4)")
    server.sql(f"INSERT INTO {table}_b VALUES (2, 5)")
    server.sql(f"INSERT INTO {table} VALUES (3, 'shut', 1)")
    server.sql(f"INSERT INTO {table} VALUES (4, 'open', 1)")
    assert [(event["table"], event["pk"]) for event in server.changes(sub)] == [(f"{table}_b", [2]), (table, [4])]


def test_cte_with_the_name_of_a_table_is_not_invalidated_by_that_table(server: Live, table: str) -> None:
    server.sql(f"CREATE TABLE {table}_b(id INTEGER PRIMARY KEY, n INTEGER)")
    sql = f"WITH {table}_b AS (SELECT id FROM {table} WHERE status = 'open') SELECT id FROM {table}_b"
    query = prepared(server, sql)
    assert server.ok("query.subscribe", query_id=query)["table_keys"] == [f"main.{table}"]
    sub = subscribed(server, query)
    server.sql(f"INSERT INTO {table}_b VALUES (1, 1)")
    server.sql(f"INSERT INTO {table} VALUES (2, 'open', 1)")
    assert [(event["table"], event["pk"]) for event in server.changes(sub)] == [(table, [2])]


# --- filters --------------------------------------------------------------------------------------------------


def test_query_feed_filters_are_applied_to_the_triggering_change(server: Live, table: str) -> None:
    query = prepared(server, f"SELECT count(*) FROM {table} WHERE total > 0")
    by = {
        "all": {},
        "ops": {"ops": ["delete"]},
        "pk": {"pk": [{"t": "i64", "v": 2}]},
        "range": {"pk_range": {"lower_bound": {"t": "i64", "v": 3}}},
        "where": {"where": "status = 'b'"},
        "columns": {"columns": ["status"]},
    }
    subs = {name: subscribed(server, query, **given) for name, given in by.items()}
    server.sql(f"INSERT INTO {table} VALUES (1, 'a', 1)")
    server.together(f"INSERT INTO {table} VALUES (2, 'b', 1)", f"INSERT INTO {table} VALUES (3, 'c', 1)")
    server.sql(f"UPDATE {table} SET total = 2 WHERE id = 3")
    server.sql(f"DELETE FROM {table} WHERE id = 1")
    keys = {name: [event["pk"] for event in server.changes(sub)] for name, sub in subs.items()}
    assert keys["all"] == [[1], [3], [3], [1]]
    assert keys["ops"] == [[1]] and keys["pk"] == [[3]], "the event is at the last change that matters"
    assert keys["where"] == [[3]] and keys["range"][0] == [3] and [1] not in keys["range"]
    assert keys["columns"] == [[1], [3], [1]]


def test_pk_with_as_many_values_as_the_key_of_one_of_two_tables_passes_only_its_changes(
    server: Live, table: str
) -> None:
    server.sql(f"CREATE TABLE {table}_b(a TEXT, b TEXT, name TEXT, PRIMARY KEY (a, b))")
    query = prepared(server, f"SELECT * FROM {table} JOIN {table}_b ON name = status")
    sub = subscribed(server, query, pk=[{"t": "i64", "v": 1}])
    server.sql(f"INSERT INTO {table}_b VALUES ('1', '1', 'x')")
    server.sql(f"INSERT INTO {table} VALUES (1, 'x', 1)")
    assert [event["table"] for event in server.changes(sub)] == [table]


@pytest.mark.parametrize(
    ("more", "code", "names"),
    [
        ({"pk": [{"t": "i64", "v": 1}, {"t": "i64", "v": 1}]}, "invalid_request", "pk"),
        ({"columns": ["nope"]}, "invalid_request", "columns"),
        ({"where": "nope > 1"}, "invalid_request", "where"),
        ({"ops": ["upsert"]}, "invalid_request", "ops"),
        ({"format": "debezium_json"}, "not_supported", "debezium_json"),
        ({"format": "nope"}, "invalid_request", "format"),
        ({"start": "snapshot"}, "invalid_request", "snapshot"),
        ({"start": {"etag": "nope"}}, "invalid_request", "etag"),
        ({"start": {"etag": 1}}, "invalid_request", "start"),
        ({"start": {"offset": 10**12}}, "invalid_request", "start.offset"),
        ({"include": {"rows": True}}, "invalid_request", "include"),
        ({"args": ["a", "b"]}, "invalid_request", "argument"),
        ({"args": [{"t": "nope"}]}, "invalid_request", "args[0]"),
        ({"txn": "atomic"}, "invalid_request", "txn"),
        ({"query_id": "q_nope"}, "not_found", "query_id"),
    ],
)
def test_invalid_query_subscription_is_refused_with_the_field_named(
    server: Live, table: str, more: dict[str, Any], code: str, names: str
) -> None:
    given = {"query_id": prepared(server, open_ones(table)), "args": ["open"]} | more
    error = server.error("cdc.subscribe_query", **given)
    assert error["code"] == code and names in error["message"], error


def test_refused_query_subscription_has_a_hint_with_valid_values(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    hint = server.error("cdc.subscribe_query", query_id=query, args=["open"], start="nope")["details"]["hint"]
    assert "snapshot" not in hint and all(word in hint for word in ("latest", "earliest", "offset", "ts", "etag"))
    for text in (r'"\ud800"', r'"\ud800 and more"', r'"\udc00"'):
        body = f'{{"id":1,"method":"cdc.subscribe_query","params":{{"query_id":"{query}","args":[{{"v":{text}}}]}}}}'
        answer = server.http.post("/api/v1/rpc", content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert "half a character" in error["message"] and "bytes" in error["details"]["hint"], error
    error = server.error("cdc.subscribe_query", query_id=prepared(server, f"SELECT ? FROM {table}"))
    assert error["message"] == "the query takes 1 argument, 0 given"
    assert error["details"]["hint"] == "It takes 1 argument, positional."


def test_subscription_to_a_volatile_query_is_refused(server: Live, table: str) -> None:
    query = prepared(server, f"SELECT random() FROM {table}")
    assert server.error("cdc.subscribe_query", query_id=query)["code"] == "not_supported"
    assert server.error("query.subscribe", query_id=query)["code"] == "not_supported"
    assert server.get(events_url(query)).status == 501
    assert server.get(events_url("q_nope")).status == 404
    assert server.get(events_url(query) + "?args=nope").status == 400


# --- the tag is a cursor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["application/json", "text/csv", "application/vnd.headwater.plain+json"])
def test_feed_started_at_a_tag_delivers_only_later_invalidations(server: Live, table: str, accept: str) -> None:
    server.sql(f"CREATE TABLE {table}_b(id INTEGER PRIMARY KEY, t INTEGER)")
    server.sql(f"CREATE VIEW {table}_v AS SELECT a.id, a.total FROM {table} a JOIN {table}_b b ON b.t = a.id")
    query = prepared(server, f"SELECT * FROM {table}_v WHERE id < 10 ORDER BY id")
    server.sql(f"INSERT INTO {table} VALUES (1, 'x', 1)")
    etag = answer_with_tag(server, query, accept=accept).headers["etag"]
    server.sql(f"INSERT INTO {table}_b VALUES (1, 1)")
    server.sql(f"INSERT INTO {table} VALUES (99, 'x', 1)")
    sub = subscribed(server, query, start={"etag": etag})
    assert [event["table"] for event in server.changes(sub)] == [f"{table}_b"], "nothing lost, nothing extra"
    now = answer_with_tag(server, query, accept=accept).headers["etag"]
    assert server.changes(subscribed(server, query, start={"etag": f"W/{now}"})) == []


def test_feed_start_at_a_tag_of_another_query_or_schema_is_refused(server: Live, table: str) -> None:
    query = prepared(server, open_ones(table))
    etag = answer_with_tag(server, query, "open").headers["etag"]
    foreign = (answer_with_tag(server, query, "shut").headers["etag"], etag.replace(".", "x."), '"row:abc"')
    for tag in foreign:
        error = server.error("cdc.subscribe_query", query_id=query, args=["open"], start={"etag": tag})
        assert error["code"] == "invalid_request", tag
    server.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
    error = server.error("cdc.subscribe_query", query_id=query, args=["open"], start={"etag": etag})
    assert error["code"] == "invalid_request" and "again" in error["details"]["hint"]


def test_feed_start_at_a_tag_before_the_horizon_requires_a_resnapshot(start: Start) -> None:
    live = start(log={"retention_events": 3})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    query = prepared(live, open_ones("t"))
    etag = answer_with_tag(live, query, "open").headers["etag"]
    sub = subscribed(live, query, "open")
    for id in range(6):
        live.sql(f"INSERT INTO t VALUES ({id}, 'open', 1)")
    assert live.error("cdc.subscribe_query", query_id=query, args=["open"], start={"etag": etag})["code"] == (
        "resnapshot_required"
    )
    page = live.poll(sub)
    assert page["resnapshot_required"] and page["snapshot_url"].startswith(f"/api/v1/q/{query}?args=")
    assert live.http.get(page["snapshot_url"]).status_code == 200


# --- confirmed ------------------------------------------------------------------------------------------------


def test_confirmed_feed_skips_a_change_that_leaves_the_answer_unchanged(
    server: Live, table: str, transport: str
) -> None:
    query = prepared(server, f"SELECT max(total) FROM {table} WHERE status = ?")
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 10)")
    quiet, loud = subscribed(server, query, "open", confirm=True), subscribed(server, query, "open")
    live = server.stream(transport, quiet)
    server.sql(f"INSERT INTO {table} VALUES (2, 'open', 3)")
    assert server.changes(quiet) == [] and len(server.changes(loud)) == 1
    server.sql(f"INSERT INTO {table} VALUES (3, 'open', 30)")
    assert live.next("invalidate").data["pk"] == [3]
    assert [event["pk"] for event in server.changes(quiet)] == [[3]]


def test_confirmed_feed_delivers_the_first_invalidation_after_a_restart(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, total REAL)")
    query = prepared(live, "SELECT max(total) FROM t")
    sub = subscribed(live, query, confirm=True)
    live.sql("INSERT INTO t VALUES (1, 10)")
    assert len(live.changes(sub)) == 1
    live.restart()
    live.sql("INSERT INTO t VALUES (2, 3)")
    assert [event["pk"] for event in live.changes(sub)][-1] == [2]


# --- the schema moves -----------------------------------------------------------------------------------------


def test_schema_change_of_a_queried_table_is_an_invalidation(server: Live, table: str, transport: str) -> None:
    query = prepared(server, f"SELECT * FROM {table} WHERE total > 1 ORDER BY id")
    sub = subscribed(server, query)
    live = server.stream(transport, sub)
    server.sql(f"INSERT INTO {table} VALUES (1, 'a', 5)")
    server.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
    server.sql(f"UPDATE {table} SET more = 'x' WHERE id = 1")  # only what is understood anew can see it
    heard = [live.next("invalidate").data for _ in range(3)]
    assert heard[1]["ddl"].startswith("ALTER") and heard[2]["reason"]["columns"] in (["more"], ["more", "total"])
    assert heard[2]["etag"] == answer_with_tag(server, query).headers["etag"] != heard[0]["etag"]
    assert [event["offset"] for event in server.changes(sub)] == [event["offset"] for event in heard]


def test_redefinition_of_a_queried_view_is_an_invalidation(server: Live, table: str) -> None:
    server.sql(f"CREATE VIEW {table}_v AS SELECT * FROM {table} WHERE id > 5")
    sub = subscribed(server, prepared(server, f"SELECT * FROM {table}_v ORDER BY id"))
    server.sql(f"DROP VIEW {table}_v")
    server.sql(f"CREATE VIEW {table}_v AS SELECT * FROM {table} WHERE id < 5")
    assert server.changes(sub)


def test_query_that_becomes_volatile_is_invalidated_by_every_change_of_its_tables(
    server: Live, table: str, transport: str
) -> None:
    server.sql(f"CREATE TABLE {table}_other(n)")
    server.sql(f"CREATE VIEW {table}_v AS SELECT total FROM {table}")
    query = prepared(server, f"SELECT total FROM {table}_v")
    sub = subscribed(server, query)
    live = server.stream(transport, sub)
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 1)")
    server.sql(f"DROP VIEW {table}_v")
    server.sql(f"CREATE VIEW {table}_v AS SELECT total, date('now') AS d FROM {table} WHERE status = 'open'")
    server.sql(f"UPDATE {table} SET total = 2")
    server.sql(f"INSERT INTO {table}_other VALUES (1)")
    server.sql(f"INSERT INTO {table} VALUES (2, 'shut', 1)")  # for all that is known
    server.sql(f"CREATE TABLE {table}_more(n)")
    heard = [live.next("invalidate").data for _ in range(6)]
    assert [event.get("pk") for event in heard] == [[1], None, None, [1], [2], None]
    for event in heard[3:5]:
        assert "date() may answer differently each time" in event["reason"]["condition"]
        assert event["reason"]["columns"] is None and event["reason"]["table"] == table
    assert len({event["etag"] for event in heard}) == 6
    for event in heard:
        path = f"/api/v1/q/{query}"
        answer = server.http.get(path, headers={"if-none-match": event["etag"]})
        assert answer.status_code == 200 and "etag" not in answer.headers
    assert [event["offset"] for event in server.changes(sub)] == [event["offset"] for event in heard]
    server.sql(f"DROP VIEW {table}_v")
    server.sql(f"CREATE VIEW {table}_v AS SELECT total FROM {table} WHERE status = 'open'")
    server.sql(f"UPDATE {table} SET total = 3 WHERE id = 2")
    server.sql(f"UPDATE {table} SET total = 3 WHERE id = 1")
    heard = [live.next("invalidate").data for _ in range(3)]
    assert heard[2]["pk"] == [1] and heard[2]["etag"] == answer_with_tag(server, query).headers["etag"]


def test_query_over_an_uncaptured_table_is_invalidated_by_every_change(server: Live, table: str) -> None:
    server.sql(f"CREATE VIRTUAL TABLE {table}_words USING fts5(word)")
    server.sql(f"CREATE VIEW {table}_v AS SELECT status AS word FROM {table}")
    sub = subscribed(server, prepared(server, f"SELECT word FROM {table}_v"))
    server.sql(f"DROP VIEW {table}_v")
    server.sql(f"CREATE VIEW {table}_v AS SELECT word FROM {table}_words")
    before = len(server.changes(sub))
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 1)")
    event = server.changes(sub)[before]
    assert event["table"] == table and "is no table whose changes are seen" in event["reason"]["condition"]


def test_query_that_became_volatile_is_invalidated_after_a_restart(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    live.sql("CREATE VIEW v AS SELECT id FROM t")
    query = prepared(live, "SELECT * FROM v")
    sub = subscribed(live, query)
    live.sql("DROP VIEW v")
    live.sql("CREATE VIEW v AS SELECT id, random() FROM t")
    live.restart()
    live.sql("INSERT INTO t VALUES (1)")
    event = live.changes(sub)[-1]
    assert event["pk"] == [1] and "random()" in event["reason"]["condition"]
    assert live.error("cdc.subscribe_query", query_id=query)["code"] == "not_supported"


def test_feed_of_a_dropped_and_recreated_table_delivers_its_changes(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, total REAL)")
    query = prepared(live, "SELECT * FROM t")
    sub = subscribed(live, query)
    stream = live.sse(sub)
    live.sql("DROP TABLE t")
    assert stream.next("invalidate").data["table"] == "t"
    live.restart()
    assert len(live.changes(sub)) >= 1, "it polls on"
    stream = live.sse(sub, f"?from_offset={live.poll(sub)['next_offset']}")
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, total REAL)")
    stream.next("invalidate")
    live.sql("INSERT INTO t VALUES (1, 1)")
    event = stream.next("invalidate").data
    assert event["pk"] == [1] and event["etag"] == answer_with_tag(live, query).headers["etag"]
    assert live.changes(sub)[-1] == event


# --- durable --------------------------------------------------------------------------------------------------


def test_query_subscription_keeps_its_tag_and_cursor_after_a_restart(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    query = prepared(live, open_ones("t"))
    sub = subscribed(live, query, "open", name="mine")
    live.sql("INSERT INTO t VALUES (1, 'open', 1)")
    live.sql("INSERT INTO t VALUES (2, 'shut', 1)")
    (event,) = live.changes(sub)
    assert answer_with_tag(live, query, "open").headers["etag"] == event["etag"]
    live.restart()
    live.until(lambda: answer_with_tag(live, query, "open").headers["etag"] == event["etag"])
    assert live.changes(sub) == [event]
    again = subscribed(live, query, "open", name="mine")
    assert again["sub_id"] == sub["sub_id"] and not again["created"]
    listed = live.ok("cdc.list", sub_id=sub["sub_id"])["subscriptions"][0]
    assert listed["query_id"] == query and listed["args"] == [{"t": "str", "v": "open"}]
    assert live.ok("stats.snapshot")["cdc"]["query_subscriptions"] == 1
    live.ok("cdc.ack", sub_id=sub["sub_id"], offset=event["offset"])
    assert live.changes(sub) == []
    live.ok("cdc.pause", sub_id=sub["sub_id"])
    live.sql("INSERT INTO t VALUES (3, 'open', 1)")
    assert live.changes(sub) == []
    live.ok("cdc.resume", sub_id=sub["sub_id"])
    assert [found["pk"] for found in live.changes(sub)] == [[3]]
    live.ok("cdc.seek", sub_id=sub["sub_id"], offset=sub["offset"])
    assert [found["pk"] for found in live.changes(sub)] == [[1], [3]]
    live.ok("cdc.close", sub_id=sub["sub_id"])
    assert live.error("cdc.poll", sub_id=sub["sub_id"])["code"] == "not_found"


def test_view_redefined_while_the_server_is_down_is_followed_after_the_start(start: Start, tmp_path: Path) -> None:
    live = start()
    for name in ("a", "b"):
        live.sql(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY)")
    live.sql("CREATE VIEW v AS SELECT id FROM a")
    query = prepared(live, "SELECT id FROM v")
    sub = subscribed(live, query)
    live.sql("INSERT INTO a VALUES (1)")
    assert [event["table"] for event in live.changes(sub)] == ["a"]
    live.stop()
    with contextlib.closing(sqlite3.connect(Path(live.config.data) / "main.db")) as db, db:
        db.executescript("DROP VIEW v; CREATE VIEW v AS SELECT id FROM b")
    live.start()
    seen = live.caught_up(sub)
    live.ok("cdc.ack", sub_id=sub["sub_id"], offset=seen)
    live.sql("INSERT INTO a VALUES (2)")
    live.sql("INSERT INTO b VALUES (3)")
    assert [(event["table"], event["pk"]) for event in live.changes(sub)] == [("b", [3])]


@pytest.mark.slow
def test_query_feed_delivers_the_same_events_and_tags_after_kill_9(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    ask = Asking(server)
    try:
        server.start()
        ask("sql.exec", sql="CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
        query = ask("query.prepare", sql=open_ones("t"))["query_id"]
        sub = ask("cdc.subscribe_query", query_id=query, args=["open"])["sub_id"]
        for id in range(20):
            ask("sql.exec", sql=f"INSERT INTO t VALUES ({id}, '{'open' if id % 2 else 'shut'}', 1)")
        before = _timeless(ask("cdc.poll", sub_id=sub)["events"])
        server.kill()
        server.start()
        assert _timeless(ask("cdc.poll", sub_id=sub)["events"]) == before and len(before) == 10
        ask("sql.exec", sql="INSERT INTO t VALUES (99, 'open', 1)")
        after = _timeless(ask("cdc.poll", sub_id=sub)["events"])
        assert after[:10] == before
        assert ask("query.execute_prepared", query_id=query, args=["open"])["etag"] == after[-1]["etag"]
    finally:
        ask.close()
        server.close()


def _timeless(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events without their times: changes that were not durable at a kill are captured again at another
    time.
    """
    return [{name: value for name, value in event.items() if name != "ts"} for event in events]


# --- never silent ---------------------------------------------------------------------------------------------

QUERIES = (
    "SELECT * FROM a ORDER BY id",
    "SELECT x, count(*) FROM a GROUP BY x ORDER BY x",
    "SELECT a.id, b.y FROM a JOIN b ON b.a = a.id WHERE a.x = ?1 ORDER BY a.id, b.id",
    "SELECT a.id, b.y FROM a LEFT JOIN b ON b.a = a.id AND b.y > ?1 ORDER BY a.id, b.id",
    "SELECT id FROM a WHERE id IN (SELECT a FROM b WHERE y = ?1) ORDER BY id",
    "SELECT id FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE b.a = a.id AND y < ?1) ORDER BY id",
    "SELECT * FROM v WHERE x < ?1 ORDER BY id, y",
    "SELECT x FROM a WHERE x > ?1 UNION SELECT y FROM b ORDER BY 1",
    "SELECT id, x FROM a WHERE x BETWEEN ?1 AND 4 ORDER BY x DESC, id LIMIT 2",
    "SELECT (SELECT max(y) FROM b WHERE a = ?1), sum(x) FROM a",
)


def _write(chance: random.Random) -> str:
    table, column = chance.choice((("a", "x"), ("b", "y")))
    id, value = chance.randrange(6), chance.choice(["NULL", *map(str, range(5))])
    match chance.randrange(4):
        case 0:
            return f"DELETE FROM {table} WHERE id = {id}"
        case 1:
            return f"UPDATE {table} SET {column} = {value} WHERE id >= {id}"
        case 2 if table == "b":
            return f"INSERT OR REPLACE INTO b VALUES ({id}, {chance.randrange(6)}, {value})"
    return f"INSERT OR REPLACE INTO a VALUES ({id}, {value}, 'n{value}')"


def _executed(live: Live, query: str, args: list[Any]) -> dict[str, Any]:
    return live.ok("query.execute_prepared", query_id=query, args=args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_changed_answer_is_preceded_by_an_invalidation(start: Start, seed: int) -> None:
    print("seed", seed)
    chance, live = random.Random(seed), start()
    live.sql("CREATE TABLE a(id INTEGER PRIMARY KEY, x INTEGER, note TEXT)")
    live.sql("CREATE TABLE b(id INTEGER PRIMARY KEY, a INTEGER, y INTEGER)")
    live.sql("CREATE VIEW v AS SELECT a.id, a.x, b.y FROM a JOIN b ON b.a = a.id WHERE b.y IS NOT NULL")
    held = []
    for sql in QUERIES:
        args = [chance.randrange(5)] if "?1" in sql else []
        query = prepared(live, sql)
        live.until(lambda query=query, args=args: _executed(live, query, args)["etag"] is not None)  # tables are new
        answer = _executed(live, query, args)
        told = subscribed(live, query, *args, start={"etag": answer["etag"]})
        sure = subscribed(live, query, *args, confirm=True)
        held.append([query, args, answer["data"], told, sure, told["offset"], sure["offset"]])
    for step in range(40):
        if chance.random() < 0.3:
            live.together(*(_write(chance) for _ in range(chance.randrange(1, 4))))
        else:
            live.sql(_write(chance))
        for each in held if step % 2 else ():
            query, args, before, told, sure, at, sure_at = each
            answer = _executed(live, query, args)
            pages = live.poll(told, from_offset=at), live.poll(sure, from_offset=sure_at)
            if answer["data"] != before:
                assert pages[0]["events"], f"seed {seed}, step {step}: {query} {args} was silent"
                assert pages[1]["events"], f"seed {seed}, step {step}: {query} {args} was silenced"
            if pages[0]["events"]:
                assert pages[0]["events"][-1]["etag"] == _executed(live, query, args)["etag"]
            each[2], each[5:] = answer["data"], [page["next_offset"] for page in pages]
    for _, _, _, told, _, _, _ in held:  # replayed, the same
        first = live.changes(told, limit=1000)
        live.ok("cdc.seek", sub_id=told["sub_id"], offset=told["offset"])
        assert live.changes(told, limit=1000, from_offset=told["offset"]) == first
