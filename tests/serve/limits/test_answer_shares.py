"""Memory of the unread answers of one caller is limited."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, Caller, calling
from tests.serve.server_fixture import Client, serving, unread
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret
from headwater.errors import Busy
from headwater.model.work.answer_limits import MEMORY, AnswerMemory
from headwater.serve.grpc.messages import message
from headwater.serve.http.handlers import rows
from headwater.serve.limits.unread_answers import UNREAD
from headwater.serve.rpc.results import row_body

pytestmark = pytest.mark.slow

MIB = 1 << 20
SQL = "SELECT k, hex(zeroblob(10485760)) AS v FROM t"
ONE = {"t": "i64", "v": 1}
CALLS = {
    "select": {"id": 1, "method": "query.select", "params": {"sql": SQL}},
    "get": {"id": 1, "method": "data.get", "params": {"table": {"db": "main", "table": "large"}, "pk": [ONE]}},
}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Whole(tmp_path) as databases, serving(databases, folder=tmp_path, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        client.rows("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        client.rows("INSERT INTO t VALUES (1)")
        yield client


@pytest.mark.parametrize("kind", ["select", "query", "get", "row"])
def test_caller_with_unread_answers_is_refused_and_others_are_not(
    client: Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: MEMORY.used == 0, "answers of other tests were freed")
    monkeypatch.setattr(MEMORY, "max_memory", 100 * MIB)
    ada, bob = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in ("ada", "bob"))
    if kind in ("get", "row"):
        client.rows("CREATE TABLE large(k INTEGER PRIMARY KEY, v TEXT)")
        client.rows("INSERT INTO large VALUES (1, hex(zeroblob(10485760)))")
    call = CALLS.get(kind)
    body = json.dumps(call)
    query = f"/api/v1/q/{client.ok('query.prepare', sql=SQL)['query_id']}"
    path = query if kind == "query" else "/api/v1/t/main/large/1"
    head = f"POST /api/v1/rpc HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head + body if call else f"GET {path} HTTP/1.1\r\n\r\n"

    def code(token: str) -> str:
        headers = {"authorization": f"Bearer {token}"}
        if call:
            answer = client.http.post("/api/v1/rpc", json=call, headers=headers).json()
            return "ok" if answer["ok"] else answer["error"]["code"]
        response = client.http.get(path, headers=headers)
        return "ok" if response.status_code == 200 else str(response.json()["code"])

    with unread(client, request, ada), unread(client, request, ada):
        assert (code(ada), code(bob), code("admin")) == ("busy", "ok", "ok")
    wait_until(lambda: MEMORY.used == 0, "the memory was released")
    assert code(ada) == "ok"


def test_first_answer_of_a_caller_may_take_more_than_its_share() -> None:
    memory = AnswerMemory()
    memory.configure(max_bytes=100, max_memory=100)
    memory.reserve(80)
    memory.charge("ada", 80)
    with pytest.raises(Busy):
        memory.charge("ada", 1)
    memory.release(80, "ada")
    memory.charge("ada", 1)
    assert memory.used == 0


def unread_value(caller: Caller) -> grpc.Call:
    """Return an unread answer to KvService/Get, opened as a stream although the call has one answer."""
    return caller.channel.unary_stream(f"/{KV}/Get")(  # type: ignore[no-any-return]
        message("sochdb.v1.KvGetRequest")(key=b"large").SerializeToString(), timeout=PATIENCE, metadata=caller.metadata
    )


def large_value(client: Client, *names: str) -> list[tuple[str, str]]:
    """Put a value of 15 MB; return the metadata of viewers."""
    with calling(client, ("authorization", "Bearer admin")) as admin:
        admin.call(f"{KV}/Put", key=b"large", value=bytes(15_000_000))
    made = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in names)
    return [("authorization", f"Bearer {token}") for token in made]


def test_caller_of_grpc_with_unread_answers_is_refused_and_others_are_not(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = large_value(client, "ada", "bob")
    monkeypatch.setattr(UNREAD, "max_memory", 80_000_000)
    with calling(client, ada) as caller, calling(client, bob) as other:
        calls = [unread_value(caller) for _ in range(2)]
        wait_until(lambda: UNREAD.used > 30_000_000, "both answers are being sent")
        assert caller.refusal(f"{KV}/Get", key=b"large").code() is grpc.StatusCode.UNAVAILABLE
        calls.append(unread_value(other))
        wait_until(lambda: UNREAD.used > 45_000_000, "that of another caller is being sent too")
        for call in calls:
            call.cancel()
        wait_until(lambda: UNREAD.used == 0, "the memory was released")


@pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson"])
def test_stream_with_large_rows_is_cut_once_too_many_are_unread(
    client: Client, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.rows("CREATE TABLE large(k INTEGER PRIMARY KEY, v TEXT)")
    for key in range(3):
        client.rows("INSERT INTO large VALUES (?, hex(zeroblob(5242880)))", key)
    wait_until(lambda: UNREAD.used == 0, "answers of other tests were released")
    monkeypatch.setattr(UNREAD, "max_memory", 60 * MIB)  # 30 for one caller: two rows
    ada, bob = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in ("ada", "bob"))
    path = "/api/v1/changes/main/large?start=earliest&include=after"
    request = f"GET {path} HTTP/1.1\r\naccept: {accept}\r\n\r\n"

    def received(token: str, rows: int) -> int:
        """Return how many rows arrive before the end, at most `rows`."""
        headers = {"authorization": f"Bearer {token}", "accept": accept}
        count = 0
        cut = contextlib.suppress(httpx.RemoteProtocolError)
        with client.http.stream("GET", path, headers=headers) as response, cut:
            for line in response.iter_lines():
                count += '"v":' in line and '"insert"' in line
                if count == rows:
                    break
        return count

    with unread(client, request, ada), unread(client, request, ada):
        wait_until(lambda: UNREAD.used > 20 * MIB, "both streams hold a row")
        assert received(ada, 3) == 0, "the third stream is cut before its first row"
        assert received(bob, 3) == 3
    wait_until(lambda: UNREAD.used == 0, "the memory was released")
    assert received(ada, 3) == 3


@pytest.mark.parametrize("method", ["GET", "HEAD", "PATCH"])
def test_large_row_is_encoded_outside_the_event_loop(
    client: Client, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.rows("CREATE TABLE large(k INTEGER PRIMARY KEY, v TEXT, n INTEGER)")
    client.rows("INSERT INTO large VALUES (1, 'short', 1), (2, hex(zeroblob(262144)), 2)")
    is_in_loop: list[bool] = []

    def noting(*args: Any, **kwargs: Any) -> bytes:
        is_in_loop.append(asyncio._get_running_loop() is not None)
        return row_body(*args, **kwargs)

    monkeypatch.setattr(rows, "row_body", noting)
    for key in (1, 2):
        body = {"json": {"n": 3}} if method == "PATCH" else {}
        assert client.http.request(method, f"/api/v1/t/main/large/{key}", **body).status_code == 200
    assert is_in_loop == [True, False]
