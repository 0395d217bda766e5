"""Each defect of SkeinDB that concerns feeds, as a test that we do not have it.

Crash safety is proved by tests/guarantees and tests/feeds/subscriptions/test_registry.py.
F5, F13, F38, F60, F83, F115–F122.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.conformance.readers import SseReader
from websockets.exceptions import InvalidStatus

from headwater.config.setting_types import Secret


def quiet_and_busy(start: Callable[..., Live]) -> Live:
    live = start(log={"retention_events": 4}, feeds={"checkpoint_seconds": 0.1})
    live.sql("CREATE TABLE quiet(id INTEGER PRIMARY KEY)")
    live.sql("CREATE TABLE busy(id INTEGER PRIMARY KEY)")
    return live


def write_busy(live: Live, times: int) -> None:
    for _ in range(times):
        live.sql("INSERT INTO busy DEFAULT VALUES")


# --- 2: a quiet filter never falls off a busy log ----------------------------------------------------------


def test_next_offset_advances_past_changes_that_do_not_match(server: Live, table: str) -> None:
    sub = server.subscribe(table, where="total > 100")
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1), (2, 'new', 2)")
    page = server.poll(sub, from_offset=sub["offset"])
    assert page["events"] == [] and page["next_offset"] == sub["offset"] + 2 == page["latest_offset"]


@pytest.mark.parametrize("how", ["with from_offset", "without", "acking"])
def test_poller_of_an_idle_table_stays_healthy_on_a_busy_log(start: Callable[..., Live], how: str) -> None:
    live = quiet_and_busy(start)
    sub = live.subscribe("quiet")
    at = sub["offset"]
    for _ in range(6):
        write_busy(live, 3)
        page = live.poll(sub, **({"from_offset": at} if how == "with from_offset" else {}))
        assert not page["resnapshot_required"] and page["next_offset"] == page["latest_offset"]
        at = page["next_offset"]
        if how == "acking":
            live.ok("cdc.ack", sub_id=sub["sub_id"], offset=at)
    live.sql("INSERT INTO quiet VALUES(1)")
    page = live.poll(sub, **({"from_offset": at} if how == "with from_offset" else {}))
    assert [change["pk"] for change in page["events"]] == [[1]]
    assert page["backpressure"]["state"] == "healthy"


def test_poller_of_an_idle_table_without_acks_stays_healthy_after_a_restart(start: Callable[..., Live]) -> None:
    live = quiet_and_busy(start)
    sub = live.subscribe("quiet")
    for _ in range(4):
        write_busy(live, 3)
        assert not live.poll(sub)["resnapshot_required"]
    live.restart()
    write_busy(live, 2)
    page = live.poll(sub)
    assert not page["resnapshot_required"] and page["backpressure"]["state"] == "healthy"


def test_unacknowledged_change_is_delivered_again(start: Callable[..., Live]) -> None:
    live = quiet_and_busy(start)
    sub = live.subscribe("quiet")
    live.sql("INSERT INTO quiet VALUES(1)")
    first = live.changes(sub)
    write_busy(live, 1)
    assert live.changes(sub) == first, "quiet moves over what does not match, never over what does"


def test_stream_of_an_idle_table_stays_healthy_on_a_busy_log(start: Callable[..., Live], transport: str) -> None:
    live = quiet_and_busy(start)
    sub = live.subscribe("quiet")
    stream = live.stream(transport, sub)
    for _ in range(3):
        write_busy(live, 3)
        latest = live.subscribe("quiet")["offset"]  # unlike stats.snapshot it waits for the log
        while (frame := stream.next("checkpoint", "resnapshot")).word == "checkpoint" and frame.data["offset"] < latest:
            pass
        assert frame.word == "checkpoint"
    stream.close()
    live.restart()
    page = live.poll(sub)
    assert not page["resnapshot_required"] and page["backpressure"]["lag"] == 0


# --- 3: an ack beyond the newest change --------------------------------------------------------------------


def test_ack_beyond_the_latest_offset_is_refused(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    latest = server.poll(sub)["latest_offset"]
    refused = server.error("cdc.ack", sub_id=sub["sub_id"], offset=latest + 1)
    assert refused["code"] == "invalid_request" and str(latest) in refused["message"]
    assert len(server.changes(sub)) == 1, "nothing was swallowed"


# --- 5: a row that leaves a key --------------------------------------------------------------------------


def test_key_change_is_a_delete_for_the_old_key_and_an_insert_for_the_new_key(server: Live, table: str) -> None:
    old, new = (
        server.subscribe(table, pk=[{"t": "i64", "v": key}], include={"before": True, "after": True}) for key in (1, 2)
    )
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.sql(f"UPDATE {table} SET id = 2 WHERE id = 1")
    _, left = server.changes(old)
    assert (left["op"], left["pk"]) == ("delete", [1]) and "after" not in left
    (came,) = server.changes(new)
    assert (came["op"], came["pk"]) == ("insert", [2]) and "before" not in came


# --- 6: every stream is locked ---------------------------------------------------------------------------


@pytest.fixture
def locked(start: Callable[..., Live]) -> Live:
    live = start(serve={"token": Secret("let-me-in"), "ticket_seconds": 30.0})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    live.sql("INSERT INTO t VALUES(1)")
    return live


def paths(sub: dict[str, str]) -> list[str]:
    return [sub["sse_url"], "/api/v1/changes/main/t", "/api/v1/changes/main", "/api/v1/snapshot/main/t"]


def test_stream_without_a_valid_credential_is_refused_with_401(locked: Live) -> None:
    sub = locked.subscribe("t", start="earliest")
    for path in (*paths(sub), sub["ws_url"]):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "let-me-ina"}):
            refused = SseReader(locked.url, path, headers)
            assert refused.status == 401 and refused.headers["www-authenticate"].startswith("Bearer"), path
            assert refused.problem()["code"] == "unauthorized"
            refused.close()
    with pytest.raises(InvalidStatus) as refusal:
        locked.headers, given = {}, locked.headers
        try:
            locked.ws(sub)
        finally:
            locked.headers = given
    assert refusal.value.response.status_code == 401
    assert locked.sse(sub).changes(1) and locked.ws(sub).changes(1)


def test_ticket_opens_streams_without_a_credential(locked: Live) -> None:
    sub = locked.subscribe("t", start="earliest")
    ticket = locked.ok("security.ticket.create")["ticket"]
    locked.headers, given = {}, locked.headers
    for path in (sub["sse_url"], "/api/v1/changes/main/t?start=earliest", "/api/v1/changes/main?start=earliest"):
        query = f"{'&' if '?' in path else '?'}ticket={ticket}"
        assert locked.get(path + query).changes(1), path
    assert locked.ws(sub, f"?ticket={ticket}").changes(1)
    assert locked.get(f"/api/v1/snapshot/main/t?ticket={ticket}").status == 307
    locked.headers = given


def test_forged_altered_or_expired_ticket_is_refused(locked: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    sub = locked.subscribe("t")
    ticket = locked.ok("security.ticket.create")["ticket"]
    flipped = ticket[:-6] + ("A" if ticket[-6] != "A" else "B") + ticket[-5:]
    for bad in ("", "x", "%00", ticket[:-8], flipped, ticket[50:], ticket + "A", "é".encode().hex()):
        refused = SseReader(locked.url, f"{sub['sse_url']}?ticket={bad}", {})
        assert refused.status == 401, bad
        refused.close()
    import time

    later = time.time_ns() + 31_000_000_000
    monkeypatch.setattr("headwater.serve.auth.tickets.time.time_ns", lambda: later)
    refused = SseReader(locked.url, f"{sub['sse_url']}?ticket={ticket}", {})
    assert refused.status == 401 and "security.ticket.create" in refused.problem()["hint"]
    refused.close()


def test_ticket_is_refused_on_routes_other_than_streams(locked: Live) -> None:
    ticket = locked.ok("security.ticket.create")["ticket"]
    for path in ("/metrics", "/", "/openapi.json", "/api/v1/rpc"):
        refused = SseReader(locked.url, f"{path}?ticket={ticket}", {})
        assert refused.status in (400, 401), path
        refused.close()


# --- 8: DDL ----------------------------------------------------------------------------------------------


def test_schema_change_is_delivered_unless_ops_exclude_it(server: Live, table: str, transport: str) -> None:
    whole, rows = server.subscribe(table), server.subscribe(table, ops=["insert", "update", "delete"])
    stream = server.stream(transport, whole)
    server.sql(f"ALTER TABLE {table} ADD COLUMN note TEXT")
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1, 'n')")
    assert [change["op"] for change in server.changes(whole)] == ["schema_change", "insert"]
    assert [change["op"] for change in server.changes(rows)] == ["insert"]
    (frame,) = stream.changes(1)
    assert frame.word == "schema_change" and frame.data["ddl"] == f"ALTER TABLE {table} ADD COLUMN note TEXT"
    assert (frame.data["offset"], "pk" in frame.data) == (whole["offset"] + 1, False)


def _without_creation(events: list[Any]) -> list[Any]:
    """Leave out CREATE TABLE, which may be logged after the subscription began."""
    return events[1:] if events[0].get("ddl", "").startswith("CREATE TABLE") else events


def test_subscription_is_pollable_after_drop_table_until_it_is_closed(server: Live, table: str) -> None:
    plain, filtered = server.subscribe(table), server.subscribe(table, where="total > 0", columns=["status"])
    stream = server.sse(plain)
    server.sql(f"INSERT INTO {table} VALUES(1, 'new', 1)")
    server.sql(f"DROP TABLE {table}")
    for sub in (plain, filtered):
        first, *_, last = _without_creation(server.whole(sub)["events"])
        assert first["op"] == "insert"
        assert last["op"] == "schema_change" and last["ddl"].startswith("DROP TABLE")
    server.sql(f"CREATE TABLE {table}(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    server.sql(f"INSERT INTO {table} VALUES(5, 'again', 1)")
    for sub in (plain, filtered):
        assert server.changes(sub)[-1]["pk"] == [5]
    assert stream.next("resnapshot", "failed", "insert").data["pk"] == [1]
    while (frame := stream.next("resnapshot", "failed", "insert", "delete")).word == "delete":
        pass
    assert frame.data["pk"] == [5]
    server.ok("cdc.close", sub_id=plain["sub_id"])
    assert server.error("cdc.poll", sub_id=plain["sub_id"])["code"] == "not_found"


def test_cursor_ahead_of_a_recreated_log_requires_a_resnapshot(start: Callable[..., Live]) -> None:
    """§1.15, 10: the database and its log are removed and the subscription is kept; no change may be lost silently."""
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    for number in range(20):
        live.sql(f"INSERT INTO t VALUES({number})")
    sub = live.subscribe("t")
    live.stop()
    for path in Path(live.config.data).glob("main.*"):
        path.unlink()
    live.start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    live.sql("INSERT INTO t VALUES(1)")
    page = live.poll(sub)
    assert (page["resnapshot_required"], page["resnapshot_reason"]) == (True, "log_generation_changed")
    for transport in ("sse", "ws"):
        assert live.stream(transport, sub).next("resnapshot").data["reason"] == "log_generation_changed"
    live.ok("cdc.seek", sub_id=sub["sub_id"], offset=page["resnapshot_from_offset"])
    assert [change["op"] for change in live.changes(sub)] == ["schema_change", "insert"]
