"""Pipelined requests: few are queued and all are answered in order, whether or not the client reads the answers."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.serve.http.websocket_protocol import FramedWebSocket
from headwater.serve.server.http_protocol import MAX_PIPELINED, BoundedHttp
from headwater.serve.tls_handshakes import READ_BYTES

GET = b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
LIST = b'{"id": 1, "method": "schema.list_databases"}'
HEADERS = b"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(LIST)
UPGRADE = b"GET /api/v1/ws HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
UPGRADE += b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
POST = b"POST /api/v1/rpc HTTP/1.1\r\n" + HEADERS + b"\r\n" + LIST


class Held(NoDatabases):
    """Databases whose list is returned only after `go` is set."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def names(self) -> list[str]:
        self.asked.set()
        assert self.go.wait(PATIENCE)
        return ["late"]


@pytest.fixture
def held() -> Iterator[Held]:
    databases = Held()
    yield databases
    databases.go.set()


@pytest.fixture
def client(held: Held) -> Iterator[Client]:
    with serving(held) as client:
        yield client
        held.go.set()


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of the queue after each request that is parsed."""
    lengths = [0]
    inherited = BoundedHttp.on_headers_complete

    def counting(self: BoundedHttp) -> None:
        inherited(self)
        lengths.append(len(self.pipeline))

    monkeypatch.setattr(BoundedHttp, "on_headers_complete", counting)
    return lengths


def connected(client: Client) -> socket.socket:
    return socket.create_connection(client.server.addresses[0], PATIENCE)


def protocol_of(client: Client, open: socket.socket) -> Any:
    """Return the server's side of the connection."""
    assert client.server._uvicorn is not None
    state = client.server._uvicorn.server_state
    name = open.getsockname()
    found: list[Any] = []

    def find() -> bool:
        found[:] = [each for each in list(state.connections) if getattr(each, "client", None) == name]
        return bool(found)

    wait_until(find, "the connection")
    return found[0]


def rest(open: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := open.recv(1 << 16):
            found += piece
    return found


def statuses(answers: bytes) -> list[int]:
    return [int(each[:3]) for each in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("number", [3, MAX_PIPELINED, 500])
def test_pipelined_requests_are_answered_in_order(client: Client, queued: list[int], number: int) -> None:
    paths = [b"/healthz" if place % 3 else b"/nowhere" for place in range(number)]
    with connected(client) as open:
        open.sendall(b"".join(GET % path for path in paths) + LAST)
        answers = rest(open)
    assert statuses(answers) == [200 if path == b"/healthz" else 404 for path in paths] + [200]
    assert max(queued) <= MAX_PIPELINED


def test_pipelined_bodies_with_blank_lines_are_read_whole(client: Client, held: Held) -> None:
    held.go.set()
    blank = b"\r\n" * 5_000
    request = POST.replace(b"length: %d" % len(LIST), b"length: %d" % len(LIST + blank)) + blank
    with connected(client) as open:
        open.sendall(request * 20 + LAST)
        answers = rest(open)
    assert statuses(answers) == [200] * 21 and answers.count(b'"late"') == 20


def test_requests_behind_a_slow_one_wait_unparsed_and_are_answered(
    client: Client, held: Held, queued: list[int]
) -> None:
    with connected(client) as open:
        open.sendall(POST)
        assert held.asked.wait(PATIENCE)
        open.sendall((GET % b"/healthz") * 3_000 + LAST)
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol.pipeline and protocol.flow.read_paused, "reading is paused")
        assert client.http.get("/healthz").status_code == 200
        assert 0 < len(protocol.pipeline) <= MAX_PIPELINED and protocol.flow.read_paused
        held.go.set()
        answers = rest(open)
    assert statuses(answers) == [200] * 3_002 and b'"late"' in answers.split(b"HTTP/1.1 ")[1]
    assert max(queued) <= MAX_PIPELINED


def test_server_stops_reading_from_a_client_that_reads_no_responses(client: Client, queued: list[int]) -> None:
    with socket.socket() as open:
        open.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        open.settimeout(PATIENCE)
        open.connect(client.server.addresses[0])

        def flood() -> None:
            with contextlib.suppress(OSError):
                while True:
                    open.sendall((GET % b"/openapi.json") * 1_000)

        thread = threading.Thread(target=flood)
        thread.start()
        protocol = protocol_of(client, open)
        wait_until(
            lambda: max(queued) > MAX_PIPELINED or (protocol.flow.write_paused and protocol.flow.read_paused),
            "reading and writing are paused",
        )
        parsed = len(queued)
        for _ in range(20):
            assert client.http.get("/healthz").status_code == 200
        assert max(queued) <= MAX_PIPELINED and len(queued) - parsed <= 20 + MAX_PIPELINED
        assert len(protocol._unparsed_data) <= 2 * READ_BYTES
        open.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


def test_aborted_connection_drops_its_pipelined_requests(client: Client, held: Held) -> None:
    with connected(client) as open:
        open.sendall(POST + (GET % b"/healthz") * 500)
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol._unparsed_data, "requests are queued")
        client.loop.call_soon_threadsafe(protocol.transport.abort)
        assert rest(open) == b""
    wait_until(lambda: not protocol.pipeline and not protocol._unparsed_data, "the queue is empty")
    assert protocol._running.disconnected


def test_stream_with_a_pipelined_request_ends_when_its_connection_is_aborted(tmp_path: Path) -> None:
    def streams() -> float:
        lines = client.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("headwater_streams{"))

    with Whole(tmp_path) as databases, serving(databases) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        with connected(client) as open:
            open.sendall(GET % b"/api/v1/changes/main/t" + GET % b"/healthz")
            assert open.recv(15) == b"HTTP/1.1 200 OK"
            protocol = protocol_of(client, open)
            wait_until(lambda: protocol.pipeline and streams() == 1, "the stream is open, and a request queued")
            client.loop.call_soon_threadsafe(protocol.transport.abort)
            wait_until(lambda: not streams(), "the stream has ended")


def test_websocket_upgrade_during_an_unanswered_request_closes_the_connection(client: Client, held: Held) -> None:
    with connected(client) as open:
        open.sendall(POST)
        assert held.asked.wait(PATIENCE)
        open.sendall(UPGRADE)
        assert rest(open) == b""


@pytest.mark.parametrize("protocol", [BoundedHttp, FramedWebSocket])
def test_connection_receives_few_bytes_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch, protocol: type[Any]
) -> None:
    inherited, lengths = protocol.data_received, []

    def recording(self: Any, data: bytes) -> None:
        lengths.append(len(data))
        inherited(self, data)

    monkeypatch.setattr(protocol, "data_received", recording)
    with connected(client) as open:
        if protocol is FramedWebSocket:
            open.sendall(UPGRADE)
            assert open.recv(12) == b"HTTP/1.1 101"
        size = 2 << 20  # a body, or a frame that is too large
        body = b"\x82\xff" + (size - 14).to_bytes(8, "big") + bytes(4)
        if protocol is BoundedHttp:
            body = b"POST /api/v1/rpc HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (size - 78)
        with contextlib.suppress(OSError):
            open.sendall(body.ljust(size))
        wait_until(lambda: READ_BYTES in lengths)
    assert max(lengths) == READ_BYTES


def test_half_of_a_request_head_is_kept_while_the_earlier_request_is_answered(client: Client, held: Held) -> None:
    with connected(client) as open:
        open.sendall(POST + b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        assert held.asked.wait(PATIENCE)
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol.scope is not protocol.cycle.scope, "the second head has begun")
        held.go.set()
        wait_until(lambda: protocol.cycle.response_complete, "the first request is answered")
        open.sendall(b"connection: close\r\n\r\n")
        assert statuses(rest(open)) == [200, 200]


def test_many_tiny_headers_are_rejected(client: Client) -> None:
    with connected(client) as open:
        open.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a:\r\n" * 5_000 + b"\r\n")
        assert rest(open).startswith(b"HTTP/1.1 431 ")


def test_server_still_answers_after_a_client_resets_its_connection(client: Client, held: Held) -> None:
    with connected(client) as open:
        open.sendall(POST + (GET % b"/healthz") * 500)
        assert held.asked.wait(PATIENCE)
        open.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    held.go.set()
    assert client.ok("schema.list_databases") == {"databases": ["late"]}
