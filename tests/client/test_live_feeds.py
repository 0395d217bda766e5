"""Feeds of a real server, by both clients: rows and changes over polls, streams, restarts and evicted offsets."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches.proxy_processes import free_port
from tests.client.both_clients import ask_sync
from tests.conformance.live_server import Live

from headwater.client import AsyncClient, Client
from headwater.errors import DuplicateKey, InvalidRequest, NotFound, OffsetExpired, Unauthorized


@pytest.fixture
def orders(live: Live) -> Live:
    live.sql("CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL)")
    live.sql("INSERT INTO orders VALUES (1, 10.5), (2, 200)")
    return live


def insert(live: Live, *ids: int) -> None:
    for id in ids:
        live.sql("INSERT INTO orders VALUES (?, ?)", id, float(id))


# --- calls -----------------------------------------------------------------------------------------------


def test_call_returns_its_result_or_raises_the_matching_error_class(orders: Live, ask: Any) -> None:
    table = {"table": "orders"}
    got = ask(orders.url, lambda client: client.call("data.get", table=table, pk=[1], format="plain_json"))
    assert got["row"] == {"id": 1, "total": 10.5}
    with pytest.raises(DuplicateKey) as raised:
        ask(orders.url, lambda client: client.call("data.insert", into=table, rows=[{"id": 1}]))
    assert raised.value.hint
    with pytest.raises(NotFound):
        ask(orders.url, lambda client: client.call("data.get", table=table, pk=[9]))
    with pytest.raises(InvalidRequest, match="colour"):
        ask(orders.url, lambda client: client.call("data.get", table=table, pk=[1], colour="red"))


def test_call_without_the_credential_is_refused(tmp_path: Path, ask: Any) -> None:
    locked = Live(tmp_path / "locked", serve={"token": "open-sesame-open-sesame"})
    try:
        with pytest.raises(Unauthorized):
            ask(locked.url, lambda client: client.call("system.ping"))
        assert ask(locked.url, lambda client: client.call("system.ping"), token="open-sesame-open-sesame")["pong"]
    finally:
        locked.stop()


# --- subscriptions ---------------------------------------------------------------------------------------


def test_polls_wait_for_changes_and_acks_move_the_cursor(orders: Live, ask: Any) -> None:
    sub = ask(
        orders.url, lambda client: client.subscribe_table(table="orders", include={"after": True}, format="plain_json")
    )
    writer = threading.Timer(0.1, insert, (orders, 3))
    writer.start()
    page = ask(orders.url, lambda client: client.poll(sub.sub_id, wait_ms=60_000))
    writer.join()
    assert [change["after"]["id"] for change in page.changes] == [3]
    assert page.next_offset == page.latest_offset == sub.offset + 1
    assert ask(orders.url, lambda client: client.ack(sub.sub_id, page.next_offset)) == page.next_offset
    assert ask(orders.url, lambda client: client.poll(sub.sub_id)).changes == []


def test_snapshot_rows_are_polled_with_a_cursor(orders: Live, ask: Any) -> None:
    sub = ask(orders.url, lambda client: client.subscribe_table(table="orders", start="snapshot", format="plain_json"))
    first = ask(orders.url, lambda client: client.poll(sub.sub_id, limit=1))
    cursor = first.snapshot["cursor"]
    second = ask(orders.url, lambda client: client.poll(sub.sub_id, cursor=cursor))
    assert [change["pk"] for change in first.changes + second.changes] == [[1], [2]]
    assert second.snapshot["done"]
    assert ask(orders.url, lambda client: client.ack(sub.sub_id, cursor=second.snapshot["cursor"])) == sub.offset


def test_subscription_stream_begins_at_its_offset(orders: Live, ask: Any) -> None:
    sub = ask(orders.url, lambda client: client.subscribe_table(table="orders", format="plain_json"))
    insert(orders, 3, 4)
    found = ask(orders.url, lambda client: client.stream(sub.sub_id, control=["caught_up"]), first=3)
    assert [one.get("pk") or one["event"] for one in found] == [[3], [4], "caught_up"]
    with pytest.raises(NotFound):
        ask(orders.url, lambda client: client.stream("sub_nowhere"))


def test_subscription_behind_the_horizon_raises_offset_expired_with_its_reason(tmp_path: Path, ask: Any) -> None:
    short = Live(tmp_path / "short", log={"retention_events": 4})
    try:
        short.sql("CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL)")
        sub = short.subscribe("orders")
        insert(short, *range(9))
        short.until(lambda: short.ok("stats.snapshot")["cdc"]["earliest_offset"] == 7)
        for one in (lambda client: client.poll(sub["sub_id"]), lambda client: client.stream(sub["sub_id"])):
            with pytest.raises(OffsetExpired) as raised:
                ask(short.url, one)
            error = raised.value
            assert (error.horizon, error.latest) == (7, 10)
            assert error.extra["resnapshot_reason"] == "wal_horizon_exceeded"
            assert error.extra["snapshot_url"].startswith("/api/v1/snapshot/main/orders?version=")
    finally:
        short.stop()


# --- changes ---------------------------------------------------------------------------------------------


def test_changes_end_at_the_requested_offset(orders: Live, ask: Any) -> None:
    insert(orders, 3, 4, 5)
    found = ask(orders.url, lambda client: client.changes("main", "orders", from_offset=2, upto=5, where="id <> 5"))
    assert [change["offset"] for change in found] == [3, 4, 5]
    assert ask(orders.url, lambda client: client.changes("main", from_offset=6, upto=6)) == []


def test_changes_with_an_unknown_column_are_refused(orders: Live, ask: Any) -> None:
    with pytest.raises(InvalidRequest, match="colour"):
        ask(orders.url, lambda client: client.changes("main", "orders", columns=["colour"]))


@pytest.fixture
def steady(tmp_path: Path) -> Iterator[Live]:
    """Yield a server that keeps its port over a restart."""
    live = Live(tmp_path / "steady", serve={"http": f"127.0.0.1:{free_port()}"})
    yield live
    live.stop()


def test_feed_continues_across_a_server_restart(steady: Live, ask: Any) -> None:
    steady.sql("CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL)")
    steps: list[Callable[[], None]] = [lambda: insert(steady, 1, 2), steady.restart, lambda: insert(steady, 3, 4)]
    offsets: list[int] = []

    def take(change: dict[str, Any]) -> bool:
        offsets.append(change["offset"])
        if change["offset"] == 3:  # two of the four are there, and the stream is open
            steps[1]()
            steps[2]()
        return change["offset"] == 5

    def read(client: Client) -> None:
        for change in client.changes("main", "orders", from_offset=1):
            if take(change):
                return

    async def read_async(client: AsyncClient) -> None:
        changes = client.changes("main", "orders", from_offset=1)
        try:
            async for change in changes:
                if take(change):
                    return
        finally:
            await changes.aclose()

    steps[0]()
    ask(steady.url, read if ask is ask_sync else read_async)
    assert offsets == [2, 3, 4, 5]


# --- rows, then changes ----------------------------------------------------------------------------------


def test_follow_delivers_the_rows_then_their_changes(orders: Live, ask: Any) -> None:
    writer = threading.Thread(target=insert, args=(orders, *range(3, 9)))
    writer.start()
    rows: dict[int, float] = {}
    found = ask(orders.url, lambda client: client.follow("main", "orders"), first=8)
    writer.join()
    for word, told in found:
        assert word == "row" or not rows.keys() >= {told["after"]["id"]}, "no row comes twice"
        row = told if word == "row" else told["after"]
        rows[row["id"]] = row["total"]
    assert rows == {1: 10.5, 2: 200.0, **{id: float(id) for id in range(3, 9)}}


def test_follow_of_an_unknown_table_raises_not_found(orders: Live, ask: Any) -> None:
    with pytest.raises(NotFound):
        ask(orders.url, lambda client: client.follow("main", "nowhere"))
