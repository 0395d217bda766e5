"""Bad subscribers: they stall, send malformed data, and reconnect constantly; others must not be affected."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter

from tests.guarantees.raw_streams import Connection, HttpStream, Status, WebSocket
from tests.guarantees.server_process import Asking, Gone, Refused, ServerProcess
from tests.suite.deadlines import PATIENCE

NONSENSE = (b"{", b'{"ack":"x"}', b'{"ack":99999999999999999999}', b'{"dance":true}', b"[]", b'{"ack":-1}', b"\x00")
BAD_PATHS = (
    "/api/v1/cdc/sse/{sub}?from_offset=-1",
    "/api/v1/cdc/sse/{sub}?from_offset=99999999999",
    "/api/v1/cdc/sse/sub_ffffffffffffffff",
    "/api/v1/cdc/sse/..%2f..%2fetc",
    "/api/v1/changes/main/item?where=n+%3E",
    "/api/v1/changes/main/nobody",
    "/api/v1/changes/main/item?pk=%5B%5D",
)


class Pests:
    """Threads that misuse the server in every way."""

    def __init__(self, server: ServerProcess, dice: random.Random, *, connects_per_second: int = 30) -> None:
        self.server, self.random, self._pace = server, dice, 1 / connects_per_second
        self.counts: Counter[str] = Counter()
        self._stop = threading.Event()
        works = (self._stall_sse, self._stall_websocket, self._talk_nonsense, self._connect)
        self._threads = [threading.Thread(target=self._work, args=(work,), name=work.__name__) for work in works]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, work: object) -> None:
        ask = Asking(self.server)
        while not self._stop.is_set():
            try:
                sub = ask("cdc.subscribe_table", table="item", name="pest", include={"before": True, "after": True})
                work(sub["sub_id"])  # type: ignore[operator]
            except (Gone, Refused, Status) as error:
                self.counts[type(error).__name__] += 1
                time.sleep(0.05)
        ask.close()

    def _stall(self, stream: HttpStream | WebSocket, url: str) -> None:
        """Hold the connection without reading, until the server restarts or the test ends."""
        try:
            self.counts["stalled"] += 1
            while self.server.url == url and not self._stop.wait(0.1):
                pass
        finally:
            stream.close()

    def _stall_sse(self, sub: str) -> None:
        url = self.server.url
        self._stall(HttpStream(url, f"/api/v1/cdc/sse/{sub}?from_offset=0", {}, sse=True), url)

    def _stall_websocket(self, sub: str) -> None:
        url = self.server.url
        self._stall(WebSocket(url, f"/api/v1/cdc/ws/{sub}?from_offset=0", {}), url)

    def _talk_nonsense(self, sub: str) -> None:
        stream = WebSocket(self.server.url, f"/api/v1/cdc/ws/{sub}", {})
        try:
            stream.say(self.random.choice(NONSENSE))
            until = time.monotonic() + PATIENCE
            while stream.read(65_536) is not None:
                if time.monotonic() > until:
                    self.counts["not refused"] += 1
                    return
            self.counts["refused frames"] += 1
        finally:
            stream.close()
        self._stop.wait(0.1)

    def _connect(self, sub: str) -> None:
        """Connect and disconnect; every second connection does not send a complete request."""
        self.counts["connects"] += 1
        with contextlib.suppress(Status, Gone):
            if self.random.random() < 0.5:
                connection = Connection(self.server.url)
                connection.send(self.random.choice((b"", b"GET /", b"\x00\xff" * 30, b"GET / HTTP/1.1\r\nHost: x")))
                connection.close()
            else:
                path = self.random.choice(BAD_PATHS).format(sub=sub)
                HttpStream(self.server.url, path, {}, sse=True).close()
        self._stop.wait(self._pace)
