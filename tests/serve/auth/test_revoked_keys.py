"""A key revoked after its caller is admitted, but before its stream or write begins, opens and writes nothing."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, PATIENCE, SUBSCRIPTIONS, calling
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headwater.config import Secret
from headwater.feeds.deliver.poll import Poll
from headwater.feeds.feeds import Feeds
from headwater.serve.auth import api_keys
from headwater.serve.auth.api_keys import Key, Keys
from headwater.serve.grpc.messages import message
from headwater.serve.http.handlers.pulls import Pulls
from headwater.serve.http.handlers.table_snapshots import Snapshots


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("revoked-meanwhile")
    with Whole(folder) as databases, serving(databases, folder=folder, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        client.rows("INSERT INTO t VALUES (1, 'first')")
        yield client


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once the server has found a key, so its holder is admitted."""
    seen, find = threading.Event(), Keys.find

    def noted(keys: Keys, text: bytes) -> Key | None:
        key = find(keys, text)
        if key is not None:
            seen.set()
        return key

    monkeypatch.setattr(Keys, "find", noted)
    return seen


def create_owner_key(client: Client) -> dict[str, Any]:
    """Create an API key of the owner role; return the answer, with its secret."""
    return dict(client.ok("security.token.create", name="k", role="owner"))


# --- gRPC: the message comes after the metadata ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "fields"),
    [
        (f"{SUBSCRIPTIONS}/Subscribe", "SubscribeRequest", {"start_sequence": 1}),
        (f"{KV}/Put", "KvPutRequest", {"key": b"k", "value": b"v"}),
    ],
)
def test_grpc_call_is_refused_if_its_key_is_revoked_before_its_first_message(
    client: Client, found: threading.Event, path: str, asked: str, fields: dict[str, Any]
) -> None:
    key = create_owner_key(client)
    said: queue.Queue[bytes | None] = queue.Queue()
    with calling(client) as caller:
        call = caller.channel.stream_stream(f"/{path}")(
            iter(said.get, None), timeout=PATIENCE, metadata=(("x-api-key", key["token"]),)
        )
        try:
            assert found.wait(PATIENCE)
            client.ok("security.token.revoke", id=key["id"])
            said.put(message(f"sochdb.v1.{asked}")(**fields).SerializeToString())
            said.put(None)
            with pytest.raises(grpc.RpcError) as failure:
                next(call)
        finally:
            said.put(None)
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with calling(client, ("x-api-key", "admin")) as caller:
        assert not caller.call(f"{KV}/Get", key=b"k").found


# --- HTTP: the body comes after the head -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("POST /api/v1/sql/exec", b"""{"sql": "INSERT INTO t VALUES (7, 'late')"}"""),
        ("POST /api/v1/rpc", b"""{"id":1,"method":"sql.exec","params":{"sql":"INSERT INTO t VALUES (7,'late')"}}"""),
        ("PUT /api/v1/t/main/t/7", b'{"v": "late"}'),
        ("PATCH /api/v1/t/main/t/1", b'{"v": "late"}'),
        ("DELETE /api/v1/t/main/t/1", b""),
    ],
    ids=lambda each: each.split()[0] if isinstance(each, str) else "",
)
def test_request_with_a_body_after_the_revocation_is_refused(
    client: Client, found: threading.Event, head: str, body: bytes
) -> None:
    key = create_owner_key(client)
    lines = [f"{head} HTTP/1.1", "host: 127.0.0.1", f"x-api-key: {key['token']}", "content-type: application/json"]
    lines += ["transfer-encoding: chunked", "connection: close", "", ""]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:]) if part]
    with socket.create_connection(client.server.addresses[0], timeout=PATIENCE) as open:
        open.sendall("\r\n".join(lines).encode() + b"".join(chunks[:1]))
        assert found.wait(PATIENCE)
        client.ok("security.token.revoke", id=key["id"])
        open.sendall(b"".join(chunks[1:]) + b"0\r\n\r\n")
        answer = b"".join(iter(lambda: open.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401 ") and b"www-authenticate: Bearer" in answer, answer
    assert client.rows("SELECT v FROM t") == [["first"]]


# --- waits: the answer comes after a minute -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wait_ms", r"wait\u005fms"])
def test_waiting_poll_returns_nothing_after_the_revocation(client: Client, found: threading.Event, name: str) -> None:
    key = create_owner_key(client)
    headers = {"authorization": f"Bearer {key['token']}"}
    body = {"id": 1, "method": "cdc.subscribe_table", "params": {"table": "t"}}
    sub = httpx.post(f"{client.http.base_url}/api/v1/rpc", json=body, headers=headers).json()["result"]["sub_id"]
    waiting = threading.Event()
    poll = f'{{"id": 2, "method": "cdc.poll", "params": {{"sub_id": "{sub}", "{name}": 60000}}}}'
    headers["content-type"] = "application/json"

    def ask() -> httpx.Response:
        waiting.set()
        return httpx.post(f"{client.http.base_url}/api/v1/rpc", content=poll, headers=headers, timeout=PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        found.clear()
        asked = pool.submit(ask)
        assert found.wait(PATIENCE) and waiting.is_set()
        wait_until(lambda: streams(client) > 0, "the poll waits")
        client.ok("security.token.revoke", id=key["id"])
        client.rows("UPDATE t SET v = 'secret'")
        answer = asked.result(PATIENCE)
    client.rows("UPDATE t SET v = 'first'")
    assert is_unauthorized(answer) and "secret" not in answer.text


def is_unauthorized(answer: httpx.Response) -> bool:
    return answer.status_code == 401 or answer.json()["error"]["code"] == "unauthorized"


def test_write_in_the_queue_is_refused_if_its_key_is_revoked_before_its_turn(client: Client) -> None:
    key = create_owner_key(client)
    headers = {"authorization": f"Bearer {key['token']}"}
    body = {"id": 1, "method": "sql.exec", "params": {"sql": "UPDATE t SET v = 'stolen'"}}
    api: Any = client.server._api  # type: ignore[attr-defined]
    source, begun, release = api.databases.get("main"), threading.Event(), threading.Event()

    def hold(session: Any) -> None:
        begun.set()
        assert release.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        held = source.write(hold)
        assert begun.wait(PATIENCE)
        try:
            url = f"{client.http.base_url}/api/v1/rpc"
            asked = pool.submit(lambda: httpx.post(url, json=body, headers=headers, timeout=PATIENCE))
            wait_until(lambda: source.status()["writes_waiting"], "the write waits")
            client.ok("security.token.revoke", id=key["id"])
        finally:
            release.set()
        held.result(PATIENCE)
        assert is_unauthorized(asked.result(PATIENCE))
    assert client.rows("SELECT v FROM t") == [["first"]]


def streams(client: Client) -> int:
    """Return how many groups of streams the hubs have."""
    feeds: Any = client.server._api.feeding()  # type: ignore[attr-defined]
    return sum(len(hub._groups) for hub in feeds._hubs.values())


# --- streams: they take a while to open ------------------------------------------------------------------------------


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Hold every opened stream until the second event is set; set the first event when a stream is held."""
    waits, go = threading.Event(), threading.Event()

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        async def opened(*args: Any, **named: Any) -> Any:
            stream = await real(*args, **named)
            waits.set()
            await asyncio.to_thread(go.wait, PATIENCE)
            return stream

        return opened

    for name in ("open", "open_changes", "open_batches"):
        monkeypatch.setattr(Feeds, name, slow(getattr(Feeds, name)))
    return waits, go


def over_http(client: Client, path: str, token: str, accept: str) -> bytes:
    headers = {"authorization": f"Bearer {token}", "accept": accept}
    url = client.server.url + path
    try:
        with httpx.stream("GET", url, headers=headers, timeout=PATIENCE) as answer:
            return b"".join(answer.iter_bytes())
    except httpx.RemoteProtocolError:
        return b"cut off"


def over_websocket(client: Client, path: str, token: str) -> int | None:
    url = client.server.url.replace("http", "ws", 1) + path
    with connect(url, additional_headers={"x-api-key": token}, open_timeout=PATIENCE, proxy=None) as open:
        try:
            while True:
                assert "first" not in str(open.recv(timeout=PATIENCE))
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None


@pytest.mark.parametrize("kind", ["sse", "ndjson", "arrow", "websocket"])
def test_stream_opened_during_the_revocation_is_refused(
    client: Client, slowly: tuple[threading.Event, threading.Event], kind: str
) -> None:
    waits, go = slowly
    key = create_owner_key(client)
    asked = {"id": 1, "method": "cdc.subscribe_table", "params": {"table": "t", "start": "earliest"}}
    mine = {"x-api-key": key["token"]}
    sub = client.http.post("/api/v1/rpc", json=asked, headers=mine).json()["result"]
    accept = {"sse": "text/event-stream", "ndjson": "application/x-ndjson", "websocket": ""}
    path = f"{sub['ws_url']}?from_offset=0" if kind == "websocket" else "/api/v1/changes/main/t"
    with ThreadPoolExecutor(1) as pool:
        if kind == "websocket":
            reading: Any = pool.submit(over_websocket, client, path, key["token"])
        else:
            wanted = accept.get(kind, "application/vnd.apache.arrow.stream")
            reading = pool.submit(over_http, client, path, key["token"], wanted)
        assert waits.wait(PATIENCE), reading.result(0) if reading.done() else "it was not asked for"
        client.ok("security.token.revoke", id=key["id"])
        go.set()
        said = reading.result(PATIENCE)  # it ends by itself
    if kind == "websocket":
        assert said == 4401
    elif kind != "arrow":
        assert b"unauthorized" in said, said


@pytest.mark.parametrize("kind", ["pull", "snapshot"])
def test_bulk_read_whose_key_is_revoked_before_it_begins_answers_401(
    client: Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    async def begin(*args: Any) -> int:
        waits.set()
        await asyncio.Event().wait()  # until the end of the key cancels it
        raise AssertionError

    monkeypatch.setattr(*((Pulls, "_pour") if kind == "pull" else (Snapshots, "_redirect")), begin)
    key = create_owner_key(client)
    path = "/api/v1/pull/main/t/log?after=0&upto=1" if kind == "pull" else "/api/v1/snapshot/main/t"
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.get, client.server.url + path, headers={"x-api-key": key["token"]}, timeout=PATIENCE)
        assert waits.wait(PATIENCE)
        assert client.ok("security.token.revoke", id=key["id"])["streams_ended"] == 1
        answer = asking.result(PATIENCE)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")


def test_waiting_poll_whose_key_is_revoked_ends_with_unauthorized(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, answer = threading.Event(), Poll.answer

    async def noted(poll: Poll) -> dict[str, Any]:
        waits.set()
        return await answer(poll)

    monkeypatch.setattr(Poll, "answer", noted)
    key = create_owner_key(client)
    subscribed = client.ok("cdc.subscribe_table", db="main", table="t")
    body = {"id": 1, "method": "cdc.poll", "params": {"sub_id": subscribed["sub_id"], "wait_ms": 60_000}}
    with ThreadPoolExecutor(1) as pool:
        url, sent = client.server.url + "/api/v1/rpc", {"x-api-key": key["token"]}
        asking = pool.submit(httpx.post, url, json=body, headers=sent, timeout=PATIENCE)
        assert waits.wait(PATIENCE)
        assert client.ok("security.token.revoke", id=key["id"])["streams_ended"] == 1
        client.rows("INSERT INTO t VALUES (2, 'later')")
        said = asking.result(PATIENCE)
    assert said.json()["error"]["code"] == "unauthorized"


def test_stream_of_a_key_revoked_on_a_full_disk_ends(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    key = create_owner_key(client)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    headers = {"authorization": f"Bearer {key['token']}"}
    with client.http.stream("GET", "/api/v1/changes/main/t", headers=headers) as stream:
        assert stream.status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(api_keys, "write_whole", full)
            assert client.rpc("security.token.revoke", id=key["id"])["error"]["code"] == "storage_full"
        stream.read()  # until the server ends it
    client.ok("security.token.revoke", id=key["id"])
