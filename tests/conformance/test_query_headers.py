"""Headers of GET /api/v1/q besides the tag: truncation, cache status, causality of tables (RFC 9211, RFC 9875)."""

from __future__ import annotations

import httpx
import pyarrow as pa
import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.config.settings import QueriesConfig
from headwater.queries.etag.causality import from_header

ARROW = "application/vnd.apache.arrow.stream"
COUNTING = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {}) SELECT n FROM c"


def prepared(server: Live, sql: str) -> str:
    return "/api/v1/q/" + server.ok("query.prepare", sql=sql)["query_id"]


def status(server: Live, path: str, **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = server.http.get(path, headers=named)
    return found.status_code, found.headers["cache-status"]


@pytest.mark.parametrize("accept", ["application/json", "application/vnd.headwater.plain+json", "text/csv", ARROW])
def test_truncated_answer_is_marked_as_truncated_in_every_format(server: Live, accept: str) -> None:
    whole = server.http.get(prepared(server, COUNTING.format(100_000)), headers={"accept": accept})
    assert "x-headwater-truncated" not in whole.headers
    cut = server.http.get(prepared(server, COUNTING.format(100_001)), headers={"accept": accept})
    assert (cut.status_code, cut.headers["x-headwater-truncated"]) == (200, "true")
    if accept == ARROW:
        reader = pa.ipc.open_stream(cut.content)
        assert reader.schema.metadata[b"truncated"] == b"true" and reader.read_all().num_rows == 100_000
        assert b"truncated" not in (pa.ipc.open_stream(whole.content).schema.metadata or {})


def test_accept_weights_decide_the_format(server: Live, table: str) -> None:
    path = prepared(server, f"SELECT id FROM {table}")
    csv = server.http.get(path, headers={"accept": "text/csv, application/json;q=0.1"})
    assert csv.headers["content-type"] == "text/csv"
    lines = httpx.Headers([("accept", "application/json;q=0.1"), ("accept", "text/csv")])
    assert server.http.get(path, headers=lines).headers["content-type"] == "text/csv"


def test_tag_changed_by_a_proxy_fails_if_match(server: Live, table: str) -> None:
    path = prepared(server, f"SELECT id FROM {table} ORDER BY id")
    tag = server.http.get(path).headers["etag"]
    encoded = tag[:-1] + '-gzip"'
    assert server.http.get(path, headers={"if-match": encoded}).status_code == 412
    assert server.http.get(path, headers={"if-match": f"{encoded}, {tag}"}).status_code == 200
    assert server.http.get(path, headers={"if-none-match": encoded}).status_code == 304


def test_cache_status_reports_a_hit_or_the_reason_for_an_execution(server: Live, table: str) -> None:
    path = prepared(server, f"SELECT id FROM {table} ORDER BY id")
    assert status(server, path) == (200, "headwater; fwd=miss")
    tag = server.http.get(path).headers["etag"]
    for _ in range(2):  # the second is remembered
        assert status(server, path, if_none_match=tag) == (304, "headwater; hit")
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 1)")
    assert status(server, path, if_none_match=tag) == (200, "headwater; fwd=stale")
    assert status(server, prepared(server, "SELECT random()")) == (200, "headwater; fwd=bypass")
    server.http.get(path, headers={"a-im": "headwater-rows"})
    tag = server.http.get(path, headers={"a-im": "headwater-rows"}).headers["etag"]
    server.sql(f"INSERT INTO {table} VALUES (2, 'open', 1)")
    patched = status(server, path, if_none_match=tag, a_im="headwater-rows")
    assert patched == (226, "headwater; fwd=stale")


def test_headers_of_a_query_over_60_tables_stay_small_and_keep_the_causality_floor(server: Live) -> None:
    names = [f"wide_{'x' * 60}_{number}" for number in range(60)]
    source = server.app.database("main").source
    made = source.write(
        lambda session: [session.execute(f"CREATE TABLE {name}(id INTEGER PRIMARY KEY)") for name in names]
    )
    made.result(PATIENCE)
    path = prepared(server, " UNION ALL ".join(f"SELECT id FROM {name}" for name in names))
    found = server.http.get(path)
    assert found.headers["cache-groups"] == '"main"'
    assert sum(len(name) + len(value) + 4 for name, value in found.headers.multi_items()) < 4_096
    seen = found.headers["x-headwater-causality"]
    (dep,) = from_header(seen).deps
    told = server.ok("query.execute_prepared", query_id=path.rpartition("/")[2])["causality"]["deps"]
    assert len(told) == 60 and dep.table == "main.*" and dep.v == max(one["v"] for one in told)
    floored = {"x-headwater-causality": seen}
    few = prepared(server, f"SELECT id FROM {names[0]}")
    assert server.http.get(path, headers=floored).status_code == 200
    assert server.http.get(few, headers=floored).status_code == 200, "another table, changed before"
    ahead = {"format": "vector_clock_v2", "deps": [{"table": "main.*", "v": 99_999_999}]}
    query = few.rpartition("/")[2]
    refused = server.error("query.execute_prepared", query_id=query, min_causality=ahead)
    assert refused["code"] == "precondition_failed"


def test_no_answer_is_cacheable_without_revalidation(server: Live, table: str) -> None:
    """F150: no answer has `s-maxage`, and no setting adds it: a cache revalidates before each use."""
    path = prepared(server, f"SELECT id FROM {table}")
    seen = server.http.get(path).headers["x-headwater-causality"]
    for headers in ({}, {"x-headwater-causality": seen}, {"cache-control": "max-stale=60"}):
        assert server.http.get(path, headers=headers).headers["cache-control"] in ("private, no-cache", "no-store")
    with pytest.raises(TypeError):
        QueriesConfig(s_maxage=1)  # type: ignore[call-arg]
