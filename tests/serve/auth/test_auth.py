"""Authentication: every route against every kind of caller. A route without a row fails here."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.serve.server_fixture import NoDatabases, serving

from headwater.config import Secret, ServeConfig
from headwater.errors import ConfigError, Forbidden, HeadwaterError, Unauthorized
from headwater.serve.auth.gate import Access, Gate, is_loopback
from headwater.serve.http.routes import ROUTES

TOKEN = "s3cret-token"
CALLERS: dict[str, dict[str, str]] = {
    "nobody": {},
    "bearer": {"authorization": f"Bearer {TOKEN}"},
    "api key": {"x-api-key": TOKEN},
    "wrong bearer": {"authorization": "Bearer s3cret-tokem"},
    "wrong key": {"x-api-key": TOKEN + "x"},
    "basic": {"authorization": f"Basic {TOKEN}"},
    "bare": {"authorization": TOKEN},
    "empty bearer": {"authorization": "Bearer"},
    "wrong and right": {"authorization": "Bearer x", "x-api-key": TOKEN},
}
TICKET = {"id": 1, "method": "security.ticket.create"}
HOLDERS = {"bearer", "api key", "wrong and right"}
EVERYBODY = set(CALLERS)
LOCKED = {  # route -> admitted callers when a token is set
    "POST /api/v1/rpc": HOLDERS,
    "POST /api/v1/sql/exec": HOLDERS,
    "GET /": HOLDERS,
    "GET /metrics": HOLDERS,
    "GET /openapi.json": HOLDERS,
    "GET /api/v1/cdc/sse/{sub_id}": HOLDERS,
    "GET /api/v1/cdc/ws/{sub_id}": HOLDERS,
    "GET /api/v1/ws": HOLDERS,
    "GET /api/v1/changes/{db}/{table}": HOLDERS,
    "GET /api/v1/changes/{db}": HOLDERS,
    "GET /api/v1/snapshot/{db}/{table}": HOLDERS,
    "GET /api/v1/q/{query_id}": HOLDERS,
    "GET /api/v1/q/{query_id}/events": HOLDERS,
    "GET /api/v1/pull/{db}/{table}/snapshot": HOLDERS,
    "GET /api/v1/pull/{db}/{table}/log": HOLDERS,
    "GET /api/v1/pull/{db}/log": HOLDERS,
    **{f"{method} /api/v1/t/{{db}}/{{table}}/{{key}}": HOLDERS for method in ("GET", "PUT", "PATCH", "DELETE")},
    "GET /healthz": EVERYBODY,
    "GET /readyz": EVERYBODY,
    "GET /docs": HOLDERS,
}


def name(route: Any) -> str:
    return f"{route.method} {route.path}"


def test_expected_statuses_list_every_route() -> None:
    assert {name(route) for route in ROUTES} == set(LOCKED)


def test_locked_route_admits_exactly_the_token_holder() -> None:
    with serving(NoDatabases(), token=Secret(TOKEN)) as client:
        for route in ROUTES:
            for caller, headers in CALLERS.items():
                response = client.http.request(route.method, route.path, headers=headers)
                inside = response.status_code != 401
                assert inside == (caller in LOCKED[name(route)]), (name(route), caller, response.text)
                if not inside:
                    assert response.headers["www-authenticate"].startswith("Bearer")
                    body = response.json()
                    assert (body["error"] if route.rpc else body)["code"] == "unauthorized"


@pytest.mark.slow
def test_unauthenticated_request_does_not_reveal_routes() -> None:
    """Every known path and query gets the same answer as an unknown one."""
    paths = {route.path for route in ROUTES if route.access is not Access.OPEN and not route.rpc}
    queries = (
        "",
        "?bogus=1",
        "?ticket=x",
        "?ticket=x&ticket=y",
        "?from_offset=0&from_offset=0",
        "?%ff&=",
        "?ticket=%ff",
    )
    headers: tuple[dict[str, str], ...] = ({}, {"x-api-key": "wrong"}, {"accept": "x"})
    with serving(NoDatabases(), token=Secret(TOKEN)) as client:
        for method, query, sent in itertools.product(("GET", "POST", "DELETE", "TRACE"), queries, headers):
            unknown = client.http.request(method, f"/no/such{query}", headers=sent)
            assert unknown.status_code == 401
            for path in sorted(paths):
                found = client.http.request(method, path + query, headers=sent)
                assert (found.status_code, found.content) == (401, unknown.content), (method, path, query)
                assert found.headers.items() - {("date", found.headers["date"])} == unknown.headers.items() - {
                    ("date", unknown.headers["date"])
                }
        for path in ("/api/v1/rpc", "/api/v1/sql/exec"):
            for query in queries:
                found = client.http.post(path + query, json={})
                assert found.status_code == 401 and found.json()["error"]["code"] == "unauthorized"


def test_ticket_is_accepted_only_on_ticket_routes() -> None:
    with serving(NoDatabases(), token=Secret(TOKEN)) as client:
        made = client.http.post("/api/v1/rpc", json=TICKET, headers=CALLERS["bearer"]).json()["result"]["ticket"]
        for method, path in (("POST", "/api/v1/rpc"), ("GET", "/"), ("GET", "/nowhere"), ("GET", "/metrics")):
            assert client.http.request(method, f"{path}?ticket={made}").status_code == 401, path
        assert client.http.get(f"/api/v1/changes/main?ticket={made}").status_code != 401
        assert client.http.get(f"/api/v1/changes/main?ticket={made}&ticket={made}").status_code == 400
        assert client.http.get(f"/api/v1/changes/main?ticket={made}&bogus=1").status_code == 400


def test_unknown_path_needs_a_credential() -> None:
    with serving(NoDatabases(), token=Secret(TOKEN)) as client:
        assert client.http.get("/secret").status_code == 401
        assert client.http.get("/secret", headers=CALLERS["bearer"]).status_code == 404


def test_metrics_open_makes_only_metrics_public() -> None:
    with serving(NoDatabases(), token=Secret(TOKEN), metrics_open=True) as client:
        assert client.http.get("/metrics").status_code == 200
        assert client.http.get("/openapi.json").status_code == 401


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        ({"host": "127.0.0.1:7171"}, True),
        ({"host": "127.9.9.9"}, True),
        ({"host": "LOCALHOST:7171"}, True),
        ({"host": "[::1]:7171"}, True),
        ({"host": "[::1]"}, True),
        ({"host": "localhost", "origin": "http://localhost:3000"}, True),
        ({"host": "localhost", "origin": "https://[::1]:3000"}, True),
        ({"host": "localhost", "sec-fetch-site": "none"}, True),
        ({"host": "localhost", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost", "sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, True),
        ({"sec-fetch-site": "cross-site", "host": "localhost", "origin": "http://127.0.0.1:3000"}, True),
        ({"host": "localhost", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "cross-site", "origin": "http://evil.example"}, False),
        ({"host": ""}, False),
        ({}, False),
        ({"host": "evil.example"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "localhost@evil.example"}, False),
        ({"host": "127.0.0.1.evil.example:80"}, False),
        ({"host": "127.0.0.1:80:90"}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "[::2]:80"}, False),
        ({"host": "localhost", "origin": "null"}, False),
        ({"host": "localhost", "origin": ""}, False),
        ({"host": "localhost", "origin": "http://evil.example"}, False),
        ({"host": "localhost", "origin": "http://localhost:80@evil.example"}, False),
        ({"host": "localhost", "origin": "http://localhost/evil.example"}, False),
        ({"host": "localhost", "origin": "file://localhost"}, False),
    ],
)
def test_server_without_a_token_refuses_foreign_hosts_and_origins(headers: dict[str, str], admitted: bool) -> None:
    pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
    gate = Gate(None)
    assert gate.admit(pairs, Access.OPEN).name == "anonymous"
    for access in (Access.LOCKED, Access.METRICS):
        if admitted:
            assert gate.admit(pairs, access).name == "anonymous"
        else:
            with pytest.raises(Forbidden):
                gate.admit(pairs, access)


def test_two_host_headers_are_refused() -> None:
    with pytest.raises(Forbidden):
        Gate(None).admit([(b"host", b"localhost"), (b"host", b"localhost")], Access.LOCKED)


def test_without_a_token_every_route_but_health_refuses_a_page_of_another_origin() -> None:
    with serving(NoDatabases()) as client:
        for route in ROUTES:
            response = client.http.request(route.method, route.path, headers={"origin": "http://evil.example"})
            assert (response.status_code == 403) == (route.access is not Access.OPEN), name(route)


def test_without_a_token_a_form_of_a_web_page_cannot_write() -> None:
    with serving(NoDatabases()) as client:
        response = client.http.post(
            "/api/v1/rpc", content=b'{"method": "system.ping"}', headers={"content-type": "text/plain"}
        )
        assert response.status_code == 415


@pytest.mark.parametrize(
    "settings",
    [
        {"http": "0.0.0.0:0"},
        {"http": "[::]:0"},
        {"http": "10.1.2.3:0"},
        {"http": "example.org:0"},
        {"auth": True},
    ],
)
def test_remote_address_without_a_credential_is_refused_at_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as found:
        Gate.of(ServeConfig(**settings))
    assert "HEADWATER_TOKEN" in found.value.hint


def test_pepper_under_32_characters_is_a_config_error(tmp_path: Path) -> None:
    """The pepper signs tickets: a caller who guesses it can forge any identity."""
    with pytest.raises(ConfigError, match=r"^serve\.key_pepper \(HEADWATER_KEY_PEPPER\) is shorter") as found:
        Gate.of(ServeConfig(token=Secret(TOKEN), key_pepper=Secret("x" * 31)), tmp_path)
    assert "openssl rand -hex 32" in found.value.hint
    Gate.of(ServeConfig(token=Secret(TOKEN), key_pepper=Secret("x" * 32)), tmp_path)


def test_long_token_allows_any_address() -> None:
    Gate.of(ServeConfig(http="0.0.0.0:0", token=Secret("x" * 16), auth=True))


@pytest.mark.parametrize("settings", [{"http": "0.0.0.0:0"}, {"grpc": "[::]:0"}, {"http": "example.org:0"}])
def test_short_token_on_a_remote_address_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shorter than 16") as found:
        Gate.of(ServeConfig(token=Secret("x" * 15), **settings))
    assert "openssl rand -hex 32" in found.value.hint
    Gate.of(ServeConfig(token=Secret("x")))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.255.0.1"])
def test_loopback_addresses_are_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "localhost.", "example.org", "1", "127.0.0.1 "])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_authentication_error_does_not_contain_the_server_token() -> None:
    with pytest.raises(HeadwaterError) as found:
        Gate(TOKEN.encode()).admit([(b"x-api-key", b"guess")], Access.LOCKED)
    assert TOKEN not in str(found.value)


@pytest.mark.parametrize("wrong", [1, 2, 50])
def test_request_with_more_than_two_credentials_is_refused_unchecked(wrong: int) -> None:
    with serving(NoDatabases(), token=Secret(TOKEN), http="127.0.0.1:0") as client:
        guesses = [("x-api-key", f"guess-{number}") for number in range(wrong)]
        response = client.http.get("/", headers=[*guesses, ("x-api-key", TOKEN)])
        assert response.status_code == (200 if wrong == 1 else 401)
    gate = Gate(TOKEN.encode())
    metadata = [(b"x-api-key", b"guess")] * wrong + [(b"authorization", b"Bearer " + TOKEN.encode())]
    if wrong == 1:
        assert gate.admit_call(metadata).role == "owner"
    else:
        with pytest.raises(Unauthorized):
            gate.admit_call(metadata)
