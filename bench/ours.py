"""Our own server under load: a real `headwater serve` in a child process, its subscriptions and its commits."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.generator import MARK, Shot, http_post, open_stream
from bench.sides import server

RPC = "/api/v1/rpc"
TABLE = "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, note TEXT)"
NOTE = MARK.ljust(64, "x")
SETTINGS = "[serve]\nmax_streams_per_client = 16_384\n"


class Ours:
    """Our server under load: the table `orders`, its subscriptions, and commits through `sql.exec`."""

    def __init__(self, url: str, pid: int, token: str = "") -> None:
        self.url, self.pids = url, [pid]
        self._headers = {"Content-Type": "application/json"} | ({"x-api-key": token} if token else {})
        self.port = urlsplit(url).port or 80
        self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._open: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> Any:
        """Return the result of one RPC."""
        body = json.dumps({"id": 1, "method": method, "params": params})
        self._http.request("POST", RPC, body, self._headers)
        answer = json.load(self._http.getresponse())
        if not answer["ok"]:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def subscribe(self, **filters: Any) -> dict[str, Any]:
        """Create a subscription of `orders` that delivers the whole new row as plain JSON."""
        given = {"table": "orders", "include": {"after": True}, "format": "plain_json", **filters}
        found: dict[str, Any] = self.ask("cdc.subscribe_table", **given)
        return found

    def subscribers(self, transport: str, count: int) -> list[bytes]:
        """Return requests that open `count` streams, each of its own subscription, from the head on."""
        while len(self._open) < count:
            self._open.append(self.subscribe())
        return self.streams(self._open[:count], transport)

    def streams(self, subscriptions: list[dict[str, Any]], transport: str, start: str | None = None) -> list[bytes]:
        """Return the requests that open streams: from the head on, wherever the cursors are, or from `start`."""
        start = f"?from_offset={self.latest()}" if start is None else start
        return [open_stream(self.port, each[transport + "_url"] + start, transport) for each in subscriptions]

    def latest(self) -> int:
        """Return the offset of the last acknowledged commit."""
        found = self.subscribe()
        self.ask("cdc.close", sub_id=found["sub_id"])
        return int(found["offset"])

    def shot(self, width: int) -> Shot:
        """Return one durable commit of `width` rows: one statement, one request."""
        values = ", ".join(["(1, ?)"] * width)
        return Shot((self.statement(f"INSERT INTO orders(customer, note) VALUES {values}", *[NOTE] * width),), 1)

    def statement(self, sql: str, *args: Any) -> bytes:
        """Return a `sql.exec` request as bytes."""
        body = {"id": 1, "method": "sql.exec", "params": {"sql": sql, "args": args}}
        return http_post(self.port, RPC, json.dumps(body))

    def size(self) -> int:
        """Return the size in bytes of one change as it is delivered."""
        watch = self.subscribe()
        self.ask("sql.exec", sql="INSERT INTO orders(customer, note) VALUES (1, ?)", args=[NOTE])
        page = self.ask("cdc.poll", sub_id=watch["sub_id"], from_offset=watch["offset"], wait_ms=5000)
        self.ask("cdc.close", sub_id=watch["sub_id"])
        return len(json.dumps(page["events"][0], separators=(",", ":")))

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def ours(data: Path, *urls: str) -> Iterator[Ours]:
    """Run a fresh server with the table `orders`; with `urls` it serves databases that have the table."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = data.with_suffix(".toml")
    settings.write_text(SETTINGS)
    with server(data, *urls, "--config", str(settings)) as (url, pid):
        side = Ours(url, pid)
        try:
            if not urls:
                side.ask("sql.exec", sql=TABLE)
            yield side
        finally:
            side.close()
