"""The memory that WebSocket clients may hold: messages that are not answered, and answers that are not read."""

import contextlib
import json
import socket
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.server.test_websocket_limits import (
    ANSWER,
    ASK,
    CONT,
    PING,
    PONG,
    TEXT,
    answer,
    closed,
    frame,
    received,
    send,
    web_socket,
)
from tests.serve.server_fixture import Client, serving
from tests.serve.server_fixture import unread as unread_answer
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret
from headwater.model.work.answer_limits import MEMORY
from headwater.serve.gateway import messages
from headwater.serve.gateway.socket import MOST_WAITING
from headwater.serve.http.websocket_protocol import FramedWebSocket
from headwater.serve.limits import request_body as bodies
from headwater.serve.limits.request_body import UNCOUNTED, BodyMemory
from headwater.serve.limits.unread_answers import UNREAD

pytestmark = pytest.mark.slow

MIB = 1 << 20
SELECT = b'{"id": 1, "type": "sql", "payload": {"query": "SELECT 1"}}'
JSON = {"content-type": "application/json"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Whole(tmp_path) as databases, serving(databases) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        yield client


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, client: Client) -> BodyMemory:
    """Return the server's budget for requests: 4 MiB, of which one address may use 2 MiB."""
    made = BodyMemory(4 * MIB)
    monkeypatch.setattr(bodies, "BODIES", made)
    return made


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[FramedWebSocket]:
    """Return a list that gets the WebSockets of the server as they are opened."""
    made: list[FramedWebSocket] = []
    inherited = FramedWebSocket.connection_made

    def noted(self: FramedWebSocket, transport: Any) -> None:
        made.append(self)
        inherited(self, transport)

    monkeypatch.setattr(FramedWebSocket, "connection_made", noted)
    return made


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; statements that read are answered once it is set."""
    made, rows = threading.Event(), messages.rows_payload

    def held(*args: Any) -> Any:
        assert made.wait(PATIENCE)
        return rows(*args)

    monkeypatch.setattr(messages, "rows_payload", held)
    yield made
    made.set()


def wait_for(memory: BodyMemory, size: int) -> None:
    wait_until(lambda: memory.used == size, f"{size} bytes are counted")


def unfinished(shape: str, size: int) -> bytes:
    """Return `size` bytes of a text message whose end is missing."""
    if shape == "fragments":
        half = b" " * (size // 2)
        return frame(TEXT, half, fin=False) + frame(CONT, half, fin=False)
    return frame(TEXT, b" " * (size + 1))[:-1]


# --- messages that are not answered ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["fragments", "frame"])
def test_unfinished_messages_of_one_address_are_limited(client: Client, memory: BodyMemory, shape: str) -> None:
    with contextlib.ExitStack() as opened:
        for number in range(1, 3):
            open = opened.enter_context(web_socket(client))
            open.sendall(unfinished(shape, MIB))
            wait_for(memory, number * MIB)
        with web_socket(client) as refused:
            send(refused, unfinished(shape, MIB))
            code, reason = closed(refused)
            assert code == 1013 and reason.startswith("busy: ") and "from your address" in reason
        assert memory.used == 2 * MIB
        body = client.http.post("/api/v1/rpc", content=b" " * MIB, headers=JSON)
        assert body.status_code == 503, "bodies of HTTP have the same budget"
        with web_socket(client) as small:  # what is small is not counted
            small.sendall(frame(TEXT, ASK))
            assert ANSWER in answer(small)
    wait_for(memory, 0)
    with web_socket(client) as open:
        open.sendall(frame(TEXT, ASK + b" " * MIB))
        assert ANSWER in answer(open)
    wait_for(memory, 0)


def test_message_that_exceeds_free_memory_closes_the_socket_and_is_not_executed(
    client: Client, memory: BodyMemory
) -> None:
    create = b'{"id": 1, "type": "sql", "payload": {"query": "CREATE TABLE refused(id INTEGER PRIMARY KEY)"}}'
    with web_socket(client) as holder:
        holder.sendall(unfinished("frame", 2 * MIB - UNCOUNTED))
        wait_for(memory, 2 * MIB - UNCOUNTED)
        with web_socket(client) as refused:
            send(refused, frame(TEXT, create + b" " * UNCOUNTED))
            assert closed(refused)[0] == 1013
    assert client.error("data.get", table={"db": "main", "table": "refused"}, pk=[{"t": "i64", "v": 1}])["code"] == (
        "not_found"
    )


@pytest.mark.parametrize("pad", ["  ", "é"])
@pytest.mark.parametrize("is_left", [False, True])
def test_message_counts_until_it_is_answered(
    client: Client, memory: BodyMemory, go_on: threading.Event, pad: str, is_left: bool
) -> None:
    text = json.dumps({"id": 1, "type": "sql", "payload": {"query": f"SELECT '{pad * UNCOUNTED}'"}}, ensure_ascii=False)
    data = text.encode()
    size = len(data) if text.isascii() else len(data) + sys.getsizeof(text)
    with web_socket(client) as open:
        open.sendall(frame(TEXT, data))
        wait_for(memory, size)
        if not is_left:
            go_on.set()
            assert b'"columns"' in answer(open)
    wait_for(memory, 0)


def test_messages_that_wait_for_their_turn_are_counted(
    client: Client, memory: BodyMemory, go_on: threading.Event
) -> None:
    padded = ASK + b" " * (UNCOUNTED // 4)
    with web_socket(client) as open:
        open.sendall(frame(TEXT, SELECT) + frame(TEXT, padded) * 8)
        wait_for(memory, len(SELECT) + 8 * len(padded))
        go_on.set()
        assert all(answer(open) for _ in range(9))
        wait_for(memory, 0)


def test_answered_message_is_not_kept_while_the_client_is_idle(client: Client) -> None:
    with web_socket(client) as open:
        open.sendall(frame(TEXT, ASK))
        answer(open)
        data = frame(TEXT, ASK + b" " * (8 * MIB))
        tracemalloc.start()
        try:
            open.sendall(data)
            assert ANSWER in answer(open)
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < MIB, "the message was freed")
        finally:
            tracemalloc.stop()


# --- messages that do not end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["fragments", "frame"])
@pytest.mark.parametrize("kind", ["gateway", "stream"])
def test_message_that_does_not_end_in_time_ends_the_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str, shape: str
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    with web_socket(client, kind) as open:
        open.sendall(unfinished(shape, 1_000))
        assert closed(open) == (1008, "a message did not end within 0.1 s")


def test_message_deadline_is_cancelled_when_the_message_is_complete(
    client: Client, connections: list[FramedWebSocket]
) -> None:
    with web_socket(client) as open:
        (connection,) = connections
        for _ in range(2):
            open.sendall(frame(TEXT, ASK, fin=False))
            wait_until(lambda: connection._deadline is not None, "the message has a deadline")
            open.sendall(frame(PING) + frame(CONT, b" "))
            assert ANSWER in answer(open)
            assert connection._deadline is None
        open.sendall(frame(PING, b"half")[:3])
        wait_until(lambda: connection._deadline is not None, "half of a ping has a deadline")
        open.sendall(frame(PING, b"half")[3:] + frame(TEXT, ASK, fin=False)[:1])
        assert received(open) == (PONG, b"half")
        timer = connection._deadline
        assert timer is not None and not timer.cancelled(), "it is the deadline of the message behind the ping"
    wait_until(lambda: connection._deadline is None, "the connection has ended")


def test_message_deadline_is_not_started_while_the_server_pauses_reading(
    client: Client, connections: list[FramedWebSocket], go_on: threading.Event
) -> None:
    number = MOST_WAITING + 2  # one is being answered, and one waits to get into the inbox
    with web_socket(client) as open:
        (connection,) = connections
        open.sendall(frame(TEXT, SELECT) * (number + 1) + frame(TEXT, SELECT, fin=False))
        wait_until(lambda: connection.queue.qsize() == 1 and connection.conn.current_size, "the inbox is full")
        assert connection._deadline is None
        go_on.set()
        assert all(answer(open) for _ in range(number + 1))
        wait_until(lambda: connection._deadline is not None, "the server reads on")


# --- answers that are not read ---------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Client]:
    """A server with a value of 10 MiB in `kv`."""
    with Whole(tmp_path) as databases, serving(databases, folder=tmp_path, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        with contextlib.closing(asking(client, "admin")) as admin:
            admin.ok("kv_put", {"key": "large", "value": "x" * (10 * MIB)})
        wait_until(lambda: MEMORY.used == 0, "answers of other tests were freed")
        yield client


SQL = {"query": "SELECT hex(zeroblob(5242880)) AS v"}
REQUESTS = {"sql": SQL, "kv_get": {"key": "large"}}


def asking(client: Client, token: str) -> GatewayClient:
    return GatewayClient(str(client.http.base_url), headers={"authorization": f"Bearer {token}"}, max_queue=None)


@contextlib.contextmanager
def unread(client: Client, token: str, type: str) -> Iterator[socket.socket]:
    """Request a value of 10 MiB and wait until the server holds its answer, without reading it."""
    before = MEMORY.used
    with web_socket(client, buffer=4096, headers=(f"authorization: Bearer {token}",)) as open:
        open.sendall(frame(TEXT, json.dumps({"id": 1, "type": type, "payload": REQUESTS[type]}).encode()))
        assert open.recv(1, socket.MSG_PEEK) == b"\x01", "the first of several frames"
        wait_until(lambda: 9 * MIB < MEMORY.used - before < 11 * MIB, "the answer counts, and its rows no more")
        yield open


@pytest.mark.parametrize("type", ["sql", "kv_get"])
def test_caller_of_the_gateway_with_unread_answers_is_refused_and_others_are_not(
    locked: Client, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEMORY, "max_memory", 50 * MIB)
    ada, bob = (locked.ok("security.token.create", name=name, role="editor")["token"] for name in ("ada", "bob"))

    def code(token: str) -> str:
        before = MEMORY.used
        found = answered(token)
        wait_until(lambda: MEMORY.used <= before, "the answer that was read was released")
        return found

    def answered(token: str) -> str:
        with contextlib.closing(asking(locked, token)) as caller:
            found = caller.ask(type, REQUESTS[type])["payload"]
            if "code" in found:
                assert caller.ok("ping")
                return str(found["code"])
            value = found["value"] if type == "kv_get" else found["rows"][0][0]
            assert value == ("x" if type == "kv_get" else "0") * (10 * MIB)
            return "ok"

    with unread(locked, ada, type), unread(locked, ada, type):
        assert (code(ada), code(bob), code("admin")) == ("busy", "ok", "ok")
    wait_until(lambda: MEMORY.used == 0, "the memory was released")
    assert code(ada) == "ok"
    wait_until(lambda: MEMORY.used == 0, "the memory was released")


def test_answer_to_a_write_is_not_refused(locked: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORY, "max_memory", 50 * MIB)
    ada = locked.ok("security.token.create", name="ada", role="editor")["token"]
    locked.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    insert = {"query": "INSERT INTO t VALUES (1, hex(zeroblob(5242880))) RETURNING v"}
    with unread(locked, ada, "sql"), unread(locked, ada, "sql"), contextlib.closing(asking(locked, ada)) as caller:
        assert len(caller.ok("sql", insert)["rows"][0][0]) == 10 * MIB
        assert caller.error("sql", SQL)["code"] == "busy"
    wait_until(lambda: MEMORY.used == 0, "the memory was released")


def test_answer_of_the_whole_server_without_memory_is_refused(locked: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORY, "max_memory", 25 * MIB)
    with unread(locked, "admin", "sql"), contextlib.closing(asking(locked, "admin")) as caller:
        assert caller.error("sql", SQL)["code"] == "busy"
        assert caller.ok("ping")


def test_control_frames_are_written_between_the_fragments_of_an_answer(locked: Client) -> None:
    with unread(locked, "admin", "sql") as open:
        open.sendall(frame(PING, b"between"))
        text, pongs = b"", 0
        while not text.endswith(b"}}"):
            opcode, payload = received(open)
            if opcode == PONG:
                pongs += 1
                assert payload == b"between"
            else:
                assert opcode == (CONT if text else TEXT)
                text += payload
        assert pongs == 1 and len(json.loads(text)["payload"]["rows"][0][0]) == 10 * MIB
        wait_until(lambda: MEMORY.used == 0, "an answer that was read counts no more")
        open.sendall(frame(TEXT, ASK))
        assert ANSWER in answer(open)


def test_memory_of_an_unread_answer_is_released_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FramedWebSocket, "linger_seconds", 0.1)
    wait_until(lambda: MEMORY.used == 0, "answers of other tests were freed")
    with contextlib.ExitStack() as opened:
        with (
            Whole(tmp_path) as databases,
            serving(databases, folder=tmp_path, token=Secret("admin"), drain_seconds=0.1) as client,
        ):
            opened.enter_context(unread(client, "admin", "sql"))
        assert MEMORY.used == 0


def test_gateway_socket_is_ended_once_too_many_changes_are_unread(
    locked: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked.rows("CREATE TABLE large(id INTEGER PRIMARY KEY, v TEXT)")
    for key in range(2):
        locked.rows("INSERT INTO large VALUES (?, hex(zeroblob(5242880)))", key)
    wait_until(lambda: UNREAD.used == 0, "answers of other tests were released")
    monkeypatch.setattr(UNREAD, "max_memory", 30 * MIB)  # 15 for one caller: one change
    ada = locked.ok("security.token.create", name="ada", role="viewer")["token"]
    asked = {"tables": ["large"], "start_sequence": 1}
    subscribe = frame(TEXT, json.dumps({"id": 1, "type": "subscribe", "payload": asked}).encode())
    headers = (f"authorization: Bearer {ada}",)
    with web_socket(locked, buffer=4096, headers=headers) as first:
        first.sendall(subscribe)
        wait_until(lambda: UNREAD.used > 9 * MIB, "the first socket holds a change")
        with web_socket(locked, headers=headers) as second:
            second.sendall(subscribe)
            received = bytearray()
            while piece := second.recv(1 << 16):
                received += piece
        assert b"busy" in received and len(received) < MIB, "the change itself was not sent"
    wait_until(lambda: UNREAD.used == 0, "the memory was released")


def test_small_changes_that_wait_for_their_turn_are_counted(locked: Client) -> None:
    locked.rows("CREATE TABLE small(id INTEGER PRIMARY KEY, v TEXT)")
    wait_until(lambda: UNREAD.used == 0, "answers of other tests were released")
    with web_socket(locked, buffer=4096, headers=("authorization: Bearer admin",)) as open:
        for number in range(64):
            asked = {"tables": ["small"], "where": f"id < {number + 5}"}
            open.sendall(frame(TEXT, json.dumps({"id": number, "type": "subscribe", "payload": asked}).encode()))
            assert b'"subscribed"' in answer(open)
        locked.rows("INSERT INTO small VALUES (1, hex(zeroblob(51200)))")
        wait_until(lambda: UNREAD.used > 10 * 100 * 1024, "the pieces of many subscriptions wait")
    wait_until(lambda: UNREAD.used == 0, "the memory was released")


def test_snapshot_is_cut_once_too_many_rows_are_unread(locked: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    locked.rows("CREATE TABLE wide(id INTEGER PRIMARY KEY, v TEXT)")
    for key in range(2):
        locked.rows("INSERT INTO wide VALUES (?, hex(zeroblob(5242880)))", key)
    wait_until(lambda: UNREAD.used == 0, "answers of other tests were released")
    monkeypatch.setattr(UNREAD, "max_memory", 30 * MIB)  # 15 for one caller: one piece, which has one row
    ada = locked.ok("security.token.create", name="ada", role="viewer")["token"]
    headers = {"authorization": f"Bearer {ada}"}
    path = locked.http.get("/api/v1/snapshot/main/wide", headers=headers).headers["location"]
    with unread_answer(locked, f"GET {path} HTTP/1.1\r\n\r\n", ada):
        wait_until(lambda: UNREAD.used > 9 * MIB, "the first reader holds a piece")
        with pytest.raises(httpx.RemoteProtocolError):
            locked.http.get(path, headers=headers)
    wait_until(lambda: UNREAD.used == 0, "the memory was released")
    assert len(locked.http.get(path, headers=headers).content) > 20 * MIB
