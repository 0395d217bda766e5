"""Limits over HTTP and gRPC: rates of callers, and quotas of databases."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import calling
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from headwater.config import DatabaseConfig, QuotasConfig, Secret
from headwater.serve.grpc.messages import message

pytestmark = pytest.mark.slow

SLOW = 0.001  # requests per second: no token comes back while a test runs
PING = {"id": 7, "method": "system.ping"}
ADMIN = {"authorization": "Bearer admin"}
RANGES = "/headwater.v1.PullService/ListRanges"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@contextlib.contextmanager
def opened(folder: Path, *, serve: Any = None, **settings: Any) -> Iterator[Client]:
    with Whole(folder, **settings) as databases, serving(databases, folder=folder, **(serve or {})) as client:
        yield client


def is_refused(response: httpx.Response) -> dict[str, Any]:
    """Return the problem response, which has the wait time and a hint."""
    assert response.status_code == 429, response.text
    body = response.json()
    error = body.get("error", {**body, "details": body})
    assert error["code"] == "limit_exceeded" and error["details"]["hint"] and error["details"]["retryable"]
    after = error["details"]["retry_after_ms"]
    assert int(response.headers["retry-after"]) == -(-after // 1000)
    return dict(error)


# --- callers -----------------------------------------------------------------------------------------------------


def test_default_settings_do_not_limit_requests() -> None:
    with serving(NoDatabases()) as client:
        for _ in range(300):
            client.ok("system.ping")


def test_rate_limit_applies_to_every_route_but_health() -> None:
    with serving(NoDatabases(), rate=SLOW, burst=3) as client:
        for _ in range(3):
            client.ok("system.ping")
        for method, path, body in [
            ("POST", "/api/v1/rpc", PING),
            ("POST", "/api/v1/sql/exec", {"sql": "SELECT 1"}),
            ("GET", "/", None),
            ("GET", "/metrics", None),
            ("GET", "/nowhere", None),
            ("GET", "/api/v1/changes/main/t", None),
            ("GET", "/api/v1/q/q_1", None),
            ("PUT", "/api/v1/t/main/t/1", {}),
        ]:
            is_refused(client.http.request(method, path, json=body))
        for path in ("/healthz", "/readyz"):
            assert client.http.get(path).status_code in (200, 503)


def test_spent_request_tokens_are_refilled_with_time() -> None:
    with serving(NoDatabases(), rate=1000.0, burst=1) as client:
        found = [client.http.post("/api/v1/rpc", json=PING).status_code for _ in range(50)]
        assert found[0] == 200 and set(found) <= {200, 429} and found.count(200) > 1


def test_each_key_has_its_own_rate_and_wrong_tokens_share_that_of_their_address(tmp_path: Path) -> None:
    with opened(tmp_path, serve={"token": Secret("admin"), "rate": SLOW, "burst": 3}) as client:

        def ask(token: str, method: str = "system.ping", **params: Any) -> httpx.Response:
            asked = {"id": 7, "method": method, "params": params}
            return client.http.post("/api/v1/rpc", json=asked, headers=bearer(token))

        made = [ask("admin", "security.token.create", name="same").json()["result"]["token"] for _ in range(2)]
        for token in made:
            assert [ask(token).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert [ask("wrong").status_code for _ in range(5)] == [401, 401, 401, 429, 429]
        assert ask("admin").status_code == 200
        assert ask("admin").status_code == 429, "of the three two made keys"


def test_cached_304_counts_toward_the_rate(tmp_path: Path) -> None:
    with opened(tmp_path, serve={"rate": SLOW, "burst": 20}) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        id = client.ok("query.prepare", sql="SELECT id FROM t")["query_id"]
        tag = client.http.get(f"/api/v1/q/{id}").headers["etag"]
        found = [client.http.get(f"/api/v1/q/{id}", headers={"if-none-match": tag}).status_code for _ in range(40)]
        assert found == [304] * 17 + [429] * 23


def test_invalid_gateway_frames_count_toward_the_rate(tmp_path: Path) -> None:
    with opened(tmp_path, serve={"rate": SLOW, "burst": 6}) as client:
        with connect(f"ws{client.server.url[4:]}/api/v1/ws", open_timeout=PATIENCE, proxy=None) as socket:
            told = []
            for bad in ("no JSON", "[]", '{"id": 1}', '{"id": 1, "type": "bogus"}') * 3:
                socket.send(bad)
                told.append(json.loads(socket.recv(timeout=PATIENCE))["payload"]["code"])
        assert "limit_exceeded" not in told[:5] and set(told[5:]) == {"limit_exceeded"}, told


def test_rate_limited_websocket_is_closed_with_4429_and_its_handshake_gets_429(tmp_path: Path) -> None:
    with opened(tmp_path, serve={"rate": SLOW, "burst": 5}) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        sub = client.ok("cdc.subscribe_table", table="t")
        url = f"ws{client.server.url[4:]}{sub['ws_url']}"
        with connect(url, open_timeout=PATIENCE) as stream:
            for _ in range(3):
                stream.send('{"ack": 0}')
            with pytest.raises(ConnectionClosed) as closed:
                for _ in range(1000):
                    stream.recv(PATIENCE)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4429 and closed.value.rcvd.reason.startswith("limit_exceeded")
        with pytest.raises(InvalidStatus) as refused:
            connect(url, open_timeout=PATIENCE)
        assert refused.value.response.status_code == 429 and refused.value.response.headers["retry-after"]


def channel_to(client: Client) -> grpc.Channel:
    return grpc.insecure_channel(client.server.grpc_address)


def list_ranges_error(channel: grpc.Channel, **fields: Any) -> grpc.RpcError:
    """Call ListRanges, which must fail; return its error."""
    request = message("headwater.v1.ListRangesRequest")(**fields).SerializeToString()
    with pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary(RANGES)(request, timeout=PATIENCE)
    return failure.value


def is_exhausted(failure: Any) -> None:
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    told = dict(failure.trailing_metadata())
    assert failure.details() == f"Rate limit exceeded. Retry after {told['retry-after-ms']}ms."
    assert told["grpc-retry-pushback-ms"] == told["retry-after-ms"]
    assert told["headwater-code"] == "limit_exceeded" and told["headwater-hint"]


def test_rate_limit_applies_to_grpc_but_not_to_health() -> None:
    with serving(NoDatabases(), rate=SLOW, burst=2) as client, channel_to(client) as channel:
        for _ in range(2):
            assert list_ranges_error(channel).code() is grpc.StatusCode.UNAVAILABLE  # it has no ranges
        is_exhausted(list_ranges_error(channel))
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)


def test_health_watch_counts_as_a_stream() -> None:
    """A health watch needs no credential, so no other limit applies to it."""
    with serving(NoDatabases(), token=Secret("t"), max_streams_per_client=3) as client, contextlib.ExitStack() as stack:
        watches = []
        for _ in range(3):
            stub = health_pb2_grpc.HealthStub(stack.enter_context(calling(client)).channel)
            watches.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE))
            assert next(watches[-1]).status == health_pb2.HealthCheckResponse.SERVING
        stub = health_pb2_grpc.HealthStub(stack.enter_context(calling(client)).channel)
        with pytest.raises(grpc.RpcError) as failure:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_streams_per_client" in dict(failure.value.trailing_metadata())["headwater-hint"]
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status == 1, "who only asks is answered"
        watches[0].cancel()
        deadline = time.monotonic() + PATIENCE
        while True:  # the server learns of it a moment later
            again = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            with contextlib.suppress(grpc.RpcError):
                next(again)
                again.cancel()
                break
            assert time.monotonic() < deadline, "the place is not given back"


def test_wrong_tokens_over_grpc_share_the_rate_of_their_address() -> None:
    with serving(NoDatabases(), rate=SLOW, burst=2, token=Secret("t")) as client, channel_to(client) as channel:
        for _ in range(2):
            assert list_ranges_error(channel).code() is grpc.StatusCode.UNAUTHENTICATED
        is_exhausted(list_ranges_error(channel))


@pytest.mark.slow
def test_grpc_message_slightly_too_large_is_refused_with_our_error() -> None:
    with serving(NoDatabases(), max_body_bytes=2048) as client, channel_to(client) as channel:
        found: Any = list_ranges_error(channel, table="t" * 3000)
        assert found.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "2048" in found.details()
        told = dict(found.trailing_metadata())
        assert told["headwater-code"] == "request_too_large" and told["headwater-hint"]
        assert list_ranges_error(channel, table="t" * 3_000_000).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- databases ---------------------------------------------------------------------------------------------------


def two(**quotas: Any) -> dict[str, Any]:
    """`a`, which has quotas, and `b`, which has none."""
    return {"databases": (DatabaseConfig("a", "", (), tuple(quotas.items())), DatabaseConfig("b", ""))}


def test_requests_count_for_the_database_they_name(tmp_path: Path) -> None:
    with opened(tmp_path, **two(rate=SLOW, burst=12)) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="a")  # 1
        id = client.ok("query.prepare", sql="SELECT id FROM t", db="a")["query_id"]  # 2
        sub = client.ok("cdc.subscribe_table", db="a", table="t")["sub_id"]  # 3
        tx = client.ok("tx.begin", db="a")["tx"]  # 4
        client.ok("sql.exec", sql="SELECT 1", tx=tx)
        client.ok("tx.rollback", tx=tx)
        client.ok("cdc.poll", sub_id=sub)
        client.ok("query.execute_prepared", query_id=id)
        assert client.http.get(f"/api/v1/q/{id}").status_code == 200
        assert client.http.get("/api/v1/t/a/t/1").status_code == 404
        client.error("data.get", table={"db": "a", "table": "t"}, pk=[1])
        client.ok("data.insert", into={"db": "a", "table": "t"}, rows=[{"id": 1}])  # 12
        calls: list[tuple[str, dict[str, Any]]] = [
            ("sql.exec", {"sql": "SELECT 1", "db": "a"}),
            ("cdc.poll", {"sub_id": sub}),
            ("query.execute_prepared", {"query_id": id}),
            ("data.insert", {"into": {"db": "a", "table": "t"}, "rows": [{"id": 2}]}),
        ]
        for method, params in calls:
            response = client.http.post("/api/v1/rpc", json={"id": 7, "method": method, "params": params})
            assert response.json()["id"] == 7
            is_refused(response)
        for path in (f"/api/v1/q/{id}", "/api/v1/t/a/t/1", "/api/v1/changes/a/t", f"/api/v1/cdc/sse/{sub}"):
            assert "'a'" in is_refused(client.http.get(path))["title"]
        with pytest.raises(InvalidStatus):
            connect(f"ws{client.server.url[4:]}/api/v1/cdc/ws/{sub}", open_timeout=PATIENCE)
        with channel_to(client) as channel:
            is_exhausted(list_ranges_error(channel, db="a", table="t"))
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="b")
        client.ok("cdc.list"), client.ok("system.ping")
        text = client.http.get("/metrics").text
        assert 'headwater_requests_total{db="a"} 12.0' in text
        assert 'headwater_limited_total{db="a",limit="rate"} 10.0' in text
    with Whole(tmp_path) as databases:
        assert databases.rows("SELECT id FROM t", db="a") == [(1,)], "what was refused changed nothing"


def test_range_requests_count_for_the_database(tmp_path: Path) -> None:
    with opened(tmp_path, **two(rate=SLOW, burst=4)) as client, channel_to(client) as channel:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="a")
        (one,) = client.ok("pull.ranges", db="a", table="t")["ranges"]
        request = message("headwater.v1.CdcPullLogRequest")(
            range_id=one["id"], range_epoch={"version": one["epoch"]}, subscriber_name="s"
        ).SerializeToString()
        pull = channel.unary_unary("/headwater.v1.PullService/CdcPullLog")
        for _ in range(2):
            pull(request, timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as failure:
            pull(request, timeout=PATIENCE)
        is_exhausted(failure.value)


def test_caller_without_scope_does_not_use_the_quota(tmp_path: Path) -> None:
    with opened(tmp_path, serve={"token": Secret("admin")}, **two(rate=SLOW, burst=3)) as client:
        make = {"id": 7, "method": "security.token.create", "params": {"name": "b", "role": "owner", "scopes": ["b"]}}
        token = client.http.post("/api/v1/rpc", json=make, headers=ADMIN).json()["result"]["token"]
        ask = {"id": 7, "method": "sql.exec", "params": {"sql": "SELECT 1", "db": "a"}}
        for _ in range(10):
            found = client.http.post("/api/v1/rpc", json=ask, headers=bearer(token))
            assert found.json()["error"]["code"] == "forbidden"
            assert client.http.get("/api/v1/t/a/t/1", headers=bearer(token)).status_code == 403
        for expected in (200, 200, 200, 429):
            assert client.http.post("/api/v1/rpc", json=ask, headers=ADMIN).status_code == expected


def test_unknown_database_names_are_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path, quotas=QuotasConfig(rate=1000.0)) as client:
        for n in range(50):
            client.error("sql.exec", sql="SELECT 1", db=f"x{n}")
            client.http.get(f"/api/v1/changes/y{n}/t")
        assert 'db="x' not in client.http.get("/metrics").text


def test_streams_and_waiting_polls_of_a_database_are_limited(tmp_path: Path) -> None:
    with opened(tmp_path, **two(max_streams=2)) as client:
        for db in "ab":
            client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db=db)
        sub = client.ok("cdc.subscribe_table", db="a", table="t")
        with contextlib.ExitStack() as stack:
            for path in ("/api/v1/changes/a/t", sub["sse_url"]):
                stack.enter_context(client.http.stream("GET", path))
            for path in ("/api/v1/changes/a/t", "/api/v1/changes/a", sub["sse_url"]):
                problem = client.http.get(path).json()
                assert (problem["status"], problem["code"]) == (429, "limit_exceeded") and "max_streams" in problem[
                    "hint"
                ]
            assert client.error("cdc.poll", sub_id=sub["sub_id"], wait_ms=1)["code"] == "limit_exceeded"
            client.ok("cdc.poll", sub_id=sub["sub_id"])
            with client.http.stream("GET", "/api/v1/changes/b/t") as stream:
                assert stream.status_code == 200


def test_subscriptions_of_a_database_are_limited(tmp_path: Path) -> None:
    with opened(tmp_path, **two(max_subscriptions=2)) as client:
        for db in "ab":
            client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db=db)
        made = [client.ok("cdc.subscribe_table", db="a", table="t", name=name) for name in "xy"]
        error = client.error("cdc.subscribe_table", db="a", table="t", name="z")
        assert error["code"] == "limit_exceeded" and "max_subscriptions" in error["details"]["hint"]
        assert not client.ok("cdc.subscribe_table", db="a", table="t", name="x")["created"], "it is there already"
        for _ in range(5):
            client.ok("cdc.subscribe_table", db="b", table="t")
        client.ok("cdc.close", sub_id=made[0]["sub_id"])
        assert client.ok("cdc.subscribe_table", db="a", table="t", name="z")["created"]
        assert len(client.ok("cdc.list", db="a")["subscriptions"]) == 2


def test_database_created_later_has_its_configured_quotas(tmp_path: Path) -> None:
    with opened(tmp_path, quotas=QuotasConfig(max_subscriptions=1), **two()) as client:
        client.ok("schema.create_database", db="c")
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="c")
        client.ok("cdc.subscribe_table", db="c", table="t")
        assert client.error("cdc.subscribe_table", db="c", table="t")["code"] == "limit_exceeded"


def test_rate_limited_notification_gets_no_answer(tmp_path: Path) -> None:
    with opened(tmp_path, **two(rate=SLOW, burst=1)) as client:
        ask = json.dumps({"method": "sql.exec", "params": {"sql": "SELECT 1", "db": "a"}})
        for _ in range(3):
            headers = {"content-type": "application/json"}
            assert client.http.post("/api/v1/rpc", content=ask, headers=headers).status_code == 204
