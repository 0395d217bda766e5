"""The HTTP endpoint that serves the metrics of a running pipeline to Prometheus."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headwater.errors import ConfigError

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_SECONDS = 10.0  # how long a client may send or read nothing
POLL_SECONDS = 0.05  # how often the thread checks whether the endpoint was closed


@contextmanager
def serve_metrics(address: str, text: Callable[[], str]) -> Iterator[str]:
    """Serve `text()` at `address` (HOST:PORT) while the context is open; yield the URL. Port 0 is any free port.

    Raise ConfigError if the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        server = _Server((host, int(port)), text)
    except OSError as error:
        hint = "Choose an address of this machine, and a port that no other process uses."
        raise ConfigError(f"cannot serve metrics on {address}: {error.strerror}", hint=hint) from None
    with server:
        thread = threading.Thread(
            target=server.serve_forever, args=(POLL_SECONDS,), name="headwater-metrics", daemon=True
        )
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}{PATH}"
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    """A server whose threads do not delay the end of the run, whatever their clients do."""

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        self.text = text
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without the request to DNS that HTTPServer makes for the name of the host."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that left; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404)
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the `Server` header, without Python's version."""
        return "headwater"

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line per request to the output of the pipeline."""
