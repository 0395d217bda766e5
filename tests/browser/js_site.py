"""A web site with the JavaScript client: a page that collects events, and the modules it loads."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "clients" / "js" / "src"
PAGE = b"""<!doctype html>
<meta charset="utf-8">
<title>A page that stays fresh</title>
<script>
var seen = [], opened = [], errors = [], closes = [];  // answers as objects; states; what failed; control events
function live(options) {
  window.query = new headwater.LiveQuery({
    ...options,
    onChange: answer => seen.push(answer.objects()),
    onState: state => opened.push(state),
    onError: error => errors.push(String(error)),
  });
}
function follow(url, params) {
  window.stream = headwater.tail(url, "main", "orders", {
    params, onOpen: () => opened.push("live"),
    onChange: change => seen.push(change), onControl: (word, data) => closes.push(word),
  });
}
</script>
<script type="module">
import * as headwater from "/src/index.js";
window.headwater = headwater;
</script>
"""


class SiteHandler(BaseHTTPRequestHandler):
    """Serves the page and its modules."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/src/")
        if self.path == "/":
            self.answer(200, PAGE, {"content-type": "text/html; charset=utf-8"})
        elif name != self.path and (SOURCES / name).is_file() and "/" not in name:
            self.answer(200, (SOURCES / name).read_bytes(), {"content-type": "text/javascript; charset=utf-8"})
        else:
            self.answer(404, b"", {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """Send one complete answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Site:
    """Serves until it is closed, with the given `handler`."""

    def __init__(self, handler: type[SiteHandler] = SiteHandler) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
