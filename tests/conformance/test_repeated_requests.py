"""Requests repeated while nothing is committed get the same 304 from memory, and never after a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import httpx
import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.queries import answers
from headwater.queries.answers import Answering
from headwater.queries.dependencies.instances import Instance
from headwater.queries.etag.causality import from_header, to_header, token
from headwater.serve.http.not_modified_cache import NotModifiedCache
from headwater.sources.query import ReadResult

Start = Callable[..., Live]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets for each request whether it was answered from memory."""
    found: list[bool] = []
    answered = NotModifiedCache.answer

    async def counting(again: NotModifiedCache, scope: object, send: object) -> bool:
        found.append(await answered(again, scope, send))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(NotModifiedCache, "answer", counting)
    return found


def ask(live: Live, query: str, tag: str = "", **headers: str) -> httpx.Response:
    named = {"if-none-match": tag} if tag else {}
    return live.http.get(f"/api/v1/q/{query}?args={quote('[1]')}", headers=named | headers)


def prepared(live: Live, table: str) -> str:
    return live.ok("query.prepare", sql=f"SELECT id, status FROM {table} WHERE id >= ? ORDER BY id")["query_id"]


def ask_until_remembered(live: Live, query: str, tag: str, counted: list[bool], **headers: str) -> None:
    """Request until the 304 comes from memory: recent commits may not be in the log yet."""

    def is_remembered() -> bool:
        assert ask(live, query, tag, **headers).status_code == 304
        return counted[-1]

    wait_until(is_remembered, "a remembered 304")


def test_repeated_304_is_served_from_memory_with_the_same_headers(
    server: Live, table: str, counted: list[bool]
) -> None:
    query = prepared(server, table)
    tag = ask(server, query).headers["etag"]
    first = ask(server, query, tag)
    assert counted[-2:] == [False, False]
    ask_until_remembered(server, query, tag, counted)
    second = ask(server, query, tag)
    assert counted[-1] is True
    dated = {"date"}
    assert (first.status_code, second.status_code) == (304, 304)
    assert {name: value for name, value in first.headers.items() if name not in dated} == {
        name: value for name, value in second.headers.items() if name not in dated
    }
    assert ask(server, query, f'"other", {tag}').status_code == 304 and counted[-1] is False, "it is another request"


def test_remembered_304_is_dropped_after_any_commit(server: Live, table: str, counted: list[bool]) -> None:
    query = prepared(server, table)
    tag = ask(server, query).headers["etag"]
    for _ in range(3):
        ask_until_remembered(server, query, tag, counted)
        server.sql("CREATE TABLE IF NOT EXISTS beside(v)")
        server.sql("INSERT INTO beside VALUES (1)")
        assert ask(server, query, tag).status_code == 304 and counted[-1] is False
    server.sql(f"INSERT INTO {table} VALUES (5, 'new', 1)")
    assert ask(server, query, tag).status_code == 200


def test_remembered_304_is_dropped_after_a_commit_of_another_process(
    start: Start, tmp_path: Path, counted: list[bool]
) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT)")
    query = prepared(live, "t")
    path = next((tmp_path / "data0").rglob("main.db"))
    other = apsw.Connection(str(path))
    other.set_busy_timeout(10_000)
    try:
        for number in range(1, 30):
            tag = ask(live, query).headers["etag"]
            ask_until_remembered(live, query, tag, counted)
            other.execute("INSERT INTO t VALUES (?, 'theirs')", (number,))
            answer = ask(live, query, tag)
            assert answer.status_code == 200 and len(answer.json()["data"]["rows"]) == number
    finally:
        other.close()


def test_remembered_304_is_dropped_after_a_view_is_redefined(server: Live, table: str, counted: list[bool]) -> None:
    server.sql(f"CREATE VIEW v_{table} AS SELECT id, status FROM {table}")
    query = prepared(server, f"v_{table}")
    tag = ask(server, query).headers["etag"]
    ask_until_remembered(server, query, tag, counted)
    server.sql(f"DROP VIEW v_{table}")
    server.sql(f"CREATE VIEW v_{table} AS SELECT id + 1 AS id, status FROM {table}")
    assert ask(server, query, tag).status_code == 200


def test_remembered_304_without_a_valid_credential_returns_401(start: Start, counted: list[bool]) -> None:
    live = start(serve={"token": "one two three"})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT)")
    query = prepared(live, "t")
    tag = ask(live, query).headers["etag"]
    ask_until_remembered(live, query, tag, counted)
    with httpx.Client(base_url=live.url) as stranger:
        path = f"/api/v1/q/{query}?args={quote('[1]')}"
        assert stranger.get(path, headers={"if-none-match": tag}).status_code == 401
        assert stranger.get(path, headers={"if-none-match": tag, "x-api-key": "one two"}).status_code == 401


def test_oldest_remembered_304_is_evicted_beyond_the_limit(
    server: Live, table: str, counted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember = NotModifiedCache.remember

    def limited(self: NotModifiedCache, *args: Any) -> None:
        monkeypatch.setattr(self._known, "_most", 3)
        remember(self, *args)

    monkeypatch.setattr(NotModifiedCache, "remember", limited)
    query = prepared(server, table)
    tag = ask(server, query).headers["etag"]
    for number in range(10):
        assert ask(server, query, tag, **{"x-number": str(number)}).status_code == 304
    ask_until_remembered(server, query, tag, counted, **{"x-number": "9"})
    assert ask(server, query, tag, **{"x-number": "2"}).status_code == 304 and not counted[-1]


# --- beside slow queries ---------------------------------------------------------------------------------

SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400000) SELECT max(i), {} FROM n"


def test_request_with_a_causality_floor_does_not_share_an_earlier_execution(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "FLOOR_SECONDS", PATIENCE)
    live = start()
    live.sql("CREATE TABLE t(v INTEGER)")
    live.sql("INSERT INTO t VALUES (0)")
    query = live.ok("query.prepare", sql=SLOW.format("(SELECT max(v) FROM t)"))["query_id"]
    seen = live.http.get(f"/api/v1/q/{query}").headers["x-headwater-causality"]
    (dep,) = from_header(seen).deps
    floor = to_header(token("main", {"t": dep.v + 1}))
    headers = [{}, {"x-headwater-causality": floor}] * 4
    with ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(live.http.get, f"/api/v1/q/{query}", headers=each) for each in headers]
        live.until(lambda: live.metric("headwater_query_executed_total") >= 2)
        live.sql("UPDATE t SET v = 1")
        found = [each.result() for each in asked]
    for sent, answer in zip(headers, found, strict=True):
        assert answer.status_code == 200
        if sent:
            assert answer.json()["data"]["rows"][0][1]["v"] == 1


def test_304_is_answered_while_slow_queries_run(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT)")
    live.sql("CREATE TABLE beside(v)")
    query, slow = prepared(live, "t"), live.ok("query.prepare", sql="SELECT v + ? FROM beside")["query_id"]
    tag = ask(live, query).headers["etag"]
    go, read = threading.Event(), Answering._read

    def slowly(answering: Answering, instance: Instance) -> ReadResult | None:
        if instance.prepared.id == slow:
            go.wait(PATIENCE)
        return read(answering, instance)

    monkeypatch.setattr(Answering, "_read", slowly)
    other = apsw.Connection(str(next((tmp_path / "data0").rglob("main.db"))))
    other.set_busy_timeout(10_000)
    with ThreadPoolExecutor(20) as threads:
        running = [threads.submit(live.http.get, f"/api/v1/q/{slow}?args=[{n}]") for n in range(20)]
        try:
            for number in range(5):
                assert ask(live, query, tag).status_code == 304
                other.execute("INSERT INTO beside VALUES (?)", (number,))
            assert not any(each.done() for each in running)
        finally:
            go.set()
        assert {each.result().status_code for each in running} == {200}
    other.close()
