"""The web site of the tests: one page, on its own port and so its own origin."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = (Path(__file__).parent / "page.html").read_bytes()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = PAGE if self.path == "/" else b""
        self.send_response(200 if body else 404)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class PageServer:
    """Serves the page until it is closed."""

    def __init__(self) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def url(self, host: str = "127.0.0.1") -> str:
        """Return the URL of the page on `host`."""
        return f"http://{host}:{self._http.server_port}/"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
