"""A reader whose credential ends loses its connection, also one that reads nothing of what it is sent."""

import base64
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import KEY_LIFETIME, PATIENCE

from headwater.config import Secret
from headwater.serve.limits.slow_reader_limits import SlowReaderLimits

ADMIN = {"authorization": "Bearer admin"}
GROW = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300) "
    "INSERT INTO t(v) SELECT printf('%.50000c', 'x') FROM n"
)
PATHS = {
    "sse": "/api/v1/changes/main/t?from_offset=0",
    "ndjson": "/api/v1/changes/main/t?from_offset=0",
    "arrow": "/api/v1/changes/main/t?from_offset=0",
    "snapshot": "/api/v1/snapshot/main/t?version={version}",
    "pull": "/api/v1/pull/main/t/log?after=0&upto={latest}",
    "websocket": "{ws_url}?from_offset=0",
    "gateway": "/api/v1/ws",
}
ACCEPT = {"ndjson": "application/x-ndjson", "arrow": "application/vnd.apache.arrow.stream"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server whose log is larger than all socket buffers."""
    folder = tmp_path_factory.mktemp("letting-go")
    with Whole(folder) as databases, serving(databases, folder=folder, token=Secret("admin")) as client:
        client.http.headers.update(ADMIN)
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        client.rows(GROW)
        yield client


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def connections(client: Client) -> float:
    lines = client.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("headwater_connections "))


@contextlib.contextmanager
def reading_nothing(client: Client, kind: str, token: str, sub: dict[str, Any]) -> Iterator[socket.socket]:
    """Open a connection that requests everything and reads none of the answer."""
    seen = client.ok("pull.describe", table="t")
    path = PATHS[kind].format(version=seen["version"], latest=seen["latest"], ws_url=sub["ws_url"])
    asked = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {token}"]
    if kind in ACCEPT:
        asked.append(f"accept: {ACCEPT[kind]}")
    if kind in ("websocket", "gateway"):
        nonce = base64.b64encode(os.urandom(16)).decode()
        asked += ["upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13"]
        asked.append(f"sec-websocket-key: {nonce}")
    with socket.socket() as open:
        open.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        open.settimeout(PATIENCE)
        open.connect(client.server.addresses[0])
        open.sendall("\r\n".join([*asked, "", ""]).encode())
        head = open.recv(15)
        assert head in (b"HTTP/1.1 200 OK", b"HTTP/1.1 101 Sw"), head + open.recv(4096)
        if kind == "gateway":
            open.sendall(masked({"id": 1, "type": "subscribe", "payload": {"tables": ["t"], "start_sequence": 1}}))
        yield open


def masked(body: Any) -> bytes:
    """Return one text frame of a client with the mask zero."""
    data = json.dumps(body).encode()
    assert len(data) < 126
    return bytes([0x81, 0x80 | len(data)]) + bytes(4) + data


@pytest.mark.slow
@pytest.mark.parametrize("how", ["revoked", "expired"])
@pytest.mark.parametrize("kind", list(PATHS))
def test_stalled_reader_is_disconnected_when_its_credential_ends(
    client: Client, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowReaderLimits, "linger_seconds", 0.1)
    named: dict[str, Any] = {"expires_in_seconds": KEY_LIFETIME} if how == "expired" else {}
    made = client.ok("security.token.create", name=f"{kind}-{how}", role="owner", **named)
    before = connections(client)
    headers = {"authorization": f"Bearer {made['token']}"}
    ask = {"id": 1, "method": "cdc.subscribe_table", "params": {"table": "t", "start": "earliest"}}
    sub = client.http.post("/api/v1/rpc", json=ask, headers=headers).json()["result"]
    with reading_nothing(client, kind, made["token"], sub) as open:
        if how == "revoked":
            assert connections(client) == before + 1
            assert client.ok("security.token.revoke", id=made["id"])["streams_ended"] == 1
        until(lambda: connections(client) == before, "the connection is still open")
        with contextlib.suppress(ConnectionError):
            while open.recv(1 << 20):
                pass
    until(lambda: not open_streams(client), "the stream is still there")


def open_streams(client: Client) -> float:
    lines = client.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(("headwater_streams{", "headwater_pulls ")))


def test_reader_gets_the_reason_when_its_credential_ends_and_others_stay(client: Client) -> None:
    tokens = [client.ok("security.token.create", name=name, role="owner") for name in ("goes", "stays")]
    path = "/api/v1/changes/main/t"
    with contextlib.ExitStack() as stack:
        goes, stays = (
            stack.enter_context(
                stack.enter_context(httpx.Client(base_url=client.http.base_url, timeout=PATIENCE)).stream(
                    "GET", path, headers={"authorization": f"Bearer {one['token']}"}
                )
            )
            for one in tokens
        )
        client.ok("security.token.revoke", id=tokens[0]["id"])
        said = "".join(goes.iter_text())
        assert "event: failed" in said and "unauthorized" in said
        client.rows("INSERT INTO t(v) VALUES ('news')")
        lines = stays.iter_lines()
        while "news" not in next(lines):
            pass


@pytest.mark.slow
def test_changes_response_read_slower_than_the_linger_time_is_delivered_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowReaderLimits, "linger_seconds", 0.05)
    with Whole(tmp_path) as databases, serving(databases) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        client.rows(GROW)
        latest = client.ok("pull.describe", table="t")["latest"]
        headers = {"accept": "application/x-ndjson"}
        with client.http.stream("GET", f"/api/v1/changes/main/t?from_offset=0&upto={latest}", headers=headers) as body:
            lines = 0
            for line in body.iter_lines():
                if not lines:
                    time.sleep(0.3)  # longer than the grace: the slowness that is tested
                lines += bool(line)
        assert lines >= 300
