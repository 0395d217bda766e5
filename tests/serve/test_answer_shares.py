"""How much memory the unread answers of one caller may hold."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from open_databases import Whole
from serving import Client, serving
from tests.suite.waiting import PATIENCE, wait_until

from headwater.config import Secret
from headwater.errors import Busy
from headwater.model.answer_limits import MEMORY, AnswerMemory

MIB = 1 << 20
SQL = "SELECT k, hex(zeroblob(10485760)) AS v FROM t"
SELECT = {"id": 1, "method": "query.select", "params": {"sql": SQL}}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Whole(tmp_path) as databases, serving(databases, folder=tmp_path, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        client.rows("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        client.rows("INSERT INTO t VALUES (1)")
        yield client


@contextlib.contextmanager
def unread(client: Client, token: str, asked: bytes) -> Iterator[None]:
    """An answer of 20 MiB that has begun, and that nobody reads."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(client.server.addresses[0])
        connection.sendall(asked.replace(b"\r\n", f"\r\nhost: x\r\nauthorization: Bearer {token}\r\n".encode(), 1))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        yield


@pytest.mark.parametrize("kind", ["rpc", "query"])
def test_caller_with_unread_answers_is_refused_and_others_are_not(
    client: Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: MEMORY.used == 0, "answers of other tests were freed")
    monkeypatch.setattr(MEMORY, "max_memory", 100 * MIB)
    ada, bob = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in ("ada", "bob"))
    body, path = json.dumps(SELECT).encode(), f"/api/v1/q/{client.ok('query.prepare', sql=SQL)['query_id']}"
    head = b"POST /api/v1/rpc HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    asked = head + body if kind == "rpc" else f"GET {path} HTTP/1.1\r\n\r\n".encode()

    def code(token: str) -> str:
        headers = {"authorization": f"Bearer {token}"}
        if kind == "rpc":
            answer = client.http.post("/api/v1/rpc", json=SELECT, headers=headers).json()
            return "ok" if answer["ok"] else answer["error"]["code"]
        response = client.http.get(path, headers=headers)
        return "ok" if response.status_code == 200 else str(response.json()["code"])

    with unread(client, ada, asked), unread(client, ada, asked):
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
