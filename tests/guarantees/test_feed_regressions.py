"""Failures that the nemesis of feeds found, each as a small test."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.guarantees.raw_streams import HttpStream, Said, WebSocket
from tests.guarantees.server_process import Asking, ServerProcess

from headwater.errors import InvalidRequest, Unavailable
from headwater.feeds.deliver.start_position import check_reached
from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.sources.sqlite.capture.capture_table import Grouping


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("data"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def ask(server: ServerProcess) -> Iterator[Asking]:
    ask = Asking(server)
    ask("sql.exec", sql="CREATE TABLE IF NOT EXISTS item(id INTEGER PRIMARY KEY)")
    ask("sql.exec", sql="INSERT INTO item(id) VALUES (NULL), (NULL)")
    yield ask
    ask.close()


def rows_of(stream: HttpStream | WebSocket, word: str) -> int:
    """Return how many rows of a snapshot arrive before `word`."""
    heard: list[Said] = []
    while not any(said.word == word for said in heard):
        heard += stream.read(65_536) or []
    stream.close()
    return sum(bool(said.body.get("snapshot")) for said in heard)


def snapshot(ask: Asking) -> dict[str, Any]:
    found: dict[str, Any] = ask("cdc.subscribe_table", table="item", start="snapshot")
    return found


def test_snapshot_page_is_delivered_again_until_the_reader_polls_past_it(ask: Asking) -> None:
    sub = snapshot(ask)["sub_id"]
    lost = ask("cdc.poll", sub_id=sub)
    again = ask("cdc.poll", sub_id=sub)
    assert again["snapshot"]["done"] and [e["pk"] for e in again["events"]] == [e["pk"] for e in lost["events"]] != []
    ask("cdc.poll", sub_id=sub, from_offset=again["next_offset"])
    assert "snapshot" not in ask("cdc.poll", sub_id=sub)


def test_acknowledged_snapshot_page_is_not_delivered_again(ask: Asking) -> None:
    for acked in ("next_offset", "cursor"):
        sub = snapshot(ask)["sub_id"]
        page = ask("cdc.poll", sub_id=sub)
        what = {"cursor": page["snapshot"]["cursor"]} if acked == "cursor" else {"offset": page["next_offset"]}
        ask("cdc.ack", sub_id=sub, **what)
        assert "snapshot" not in ask("cdc.poll", sub_id=sub)


def test_snapshot_rows_of_a_disconnected_stream_are_delivered_again(server: ServerProcess, ask: Asking) -> None:
    sub = snapshot(ask)
    number = rows_of(WebSocket(server.url, sub["ws_url"], {}), "snapshot_end")
    assert number > 0
    assert rows_of(HttpStream(server.url, sub["sse_url"], {}, sse=True), "snapshot_end") == number


def test_ack_frame_with_a_negative_offset_closes_the_websocket(server: ServerProcess, ask: Asking) -> None:
    sub = ask("cdc.subscribe_table", table="item")
    stream = WebSocket(server.url, sub["ws_url"], {})
    stream.say({"ack": -1})
    while stream.read(65_536) is not None:
        pass
    stream.close()


def test_cursor_beyond_an_unsettled_log_is_unavailable_instead_of_invalid() -> None:
    log: Any = SimpleNamespace(latest=6)
    check_reached(log, 6, "offset", False)
    with pytest.raises(Unavailable):
        check_reached(log, 7, "offset", False)
    with pytest.raises(InvalidRequest):
        check_reached(log, 7, "offset", True)


def test_parts_of_a_transaction_cut_by_pages_have_the_same_commit_time() -> None:
    """Otherwise the log, which cuts parts again, has another time than live readers received."""
    table = Table("t", (Column("x", "i64", ""),), ())
    grouping = Grouping(lambda: None)
    pages = [[(n, Change(Op.INSERT, table, after=(n,))) for n in page] for page in (range(1, 4), range(4, 6))]
    times = (100_007, 200_008)
    found = [part for us, page in zip(times, pages, strict=True) for part in grouping.parts(page, [], 5, us)]
    assert [(part.id, part.start, part.last, part.commit_ts_us) for part in found] == [
        ("1", 0, False, 100_007),
        ("1", 3, True, 100_007),
    ]
