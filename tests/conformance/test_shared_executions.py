"""Shared executions are counted and marked, and answers without a tag report the reason."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.queries.answers import Answering
from headwater.queries.dependencies.instances import Instance
from headwater.sources.query import ReadResult


def prepared(server: Live, sql: str) -> str:
    return "/api/v1/q/" + server.ok("query.prepare", sql=sql)["query_id"]


def test_shared_execution_is_marked_as_collapsed(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = prepared(server, "SELECT 1"), "headwater_query_shared_total"
    go, read, before = threading.Event(), Answering._read, server.metric(name)

    def held(answering: Answering, instance: Instance) -> ReadResult | None:
        assert go.wait(PATIENCE)
        return read(answering, instance)

    monkeypatch.setattr(Answering, "_read", held)
    with ThreadPoolExecutor(4) as pool:
        try:
            asked = [pool.submit(httpx.get, server.url + path) for _ in range(4)]
            server.until(lambda: server.metric(name) == before + 3)
        finally:
            go.set()
        found = sorted(each.result().headers["cache-status"] for each in asked)
    assert found == ["headwater; fwd=miss", *["headwater; fwd=miss; collapsed"] * 3]


def test_metrics_count_the_reason_for_an_answer_without_a_tag(server: Live) -> None:
    name = "headwater_query_uncacheable_reasons_total"
    before = server.metric(name, reason="volatile_function")
    server.http.get(prepared(server, "SELECT random()"))
    assert server.metric(name, reason="volatile_function") == before + 1
