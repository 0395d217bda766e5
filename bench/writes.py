"""Durable single-row commits per second: 16 clients on the writer queue (threads, tasks, RPC) against a loop that has
the file to itself, captured or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import apsw

from bench.sides import INSERT, TABLE, Notes, folder, medians, new_file, rows, server, versions
from headwater.serve.thread_bridge import Bridge
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

CLIENTS = 16
COUNT = 16_000
NAMES = ("id", "a", "b", "c", "d", "e")


def direct(captured: bool, count: int = 6_000) -> float:
    """Return the durable single-row commits per second of one loop that has the file to itself."""
    with folder() as place:
        path = place / "t.db"
        new_file(path, captured=captured)
        db = apsw.Connection(str(path))
        db.execute("PRAGMA synchronous = FULL")
        started = time.perf_counter()
        for row in rows(count):
            db.execute(INSERT, row)
        seconds = time.perf_counter() - started
        db.close()
        return count / seconds


@contextlib.contextmanager
def writable() -> Iterator[SqliteSource]:
    """Yield a source on a new file, with capture."""
    with folder() as place:
        path = place / "t.db"
        new_file(path, captured=False)
        source = SqliteSource("bench", str(path), notes=Notes(), config=SqliteConfig())
        source.prove(generation="bench", latest=0, read=lambda after: iter(()))
        try:
            yield source
        finally:
            source.close()


def in_process(clients: int = CLIENTS, count: int = COUNT) -> float:
    """Return the commits per second of client threads on `SqliteSource.write`, each waiting for its own commit."""
    with writable() as source:

        def client(number: int) -> None:
            for row in rows(count // clients, 1 + number * count):
                values = dict(zip(NAMES, row, strict=True))
                source.write(lambda s, values=values: s.insert("t", [values], returning=False)).result()  # type: ignore[misc]

        threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count / (time.perf_counter() - started)


def in_one_loop(clients: int = CLIENTS, count: int = COUNT) -> float:
    """Return the commits per second of clients that are tasks of one event loop, as in the server."""
    import uvloop

    with writable() as source, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return count / runner.run(_tasks(source, clients, count))


async def _tasks(source: SqliteSource, clients: int, count: int) -> float:
    bridge = Bridge(threads=1)

    async def client(number: int) -> None:
        for row in rows(count // clients, 1 + number * count):
            values = dict(zip(NAMES, row, strict=True))
            await bridge.wait(source.write(lambda s, values=values: s.insert("t", [values], returning=False)))  # type: ignore[misc]

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds = time.perf_counter() - started
    bridge.close()
    return seconds


class Caller(asyncio.Protocol):
    """One connection with one request in flight; it sends raw bytes, to keep the cost of the client small."""

    def __init__(self, requests: list[bytes], done: asyncio.Future[None]) -> None:
        self._requests, self._done = requests, done
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not length or len(body) < int(length):
            return
        if b'"ok":true' not in body:
            raise RuntimeError(body.decode(errors="replace")[:500])
        self._answer = b""
        self._send()

    def _send(self) -> None:
        if self._requests:
            self._transport.write(self._requests.pop())  # type: ignore[attr-defined]
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


def request(host: str, method: str, params: dict[str, object]) -> bytes:
    """Return one RPC as bytes."""
    body = json.dumps({"id": 1, "method": method, "params": params}).encode()
    head = (
        "POST /api/v1/rpc HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def _calls(url: str, batches: list[list[bytes]]) -> float:
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    waits = []
    started = time.perf_counter()
    for batch in batches:
        done: asyncio.Future[None] = loop.create_future()
        await loop.create_connection(lambda batch=batch, done=done: Caller(batch, done), host, int(port))  # type: ignore[misc]
        waits.append(done)
    await asyncio.gather(*waits)
    return time.perf_counter() - started


def over_rpc(clients: int = CLIENTS, count: int = COUNT) -> float:
    """Return the commits per second through `data.insert` of a real server in a child process."""
    import uvloop

    with folder() as place, server(Path(place) / "data") as (url, _):
        host = url.removeprefix("http://")
        create = request(host, "sql.exec", {"sql": TABLE})
        tags = ("i64", "i64", "str", "f64", "str", "i64")
        batches = [
            [
                request(
                    host,
                    "data.insert",
                    {
                        "into": {"db": "main", "table": "t"},
                        "rows": [{n: {"t": t, "v": v} for n, t, v in zip(NAMES, tags, row, strict=True)}],
                    },
                )
                for row in rows(count // clients, 1 + number * count)
            ]
            for number in range(clients)
        ]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_calls(url, [[create]]))
            return count / runner.run(_calls(url, batches))


def main(repeats: int = 5) -> None:
    """Print rates and ratios."""
    print(versions())
    found = medians(
        {
            "direct loop, bare file": lambda: direct(False),
            "direct loop, captured file": lambda: direct(True),
            "16 threads in process": in_process,
            "16 tasks of one loop": in_one_loop,
            "16 clients over RPC": over_rpc,
        },
        repeats,
    )
    base = found["direct loop, captured file"]
    print("writes: durable single-row commits per second (bars: in process 2x, over RPC 0.5x of the direct loop)")
    for name, rate in found.items():
        print(f"  {name:28} {rate:>9,.0f}/s   {rate / base:.2f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
