"""The envelope rules, one by one, against a running server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.server_fixture import Client, NoDatabases, envelope, serving

from headwater.serve.rpc.envelope import MAX_ID
from headwater.serve.rpc.methods import METHODS


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(NoDatabases(), folder=tmp_path_factory.mktemp("envelope")) as found:
        yield found


def post(client: Client, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.http.post("/api/v1/rpc", content=content, headers={"content-type": "application/json"} | headers)


@pytest.mark.parametrize("id", ["a", "", 0, -1, 2**63 - 1, -(2**63)])
def test_rpc_response_has_the_id_of_its_request(client: Client, id: Any) -> None:
    response = post(client, {"skeinql": "1.0", "id": id, "method": "system.ping"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert envelope(response.json(), id)["result"]["pong"] is True


@pytest.mark.parametrize("method", ["system.ping", "no.such"])
def test_request_with_too_long_an_id_is_refused_without_it(client: Client, method: str) -> None:
    assert envelope(post(client, {"id": "é" * MAX_ID, "method": method}).json(), "é" * MAX_ID)
    response = post(client, {"id": "é" * (MAX_ID + 1), "method": method})
    error = envelope(response.json(), None)["error"]
    assert (response.status_code, error["code"]) == (200, "invalid_request")
    assert error["message"] == f"request.id: Expected `str` of length <= {MAX_ID}"


@pytest.mark.parametrize("extra", [{}, {"id": None}])
@pytest.mark.parametrize("method", ["system.ping", "no.such", "data.insert"])
def test_rpc_request_without_id_gets_an_empty_204_even_when_it_fails(
    client: Client, method: str, extra: dict[str, Any]
) -> None:
    response = post(client, {"method": method} | extra)
    assert (response.status_code, response.content) == (204, b"")


def test_supported_version_is_accepted_in_every_json_escape(client: Client) -> None:
    for version in (rb'"1.0"', rb' "1\u002e0" ', rb'"\u0031\u002E\u0030"'):
        body = b'{"id": 1, "method": "system.ping", "skeinql":%s}' % version
        assert envelope(post(client, body).json(), 1)["ok"], version


@pytest.mark.parametrize("version", [b"1e999", b'"\xff"', b"[" * 19 + b"]" * 19])
def test_version_that_is_malformed_json_is_refused(client: Client, version: bytes) -> None:
    body = b'{"id": 1, "method": "system.ping", "skeinql":%s}' % version
    assert envelope(post(client, body).json(), 1)["error"]["code"] in ("unsupported_version", "invalid_request")


@pytest.mark.parametrize("version", ["1.1", "2.0", 1.0, 1, None, [], {"a": 1}])
def test_unsupported_envelope_version_is_refused_with_a_hint(client: Client, version: Any) -> None:
    answer = envelope(post(client, {"id": 1, "method": "system.ping", "skeinql": version}).json(), 1)
    assert answer["error"]["code"] == "unsupported_version"
    assert "1.0" in answer["error"]["details"]["hint"]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"id": 1, "method": "system.ping", "jsonrpc": "2.0"}, "jsonrpc"),
        ({"id": 1}, "method"),
        ({"id": 1, "method": 5}, "method"),
        ({"id": 1, "method": None}, "method"),
        ({"id": 1, "method": "data.get", "params": []}, "params"),
        ({"id": 1, "method": "data.get", "params": "x"}, "params"),
        ({"id": 1, "method": "data.get"}, "missing params"),
        ({"id": 1, "method": "data.get", "params": None}, "missing params"),
        ({"id": 1, "method": "system.ping", "params": {"shout": True}}, "shout"),
        ({"id": 1, "method": "data.get", "params": {"table": {"table": 1}, "pk": []}}, "params.table.table"),
        ({"id": 1, "method": "data.get", "params": {"table": {"table": "t"}, "pk": 1}}, "params.pk"),
        ({"id": 1, "method": "data.get", "params": {"table": {"table": "t", "x": 1}, "pk": []}}, "`x`"),
    ],
)
def test_invalid_envelope_or_params_get_invalid_request_naming_the_bad_field(
    client: Client, request_: dict[str, Any], named: str
) -> None:
    response = post(client, request_)
    assert response.status_code == 200
    error = envelope(response.json(), 1)["error"]
    assert error["code"] == "invalid_request"
    assert named in error["message"]
    assert error["details"]["hint"]


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("data.get", {"table": "item", "pk": []}, "table: {table: text, db?: text}, pk: [value, …]"),
        ("data.insert", {"into": {"table": "t"}, "rows": {}}, "rows: [{name: value}, …]"),
        ("sql.exec", {"sql": "SELECT 1", "argz": []}, "{sql: text, args?: "),
        ("tx.begin", {"read_only": 1}, "read_only?: true or false"),
        ("system.ping", {"shout": True}, "Expected no fields."),
    ],
)
def test_invalid_params_error_names_the_fields_of_the_method(
    client: Client, method: str, params: dict[str, Any], expected: str
) -> None:
    assert expected in client.error(method, **params)["details"]["hint"]


@pytest.mark.parametrize("id", [1.5, True, [], {}, 2**63, -(2**63) - 1, 10**40])
def test_rpc_id_that_is_neither_string_nor_64_bit_integer_is_rejected(client: Client, id: Any) -> None:
    answer = envelope(post(client, {"id": id, "method": "system.ping"}).json(), None)
    assert answer["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"{",
        b'{"id": 1, "method": "system.ping"} x',
        b"\xff\xfe",
        b'{"id": 1, "method": "\xff"}',
        b'{"id": NaN}',
        b'{"id": 1, "method": "system.ping", "params": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/rpc", "/api/v1/sql/exec"])
def test_rpc_body_that_is_not_a_json_object_gets_400_with_an_envelope(client: Client, body: bytes, path: str) -> None:
    response = client.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    answer = envelope(response.json(), None if path.endswith("rpc") else "sql.exec.http")
    assert answer["error"]["code"] == "invalid_request"
    assert ('"method"' if path.endswith("rpc") else '"sql"') in answer["error"]["details"]["hint"]


@pytest.mark.parametrize("text", [rb"\ud800", rb"\ud800 and more text", rb"\udc00", rb"\ud800\ud800"])
@pytest.mark.parametrize("path", ["/api/v1/rpc", "/api/v1/sql/exec"])
def test_lone_surrogate_in_a_request_is_refused_by_name(client: Client, text: bytes, path: str) -> None:
    body = b'{"id": 1, "method": "%b"}' % text
    response = client.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_request" and "half a character" in error["message"] and error["details"]["hint"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_rpc_body_with_another_content_type_gets_415_with_an_envelope(client: Client, kind: str) -> None:
    response = post(client, {"id": 1, "method": "system.ping"}, **{"content-type": kind})
    assert response.status_code == 415
    assert envelope(response.json(), None)["error"]["code"] == "invalid_request"


def test_compressed_body_gives_415_and_an_envelope(client: Client) -> None:
    ping: dict[str, Any] = {"id": 1, "method": "system.ping"}
    response = post(client, ping, **{"content-type": "application/json", "content-encoding": "gzip"})
    assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
    assert "compression" in envelope(response.json(), None)["error"]["details"]["hint"]
    assert post(client, ping, **{"content-type": "application/json", "content-encoding": "identity"}).json()["ok"]


def test_rpc_content_type_with_a_charset_is_accepted(client: Client) -> None:
    response = post(client, {"id": 1, "method": "system.ping"}, **{"content-type": "Application/JSON; charset=utf-8"})
    assert response.json()["ok"] is True


def test_rpc_request_with_a_query_string_gets_400(client: Client) -> None:
    response = client.http.post("/api/v1/rpc?x=1", json={"id": 1, "method": "system.ping"})
    assert (response.status_code, envelope(response.json(), None)["ok"]) == (400, False)


@pytest.mark.parametrize(
    "method",
    ["merge.apply", "vector.search", "view.create"],
)
def test_method_of_the_contract_that_is_not_built_returns_not_supported(client: Client, method: str) -> None:
    error = client.error(method, anything=1)
    assert error["code"] == "not_supported"
    assert "later" in error["details"]["hint"]


@pytest.mark.parametrize("method", ["cluster.status", "nope", "", "data.insert ", "x" * 10_000])
def test_unknown_rpc_method_gets_not_supported_with_a_short_message(client: Client, method: str) -> None:
    error = client.error(method)
    assert error["code"] == "not_supported"
    assert len(error["message"]) < 200


def test_unknown_rpc_method_error_has_the_exact_text_clients_match_on(client: Client) -> None:
    assert client.error("no.such")["message"] == "Method 'no.such' is not supported in this build"


def test_capabilities_list_exactly_the_implemented_methods(client: Client) -> None:
    found = client.ok("system.capabilities")
    assert found["name"] == "headwater"
    assert found["methods"] == sorted(METHODS)
    assert client.ok("system.version")["skeinql"] == "1.0"


def test_every_method_called_without_params_answers_without_an_internal_error(client: Client) -> None:
    for name in METHODS:
        answer = client.rpc(name)
        assert answer["ok"] or answer["error"]["code"] in ("invalid_request", "not_found", "unavailable"), answer


class Broken(NoDatabases):
    """Databases that fail with an unexpected exception."""

    def names(self) -> list[str]:
        raise RuntimeError("secret path /etc/shadow")


def test_unexpected_exception_returns_only_a_request_id_and_is_logged_under_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Broken()) as client:
        error = client.error("schema.list_databases")
    assert error["code"] == "internal"
    assert "secret" not in json.dumps(error)
    assert error["details"]["request_id"] in caplog.text
    assert "secret path" in caplog.text


class Crowded(NoDatabases):
    """Databases that raise MemoryError."""

    def names(self) -> list[str]:
        raise MemoryError


def test_memory_error_while_answering_is_reported_as_invalid_request_with_a_hint() -> None:
    with serving(Crowded()) as client:
        error = client.error("schema.list_databases")
    assert error["code"] == "invalid_request"
    assert error["details"]["hint"]
