"""A small HTTP server whose answers the test sets: complete, cut off in the body, refused, or none."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"


class Asked(NamedTuple):
    """A received request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def params(self) -> dict[str, Any]:
        return json.loads(self.body)["params"]


class Reply(NamedTuple):
    """An answer; after `cut` bytes of its body the connection is closed."""

    body: bytes = b""
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = {}
    cut: int | None = None
    hang_up: bool = False  # close the connection after a whole answer, without saying so
    never: bool = False  # read the request, then close without a word


Answer = Callable[[Asked], Reply]


class Faulty:
    """Every request is answered by `answer`, or by the next of `replies`; `asked` holds all of them."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.replies: list[Reply] = []
        self.answer: Answer = lambda asked: self.replies.pop(0)
        self.connections = 0
        self.failures: list[BaseException] = []
        self.hung_up = threading.Semaphore(0)  # counts connections that were closed without saying so
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.connections += 1

            def do_GET(self) -> None:
                outer._serve(self)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                """Log nothing."""

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore a client that disconnects."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://localhost:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Faulty:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        assert self.failures == []

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        size = int(handler.headers.get("content-length") or 0)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        asked = Asked(handler.command, unquote(parts.path), query, headers, handler.rfile.read(size))
        self.asked.append(asked)
        try:
            reply = self.answer(asked)
        except BaseException as error:  # told to the test when it ends
            self.failures.append(error)
            reply = Reply(never=True)
        _send(handler, reply)
        if reply.hang_up:
            _hang_up(handler)
            self.hung_up.release()


def _send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    if reply.never:
        _hang_up(handler)
        return
    handler.send_response(reply.status)
    for name, value in {"content-type": reply.kind, "transfer-encoding": "chunked", **reply.headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    body = reply.body[: reply.cut]
    for start in range(0, len(body), 1 << 16):
        piece = body[start : start + (1 << 16)]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
    if reply.cut is None:
        handler.wfile.write(b"0\r\n\r\n")
    handler.wfile.flush()
    if reply.cut is not None:
        _hang_up(handler)


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


# --- bodies ----------------------------------------------------------------------------------------------


def arrow_body(
    schema: pa.Schema, batches: Iterable[tuple[pa.RecordBatch, dict[str, str]]], *, end: bool = True
) -> bytes:
    """Return an Arrow IPC stream whose batches carry their own metadata."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    whole: bytes = sink.getvalue().to_pybytes()
    return whole if end else whole[:-8]


def result(value: Any, **reply: Any) -> Reply:
    """Return a successful answer to an RPC."""
    return Reply(json.dumps({"id": 1, "ok": True, "result": value}).encode(), **reply)


def failure(code: str, message: str = "no", **details: Any) -> Reply:
    """Return an error answer to an RPC."""
    error = {"code": code, "message": message, "details": details}
    return Reply(json.dumps({"id": 1, "ok": False, "error": error}).encode())


def problem(status: int, code: str, message: str = "no", **details: Any) -> Reply:
    """Return an error answer of a route other than RPC: problem+json with an HTTP status."""
    body = {"type": f"urn:headwater:error:{code}", "title": message, "status": status, "code": code, **details}
    return Reply(json.dumps(body).encode(), status, "application/problem+json")
