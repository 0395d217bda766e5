"""Readers of streams: server-sent events, lines and WebSocket frames, each over a socket of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.suite.deadlines import PATIENCE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

CHANGES = frozenset(("insert", "update", "delete", "schema_change", "truncate"))


class Frame(NamedTuple):
    """One frame of a stream."""

    id: Any  # text on SSE, a number or text on WebSocket
    word: str
    data: Any


class SseParser:
    """The event stream parser of the HTML standard, section 9.2.6."""

    def __init__(self) -> None:
        self._rest = b""
        self._last_id = ""  # of the stream: it stays until another one comes
        self._word, self._data = "", []
        self.retry: list[int] = []
        self.comments: list[str] = []

    def feed(self, data: bytes) -> list[Frame]:
        """Return the events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for raw in lines:
            line = raw.decode().removesuffix("\r")
            if line:
                self._field(line)
                continue
            if self._data:
                found.append(Frame(self._last_id, self._word or "message", json.loads("\n".join(self._data))))
            self._word, self._data = "", []
        return found

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                self.comments.append(value)
            case "id":
                self._last_id = value
            case "event":
                self._word = value
            case "data":
                self._data.append(value)
            case "retry":
                self.retry.append(int(value))
            case _:
                raise AssertionError(f"a field that no EventSource knows: {line!r}")


class _Reader:
    """The shared part of the readers: frames one by one, with a timeout."""

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        raise NotImplementedError

    def next(self, *words: str) -> Frame:
        """Return the next frame of one of these `words`, skipping others; fail if the stream ends first."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.frame(deadline - time.monotonic())) is not None:
            if not words or found.word in words:
                return found
        raise AssertionError(f"the stream ended before {words}")

    def changes(self, count: int) -> list[Frame]:
        """Return the next `count` changes."""
        return [self.next(*CHANGES) for _ in range(count)]

    def upto(self, word: str) -> list[Frame]:
        """Return every frame up to and including the first of `word`."""
        found = [self.next()]
        while found[-1].word != word:
            found.append(self.next())
        return found

    def rest(self) -> list[Frame]:
        """Return every frame up to the end of the stream; raise TimeoutError if it does not end."""
        deadline = time.monotonic() + PATIENCE
        found = []
        while (one := self.frame(deadline - time.monotonic())) is not None:
            found.append(one)
        return found


class SseReader(_Reader):
    """An HTTP stream read piece by piece: server-sent events, or lines of NDJSON."""

    def __init__(self, url: str, path: str, headers: dict[str, Any], method: str = "GET") -> None:
        where = urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), PATIENCE)
        if where.scheme == "https":
            self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=where.hostname)
        self._arrived, self._body = b"", b""
        self._frames: list[Frame] = []
        self._parser = SseParser()
        self.whole = False  # the body came to its proper end
        asked = [f"{method} {path} HTTP/1.1".encode(), f"host: {where.netloc}".encode()]
        for name, value in headers.items():
            asked.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()))
        self._socket.sendall(b"\r\n".join(asked) + b"\r\n\r\n")
        self.status, self.headers = self._head()

    def _head(self) -> tuple[int, dict[str, str]]:
        deadline = time.monotonic() + PATIENCE
        while b"\r\n\r\n" not in self._arrived:
            assert self._receive(deadline), "closed without an answer"
        head, self._arrived = self._arrived.split(b"\r\n\r\n", 1)
        first, *rest = head.decode().split("\r\n")
        return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}

    @property
    def comments(self) -> list[str]:
        """Return the comments so far."""
        return self._parser.comments

    @property
    def retry(self) -> list[int]:
        """Return the retry times that the server has sent so far."""
        return self._parser.retry

    def problem(self) -> dict[str, Any]:
        """Return the JSON body of a refusal."""
        deadline = time.monotonic() + PATIENCE
        size = int(self.headers["content-length"])
        while len(self._arrived) < size and self._receive(deadline):
            pass
        return json.loads(self._arrived)

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        """Return the next frame; None at the end of the stream. Raise TimeoutError if none arrives."""
        deadline = time.monotonic() + patience
        while not self._frames:
            more = self._unchunk()
            if not self._frames and (not more or not self._receive(deadline)):
                return None
        return self._frames.pop(0)

    def _receive(self, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        found = self._socket.recv(1 << 16)
        self._arrived += found
        return bool(found)

    def _unchunk(self) -> bool:
        """Parse the complete chunks; return whether more can come."""
        while not self.whole:
            size, line, rest = self._arrived.partition(b"\r\n")
            length = int(size, 16) if line else -1
            if not line or len(rest) < length + 2:
                return True
            self._arrived = rest[length + 2 :]
            self.whole = length == 0
            self._take(rest[:length])
        return False

    def _take(self, piece: bytes) -> None:
        if self.headers["content-type"] == "text/event-stream":
            self._frames += self._parser.feed(piece)
            return
        *lines, self._body = (self._body + piece).split(b"\n")
        for found in (json.loads(line) for line in lines if line):
            if "event" in found and "data" in found:
                self._frames.append(Frame(found["id"], found["event"], found["data"]))
            else:
                self._frames.append(Frame(found.get("offset"), found.get("op", ""), found))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _settled() -> ssl.SSLContext:
    """Return a TLS 1.2 context: the client reads and writes in two threads, and before Python 3.13 a request written
    while a TLS 1.3 ticket arrived could be lost.
    """
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def web_socket(url: str, path: str, headers: dict[str, Any], **more: Any) -> ClientConnection:
    """Return an open WebSocket, which is also a context manager."""
    return connect(
        url.replace("http", "ws", 1) + path,
        ssl=_settled() if url.startswith("https") else None,
        additional_headers={name: each.decode() if isinstance(each, bytes) else each for name, each in headers.items()},
        open_timeout=PATIENCE,
        close_timeout=1,
        ping_interval=None,  # a client that does not read, or a busy machine, is not the subject
        max_size=None,
        compression=None,
        proxy=None,
        **more,
    )


class WsReader(_Reader):
    """A WebSocket stream."""

    def __init__(self, url: str, path: str, headers: dict[str, Any]) -> None:
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(web_socket(url, path, headers))

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        """Return the next frame; None once the socket is closed. Raise TimeoutError if none arrives."""
        try:
            found = json.loads(self.socket.recv(timeout=patience))
        except ConnectionClosed:
            return None
        assert list(found) == ["id", "event", "data"]
        return Frame(found["id"], found["event"], found["data"])

    def say(self, body: Any) -> None:
        """Send a frame: an object as JSON, text and bytes unchanged."""
        self.socket.send(body if isinstance(body, (str, bytes)) else json.dumps(body))

    @property
    def closed_with(self) -> tuple[int | None, str | None]:
        """Return code and reason of the close."""
        return self.socket.close_code, self.socket.close_reason

    def close(self) -> None:
        """Close the connection."""
        self._open.close()
