"""The headers that guard answers: on every route, whatever the status, and on what never reaches a route."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.certificates import Authority
from tests.serve.server_fixture import Client, NoDatabases, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from headwater.config import Secret
from headwater.serve.http.routes import ROUTES, Route
from headwater.serve.http.security_headers import PLAIN, with_security_headers

DATA = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("shields")
    with Whole(folder) as databases, serving(databases, folder=folder, token=Secret("admin")) as client:
        client.http.headers.update(ADMIN)
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        client.rows("INSERT INTO t VALUES (1, 'x')")
        yield client


def is_guarded(headers: httpx.Headers) -> bool:
    return all(headers.get_list(name) == [value] for name, value in DATA.items())


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
@pytest.mark.parametrize("credential", ["admin", "wrong"])
def test_every_route_has_security_and_cache_headers_whatever_its_status(
    client: Client, route: Route, credential: str
) -> None:
    headers = {"authorization": f"Bearer {credential}"}
    method, path = route.method, route.path.replace("{db}", "main").replace("{table}", "t").replace("{key}", "9")
    with client.http.stream(method, path, headers=headers) as found:
        if found.headers.get("content-type", "").startswith("text/html"):
            assert "default-src 'none'" in found.headers["content-security-policy"]
        else:
            assert is_guarded(found.headers), found.headers
        assert found.headers.get("cache-control"), "who says nothing is kept as long as a cache likes"


@pytest.mark.parametrize("path", ["/nowhere", "/api/v1/t/main/absent/1", "/?x=1"])
def test_error_response_has_security_headers(client: Client, path: str) -> None:
    found = client.http.get(path)
    assert found.status_code >= 400 and is_guarded(found.headers)


def test_response_with_cors_has_security_headers(client: Client) -> None:
    found = client.http.get("/", headers={"origin": "https://a.example"})
    assert is_guarded(found.headers) and found.headers["access-control-allow-origin"] == "https://a.example"
    found = client.http.options("/api/v1/rpc", headers={"origin": "https://a.example"})
    assert found.status_code == 204 and is_guarded(found.headers)


def test_long_origin_is_neither_allowed_nor_repeated(client: Client) -> None:
    origin = "https://a.example".ljust(301, "e")
    assert client.http.get("/", headers={"origin": origin[:-1]}).headers["access-control-allow-origin"] == origin[:-1]
    for found in (
        client.http.get("/", headers={"origin": origin}),
        client.http.options("/", headers={"origin": origin}),
    ):
        assert not [name for name in found.headers if name.startswith("access-control-")]
        assert "vary" in found.headers


def test_answers_with_secrets_are_no_store(client: Client) -> None:
    for method, params in (("security.token.create", {"name": "x"}), ("security.ticket.create", {})):
        found = client.http.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params})
        assert found.json()["ok"] and found.headers["cache-control"] == "no-store"


def test_304_has_no_security_headers(client: Client) -> None:
    id = client.ok("query.prepare", sql="SELECT id FROM t")["query_id"]
    for path in (f"/api/v1/q/{id}", "/api/v1/t/main/t/1"):
        full = client.http.get(path)
        assert full.status_code == 200 and is_guarded(full.headers)
        for _ in range(3):  # by the query itself, and as it is remembered
            found = client.http.get(path, headers={"if-none-match": full.headers["etag"]})
            assert found.status_code == 304 and not set(DATA) & set(found.headers)


def test_not_modified_query_result_has_the_cors_header_of_the_origin(client: Client) -> None:
    id = client.ok("query.prepare", sql="SELECT v FROM t")["query_id"]
    headers = {"if-none-match": client.http.get(f"/api/v1/q/{id}").headers["etag"], "origin": "https://a.example"}
    for _ in range(3):
        found = client.http.get(f"/api/v1/q/{id}", headers=headers)
        assert found.status_code == 304
        assert found.headers.get_list("access-control-allow-origin") == ["https://a.example"]


def test_rejected_websocket_handshake_has_the_security_headers(client: Client) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws{client.server.url[4:]}/api/v1/cdc/ws/sub_1", additional_headers=ADMIN)
    assert is_guarded(httpx.Headers(list(refused.value.response.headers.raw_items())))


@pytest.mark.parametrize("request_", [b"nonsense\r\n\r\n", b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"])
def test_malformed_request_gets_security_headers(client: Client, request_: bytes) -> None:
    with socket.create_connection(client.server.addresses[0], 10) as open:
        open.sendall(request_)
        head = open.recv(65536).split(b"\r\n\r\n")[0].decode()
    found = httpx.Headers([tuple(line.split(": ", 1)) for line in head.split("\r\n")[1:]])
    assert is_guarded(found) and found["cache-control"] == "no-store"


def test_response_without_tls_has_no_hsts(client: Client) -> None:
    assert "strict-transport-security" not in client.http.get("/").headers


def test_response_with_tls_has_hsts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    with serving(NoDatabases(), tls_cert=str(certificate), tls_key=str(key)) as client:
        trusted = ssl.create_default_context(cafile=authority.file)
        found = httpx.get(client.server.url + "/healthz", verify=trusted)
        assert is_guarded(found.headers) and found.headers["strict-transport-security"] == "max-age=31536000"


def test_html_page_keeps_its_own_csp_and_otherwise_forbids_framing() -> None:
    page = [(b"content-type", b"text/html; charset=utf-8")]
    own = [*page, (b"content-security-policy", b"default-src 'self'")]
    assert with_security_headers(own, tls=False) == own + PLAIN
    assert (b"content-security-policy", b"frame-ancestors 'none'") in with_security_headers(page, tls=False)


def test_embeddable_answers_have_a_same_origin_resource_policy(client: Client) -> None:
    name = "cross-origin-resource-policy"
    for path in ("/", "/docs", "/healthz", "/nowhere", "/api/v1/t/main/t/1"):
        for method in ("GET", "HEAD"):
            assert client.http.request(method, path).headers.get_list(name) == ["same-origin"], (method, path)
    tag = client.http.get("/api/v1/t/main/t/1").headers["etag"]
    found = client.http.get("/api/v1/t/main/t/1", headers={"if-none-match": tag})
    assert found.status_code == 304 and name not in found.headers
