"""GET of a prepared query and the query methods, as used by other people's HTTP clients (WIRE §6, §11)."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pyarrow as pa
import pytest
from tests.conformance.live_server import Live

Start = Callable[..., Live]


@pytest.fixture
def query(server: Live, table: str) -> str:
    """Insert three rows and prepare a query of the rows with a status; return its id."""
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 2.5), (2, 'shut', 1.0), (3, 'open', NULL)")
    return server.ok("query.prepare", sql=f"SELECT id, total FROM {table} WHERE status = ? ORDER BY id")["query_id"]


def get(server: Live, query: str, *args: Any, method: str = "GET", **headers: str) -> httpx.Response:
    path = f"/api/v1/q/{query}" + (f"?args={quote(json.dumps(args))}" if args else "")
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.request(method, path, headers=named)


def tag_of(server: Live, query: str, *args: Any, **headers: str) -> str:
    return get(server, query, *args, **headers).headers["etag"]


# --- tags and conditions ---------------------------------------------------------------------------------


def test_answer_has_a_tag_and_its_304_repeats_the_same_headers(server: Live, query: str) -> None:
    full = get(server, query, "open")
    assert full.status_code == 200 and full.json()["etag"] == full.headers["etag"]
    assert full.json()["data"]["rows"] == [
        [{"t": "i64", "v": 1}, {"t": "f64", "v": 2.5}],
        [{"t": "i64", "v": 3}, {"t": "null"}],
    ]
    same = get(server, query, "open", if_none_match=full.headers["etag"])
    assert (same.status_code, same.content) == (304, b"")
    for name in ("etag", "cache-control", "vary", "x-headwater-causality", "cache-groups"):
        assert same.headers[name] == full.headers[name]


def test_write_outside_the_answer_keeps_the_tag_and_write_inside_changes_it(
    server: Live, query: str, table: str
) -> None:
    tag = tag_of(server, query, "open")
    for outside in (f"INSERT INTO {table} VALUES (4, 'shut', 1)", f"UPDATE {table} SET total = 9 WHERE id = 2"):
        server.sql(outside)
        assert get(server, query, "open", if_none_match=tag).status_code == 304
    for inside in (
        f"UPDATE {table} SET total = 9 WHERE id = 1",
        f"UPDATE {table} SET status = 'open' WHERE id = 2",
        f"DELETE FROM {table} WHERE id = 3",
    ):
        server.sql(inside)
        fresh = get(server, query, "open", if_none_match=tag)
        assert fresh.status_code == 200 and fresh.headers["etag"] != tag
        tag = fresh.headers["etag"]


@pytest.mark.parametrize("form", ["{}", "W/{}", '"x", {}', '"x.1" ,W/{} , "y"', "gzip"])
def test_tag_in_a_list_weak_or_changed_by_a_proxy_gives_304(server: Live, query: str, form: str) -> None:
    tag = tag_of(server, query, "open")
    sent = tag[:-1] + '-gzip"' if form == "gzip" else form.format(tag)
    assert get(server, query, "open", if_none_match=sent).status_code == 304


@pytest.mark.parametrize(
    "tag",
    ['"x"', '"AAAAAAAAAAAAAAAA.1"', '""', '"row:abc"', "nonsense", '"AAAAAAAAAAAAAAAA.ffffffffffffff"', 'W/"', ","],
)
def test_forged_tag_returns_200(server: Live, query: str, tag: str) -> None:
    assert get(server, query, "open", if_none_match=tag).status_code == 200


def test_tag_of_another_query_arguments_or_format_returns_200(server: Live, query: str, table: str) -> None:
    tag = tag_of(server, query, "open")
    other = server.ok("query.prepare", sql=f"SELECT id, total FROM {table} WHERE status = ?")["query_id"]
    assert get(server, query, "shut", if_none_match=tag).status_code == 200
    assert get(server, other, "open", if_none_match=tag).status_code == 200
    assert get(server, query, "open", if_none_match=tag, accept="text/csv").status_code == 200
    prefix, offset = tag.strip('"').split(".")
    ahead = f'"{prefix}.{int(offset, 16) + 1_000_000:x}"'
    assert get(server, query, "open", if_none_match=ahead).status_code == 200, "of the future"


def test_if_none_match_star_returns_304_and_a_stale_if_match_returns_412(server: Live, query: str) -> None:
    tag = tag_of(server, query, "open")
    star = get(server, query, "open", if_none_match="*")
    assert star.status_code == 304 and star.headers["etag"]
    assert get(server, query, "open", if_match=tag).status_code == 200
    assert get(server, query, "open", if_match="*").status_code == 200
    stale = get(server, query, "open", if_match='"AAAAAAAAAAAAAAAA.1"')
    assert stale.status_code == 412 and stale.json()["code"] == "precondition_failed"
    assert get(server, query, "open", if_match=f"W/{tag}").status_code == 412, "strong comparison"


def test_head_returns_the_headers_of_get(server: Live, query: str) -> None:
    full, head = get(server, query, "open"), get(server, query, "open", method="HEAD")
    assert head.content == b"" and head.status_code == 200
    for name in ("etag", "content-length", "content-type", "vary"):
        assert head.headers[name] == full.headers[name]
    tag = full.headers["etag"]
    assert get(server, query, "open", method="HEAD", if_none_match=tag).status_code == 304


def test_rpc_and_get_return_the_same_tag_and_data(server: Live, query: str) -> None:
    full = get(server, query, "open")
    told = server.ok("query.execute_prepared", query_id=query, args=["open"])
    assert told["etag"] == full.headers["etag"] and told["data"] == full.json()["data"]
    for form in (told["etag"], f"W/{told['etag']}", told["etag"].strip('"')):
        again = server.ok("query.execute_prepared", query_id=query, args=["open"], if_none_match=form)
        assert again["not_modified"] and "data" not in again


def test_query_tag_is_valid_after_a_restart_until_its_answer_changes(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    live.sql("INSERT INTO t VALUES (1, 1), (2, 2)")
    query = live.ok("query.prepare", sql="SELECT v FROM t WHERE id = ?")["query_id"]
    tag = tag_of(live, query, 1)
    live.restart()
    assert get(live, query, 1, if_none_match=tag).status_code == 304
    live.sql("UPDATE t SET v = 3 WHERE id = 2")
    live.restart()
    assert get(live, query, 1, if_none_match=tag).status_code == 304
    live.sql("UPDATE t SET v = 3 WHERE id = 1")
    live.restart()
    assert get(live, query, 1, if_none_match=tag).status_code == 200


# --- forms -----------------------------------------------------------------------------------------------


def test_each_of_the_five_answer_formats_has_its_own_tag(server: Live, query: str) -> None:
    arrow = "application/vnd.apache.arrow.stream"
    kinds = ["application/json", "application/vnd.headwater.objects+json", "application/vnd.headwater.plain+json"]
    found = {kind: get(server, query, "open", accept=kind) for kind in (*kinds, "text/csv", arrow)}
    assert len({answer.headers["etag"] for answer in found.values()}) == 5
    assert all(answer.headers["content-type"] == kind for kind, answer in found.items())
    assert found[kinds[1]].json()["data"]["rows"][0] == {"id": {"t": "i64", "v": 1}, "total": {"t": "f64", "v": 2.5}}
    assert found[kinds[2]].json()["data"]["rows"] == [[1, 2.5], [3, None]]
    assert list(csv.reader(io.StringIO(found["text/csv"].text))) == [["id", "total"], ["1", "2.5"], ["3", ""]]
    table = pa.ipc.open_stream(found[arrow].content).read_all()
    assert table.select(["id", "total"]).to_pylist() == [{"id": 1, "total": 2.5}, {"id": 3, "total": None}]


def test_duplicate_column_names_are_refused_as_objects_and_numbered_in_arrow(server: Live) -> None:
    query = server.ok("query.prepare", sql="SELECT 1 AS a, 2 AS a")["query_id"]
    assert get(server, query, accept="application/vnd.headwater.objects+json").status_code == 400
    arrow = get(server, query, accept="application/vnd.apache.arrow.stream").content
    assert pa.ipc.open_stream(arrow).read_all().column_names[:2] == ["a", "a_2"]


def test_named_arguments_are_accepted_as_plain_values_or_typed_literals(server: Live, query: str, table: str) -> None:
    named = server.ok("query.prepare", sql=f"SELECT id FROM {table} WHERE status = :s AND id > @n")["query_id"]
    bodies = []
    for args in ({"s": "open", "n": 1}, {":s": {"t": "str", "v": "open"}, "@n": {"t": "i64", "v": 1}}):
        bodies.append(server.http.get(f"/api/v1/q/{named}?args={quote(json.dumps(args))}").json())
    assert bodies[0] == bodies[1] and len(bodies[0]["data"]["rows"]) == 1
    one, other = (get(server, query, arg).headers["etag"] for arg in ({"t": "str", "v": "open"}, "open"))
    assert one == other


def test_json_queries_that_differ_only_in_field_order_have_the_same_id(server: Live, table: str, query: str) -> None:
    select = {
        "projection": [{"expr": {"col": "id"}}],
        "from": [{"table": table}],
        "where": {"op": "eq", "a": {"col": "status"}, "b": {"param": 0}},
    }
    turned = dict(reversed(list(select.items())))
    one, other = (server.ok("query.prepare", query={"body": {"select": each}}) for each in (select, turned))
    assert one == other and one["canonical"]["body"]["select"]["from"]
    found = server.ok("query.execute_prepared", query_id=one["query_id"], args=["open"], result_format="plain_json")
    assert found["data"]["rows"] == [[1], [3]]
    assert server.ok("query.select", query={"body": {"select": select}}, args=["open"])["etag"] == tag_of(
        server, one["query_id"], "open"
    )


# --- what is not kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sql", ["SELECT random()", "SELECT date('now')", "SELECT * FROM sqlite_schema"])
def test_volatile_query_has_no_tag(server: Live, sql: str) -> None:
    query = server.ok("query.prepare", sql=sql)
    assert query["cacheable"] is False
    answer = get(server, query["query_id"], if_none_match="*")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    assert "etag" not in answer.headers and server.ok("query.explain", sql=sql)["volatile"]


def test_query_in_a_transaction_reads_its_writes_and_has_no_tag(server: Live, table: str) -> None:
    tx = server.ok("tx.begin")["tx"]
    server.sql(f"INSERT INTO {table} VALUES (9, 'mine', 1)", tx=tx)
    asked = {"sql": f"SELECT id FROM {table}", "result_format": "plain_json"}
    inside = server.ok("query.select", **asked, tx=tx)
    assert inside["data"]["rows"] == [[9]] and inside["etag"] is None
    assert server.error("query.select", sql=f"DELETE FROM {table}", tx=tx)["code"] == "invalid_request"
    server.ok("tx.rollback", tx=tx)
    assert server.ok("query.select", **asked)["data"]["rows"] == []


# --- causality -------------------------------------------------------------------------------------------


def test_answer_with_the_causality_token_of_a_write_includes_that_write(server: Live, table: str, query: str) -> None:
    result = server.ok("sql.exec", sql=f"INSERT INTO {table} VALUES (7, 'open', 7)")["result"]
    (dep,) = result["causality"]["deps"]
    told = server.ok("query.execute_prepared", query_id=query, args=["open"], min_causality=result["causality"])
    assert told["causality"]["deps"] == [dep] == told["deps"]["tables"]
    token = base64.urlsafe_b64encode(json.dumps(result["causality"]).encode()).decode()
    answer = get(server, query, "open", x_headwater_causality=token)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    assert get(server, query, "open", x_headwater_causality="?").status_code == 400
    other = {"format": "vector_clock_v2", "deps": [{"table": "main.elsewhere", "v": 10**9}]}
    assert server.ok("query.execute_prepared", query_id=query, args=["open"], min_causality=other)


@pytest.mark.slow
def test_query_with_an_unreached_causality_floor_is_refused(server: Live, table: str, query: str) -> None:
    ahead = {"format": "vector_clock_v2", "deps": [{"table": f"main.{table}", "v": 10**9}]}
    error = server.error("query.execute_prepared", query_id=query, args=["open"], min_causality=ahead)
    assert error["code"] == "precondition_failed"


def test_tag_with_a_causality_floor_gives_304_only_when_the_floor_is_reached(
    server: Live, table: str, query: str
) -> None:
    tag = get(server, query, "open").headers["etag"]
    written = server.ok("sql.exec", sql=f"INSERT INTO {table} VALUES (8, 'shut', 8)")["result"]["causality"]
    reached = base64.urlsafe_b64encode(json.dumps(written).encode()).decode()
    assert get(server, query, "open", if_none_match=tag, x_headwater_causality=reached).status_code == 304
    (dep,) = written["deps"]
    ahead = {**written, "deps": [{**dep, "v": dep["v"] + 10**9}]}
    unreached = base64.urlsafe_b64encode(json.dumps(ahead).encode()).decode()
    refused = get(server, query, "open", if_none_match=tag, x_headwater_causality=unreached)
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    written = server.ok("sql.exec", sql=f"INSERT INTO {table} VALUES (9, 'open', 9)")["result"]["causality"]
    reached = base64.urlsafe_b64encode(json.dumps(written).encode()).decode()
    answer = get(server, query, "open", if_none_match=tag, x_headwater_causality=reached)
    assert answer.status_code == 200 and answer.headers["etag"] != tag


def test_causality_floor_in_the_older_format_is_enforced(server: Live, table: str, query: str) -> None:
    written = server.ok("sql.exec", sql=f"INSERT INTO {table} VALUES (8, 'open', 8)")["result"]["causality"]
    older = {**written, "format": "etag_chain_v1"}
    told = server.ok("query.execute_prepared", query_id=query, args=["open"], min_causality=older)
    assert told["causality"]["deps"] == written["deps"]
    older["deps"] = [{**dep, "v": dep["v"] + 10**9} for dep in written["deps"]]
    error = server.error("query.execute_prepared", query_id=query, args=["open"], min_causality=older)
    assert error["code"] == "precondition_failed"


def test_capabilities_report_causality_and_writes_return_it(server: Live, table: str) -> None:
    assert server.ok("system.capabilities")["causal_etags"] is True
    (dep,) = server.ok("sql.exec", sql=f"INSERT INTO {table} VALUES (1, 'x', 1)")["result"]["causality"]["deps"]
    assert dep["table"] == f"main.{table}" and dep["v"] > 0


# --- patches ---------------------------------------------------------------------------------------------


def test_request_that_accepts_patches_receives_226_with_the_changed_rows(server: Live, table: str, query: str) -> None:
    first = get(server, query, "open", a_im="headwater-rows")
    assert first.status_code == 200 and first.content == get(server, query, "open").content
    tag = first.headers["etag"]
    assert get(server, query, "open", a_im="headwater-rows", if_none_match=tag).status_code == 304
    server.sql(f"UPDATE {table} SET total = 8 WHERE id = 1")
    patch = get(server, query, "open", a_im="headwater-rows", if_none_match=tag)
    assert patch.status_code == 226 and patch.headers["im"] == "headwater-rows"
    assert patch.headers["cache-control"] == "no-store" and patch.headers["etag"] != tag
    body = patch.json()
    assert body["base_etag"] == tag and [row["pk"] for row in body["updated"]] == [[{"t": "i64", "v": 1}]]
    assert not body["added"] and not body["removed"] and body["result_hash"].startswith("sha256:")
    told = server.ok("query.patch", query_id=query, args=["open"], base_etag=tag)
    assert told["data"]["updated"] == body["updated"] and told["etag"] == patch.headers["etag"]
    assert server.ok("query.patch", query_id=query, args=["open"], base_etag=told["etag"])["not_modified"]
    unknown = get(server, query, "open", a_im="headwater-rows", if_none_match='"AAAAAAAAAAAAAAAA.1"')
    assert unknown.status_code == 200


def test_patch_of_an_answer_without_a_settled_offset_is_unavailable(
    server: Live, table: str, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = server.api.asking().answering("main").database.source
    answer = source.answer

    def unsettled(*args: Any, **options: Any) -> Any:
        found = answer(*args, **options)
        return None if found is None else msgspec.structs.replace(found, settled=False)

    with monkeypatch.context() as behind:
        behind.setattr(source, "answer", unsettled)
        assert server.error("query.patch", query_id=query, args=["open"])["code"] == "unavailable"
    assert server.ok("query.patch", query_id=query, args=["open"])["etag"]
    assert server.error("query.patch", sql=f"SELECT random() FROM {table}")["code"] == "not_supported"


# --- many at once ----------------------------------------------------------------------------------------


def test_concurrent_requests_for_the_same_query_share_executions(start: Start) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    live.sql(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 3000) INSERT INTO t SELECT i, i FROM n"
    )
    query = live.ok("query.prepare", sql="SELECT count(*) FROM t a JOIN t b ON a.v + b.v = 3000")["query_id"]
    before = live.metric("headwater_query_executed_total")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: get(live, query).json(), range(24)))
    assert all(each["data"] == found[0]["data"] for each in found)
    runs = live.metric("headwater_query_executed_total") - before
    assert runs + live.metric("headwater_query_shared_total") == 24 and runs < 24


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "SELECT",
        "SELECT 1; SELECT 2",
        "DELETE FROM t",
        "PRAGMA user_version",
        "SELECT * FROM nowhere",
        "SELECT nothing",
    ]
    + ["BEGIN", "SELECT '\0'", "CREATE TABLE x(a)", "EXPLAIN SELECT 1"],
)
def test_statement_that_is_no_query_is_refused(server: Live, sql: str) -> None:
    for method in ("query.prepare", "query.select", "query.explain"):
        assert server.error(method, sql=sql)["code"] == "invalid_request"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"sql": "SELECT 1", "query": {}},
        {"query": []},
        {"query": {"body": {}}},
        {"sql": "SELECT 1", "db": "nowhere"},
        {"sql": "SELECT 1", "result_format": "xml"},
        {"sql": "SELECT 1", "result_format": "skeinpack_v1"},
        {"sql": "SELECT 1", "args": [1]},
        {"sql": "SELECT ?", "args": []},
        {"sql": "SELECT ?", "args": [{"t": "unavailable"}]},
        {"sql": "SELECT ?", "args": [{"t": "i64", "v": "x"}]},
        {"sql": "SELECT 1", "cache": {"mode": "weird"}},
        {"sql": "SELECT 1", "cache": {"min_causality": {"format": "x"}}},
        {"sql": "SELECT 1", "cache": {"min_causality": 7}},
        {"sql": "SELECT 1", "as_of": {"t": "i64", "v": 1}},
        {"sql": "SELECT 1", "strange": 1},
    ],
)
def test_invalid_query_parameters_are_refused_with_a_message(server: Live, params: dict[str, Any]) -> None:
    error = server.error("query.select", **params)
    assert error["code"] in ("invalid_request", "not_supported", "not_found") and error["message"]


def test_request_without_a_query_or_with_two_gets_an_error_that_says_so(server: Live) -> None:
    assert "neither `sql` nor `query`" in server.error("query.select")["message"]
    assert "both `sql` and `query`" in server.error("query.select", sql="SELECT 1", query={})["message"]


@pytest.mark.parametrize("args", ["{", "7", '"x"', "null", "[1,2]", "[]", '{"x":1}', "[" * 5000, quote("[1]") * 4000])
def test_invalid_query_arguments_are_refused(server: Live, query: str, args: str) -> None:
    response = server.http.get(f"/api/v1/q/{query}?args={quote(args)}")
    assert response.status_code in (400, 414, 431) and response.json()["code"]


def test_unknown_query_returns_404_and_unknown_parameter_returns_400(server: Live, query: str) -> None:
    unknown = get(server, "q_nothing")
    assert unknown.status_code == 404 and unknown.json()["title"] == "unknown query_id"
    assert server.http.get(f"/api/v1/q/{query}?arg=[1]").status_code == 400
    assert server.error("query.execute_prepared", query_id="q_nothing")["code"] == "not_found"
    refused = server.http.post(f"/api/v1/q/{query}", json={})
    assert refused.status_code == 405 and refused.headers["allow"] == "GET, HEAD"
