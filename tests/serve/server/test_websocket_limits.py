"""Frames that cost a WebSocket server more than their sender: fragments, pings, and frames before the handshake."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret
from headwater.serve.http import websocket_protocol
from headwater.serve.http.websocket_protocol import MAX_SHORT_FRAGMENTS, PARSED_BYTES, TURN_FRAMES, FramedWebSocket

CONT, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10
ASK = b'{"id": 1, "type": "ping"}'
ANSWER = b'"pong"'
NO_LIMIT = 1 << 60


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Whole(tmp_path_factory.mktemp("limits")) as whole, serving(whole) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        yield client


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return one frame of a client with the mask zero."""
    head, size = bytes([(0x80 if fin else 0) | opcode]), len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = struct.pack(">BH", 0x80 | 126, size) if size < 1 << 16 else struct.pack(">BQ", 0x80 | 127, size)
    return head + length + bytes(4) + payload


def upgrade(path: str, *more: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", "upgrade: websocket", "connection: upgrade"]
    lines += ["sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def connected(client: Client, *, buffer: int = 0) -> socket.socket:
    open = socket.socket()
    if buffer:
        open.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    open.settimeout(PATIENCE)
    open.connect(client.server.addresses[0])
    return open


def path_of(client: Client, kind: str) -> str:
    if kind == "gateway":
        return "/api/v1/ws"
    return f"/api/v1/cdc/ws/{client.ok('cdc.subscribe_table', table='t')['sub_id']}"


@contextlib.contextmanager
def web_socket(
    client: Client, kind: str = "gateway", *, buffer: int = 0, headers: tuple[str, ...] = ()
) -> Iterator[socket.socket]:
    with connected(client, buffer=buffer) as open:
        open.sendall(upgrade(path_of(client, kind), *headers))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += open.recv(1)
        assert head.startswith(b"HTTP/1.1 101 ")
        yield open


def send(open: socket.socket, data: bytes) -> None:
    """Send as many bytes as the server accepts."""
    with contextlib.suppress(ConnectionError):
        open.sendall(data)


def exactly(open: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = open.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


def received(open: socket.socket) -> tuple[int, bytes]:
    """Return opcode and payload of the server's next frame."""
    first, size = exactly(open, 2)
    if size == 126:
        (size,) = struct.unpack(">H", exactly(open, 2))
    elif size == 127:
        (size,) = struct.unpack(">Q", exactly(open, 8))
    return first & 0x0F, exactly(open, size)


def closed(open: socket.socket) -> tuple[int, str]:
    """Return code and reason of the server's close, and check that the connection ends."""
    while (got := received(open))[0] != CLOSE:
        pass
    with contextlib.suppress(ConnectionError):
        assert open.recv(1) == b""
    return struct.unpack(">H", got[1][:2])[0], got[1][2:].decode()


def answer(open: socket.socket) -> bytes:
    while (got := received(open))[0] != TEXT:
        pass
    return got[1]


# --- fragments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gateway", "stream"])
def test_empty_websocket_fragment_closes_the_connection_with_1008(client: Client, kind: str) -> None:
    with web_socket(client, kind) as open:
        send(open, frame(TEXT, b"a", fin=False) + frame(CONT, fin=False) * 20_000)
        assert closed(open) == (1008, "a fragment is empty")
    assert client.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("kind", ["gateway", "stream"])
def test_too_many_short_fragments_close_the_connection(client: Client, kind: str) -> None:
    with web_socket(client, kind) as open:
        send(open, frame(TEXT, b"a", fin=False) + frame(CONT, b"b", fin=False) * (MAX_SHORT_FRAGMENTS + 1))
        code, reason = closed(open)
        assert code == 1008 and str(MAX_SHORT_FRAGMENTS) in reason


def test_websocket_message_in_short_fragments_is_answered(client: Client) -> None:
    parts = [ASK[place : place + 1] for place in range(len(ASK))]
    with web_socket(client) as open:
        for _ in range(2 * MAX_SHORT_FRAGMENTS // len(parts)):  # each message counts by itself
            fragments = [frame(CONT, part, fin=False) for part in parts[1:]]
            open.sendall(frame(TEXT, parts[0], fin=False) + b"".join(fragments) + frame(CONT))
            assert ANSWER in answer(open)


def test_large_websocket_message_in_long_fragments_is_answered(client: Client) -> None:
    pad = frame(CONT, b" " * 4096, fin=False) * (2 * MAX_SHORT_FRAGMENTS)
    with web_socket(client) as open:
        open.sendall(frame(TEXT, ASK, fin=False) + pad + frame(CONT))
        assert ANSWER in answer(open)


def test_messages_sent_together_are_answered_in_order(client: Client) -> None:
    number = 3_000
    with web_socket(client) as open:
        asks = [frame(TEXT, b'{"id": %d, "type": "ping"}' % place) for place in range(number)]
        thread = threading.Thread(target=send, args=(open, b"".join(asks)))
        thread.start()
        for place in range(number):
            assert answer(open).startswith(b'{"id":%d,' % place)
        thread.join(PATIENCE)


# --- control frames --------------------------------------------------------------------------------------


def test_pings_are_answered(client: Client) -> None:
    with web_socket(client) as open:
        open.sendall(b"".join(frame(PING, b"%d" % place) for place in range(100)))
        assert [received(open) for _ in range(100)] == [(PONG, b"%d" % place) for place in range(100)]


@pytest.mark.parametrize("opcode", [PING, PONG])
def test_flood_of_pings_or_pongs_closes_the_websocket_with_1008(client: Client, opcode: int) -> None:
    with web_socket(client) as open:
        send(open, frame(opcode) * 20_000)
        code, reason = closed(open)
        assert code == 1008 and "pings" in reason


@pytest.mark.slow
def test_unread_pongs_take_no_memory(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "MAX_CONTROL_FRAMES", NO_LIMIT)
    inherited, unread, largest = FramedWebSocket.handle_ping, [0], [0]

    def watched(self: FramedWebSocket) -> None:
        inherited(self)
        unread[0] += not self.writable.is_set()
        largest[0] = max(largest[0], self.transport.get_write_buffer_size())

    monkeypatch.setattr(FramedWebSocket, "handle_ping", watched)
    more = threading.Event()

    def flood(open: socket.socket) -> None:
        while not more.is_set():
            open.sendall(frame(PING, b"p" * 125) * 500)
        open.sendall(frame(PING, b"last"))

    with web_socket(client, buffer=4096) as open:
        thread = threading.Thread(target=flood, args=(open,))
        thread.start()
        wait_until(lambda: unread[0] > 20_000, "20,000 pings came while the client did not read")
        more.set()
        while received(open) != (PONG, b"last"):
            pass
        thread.join(PATIENCE)
        assert largest[0] < 1 << 20, "20,000 pongs would be 2.5 MB"
        open.sendall(frame(TEXT, ASK))
        assert ANSWER in answer(open)


def test_many_frames_in_one_read_are_handled_in_several_turns(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_protocol, "MAX_CONTROL_FRAMES", NO_LIMIT)
    inherited, turn, handled = FramedWebSocket.handle_pong, [0], dict[int, int]()
    over = threading.Event()

    def count_turns() -> None:
        turn[0] += 1
        if not over.is_set():
            client.loop.call_soon(count_turns)

    def counted(self: FramedWebSocket, event: Any) -> None:
        handled[turn[0]] = handled.get(turn[0], 0) + 1
        inherited(self, event)

    monkeypatch.setattr(FramedWebSocket, "handle_pong", counted)
    with web_socket(client) as open:
        client.loop.call_soon_threadsafe(count_turns)
        try:
            open.sendall(frame(PONG) * 30_000 + frame(TEXT, ASK))
            assert ANSWER in answer(open)
        finally:
            over.set()
    assert sum(handled.values()) == 30_000
    assert max(handled.values()) <= 2 * (TURN_FRAMES + PARSED_BYTES // 6)  # twice: turns are counted between two others


# --- before the handshake --------------------------------------------------------------------------------


def test_frames_before_a_refused_handshake_are_not_handled(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    handled: list[object] = []
    monkeypatch.setattr(FramedWebSocket, "handle_text", lambda self, event: handled.append(event))
    folder = tmp_path_factory.mktemp("locked")
    with Whole(folder) as whole, serving(whole, folder=folder, token=Secret("s3cret-token")) as client:
        for _ in range(20):
            with connected(client) as open:
                open.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send(open, upgrade("/api/v1/ws"))
                send(open, frame(TEXT, b"a", fin=False) + frame(CONT, fin=False) * 1_000)
                assert open.recv(12) == b"HTTP/1.1 401"
    assert not handled


def test_websocket_handshake_with_200_headers_gets_431_and_is_closed(client: Client) -> None:
    with connected(client) as open:
        open.sendall(upgrade("/api/v1/ws", *(f"x-{place}: y" for place in range(200))))
        found = b""
        while piece := open.recv(4096):
            found += piece
    assert found.startswith(b"HTTP/1.1 431 ")
