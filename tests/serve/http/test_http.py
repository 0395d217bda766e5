"""Routes, statuses, limits and stopping, against a running server."""

import asyncio
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret, ServeConfig
from headwater.database import DatabaseStatus
from headwater.errors import ConfigError
from headwater.serve.api import Api
from headwater.serve.auth.gate import Access
from headwater.serve.http.openapi import document
from headwater.serve.http.routes import ROUTES
from headwater.serve.rpc.methods import METHODS
from headwater.serve.server.application import Application
from headwater.serve.server.server import Server


class Numbers(NoDatabases):
    """Databases that have only statistics."""

    def __init__(self, **found: DatabaseStatus) -> None:
        self.found = found

    def status(self) -> dict[str, Any]:
        return self.found


READY = DatabaseStatus(ready=True, generation="g1", horizon=5, latest=9, retention_changes=1000)
NOT_READY = DatabaseStatus(ready=False, generation="g1", horizon=1, latest=0)


def test_unknown_path_gets_a_404_problem_with_a_hint() -> None:
    with serving(NoDatabases()) as client:
        for path in ("/nope", "/api/v1", "/api/v1/rpc/", "/healthz/", "/%00"):
            response = client.http.get(path)
            assert response.status_code == 404, path
            assert response.headers["content-type"] == "application/problem+json"
            assert response.json()["code"] == "not_found"
            assert response.json()["status"] == 404
            assert response.json()["hint"]


def test_wrong_http_method_gets_405_with_the_allowed_methods() -> None:
    with serving(NoDatabases()) as client:
        for route in (route for route in ROUTES if not route.websocket):
            wrong = "GET" if route.method == "POST" else "POST"
            response = client.http.request(wrong, route.path)
            assert response.status_code == 405
            assert response.headers["allow"] == route.allow
            assert response.headers["content-type"] == "application/problem+json"
            assert list(response.json())[:5] == ["type", "title", "status", "code", "hint"]
            assert all(method in response.json()["hint"] for method in route.allow.split(", "))


def test_unused_query_string_is_refused_except_on_health() -> None:
    with serving(Numbers(main=READY)) as client:
        for route in ROUTES:
            status = client.http.request(route.method, route.path + "?x=1").status_code
            assert (status == 400) == (route.access is not Access.OPEN), route.path


def test_head_gives_the_headers_of_get_and_no_body() -> None:
    with serving(Numbers(main=READY)) as client:
        there = [route for route in ROUTES if route.method == "GET" and not route.placeholders]
        pages = [route for route in there if not (route.stream or route.websocket)]
        for route in (route for route in pages if route.handler != "metrics"):
            head, get = client.http.head(route.path), client.http.get(route.path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == get.headers["content-length"]


FAILED = msgspec.structs.replace(READY, error="log_damaged: the file /secret/main.log.db is damaged")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("databases", "any_status", "all_status", "reasons"),
    [
        ({}, 503, 503, ["starting"]),
        ({"main": NOT_READY}, 503, 503, ["starting"]),
        ({"main": FAILED}, 503, 503, ["log_damaged"]),
        ({"main": READY, "other": NOT_READY}, 200, 503, ["starting"]),
        ({"main": READY, "other": FAILED}, 200, 503, ["log_damaged"]),
        ({"main": READY, "other": READY}, 200, 200, None),
    ],
)
def test_readyz_is_503_with_reasons_while_capture_does_not_run(
    databases: dict[str, Any], any_status: int, all_status: int, reasons: list[str] | None
) -> None:
    for ready, status in (("any", any_status), ("all", all_status)):
        with serving(Numbers(**databases), ready=ready) as client:
            answer = client.http.get("/readyz")
            assert answer.status_code == status and answer.json()["ready"] == (status == 200)
            assert answer.json().get("reasons") == reasons and "secret" not in answer.text
            assert client.http.get("/healthz").status_code == 200


def test_readyz_with_a_database_reports_only_its_own_state() -> None:
    with serving(Numbers(main=READY, other=FAILED)) as client:
        assert client.http.get("/readyz?db=main").status_code == 200
        assert client.http.get("/readyz?db=default").status_code == 200
        other = client.http.get("/readyz?db=other")
        assert (other.status_code, other.json()["reasons"]) == (503, ["log_damaged"])
        absent = client.http.get("/readyz?db=absent")
        assert (absent.status_code, absent.json()["reasons"]) == (503, ["not_found"])


def test_concurrent_requests_of_readyz_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    release, checks, entered, readyz = threading.Event(), list[None](), threading.Semaphore(0), Application._readyz

    class Slow(Numbers):
        def status(self) -> dict[str, Any]:
            checks.append(None)
            assert release.wait(PATIENCE)
            return super().status()

    async def counted(self: Application, *args: Any) -> Any:
        entered.release()
        return await readyz(self, *args)

    monkeypatch.setattr(Application, "_readyz", counted)
    with serving(Slow(main=READY)) as client, ThreadPoolExecutor(20) as threads:
        answers = [threads.submit(client.http.get, "/readyz") for _ in range(20)]
        for _ in answers:
            assert entered.acquire(timeout=PATIENCE)
        release.set()
        assert {answer.result().status_code for answer in answers} == {200}
        assert len(checks) == 1
        assert client.http.get("/readyz").status_code == 200
        assert len(checks) == 2, "a later request checks again"


def test_readyz_of_one_database_needs_a_credential_on_a_locked_server() -> None:
    with serving(Numbers(main=READY), token=Secret("t")) as client:
        assert client.http.get("/readyz").status_code == 200
        assert client.http.get("/readyz?db=main").status_code == 401
        known = {"authorization": "Bearer t"}
        assert client.http.get("/readyz?db=main", headers=known).status_code == 200


def test_docs_page_names_every_route_and_method_and_loads_nothing() -> None:
    with serving(NoDatabases()) as client:
        answer = client.http.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        assert all(route.path in answer.text for route in ROUTES)
        assert all(name in answer.text for name in METHODS)
        assert "<script" not in answer.text and "http://" not in answer.text and "https://" not in answer.text


def test_content_length_over_the_body_limit_gets_413() -> None:
    with serving(NoDatabases(), max_body_bytes=1024) as client:
        big = {"id": 1, "method": "system.ping", "params": {"x": "y" * 2000}}
        response = client.http.post("/api/v1/rpc", json=big)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert response.json()["id"] is None
        assert client.ok("system.ping")


def test_chunked_body_over_the_limit_gets_413() -> None:
    with serving(NoDatabases(), max_body_bytes=1024) as client:
        chunks = iter([b'{"id": 1, "method": "system.ping", "params": {"x": "'] + [b"y" * 100] * 50 + [b'"}}'])
        response = client.http.post("/api/v1/rpc", content=chunks, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert client.ok("system.ping")


def test_chunked_body_within_the_limit_is_accepted() -> None:
    with serving(NoDatabases(), max_body_bytes=1024) as client:
        response = client.http.post(
            "/api/v1/rpc",
            content=iter([b'{"id": 1,', b'"method":', b'"system.ping"}']),
            headers={"content-type": "application/json"},
        )
        assert response.json()["ok"]


def test_disconnect_during_the_body_does_not_affect_others() -> None:
    with serving(NoDatabases()) as client:
        host, port = client.server.addresses[0]
        with socket.create_connection((host, port)) as raw:
            raw.sendall(
                b"POST /api/v1/rpc HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
        assert client.ok("system.ping")


def test_http_connection_is_reused_for_later_requests() -> None:
    with serving(NoDatabases()) as client:
        host, port = client.server.addresses[0]
        connection = http.client.HTTPConnection(host, port)
        for _ in range(3):
            connection.request(
                "POST", "/api/v1/rpc", b'{"method": "system.ping"}', {"content-type": "application/json"}
            )
            response = connection.getresponse()
            assert (response.status, response.read()) == (204, b"")
        connection.close()


def test_numbers_appear_in_stats_and_metrics_and_unknown_ones_do_not() -> None:
    with serving(Numbers(main=READY, other=NOT_READY)) as client:
        cdc = client.ok("stats.snapshot")["cdc"]
        assert len(cdc) == 17
        assert (cdc["earliest_offset"], cdc["latest_offset"], cdc["retained_events"]) == (5, 9, 5)
        assert (cdc["dropped_events_total"], cdc["warn_lag"], cdc["throttle_lag"]) == (4, 500, 750)
        assert client.ok("stats.snapshot", db="other")["cdc"]["earliest_offset"] == 0
        assert client.error("stats.snapshot", db="nope")["code"] == "not_found"
        text = client.http.get("/metrics").text
    assert 'headwater_log_latest_offset{db="main"} 9.0' in text
    assert 'headwater_ready{db="other"} 0.0' in text
    assert 'headwater_rpc_requests_total{code="not_found",method="stats.snapshot"} 1.0' in text
    assert "headwater_capture_lag_seconds{" not in text


def test_openapi_document_lists_every_route_and_all_its_references_resolve() -> None:
    with serving(NoDatabases()) as client:
        found = client.http.get("/openapi.json").json()
    assert found == httpx.Response(200, json=document()).json()
    assert found["openapi"].startswith("3.1")
    assert {(m.upper(), path) for path, item in found["paths"].items() for m in item} == {
        (route.method, route.path) for route in ROUTES
    }
    operations = [operation for item in found["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)
    assert all(operation["responses"] for operation in operations)
    for reference in references(found):
        here: Any = found
        for part in reference.removeprefix("#/").split("/"):
            here = here[part]


def references(body: Any) -> list[str]:
    if isinstance(body, dict):
        own = [body["$ref"]] if "$ref" in body else []
        return own + [found for value in body.values() for found in references(value)]
    return [found for value in body for found in references(value)] if isinstance(body, list) else []


class Slow(NoDatabases):
    """Databases that answer when the test allows it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def names(self) -> list[str]:
        self.entered.set()
        self.release.wait(PATIENCE)
        return ["late"]


def test_stopping_server_finishes_open_requests_and_refuses_new_connections() -> None:
    slow = Slow()
    got: list[Any] = []
    with serving(slow) as client:
        thread = threading.Thread(target=lambda: got.append(client.ok("schema.list_databases")))
        thread.start()
        assert slow.entered.wait(PATIENCE)
        stopping = asyncio.run_coroutine_threadsafe(client.server.stop(), client.loop)
        refused = threading.Event()

        def watch() -> None:
            while not refused.is_set():
                try:
                    httpx.get(client.server.url + "/healthz").close()
                except httpx.TransportError:
                    refused.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert refused.wait(PATIENCE)
        assert not stopping.done()
        slow.release.set()
        thread.join(PATIENCE)
        stopping.result(PATIENCE)
        watcher.join(PATIENCE)
    assert got == [{"databases": ["late"]}]


def test_request_longer_than_the_drain_time_gets_503_when_the_server_stops() -> None:
    slow = Slow()
    got: list[httpx.Response] = []
    body = {"id": 1, "method": "schema.list_databases"}
    with serving(slow, drain_seconds=0.05) as client:
        thread = threading.Thread(target=lambda: got.append(client.http.post("/api/v1/rpc", json=body)))
        thread.start()
        assert slow.entered.wait(PATIENCE)
        stopping = asyncio.run_coroutine_threadsafe(client.server.stop(), client.loop)
        thread.join(PATIENCE)
        slow.release.set()
        stopping.result(PATIENCE)
    assert got[0].status_code == 503
    assert got[0].json()["error"]["code"] == "unavailable"


def test_starting_on_a_port_in_use_is_a_config_error_naming_the_port() -> None:
    with serving(NoDatabases()) as client:
        host, port = client.server.addresses[0]
        second = Server(ServeConfig(http=f"{host}:{port}", grpc="off"), Api.over(NoDatabases()))
        with pytest.raises(ConfigError) as found:
            asyncio.run(second.start())
    assert str(port) in found.value.message
    assert found.value.hint


def test_starting_on_an_unresolvable_host_is_a_config_error() -> None:
    from headwater.config import Secret

    server = Server(ServeConfig(http="no-such-host.invalid:0", token=Secret("t" * 16)), Api.over(NoDatabases()))
    with pytest.raises(ConfigError):
        asyncio.run(server.start())


def test_host_with_several_addresses_listens_on_the_same_port_on_each() -> None:
    with serving(NoDatabases(), http="localhost:0") as client:
        assert len({port for _, port in client.server.addresses}) == 1
        for host, port in client.server.addresses:
            socket.create_connection((host, port)).close()


def test_stopping_a_server_that_never_started_does_not_fail() -> None:
    asyncio.run(Server(ServeConfig(http="127.0.0.1:0"), Api.over(NoDatabases())).stop())
