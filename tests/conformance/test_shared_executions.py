"""What answering.py counts and tells of an execution: shared, and why it has no tag."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
from tests.conformance.live_server import Live

SLOW = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 3000000) SELECT max(n) FROM c"


def prepared(server: Live, sql: str) -> str:
    return "/api/v1/q/" + server.ok("query.prepare", sql=sql)["query_id"]


def test_shared_execution_is_marked_as_collapsed(server: Live) -> None:
    path = prepared(server, SLOW)
    with ThreadPoolExecutor(4) as pool:
        found = sorted(pool.map(lambda _: httpx.get(server.url + path).headers["cache-status"], range(4)))
    assert found == ["headwater; fwd=miss", *["headwater; fwd=miss; collapsed"] * 3]


def test_metrics_count_the_reason_for_an_answer_without_a_tag(server: Live) -> None:
    name = "headwater_query_uncacheable_reasons_total"
    before = server.metric(name, reason="volatile_function")
    server.http.get(prepared(server, "SELECT random()"))
    assert server.metric(name, reason="volatile_function") == before + 1
