"""Rows first, then changes, without gap or repeat, under concurrent writes and restarts.

WIRE §4 `start: "snapshot"`, §11.14. F98–F102, F104–F107.
"""

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.conformance.readers import CHANGES, Frame

from headwater.feeds.snapshot import Position

ROWS = 1500


class Folded:
    """The table as a reader knows it; a change that does not fit its rows fails."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def take(self, changes: Iterable[dict[str, Any]]) -> None:
        for change in changes:
            match change["op"]:
                case "insert":
                    assert change["pk"][0] not in self.rows, f"told twice: {change}"
                    self.rows[change["pk"][0]] = change["after"]
                case "update":
                    del self.rows[change.get("pk_before", change["pk"])[0]]
                    self.rows[change["pk"][0]] = change["after"]
                case "delete":
                    del self.rows[change["pk"][0]]

    def take_again(self, changes: Iterable[dict[str, Any]]) -> None:
        """Apply changes of which some may be known already, as after a reconnect."""
        for change in changes:
            self.rows.pop(change.get("pk_before", change["pk"])[0], None)
            if change["op"] != "delete":
                self.rows[change["pk"][0]] = change["after"]


class Writing:
    """A thread that writes until it has run `times` statements."""

    def __init__(self, live: Live, table: str, times: int, seed: int) -> None:
        self._live, self._table, self._times, self._dice = live, table, times, random.Random(seed)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        for step in range(self._times):
            id, dice = self._dice.randrange(ROWS + 200), self._dice.random()
            if dice < 0.4:
                self._live.sql(f"INSERT OR REPLACE INTO {self._table} VALUES({id}, 'w{step}', {step})")
            elif dice < 0.7:
                self._live.sql(f"UPDATE {self._table} SET total = {step} WHERE id BETWEEN {id} AND {id + 3}")
            else:
                self._live.sql(f"DELETE FROM {self._table} WHERE id = {id}")


def fill(live: Live, table: str, rows: int = ROWS) -> None:
    many = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {rows - 1})"
    live.sql(f"INSERT INTO {table} {many} SELECT i, 'row', i FROM n")


def now(live: Live, table: str) -> dict[int, dict[str, Any]]:
    return {
        row[0]: dict(zip(("id", "status", "total"), row, strict=True)) for row in live.sql(f"SELECT * FROM {table}")
    }


def changes_upto(stream: Any, offset: int) -> list[dict[str, Any]]:
    """Return the changes of a stream up to `offset`."""
    found: list[Frame] = [stream.next()]
    while found[-1].word in ("snapshot_restart",) or str(found[-1].id).startswith("s:") or int(found[-1].id) < offset:
        found.append(stream.next())
    return [frame.data for frame in found if frame.word in CHANGES]


def marked(live: Live, table: str) -> int:
    """Insert a last row, which every reader waits for; return its offset."""
    base = live.subscribe(table)["offset"]
    live.sql(f"INSERT INTO {table} VALUES(999999, 'end', 0)")
    return base + 1


# --- by poll ---------------------------------------------------------------------------------------------


def test_polled_snapshot_plus_changes_equals_the_table(server: Live, table: str) -> None:
    fill(server, table)
    sub = server.subscribe(table, start="snapshot")
    known, cursor, pages = Folded(), {}, 0
    with Writing(server, table, 150, seed=1):
        while True:
            page = server.poll(sub, limit=100, **cursor)
            assert all(row["snapshot"] and row["op"] == "insert" for row in page["events"])
            assert not page["caught_up"]
            known.take(page["events"])
            pages += 1
            if page["snapshot"]["done"]:
                break
            cursor = {"cursor": page["snapshot"]["cursor"]}
    assert pages >= ROWS // 100
    server.ok("cdc.ack", sub_id=sub["sub_id"], cursor=page["snapshot"]["cursor"])
    page = server.poll(sub, limit=10_000)
    known.take(page["events"])
    assert page["caught_up"] and known.rows == now(server, table)


def test_poll_with_a_repeated_cursor_returns_the_same_rows(server: Live, table: str) -> None:
    fill(server, table, 50)
    sub = server.subscribe(table, start="snapshot")
    first = server.poll(sub, limit=10)
    cursor = first["snapshot"]["cursor"]
    one, two = (server.poll(sub, limit=10, cursor=cursor) for _ in range(2))
    assert [row["pk"] for row in one["events"]] == [row["pk"] for row in two["events"]] == [[n] for n in range(10, 20)]


def test_acknowledged_snapshot_cursor_is_kept_after_a_restart(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 300)
    sub = live.subscribe("t", start="snapshot")
    known = Folded()
    page = live.poll(sub, limit=100)
    known.take(page["events"])
    acked = live.ok("cdc.ack", sub_id=sub["sub_id"], cursor=page["snapshot"]["cursor"])
    assert acked["cursor"] == page["snapshot"]["cursor"]
    live.sql("DELETE FROM t WHERE id = 5")  # known already
    live.sql("DELETE FROM t WHERE id = 250")  # not yet
    live.restart()
    live.sql("UPDATE t SET total = -1 WHERE id IN (6, 251)")
    while not page["snapshot"]["done"]:
        page = live.poll(sub, limit=100)
        known.take(page["events"])
        live.ok("cdc.ack", sub_id=sub["sub_id"], cursor=page["snapshot"]["cursor"])
    assert 250 not in known.rows and 5 in known.rows
    known.take(live.changes(sub))
    assert known.rows == now(live, "t")


def test_filter_is_applied_to_snapshot_rows_and_changes(server: Live, table: str) -> None:
    fill(server, table, 200)
    sub = server.subscribe(table, start="snapshot", where="total >= 150", columns=["total"])
    page = server.poll(sub, limit=1000)
    while not page["snapshot"]["done"]:
        more = server.poll(sub, limit=1000, cursor=page["snapshot"]["cursor"])
        page = {**more, "events": page["events"] + more["events"]}
    assert [row["after"] for row in page["events"]] == [{"total": float(n)} for n in range(150, 200)]
    server.sql(f"UPDATE {table} SET total = 0 WHERE id = 199")
    server.sql(f"UPDATE {table} SET total = 500 WHERE id = 3")
    found = server.changes(sub, from_offset=page["next_offset"])
    assert [(change["op"], change["pk"]) for change in found] == [("delete", [199]), ("insert", [3])]


@pytest.mark.parametrize("bad", ["", "x", "kwEAxAKRA", "s:kwEAxAKRAQ", "////", "A" * 5000])
def test_invalid_snapshot_cursor_is_refused(server: Live, table: str, bad: str) -> None:
    sub = server.subscribe(table, start="snapshot")
    for method in ("poll", "ack"):
        refused = server.rpc(f"cdc.{method}", sub_id=sub["sub_id"], cursor=bad)
        assert not refused["ok"] and refused["error"]["code"] == "invalid_request", method


@pytest.mark.parametrize(
    "place", [Position(1, 0, ("text",)), Position(1, 0, (1, 2)), Position(1, 0, (None,)), Position(1, 7, None)]
)
def test_snapshot_cursor_with_a_key_of_another_type_leaves_the_subscription_usable(
    server: Live, table: str, place: Position
) -> None:
    fill(server, table, 5)
    sub = server.subscribe(table, start="snapshot")
    server.poll(sub, limit=2)
    answer = server.rpc("cdc.poll", sub_id=sub["sub_id"], cursor=place.text())
    assert answer["ok"] or answer["error"]["code"] == "invalid_request", answer
    assert server.poll(sub, limit=5)["events"], "and the subscription goes on"


# --- by stream -------------------------------------------------------------------------------------------


def test_streamed_snapshot_plus_changes_equals_the_table(server: Live, table: str, transport: str) -> None:
    fill(server, table)
    sub = server.subscribe(table, start="snapshot")
    known = Folded()
    with Writing(server, table, 100, seed=2):
        stream = server.stream(transport, sub)
        *rows, end = stream.upto("snapshot_end")
    assert {frame.word for frame in rows} == {"insert"}
    assert all(frame.id.startswith("s:") and frame.data["snapshot"] for frame in rows)
    assert int(end.id) == end.data["offset"] and end.data["rows"] == len(rows)
    known.take(frame.data for frame in rows)
    last = marked(server, table)
    known.take(changes_upto(stream, last))
    assert known.rows == now(server, table)


def test_stream_resumes_in_the_middle_of_its_snapshot_after_a_restart(
    start: Callable[..., Live], transport: str
) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t")
    sub = live.subscribe("t", start="snapshot")
    stream = live.stream(transport, sub)
    rows = [stream.next("insert") for _ in range(400)]
    stream.close()
    live.sql("DELETE FROM t WHERE id IN (7, 900, 1400)")
    live.restart()
    live.sql("UPDATE t SET total = -1 WHERE id IN (8, 401, 1401)")
    again = live.stream(transport, sub, last_event_id=rows[-1].id)
    *more, end = again.upto("snapshot_end")
    assert [frame.data["pk"][0] for frame in more][0] == 400 and end.word == "snapshot_end"
    known = Folded()
    known.take(frame.data for frame in (*rows, *more))
    known.take_again(changes_upto(again, marked(live, "t")))
    assert known.rows == now(live, "t")


def test_stream_without_a_subscription_delivers_a_snapshot_then_changes(server: Live, table: str) -> None:
    fill(server, table, 300)
    stream = server.get(f"/api/v1/changes/main/{table}?start=snapshot&format=plain_json")
    *rows, end = stream.upto("snapshot_end")
    known = Folded()
    known.take(frame.data for frame in rows)
    assert end.data == {"offset": int(end.id), "rows": 300}
    known.take(changes_upto(stream, marked(server, table)))
    assert known.rows == now(server, table)


def test_snapshot_of_an_empty_table_ends_with_zero_rows(server: Live, table: str, transport: str) -> None:
    stream = server.stream(transport, server.subscribe(table, start="snapshot"))
    end = stream.next()
    assert (end.word, end.data["rows"]) == ("snapshot_end", 0)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert stream.changes(1)[0].data["pk"] == [1]


# --- the lease -------------------------------------------------------------------------------------------


def test_horizon_does_not_pass_a_running_snapshot(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 4})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 50)
    sub = live.subscribe("t", start="snapshot")
    known = Folded()
    page = live.poll(sub, limit=10)
    known.take(page["events"])
    for id in range(20):
        live.sql(f"UPDATE t SET total = -1 WHERE id = {id}")
    while not page["snapshot"]["done"]:
        page = live.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
        assert "restarted" not in page["snapshot"]
        known.take(page["events"])
    known.take(live.changes(sub, from_offset=page["next_offset"]))
    assert known.rows == now(live, "t")


def lose_lease(live: Live, page: dict[str, Any]) -> None:
    """Write until the log has evicted what a snapshot without a lease would need."""

    def forgotten() -> bool:
        live.sql("UPDATE t SET total = total - 1 WHERE id = 1")
        return live.ok("stats.snapshot")["cdc"]["earliest_offset"] > page["latest_offset"] + 1

    live.until(forgotten)


def test_streamed_snapshot_without_its_lease_sends_snapshot_restart(start: Callable[..., Live], transport: str) -> None:
    live = start(log={"retention_events": 4}, feeds={"lease_seconds": 3600.0, "lease_bytes": 0})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 2000)
    sub = live.subscribe("t", start="snapshot")
    page = live.poll(sub, limit=10)
    cursor = page["snapshot"]["cursor"]
    lose_lease(live, page)
    stream = live.stream(transport, sub, last_event_id=f"s:{cursor}")
    while (frame := stream.next()).word == "backpressure":
        assert frame.data["state"] == "throttle", "it reads rows: it is not lost"
    assert frame.word == "snapshot_restart" and frame.id.startswith("s:")
    assert frame.data == {"sub_id": sub["sub_id"], "reason": "snapshot_expired"}
    *rows, _ = stream.upto("snapshot_end")
    known = Folded()
    known.take(frame.data for frame in rows)
    assert known.rows == now(live, "t")


def test_polled_snapshot_without_its_lease_is_reported_as_restarted(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 4}, feeds={"lease_bytes": 0})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 100)
    sub = live.subscribe("t", start="snapshot")
    page = live.poll(sub, limit=10)
    lose_lease(live, page)
    page = live.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
    assert (page["snapshot"]["restarted"], page["snapshot"]["reason"]) == (True, "snapshot_expired")
    assert not page["resnapshot_required"] and page["backpressure"]["state"] == "throttle"
    assert [row["pk"][0] for row in page["events"]] == list(range(10))
    again = live.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
    assert "restarted" not in again["snapshot"] and again["events"][0]["pk"] == [10]


# --- the table changes meanwhile -------------------------------------------------------------------------


def rebuilt(live: Live, table: str, shape: str) -> dict[int, Any]:
    """Read some rows, replace the table by another, read on; return the rows that the reader knows then."""
    fill(live, table, 60)
    sub = live.subscribe(table, start="snapshot")
    known: dict[Any, Any] = {}
    page = live.poll(sub, limit=10)
    live.sql(f"DROP TABLE {table}")
    live.sql(f"CREATE TABLE {table}({shape})")
    live.sql(f"INSERT INTO {table} VALUES(5, 'new', 5), (55, 'new', 55), (70, 'new', 70)")
    while True:
        if page["snapshot"].get("restarted"):
            known.clear()
        known |= {row["pk"][0]: row["after"] for row in page["events"]}
        if page["snapshot"]["done"]:
            break
        page = live.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
    for change in live.changes(sub, from_offset=page["next_offset"]):
        if change["op"] == "schema_change" and change["ddl"].startswith("DROP"):
            known.clear()
        elif change["op"] == "delete":
            known.pop(change["pk"][0], None)
        elif change["op"] != "schema_change":
            known[change["pk"][0]] = change["after"]
    return known


@pytest.mark.parametrize(
    "shape",
    [
        "id INTEGER PRIMARY KEY, status TEXT, total REAL",
        "id INTEGER, status TEXT, total REAL, PRIMARY KEY(id, status)",
        "id TEXT PRIMARY KEY, status TEXT, total REAL",
    ],
)
def test_table_replaced_during_its_snapshot_is_delivered_with_its_new_rows(
    server: Live, table: str, shape: str
) -> None:
    known = rebuilt(server, table, shape)
    assert sorted(int(id) for id in known) == [5, 55, 70]


def test_table_replaced_before_its_snapshot_is_delivered_with_its_new_rows(server: Live, table: str) -> None:
    other = f"{table}_b"
    server.sql(f"CREATE TABLE {other}(id INTEGER PRIMARY KEY)")
    fill(server, table, 20)
    sub = server.subscribe(tables=[table, other], start="snapshot")
    page = server.poll(sub, limit=10)
    server.sql(f"DROP TABLE {other}")
    server.sql(f"CREATE TABLE {other}(id INTEGER PRIMARY KEY)")
    server.sql(f"INSERT INTO {other} VALUES(1)")
    known: set[int] = set()
    while not page["snapshot"]["done"]:
        page = server.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
        known |= {row["pk"][0] for row in page["events"] if row["table"] == other}
    for change in server.changes(sub, from_offset=page["next_offset"]):
        if change["op"] == "schema_change" and change["ddl"].startswith("DROP"):
            known.clear()
        elif change["op"] == "insert" and change["table"] == other:
            known.add(change["pk"][0])
    assert known == {1}


def test_poll_from_an_offset_inside_a_snapshot_is_refused_until_its_end(server: Live, table: str) -> None:
    fill(server, table, 50)
    sub = server.subscribe(table, start="snapshot")
    for _ in range(2):  # the second time by a client that forgot the rows, while the server had read them all
        page = server.poll(sub, limit=10)
        known = Folded()
        while not page["snapshot"]["done"]:
            known.take(page["events"])
            refused = server.rpc("cdc.poll", sub_id=sub["sub_id"], from_offset=page["next_offset"])["error"]
            assert refused["code"] == "invalid_request" and "snapshot.cursor" in refused["details"]["hint"]
            page = server.poll(sub, limit=10, cursor=page["snapshot"]["cursor"])
        known.take(page["events"])
        assert known.rows == now(server, table)
    server.sql(f"DELETE FROM {table} WHERE id = 7")
    known.take(server.changes(sub, from_offset=page["next_offset"]))
    assert known.rows == now(server, table)


def test_first_snapshot_poll_from_the_subscription_offset_returns_the_rows(server: Live, table: str) -> None:
    fill(server, table, 5)
    sub = server.subscribe(table, start="snapshot")
    page = server.poll(sub, from_offset=sub["offset"])
    assert len(page["events"]) == 5
