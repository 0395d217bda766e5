"""SkeinDB's own tests of table feeds, ported with our numbers: DDL takes an offset, so counts begin at `offset`.

F1–F7, F24–F33, F57, F59–F62, F64–F70, F82–F86, F115, F168–F170, F172, F173, F175.
"""

from collections.abc import Callable

from tests.conformance.live_server import Live

I64 = "i64"


def lit(value: int) -> dict[str, object]:
    return {"t": I64, "v": value}


def test_acknowledged_change_is_not_repeated_and_a_closed_subscription_is_not_found(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    base = sub["offset"]
    assert sub["sse_url"] == f"/api/v1/cdc/sse/{sub['sub_id']}" and sub["ws_url"] == f"/api/v1/cdc/ws/{sub['sub_id']}"
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    (first,) = server.changes(sub, from_offset=base)
    acked = server.ok("cdc.ack", sub_id=sub["sub_id"], offset=first["seq"])
    assert acked == {"sub_id": sub["sub_id"], "acked_offset": base + 1}
    server.sql(f"INSERT INTO {table} VALUES(2, 'new', 2)")
    assert [change["pk"] for change in server.changes(sub, from_offset=base)] == [[2]]
    assert server.ok("cdc.close", sub_id=sub["sub_id"]) == {"sub_id": sub["sub_id"], "closed": True}
    for method, more in (("poll", {}), ("ack", {"offset": 1}), ("pause", {}), ("resume", {}), ("close", {})):
        assert server.error(f"cdc.{method}", sub_id=sub["sub_id"], **more)["code"] == "not_found"
    assert server.error("cdc.seek", sub_id=sub["sub_id"], offset=1)["code"] == "not_found"
    assert {"cdc.ack", "cdc.close"} <= set(server.ok("system.capabilities")["methods"])


def test_ack_of_an_older_offset_is_ignored(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1), (2, 'new', 1)")
    last = server.poll(sub)["next_offset"]
    for offset in (last, last - 1, 0):
        assert server.ok("cdc.ack", sub_id=sub["sub_id"], offset=offset)["acked_offset"] == last
    assert server.changes(sub, from_offset=0) == []


def test_default_format_is_objects_json_without_row_images(server: Live, table: str) -> None:
    sub = server.ok("cdc.subscribe_table", db="main", table=table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    (change,) = server.changes(sub)
    seq = sub["offset"] + 1
    assert list(change) == [
        *("seq", "db", "table", "op", "pk", "commit_ts_ms", "lsn"),
        *("offset", "ts", "txn", "schema"),
    ]
    assert (change["seq"], change["lsn"], change["offset"]) == (seq, seq, seq)
    assert (change["db"], change["table"], change["op"], change["pk"]) == ("main", table, "insert", [lit(1)])


def test_plain_json_contains_plain_values_with_sorted_keys(server: Live, table: str) -> None:
    sub = server.subscribe(table, format="plain_json", include={"after": True})
    server.sql(f"INSERT INTO {table} VALUES(1, 'one', 2.5)")
    (change,) = server.changes(sub)
    assert change["pk"][0] == 1
    assert list(change["after"].items()) == [("id", 1), ("status", "one"), ("total", 2.5)]


def test_ops_filter_delivers_only_the_requested_ops(server: Live, table: str) -> None:
    refused = server.error("cdc.subscribe_table", table=table, ops=["merge"])
    assert refused["code"] == "invalid_request" and "merge" in refused["message"]
    assert server.error("cdc.subscribe_table", table=table, ops=[])["code"] == "invalid_request"
    sub = server.subscribe(table, ops=[" Update "], include={"after": True})
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.sql(f"UPDATE {table} SET status = 'paid'")
    server.sql(f"DELETE FROM {table}")
    (change,) = server.changes(sub)
    assert change["op"] == "update" and change["after"]["status"] == "paid"
    assert change.get("before") is None


def test_pk_filter_delivers_only_the_requested_primary_key(server: Live, table: str) -> None:
    refused = server.error("cdc.subscribe_table", table=table, pk=[lit(1), lit(2)])
    assert refused["code"] == "invalid_request" and "pk" in refused["message"]
    sub = server.subscribe(table, pk=[lit(2)])
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1), (2, 'new', 1), (3, 'new', 1)")
    server.sql(f"UPDATE {table} SET total = 9")
    server.sql(f"DELETE FROM {table} WHERE id < 3")
    assert [(change["op"], change["pk"]) for change in server.changes(sub)] == [
        ("insert", [2]),
        ("update", [2]),
        ("delete", [2]),
    ]


def test_pk_range_filter_includes_both_bounds(server: Live, table: str) -> None:
    for bad in ({}, {"lower_bound": lit(3), "upper_bound": lit(2)}, {"from": lit(1)}):
        assert server.error("cdc.subscribe_table", table=table, pk_range=bad)["code"] == "invalid_request", bad
    sub = server.subscribe(table, pk_range={"lower_bound": lit(2), "upper_bound": lit(3)})
    for id in range(1, 5):
        server.sql(f"INSERT INTO {table} VALUES({id}, 'new', 1)")
    server.sql(f"DELETE FROM {table} WHERE id IN (2, 4)")
    server.sql(f"UPDATE {table} SET total = 2 WHERE id IN (1, 3)")
    assert [(change["op"], change["pk"][0]) for change in server.changes(sub)] == [
        ("insert", 2),
        ("insert", 3),
        ("delete", 2),
        ("update", 3),
    ]


def test_columns_filter_delivers_only_changes_and_images_of_the_requested_columns(server: Live, table: str) -> None:
    refused = server.error("cdc.subscribe_table", table=table, columns=["stat"])
    assert refused["code"] == "invalid_request" and "status" in refused["details"]["hint"]
    sub = server.subscribe(table, columns=["status"], include={"before": True, "after": True})
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.sql(f"UPDATE {table} SET total = 2")
    server.sql(f"UPDATE {table} SET status = 'paid', total = 3")
    server.sql(f"DELETE FROM {table}")
    images = [(change["op"], change.get("before"), change.get("after")) for change in server.changes(sub)]
    assert images == [
        ("insert", None, {"status": "new"}),
        ("update", {"status": "new"}, {"status": "paid"}),
        ("delete", {"status": "paid"}, None),
    ]


def test_row_images_are_delivered_on_request(server: Live, table: str) -> None:
    assert server.error("cdc.subscribe_table", table=table, format="rows_json")["code"] == "invalid_request"
    for include in ({"before": 1}, {"during": True}):
        assert server.error("cdc.subscribe_table", table=table, include=include)["code"] == "invalid_request"
    sub = server.subscribe(table, include={"before": True, "after": True})
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.sql(f"UPDATE {table} SET status = 'paid'")
    insert, update = server.changes(sub)
    assert insert.get("before") is None and insert["after"]["status"] == "new"
    assert (update["before"]["status"], update["after"]["status"]) == ("new", "paid")


def test_unknown_table_or_database_is_not_found(server: Live, table: str) -> None:
    assert server.error("cdc.subscribe_table", table="nowhere")["code"] == "not_found"
    assert server.error("cdc.subscribe_table", db="nowhere", table=table)["code"] == "not_found"
    assert server.error("cdc.subscribe_table", table=table, tabel=1)["code"] == "invalid_request"


# --- beyond the horizon: retention 2, and the table takes offset 1 -----------------------------------------


def lost(live: Live) -> dict[str, object]:
    """Return a subscription at offset 1, whose log begins at 3."""
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    sub = live.subscribe("t")
    for id in (1, 2, 3):
        live.sql(f"INSERT INTO t VALUES({id}, 'x')")
    return sub


def test_poll_before_the_horizon_requires_a_resnapshot(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    sub = lost(live)
    live.until(lambda: live.poll(sub)["earliest_offset"] == 3)
    page = live.poll(sub, from_offset=0)
    generation = live.app.database("main").log.generation
    assert page == {
        "events": [],
        "next_offset": 2,
        "earliest_offset": 3,
        "latest_offset": 4,
        "resnapshot_required": True,
        "resnapshot_from_offset": 2,
        "resnapshot_reason": "wal_horizon_exceeded",
        "snapshot_url": f"/api/v1/snapshot/main/t?version={generation}.4",
        "caught_up": False,
        "backpressure": {"state": "resnapshot_required", "lag": 3, "remaining_until_resnapshot": 0, "paused": False},
    }


def test_paused_subscription_before_the_horizon_reports_resnapshot_required(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    sub = lost(live)
    live.ok("cdc.pause", sub_id=sub["sub_id"])
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    found = live.poll(sub)["backpressure"]
    assert (found["state"], found["paused"]) == ("resnapshot_required", True)


def test_stream_before_the_horizon_sends_resnapshot_and_ends(start: Callable[..., Live], transport: str) -> None:
    live = start(log={"retention_events": 2})
    sub = lost(live)
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    stream = live.stream(transport, sub)
    pressure, frame = stream.rest()
    assert (pressure.word, pressure.data["state"]) == ("backpressure", "resnapshot_required")
    generation = live.app.database("main").log.generation
    assert frame == (
        "2" if transport == "sse" else 2,
        "resnapshot",
        {
            "sub_id": sub["sub_id"],
            "earliest_offset": 3,
            "latest_offset": 4,
            "resnapshot_from_offset": 2,
            "reason": "wal_horizon_exceeded",
            "snapshot_url": f"/api/v1/snapshot/main/t?version={generation}.4",
        },
    )
    if transport == "ws":
        code, reason = stream.closed_with
        assert code == 4410 and "wal_horizon_exceeded" in reason
    else:
        assert stream.whole


def test_seek_to_resnapshot_from_offset_delivers_the_retained_changes(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    sub = lost(live)
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    page = live.poll(sub)
    live.ok("cdc.seek", sub_id=sub["sub_id"], offset=page["resnapshot_from_offset"])
    assert [change["seq"] for change in live.changes(sub)] == [3, 4]


# --- streams ---------------------------------------------------------------------------------------------


def test_sse_stream_resumes_after_the_last_event_id(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    base = sub["offset"]
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    stream = server.sse(sub)
    assert stream.status == 200 and stream.headers["content-type"] == "text/event-stream"
    (frame,) = stream.changes(1)
    assert (frame.id, frame.word) == (str(base + 1), "insert")
    stream.close()
    server.sql(f"INSERT INTO {table} VALUES(2, 'new', 1)")
    (frame,) = server.sse(sub, last_event_id=frame.id).changes(1)
    assert frame.id == str(base + 2)


def test_websocket_resumes_after_from_offset_or_the_last_event_id(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    stream = server.ws(sub)
    (frame,) = stream.changes(1)
    assert frame.id == sub["offset"] + 1
    stream.close()
    server.sql(f"INSERT INTO {table} VALUES(2, 'new', 1)")
    assert server.ws(sub, f"?from_offset={frame.id}").changes(1)[0].id == frame.id + 1
    assert server.ws(sub, last_event_id=str(frame.id)).changes(1)[0].id == frame.id + 1


def test_first_frame_of_a_paused_stream_reports_paused(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    frame = server.stream(transport, sub).next()
    assert frame.word == "backpressure" and str(frame.id) == str(sub["offset"])
    assert (frame.data["state"], frame.data["paused"], frame.data["lag"]) == ("paused", True, 1)
    required = ["sub_id", "state", "lag", "remaining_until_resnapshot", "paused", "earliest_offset", "latest_offset"]
    assert list(frame.data)[:7] == required


def test_websocket_delivers_changes(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    stream = server.ws(sub)
    server.sql(f"INSERT INTO {table} VALUES(7, 'new', 1)")
    (frame,) = stream.changes(1)
    assert frame.word == "insert" and frame.id == frame.data["seq"]
    assert (frame.data["db"], frame.data["table"], frame.data["pk"]) == ("main", table, [7])


def test_all_transports_deliver_the_same_changes_live_and_replayed(server: Live, table: str) -> None:
    sub = server.subscribe(table, format="objects_json", include={"before": True, "after": True})
    live = [server.sse(sub), server.ws(sub)]
    server.together(
        f"INSERT INTO {table} VALUES(1, 'ü', 1.5), (2, NULL, -0.0)", f"UPDATE {table} SET total = total + 1"
    )
    server.sql(f"DELETE FROM {table}")
    polled = server.changes(sub)
    assert len(polled) == 6
    for stream in (*live, server.sse(sub), server.ws(sub)):
        assert [frame.data for frame in stream.changes(6)] == polled


# --- across a restart ------------------------------------------------------------------------------------


def test_cursor_format_and_pause_survive_a_restart(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    sub = live.subscribe("t", format="plain_json", include={"after": True})
    gone = live.subscribe("t")
    live.sql("INSERT INTO t VALUES(1, 'x')")
    live.sql("INSERT INTO t VALUES(2, 'y')")
    live.ok("cdc.ack", sub_id=sub["sub_id"], offset=2)
    live.ok("cdc.pause", sub_id=sub["sub_id"])
    live.ok("cdc.close", sub_id=gone["sub_id"])
    live.restart()
    page = live.poll(sub, from_offset=0)
    assert page["events"] == [] and page["backpressure"]["state"] == "paused"
    assert live.sse(sub).next().data["state"] == "paused"
    live.ok("cdc.resume", sub_id=sub["sub_id"])
    (change,) = live.changes(sub, from_offset=0)
    assert (change["seq"], change["after"]) == (3, {"id": 2, "v": "y"})
    assert live.error("cdc.poll", sub_id=gone["sub_id"])["code"] == "not_found"
    assert live.subscribe("t")["sub_id"] not in (sub["sub_id"], gone["sub_id"])


def test_paused_subscription_delivers_nothing_until_the_resume(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    paused = server.ok("cdc.pause", sub_id=sub["sub_id"])
    assert (paused["paused"], paused["acked_offset"]) == (True, sub["offset"])
    assert paused["backpressure"]["state"] == "paused"
    page = server.poll(sub)
    assert (page["events"], page["next_offset"]) == ([], sub["offset"])
    assert page["backpressure"]["state"] == "paused"
    resumed = server.ok("cdc.resume", sub_id=sub["sub_id"])
    assert resumed["paused"] is False and resumed["backpressure"]["state"] == "healthy"
    assert len(server.changes(sub)) == 1


def test_open_stream_is_stopped_by_pause_and_continued_by_resume(server: Live, table: str, transport: str) -> None:
    sub = server.subscribe(table)
    stream = server.stream(transport, sub)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    stream.changes(1)
    server.ok("cdc.pause", sub_id=sub["sub_id"])
    assert stream.next("backpressure").data["state"] == "paused"
    server.sql(f"INSERT INTO {table} VALUES(2, 'new', 1)")
    server.ok("cdc.resume", sub_id=sub["sub_id"])
    assert stream.next("insert", "backpressure").data["pk"] == [2]
