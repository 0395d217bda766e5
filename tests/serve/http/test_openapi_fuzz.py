"""The OpenAPI document against the server: what fits it and what does not is answered, never with a 5xx of ours.

Schemathesis makes the requests; each must have an answer that the document promises. `make soak` sends 10,000 more.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from tests.queries.open_databases import Whole
from tests.serve.fuzz_cases import cases
from tests.serve.server_fixture import Client, serving

from headwater.serve.http import openapi
from headwater.serve.http.routes import ROUTES

pytestmark = pytest.mark.slow

SEED = 20261115
OPERATIONS = sorted(f"{route.method} {route.path}" for route in ROUTES if not route.websocket or route.stream)
THERE = {"db": "main", "table": "t", "key": "1"}  # what a request can be about
MEANT = {501, 503, 507}  # not built here, busy, full: reported with their codes, no defects


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Whole(tmp_path_factory.mktemp("fuzz")) as whole, serving(whole) as found:
        yield found


def furnish(client: Client) -> None:
    """Create what the requests are about again: earlier requests may have removed it."""
    client.ok("sql.exec", sql="CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, v TEXT, b BLOB)")
    client.ok("sql.exec", sql="INSERT OR REPLACE INTO t(id, v) VALUES (1, 'a'), (2, NULL)")
    THERE["query_id"] = client.ok("query.prepare", sql="SELECT id FROM t WHERE id = ?")["query_id"]
    THERE["sub_id"] = client.ok("cdc.subscribe_table", table="t")["sub_id"]


def aimed(case: Case, names: bool, credential: bool) -> Case:
    """Return `case` with names that exist: a request for a missing name tests little."""
    if names:
        case.path_parameters = {name: THERE[name] for name in case.path_parameters or {}}
        case.body = _named(case.body)
    if not credential and isinstance(case.query, dict):
        case.query.pop("ticket", None)
    return case


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: THERE.get(name, "") if _is_name(name, each) else _named(each) for name, each in value.items()}
    return [_named(each) for each in value] if isinstance(value, list) else value


def _is_name(name: str, value: Any) -> bool:
    return name in THERE and isinstance(value, str)


def operation(name: str) -> Any:
    method, path = name.split(" ")
    schema = schemathesis.openapi.from_dict(openapi.document())
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return schema[path][method.lower()]


def send(client: Client, case: Case) -> tuple[int, str, bytes]:
    """Return status, content type and beginning of the answer: a stream may not end."""
    sent = case.as_transport_kwargs(base_url=str(client.http.base_url))
    request = httpx.Request(
        sent["method"],
        httpx.URL(sent["url"]),
        params=sent.get("params") or None,
        headers=_sendable(sent.get("headers") or {}),
        **{name: sent[name] for name in ("json", "content") if sent.get(name) is not None},
        **({"content": sent["data"]} if isinstance(sent.get("data"), (str, bytes)) else {}),
    )
    response = client.http.send(request, stream=True)
    try:
        body = b""
        if "event-stream" not in response.headers.get("content-type", ""):
            body = b"".join(itertools.islice(response.iter_raw(), 1))
        return response.status_code, response.headers.get("content-type", ""), body
    finally:
        response.close()


def _sendable(headers: Any) -> list[tuple[str, str]]:
    """Return the headers that HTTP can carry."""
    found = [(name, str(value)) for name, value in headers.items()]
    return [(name, value) for name, value in found if value.isascii() and value.isprintable() and name.isascii()]


def check(client: Client, case: Case) -> None:
    """Send a case and check its answer against the document."""
    try:
        status, kind, body = send(client, case)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return  # nothing that a client can send
    told = f"{case.method} {case.formatted_path} {case.query} {case.body!r}: {status} {body[:300]!r}"
    assert status < 500 or status in MEANT, told
    if status >= 400 and case.method != "HEAD":
        rpc = case.path in ("/api/v1/rpc", "/api/v1/sql/exec", "/readyz") and status not in (401, 403, 405)
        assert kind.split(";")[0] == ("application/json" if rpc else "application/problem+json"), told
        assert b'"code":"internal"' not in body, told
    if case.path == "/api/v1/rpc" and status == 200:
        assert b'"code":"internal"' not in body, told


def run(client: Client, name: str, examples: int, number: int) -> None:
    """Check `examples` cases of one operation."""

    @cases(examples, number)
    @given(operation(name).as_strategy(), st.integers(0, 3), st.integers(0, 3))
    def one(case: Case, names: int, credential: int) -> None:
        check(client, aimed(case, names > 0, credential == 0))

    furnish(client)
    one()
    assert client.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_answers_valid_and_invalid_requests(client: Client, name: str) -> None:
    run(client, name, 15, SEED)


@pytest.mark.soak(seconds=10)
@pytest.mark.parametrize("name", OPERATIONS)
def test_ten_thousand_hostile_requests_meet_no_defect(client: Client, name: str, fresh_number: int) -> None:
    run(client, name, -(-10_000 // len(OPERATIONS)), fresh_number)
