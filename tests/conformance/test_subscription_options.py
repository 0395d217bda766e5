"""Options of subscriptions beyond SkeinDB's: names, starts, seeks, backtests, transactions, waits, shards.

WIRE §4 and §11. F34–F36, F41, F42, F58, F60, F66, F87, F90, F107.
"""

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE


def keys(changes: list[dict[str, Any]]) -> list[Any]:
    return [change["pk"][0] for change in changes if "pk" in change]


# --- name ------------------------------------------------------------------------------------------------


def test_subscribe_with_an_existing_name_returns_that_subscription(server: Live, table: str) -> None:
    first = server.subscribe(table, name=f"of {table}", ops=["insert", "delete"])
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    again = server.subscribe(table, name=f"of {table}", ops=["delete", "insert", "insert"], start="latest")
    assert first["created"] and not again["created"]
    assert {**again, "created": True} == first, "its cursor stays where it was"
    assert keys(server.changes(again)) == [1]


def test_subscribe_with_an_existing_name_and_different_options_is_a_conflict(server: Live, table: str) -> None:
    server.subscribe(table, name=f"of {table}")
    refused = server.error("cdc.subscribe_table", table=table, name=f"of {table}", ops=["insert"])
    assert refused["code"] == "conflict" and refused["details"]["hint"]


def test_subscribe_with_an_existing_name_ignores_the_start(server: Live, table: str) -> None:
    rows = server.subscribe(table, name=f"rows of {table}", start="snapshot")
    again = server.subscribe(table, name=f"rows of {table}")
    assert {**again, "created": True} == rows, "images by default are not other options"
    named = server.subscribe(table, name=f"of {table}")
    again = server.subscribe(table, name=f"of {table}", start={"offset": 10**12})
    assert {**again, "created": True} == named, "start is not looked at"


def test_name_of_a_closed_subscription_is_reusable(server: Live, table: str) -> None:
    first = server.subscribe(table, name=f"of {table}")
    server.ok("cdc.close", sub_id=first["sub_id"])
    again = server.subscribe(table, name=f"of {table}", ops=["insert"])
    assert again["created"] and again["sub_id"] != first["sub_id"]


def test_subscription_is_listed_with_its_cursor_lag_and_state(server: Live, table: str) -> None:
    sub = server.subscribe(table, name=f"of {table}", where="total > 1")
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 5)")
    server.poll(sub)
    (found,) = server.ok("cdc.list", sub_id=sub["sub_id"])["subscriptions"]
    assert (found["sub_id"], found["name"], found["tables"]) == (sub["sub_id"], f"of {table}", [table])
    assert (found["acked_offset"], found["paused"], found["lag"], found["state"]) == (
        sub["offset"],
        False,
        1,
        "healthy",
    )
    assert found["options"]["where"] == "total > 1"
    assert found["sub_id"] in [one["sub_id"] for one in server.ok("cdc.list")["subscriptions"]]


# --- start and seek --------------------------------------------------------------------------------------


def test_feed_starts_at_the_earliest_the_latest_an_offset_or_a_time(server: Live, table: str) -> None:
    base = server.subscribe(table)["offset"]
    for id in (1, 2, 3):
        server.sql(f"INSERT INTO {table} VALUES({id}, 'a', 1)")
    every = server.changes(server.subscribe(table, start="earliest"), limit=1000)
    assert keys(every) == [1, 2, 3] and every[0]["op"] == "schema_change"
    assert keys(server.changes(server.subscribe(table, start="latest"))) == []
    assert keys(server.changes(server.subscribe(table, start={"offset": base + 1}))) == [2, 3]
    second = every[2]["ts"]
    assert keys(server.changes(server.subscribe(table, start={"ts": second}))) == [3], "exclusive"
    milliseconds = int(second.split(".")[0])
    assert keys(server.changes(server.subscribe(table, start={"ts": milliseconds - 1})))[-2:] == [2, 3]


@pytest.mark.parametrize(
    "start",
    [{"offset": 10**9}, {"offset": -1}, {"offset": 1.5}, {"ts": "x"}, {"ts": -1}, {"offset": 1, "ts": 1}, "now", {}, 5],
)
def test_invalid_feed_start_is_refused(server: Live, table: str, start: Any) -> None:
    assert server.error("cdc.subscribe_table", table=table, start=start)["code"] == "invalid_request"


def test_feed_start_before_the_horizon_is_refused_with_the_earliest_offset(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    for id in range(5):
        live.sql(f"INSERT INTO t VALUES({id})")
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["earliest_offset"] == 5)
    for place in ({"offset": 1}, {"ts": 1}):
        refused = live.error("cdc.subscribe_table", table="t", start=place)
        assert refused["code"] == "resnapshot_required", place
        assert (refused["details"]["earliest_offset"], refused["details"]["latest_offset"]) == (5, 6)
    assert keys(live.changes(live.subscribe("t", start="earliest"))) == [3, 4]


def test_seek_moves_the_cursor_back_forward_and_to_a_time(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    for id in (1, 2, 3):
        server.sql(f"INSERT INTO {table} VALUES({id}, 'a', 1)")
    every, base, id = server.changes(sub), sub["offset"], sub["sub_id"]
    assert server.ok("cdc.seek", sub_id=id, offset=base + 2) == {"sub_id": id, "acked_offset": base + 2}
    assert keys(server.changes(sub)) == [3]
    server.ok("cdc.seek", sub_id=id, offset=base)
    assert keys(server.changes(sub, from_offset=0)) == [1, 2, 3]
    assert server.ok("cdc.seek", sub_id=id, ts=every[0]["ts"])["acked_offset"] == base + 1
    assert keys(server.changes(sub)) == [2, 3]
    assert [frame.data["pk"][0] for frame in server.sse(sub).changes(2)] == [2, 3]
    for bad in ({"offset": base + 4}, {}, {"offset": base, "ts": "1.0"}, {"ts": "yesterday"}, {"offset": -1}):
        assert server.error("cdc.seek", sub_id=id, **bad)["code"] == "invalid_request", bad


# --- backtest --------------------------------------------------------------------------------------------


def test_backtest_reports_the_changes_that_a_subscription_delivers(server: Live, table: str) -> None:
    asked = {"table": table, "where": "total > 2", "ops": ["insert", "delete"], "include": {"after": True}}
    for id in range(8):
        server.sql(f"INSERT INTO {table} VALUES({id}, 'a', {id})")
    server.sql(f"UPDATE {table} SET total = 0 WHERE id IN (6, 7)")
    tested = server.ok("cdc.backtest", format="plain_json", **asked)
    listed = {one["sub_id"] for one in server.ok("cdc.list")["subscriptions"]}
    page = server.poll(server.subscribe(start="earliest", **asked), limit=1000)
    delivered = page["events"]
    assert tested["matches"] == len(delivered) == 7 and tested["samples"] == delivered[-5:]
    assert tested["ops"] == {"insert": 5, "delete": 2}
    assert tested["upto_offset"] == page["next_offset"]
    started = server.ok("cdc.backtest", format="plain_json", start={"offset": delivered[3]["offset"]}, **asked)
    assert started["matches"] == 3 and started["from_offset"] == delivered[3]["offset"]
    raw = server.http.post("/api/v1/rpc", json={"id": 1, "method": "cdc.poll", "params": {"sub_id": _newest(server)}})
    assert tested["bytes"] == len(raw.content.split(b'"events":[', 1)[1].split(b'],"next_offset"')[0]) - 6
    assert len(server.ok("cdc.list")["subscriptions"]) == len(listed) + 1, "the backtest made none"


def _newest(server: Live) -> str:
    return server.ok("cdc.list")["subscriptions"][-1]["sub_id"]


# --- whole transactions ----------------------------------------------------------------------------------


def test_atomic_pages_never_split_a_transaction(server: Live, table: str) -> None:
    atomic, plain = server.subscribe(table, txn="atomic"), server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    server.sql(f"INSERT INTO {table} VALUES(2, 'a', 1), (3, 'a', 1), (4, 'a', 1)")
    server.sql(f"INSERT INTO {table} VALUES(5, 'a', 1)")
    pages, at = [], atomic["offset"]
    while not pages or pages[-1]:
        page = server.poll(atomic, from_offset=at, limit=2)
        pages.append(page["events"])
        at = page["next_offset"]
    assert [keys(page) for page in pages] == [[1], [2, 3, 4], [5], []]
    assert all(page[-1]["txn"]["last"] for page in pages if page)
    assert [change["txn"]["seq"] for change in pages[1]] == [0, 1, 2]
    assert keys(server.changes(plain, limit=2)) == [1, 2], "without it, pages split where they are full"


BIG = 40  # rows of 1 MB: more than the 16 MiB that are kept together, and than the log keeps in memory


@pytest.fixture
def big(server: Live) -> tuple[str, int]:
    """Create a table whose name needs quoting, with one transaction over 16 MiB; return its name and the offset before
    it.
    """
    name = f"größe & {time.monotonic_ns()}/?"
    server.sql(f'CREATE TABLE "{name}"(id INTEGER PRIMARY KEY, v TEXT)')
    base = server.caught_up(server.subscribe(name))
    rows = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {BIG})"
    server.sql(f"INSERT INTO \"{name}\" {rows} SELECT i, printf('%.*c', 1000000, 'x') FROM n")
    return name, base


def test_huge_transaction_is_delivered_in_parts_or_refused_with_a_working_pull_url(
    server: Live, big: tuple[str, int]
) -> None:
    name, base = big
    begin = {"table": name, "include": {"after": True}, "start": {"offset": base}}
    atomic = server.subscribe(txn="atomic", **begin)
    page = server.poll(atomic, limit=2)
    assert 1 < len(page["events"]) < BIG and page["events"][-1]["txn"]["last"] is False
    found = page["events"]
    while not found[-1]["txn"]["last"]:
        page = server.poll(atomic, from_offset=page["next_offset"])
        found += page["events"]
    assert keys(found) == list(range(1, BIG + 1))
    strict = server.subscribe(txn="atomic_strict", **begin)
    refused = server.error("cdc.poll", sub_id=strict["sub_id"])
    assert refused["code"] == "transaction_too_large"
    told = refused["details"]
    assert (told["first_offset"], told["last_offset"]) == (base + 1, base + BIG)
    assert quote(name, safe="") in told["pull_url"]
    stream = server.get(told["pull_url"], accept="application/x-ndjson")
    assert keys([frame.data for frame in stream.rest() if frame.word == "insert"]) == list(range(1, BIG + 1))
    assert stream.whole
    server.ok("cdc.seek", sub_id=strict["sub_id"], offset=told["last_offset"])
    assert server.poll(strict)["caught_up"]


def test_pull_url_of_a_huge_transaction_applies_the_options_of_the_subscription(
    server: Live, big: tuple[str, int]
) -> None:
    name, base = big
    chosen = {
        "table": name,
        "where": "id % 2 = 0 AND v > 'a&b=+é'",
        "spans": [{"lower_bound": [{"t": "i64", "v": 4}]}],
        "ops": ["insert", "delete"],
        "include": {"before": True, "after": True},
        "format": "plain_json",
        "start": {"offset": base},
    }
    expected = server.changes(server.subscribe(**chosen), limit=1000)
    strict = server.subscribe(txn="atomic_strict", **chosen)
    told = server.error("cdc.poll", sub_id=strict["sub_id"])["details"]
    stream = server.get(told["pull_url"], accept="application/x-ndjson")
    found = [frame.data for frame in stream.rest() if frame.word in ("insert", "update", "delete")]
    assert stream.whole and keys(found) == list(range(4, BIG + 1, 2))
    assert found[: len(expected)] == expected, "byte for byte the same changes; a page ends earlier"


# --- waiting, limits -------------------------------------------------------------------------------------


def test_long_poll_answers_as_soon_as_a_matching_change_commits(server: Live, table: str) -> None:
    sub = server.subscribe(table, where="total > 100")
    answered: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: answered.append(server.poll(sub, wait_ms=60_000)))
    began = time.monotonic()
    waiting.start()
    server.until(lambda: server.metric("headwater_polls") == 1)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")  # does not match
    server.sql(f"INSERT INTO {table} VALUES(2, 'a', 500)")
    waiting.join(PATIENCE)
    assert time.monotonic() - began < 50, "well within the wait"
    assert keys(answered[0]["events"]) == [2] and answered[0]["next_offset"] == sub["offset"] + 2


def test_long_poll_at_its_deadline_is_empty_and_skips_changes_that_do_not_match(server: Live, table: str) -> None:
    for id in range(10):
        sub = server.subscribe(table, where="total > 100")
        began = time.monotonic()
        answered: list[dict[str, Any]] = []

        def poll(sub: dict[str, Any] = sub, answered: list[dict[str, Any]] = answered) -> None:
            answered.append(server.poll(sub, wait_ms=2_000))

        waiting = threading.Thread(target=poll)
        waiting.start()
        server.until(lambda answered=answered: answered or server.metric("headwater_polls") == 1)
        server.sql(f"INSERT INTO {table} VALUES({id}, 'a', 1)")
        waiting.join(PATIENCE)
        assert time.monotonic() - began >= 2
        (page,) = answered
        if page["next_offset"] > sub["offset"]:
            break  # else the change came after the deadline, on a busy machine
    assert (page["events"], page["next_offset"], page["caught_up"]) == ([], sub["offset"] + 1, True)


def test_waiting_long_poll_is_answered_on_pause_and_close(server: Live, table: str) -> None:
    for method in ("pause", "close"):
        sub = server.subscribe(table)
        answered: list[dict[str, Any]] = []
        asked = {"sub_id": sub["sub_id"], "wait_ms": 60_000}
        waiting = threading.Thread(
            target=lambda asked=asked, into=answered: into.append(server.rpc("cdc.poll", **asked))
        )
        waiting.start()
        server.until(lambda: server.metric("headwater_polls") == 1)
        server.ok(f"cdc.{method}", sub_id=sub["sub_id"])
        waiting.join(PATIENCE)
        (answer,) = answered
        if method == "pause":
            assert answer["result"]["backpressure"]["state"] == "paused"
        else:
            assert answer["error"]["code"] == "not_found"


def test_long_poll_with_available_changes_is_answered_without_waiting(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    began = time.monotonic()
    assert len(server.changes(sub, wait_ms=60_000)) == 1
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    "bad",
    [
        {"wait_ms": 60_001},
        {"wait_ms": -1},
        {"limit": 0},
        {"limit": -5},
        {"limit": 10**6},
        {"from_offset": -1},
        {"from_offset": 10**9},
        {"from_offset": "5"},
        {"from_offset": 1.5},
        {"offset": 1},
        {"cursor": "!"},
    ],
)
def test_poll_parameter_out_of_range_is_refused(server: Live, table: str, bad: dict[str, Any]) -> None:
    sub = server.subscribe(table)
    assert server.error("cdc.poll", sub_id=sub["sub_id"], **bad)["code"] == "invalid_request"


def test_poll_pages_respect_the_limit_and_the_last_reports_caught_up(server: Live, table: str) -> None:
    sub = server.subscribe(table)
    values = ", ".join(f"({id}, 'a', 1)" for id in range(250))
    server.sql(f"INSERT INTO {table} VALUES {values}")
    page = server.poll(sub)
    assert len(page["events"]) == 200 and not page["caught_up"] and page["next_offset"] == sub["offset"] + 200
    page = server.poll(sub, from_offset=page["next_offset"], limit=49)
    assert len(page["events"]) == 49 and not page["caught_up"]
    page = server.poll(sub, from_offset=page["next_offset"], limit=49)
    assert keys(page["events"]) == [249] and page["caught_up"]


# --- several tables, shares ------------------------------------------------------------------------------


def test_database_subscription_receives_changes_of_every_table_including_new_ones(server: Live, table: str) -> None:
    other, later = f"{table}_other", f"{table}_later"
    server.sql(f"CREATE TABLE {other}(id INTEGER PRIMARY KEY)")
    some, whole = server.subscribe(tables=[table, other]), server.subscribe()
    streams = [server.sse(whole), server.ws(whole)]
    server.sql(f"CREATE TABLE {later}(id INTEGER PRIMARY KEY)")
    for name in (later, other):
        server.sql(f"INSERT INTO {name} VALUES(1)")
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    assert [change["table"] for change in server.changes(some)] == [other, table]
    expected = [(later, "schema_change"), (later, "insert"), (other, "insert"), (table, "insert")]
    assert [(change["table"], change["op"]) for change in server.changes(whole)] == expected
    for stream in streams:
        assert [(frame.data["table"], frame.word) for frame in stream.changes(4)] == expected


def test_table_filters_without_a_single_table_are_refused(server: Live, table: str) -> None:
    for bad in ({"where": "id > 1"}, {"columns": ["id"]}, {"pk": [{"t": "i64", "v": 1}]}):
        assert server.error("cdc.subscribe_table", **bad)["code"] == "invalid_request"
    assert server.error("cdc.subscribe_table", table=table, tables=[table])["code"] == "invalid_request"


def test_shards_deliver_every_key_to_exactly_one_shard(server: Live, table: str) -> None:
    shares = [server.subscribe(table, shard={"index": index, "of": 3}) for index in range(3)]
    values = ", ".join(f"({id}, 'a', 1)" for id in range(60))
    server.sql(f"INSERT INTO {table} VALUES {values}")
    server.sql(f"UPDATE {table} SET total = 2 WHERE id % 2")
    seen = [server.changes(share) for share in shares]
    inserted = [{change["pk"][0] for change in changes if change["op"] == "insert"} for changes in seen]
    updated = [{change["pk"][0] for change in changes if change["op"] == "update"} for changes in seen]
    assert sorted(id for share in inserted for id in share) == list(range(60)) and all(inserted)
    for one, other in zip(inserted, updated, strict=True):
        assert other == {id for id in one if id % 2}, "a key stays with its share"
    for bad in ({"index": 3, "of": 3}, {"index": 0}, {"index": -1, "of": 2}, {"index": 0, "of": 0}):
        assert server.error("cdc.subscribe_table", table=table, shard=bad)["code"] == "invalid_request"
