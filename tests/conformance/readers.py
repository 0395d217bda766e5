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
    """One thing that a stream said."""

    id: Any  # text on SSE, a number or text on WebSocket
    word: str
    data: Any


class SseParser:
    """The parser of the HTML standard, section 9.2.6, fed with whatever arrived."""

    def __init__(self) -> None:
        self._rest = b""
        self._last_id = ""  # of the stream: it stays until another one comes
        self._word, self._data = "", []
        self.retry: list[int] = []
        self.comments: list[str] = []

    def feed(self, data: bytes) -> list[Frame]:
        """The events that are complete now."""
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
    """What the readers share: frames one by one, with patience."""

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        raise NotImplementedError

    def next(self, *words: str) -> Frame:
        """The next frame of one of these `words`; others are passed over."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.frame(deadline - time.monotonic())) is not None:
            if not words or found.word in words:
                return found
        raise AssertionError(f"the stream ended before {words}")

    def changes(self, count: int) -> list[Frame]:
        """The next `count` changes."""
        return [self.next(*CHANGES) for _ in range(count)]

    def upto(self, word: str) -> list[Frame]:
        """Every frame up to and with the first of `word`."""
        found = [self.next()]
        while found[-1].word != word:
            found.append(self.next())
        return found

    def rest(self) -> list[Frame]:
        """Every frame up to the end of the stream, which must come."""
        deadline = time.monotonic() + PATIENCE
        found = []
        while (one := self.frame(deadline - time.monotonic())) is not None:
            found.append(one)
        return found


class SseReader(_Reader):
    """An HTTP response read piece by piece; `lines` of NDJSON are frames too."""

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
        """The comments so far."""
        return self._parser.comments

    @property
    def retry(self) -> list[int]:
        """The waits that the server asked for so far."""
        return self._parser.retry

    def problem(self) -> dict[str, Any]:
        """The body of a refusal."""
        deadline = time.monotonic() + PATIENCE
        size = int(self.headers["content-length"])
        while len(self._arrived) < size and self._receive(deadline):
            pass
        return json.loads(self._arrived)

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        """The next frame; None at the end of the stream. TimeoutError when nothing comes."""
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
        """Take what is whole; whether more can come."""
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
        """Leave."""
        self._socket.close()


def _settled() -> ssl.SSLContext:
    """TLS 1.2: the client reads and writes in two threads, and before Python 3.13 a request that it wrote while a
    ticket of TLS 1.3 came in could be lost."""
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def web_socket(url: str, path: str, headers: dict[str, Any], **more: Any) -> ClientConnection:
    """An open WebSocket; a context, too."""
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
    """A WebSocket."""

    def __init__(self, url: str, path: str, headers: dict[str, Any]) -> None:
        self._open = contextlib.ExitStack()
        self.socket = self._open.enter_context(web_socket(url, path, headers))

    def frame(self, patience: float = PATIENCE) -> Frame | None:
        """The next frame; None once it is closed. TimeoutError when nothing comes."""
        try:
            found = json.loads(self.socket.recv(timeout=patience))
        except ConnectionClosed:
            return None
        assert list(found) == ["id", "event", "data"]
        return Frame(found["id"], found["event"], found["data"])

    def say(self, body: Any) -> None:
        """Send a frame: an object, or text or bytes as they are."""
        self.socket.send(body if isinstance(body, (str, bytes)) else json.dumps(body))

    @property
    def closed_with(self) -> tuple[int | None, str | None]:
        """Code and reason, once it is closed."""
        return self.socket.close_code, self.socket.close_reason

    def close(self) -> None:
        """Leave."""
        self._open.close()
