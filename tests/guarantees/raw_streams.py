"""Streams over raw sockets: SSE, NDJSON and WebSocket, read in pieces of any size and cut anywhere."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.guarantees.server_process import Gone
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Opcode
from websockets.uri import parse_uri

TICK = 0.1  # how long one look at a quiet stream takes


class Said(NamedTuple):
    """One frame: its id (None if the transport has none), its kind, and its JSON."""

    id: int | str | None
    word: str
    body: dict[str, Any]


class Status(Exception):
    """A request was answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:300]}")
        self.status, self.body = status, body


class Connection:
    """One socket to the server with a small receive buffer, so that a reader that stops soon blocks the server."""

    def __init__(self, url: str) -> None:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self.socket.settimeout(10)
        try:
            self.socket.connect((host, port))
        except OSError as error:
            self.socket.close()
            raise Gone(str(error)) from error

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self, size: int, seconds: float = TICK) -> bytes | None:
        """Return up to `size` bytes; b"" if none arrive in time, None at the end."""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(size) or None
        except TimeoutError:
            return b""
        except OSError as error:
            raise Gone(str(error)) from error

    def close(self) -> None:
        self.socket.close()


class HttpStream:
    """An endless chunked answer of SSE or NDJSON frames."""

    def __init__(self, url: str, path: str, headers: dict[str, str], *, sse: bool) -> None:
        self._sse = sse
        self._raw, self._text = b"", b""
        self.is_whole = False  # the answer was ended, not cut
        self._connection = Connection(url)
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self._connection.send(f"GET {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{lines}\r\n".encode())
            self._read_head()
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> None:
        while b"\r\n\r\n" not in self._raw:
            piece = self._connection.receive(4096, 30)
            if not piece:
                raise Gone("no answer")
            self._raw += piece
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            while b"}" not in self._raw and (piece := self._connection.receive(4096, 1)):
                self._raw += piece
            raise Status(status, self._raw.decode(errors="replace"))

    def read(self, size: int) -> list[Said] | None:
        """Return the frames that have arrived; None at the end."""
        piece = self._connection.receive(size)
        if piece is None:
            return None
        self._raw += piece
        while (chunk := self._chunk()) is not None:
            if not chunk:
                self.is_whole = True
                return self._frames() or None
            self._text += chunk
        return self._frames()

    def _chunk(self) -> bytes | None:
        size, found, rest = self._raw.partition(b"\r\n")
        if not found or len(rest) < int(size, 16) + 2:
            return None
        self._raw = rest[int(size, 16) + 2 :]
        return rest[: int(size, 16)]

    def _frames(self) -> list[Said]:
        *blocks, self._text = self._text.split(b"\n\n" if self._sse else b"\n")
        found = map(_sse_frame if self._sse else _line, blocks)
        return [said for said in found if said is not None]

    def close(self) -> None:
        self._connection.close()


class WebSocket:
    """The same frames over a WebSocket, parsed by the `websockets` package and not by our code."""

    def __init__(self, url: str, path: str, headers: dict[str, str]) -> None:
        self._connection = Connection(url)
        try:
            self._protocol = ClientProtocol(parse_uri(url.replace("http", "ws", 1) + path), max_size=None)
            request = self._protocol.connect()
            for name, value in headers.items():
                request.headers[name] = value
            self._protocol.send_request(request)
            self._flush()
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def _shake_hands(self) -> None:
        events: list[Any] = []
        while not events:
            piece = self._connection.receive(4096, 30)
            if not piece:
                raise Gone("no answer")
            self._protocol.receive_data(piece)
            events = self._protocol.events_received()
        if self._protocol.handshake_exc is not None:
            answer = events[0]
            raise Status(answer.status_code, bytes(answer.body or b"").decode(errors="replace"))
        self._early = events[1:]

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._connection.send(data)

    def say(self, body: Any) -> None:
        """Send a frame: JSON, or bytes unchanged."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self._protocol.send_text(text)
        except InvalidState as error:
            raise Gone(str(error)) from error
        self._flush()

    def read(self, size: int) -> list[Said] | None:
        """Return the frames that have arrived; None at the end."""
        events, self._early = self._early, []
        piece = self._connection.receive(size) if not events else b""
        if piece is None:
            return None
        if piece:
            self._protocol.receive_data(piece)
            events += self._protocol.events_received()
            self._flush()
        if self._protocol.parser_exc is not None:
            raise AssertionError(f"a broken frame: {self._protocol.parser_exc}")
        found = [json.loads(bytes(frame.data)) for frame in events if frame.opcode is Opcode.TEXT]
        ended = any(frame.opcode is Opcode.CLOSE for frame in events)
        return [Said(body["id"], body["event"], body["data"]) for body in found] or (None if ended else [])

    def close(self) -> None:
        self._connection.close()


def _sse_frame(block: bytes) -> Said | None:
    fields: dict[str, str] = {}
    for line in block.decode().split("\n"):
        name, colon, value = line.partition(": ")
        if colon and name:
            fields[name] = value
    if "data" not in fields:
        return None
    id = fields["id"]
    return Said(int(id) if id.isdigit() else id, fields["event"], json.loads(fields["data"]))


def _line(line: bytes) -> Said | None:
    if not line.strip():
        return None
    body = json.loads(line)
    if "event" in body:
        return Said(body["id"], body["event"], body["data"])
    return Said(None if body.get("snapshot") else body["offset"], body["op"], body)
