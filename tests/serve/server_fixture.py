"""A real server on a free port, run by a loop in its own thread, and a client that speaks envelopes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.suite.deadlines import PATIENCE

from headwater.config import QuotasConfig, ServeConfig
from headwater.database import ManagedDatabases
from headwater.errors import NotFound
from headwater.serve.api import Api
from headwater.serve.server.server import Server, loop_factory


class Client:
    """A client of one server, which checks the envelope of every answer."""

    def __init__(self, url: str, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)
        self.server = server
        self.loop = loop

    def rpc(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the envelope of the answer, after checking its form."""
        response = self.http.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params})
        assert response.status_code == 200, response.text
        return envelope(response.json(), 1)

    def ok(self, method: str, **params: Any) -> Any:
        answer = self.rpc(method, **params)
        assert answer["ok"], answer
        return answer["result"]

    def error(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.rpc(method, **params)
        assert not answer["ok"], answer
        return answer["error"]

    def rows(self, sql: str, *args: Any, db: str = "main") -> list[list[Any]]:
        """Return the rows of a statement as plain values."""
        data = self.ok("sql.exec", sql=sql, args=list(args), db=db)["result"]["data"]
        return [[lit.get("v") for lit in row] for row in data["rows"]]


def envelope(body: Any, id: Any) -> dict[str, Any]:
    """Return `body` after checking that it is a well-formed answer to `id`."""
    assert isinstance(body, dict) and body["id"] == id and type(body["ok"]) is bool, body
    assert set(body) == {"id", "ok", "result" if body["ok"] else "error"}, body
    if not body["ok"]:
        assert set(body["error"]) <= {"code", "message", "details"}, body
        assert isinstance(body["error"]["code"], str) and isinstance(body["error"]["message"], str)
        assert body["error"].get("details", True), "empty details are left out"
    return body


@contextlib.contextmanager
def serving(databases: ManagedDatabases, *, folder: Path | None = None, **settings: Any) -> Iterator[Client]:
    """Yield a client of a started server; stop the server and join its thread at the end."""
    config = ServeConfig(**{"http": "127.0.0.1:0", "drain_seconds": 5.0} | settings)
    server = Server(config, Api.over(databases), getattr(databases, "open_feeds", None), folder)
    started, done = threading.Event(), threading.Event()
    waiting: list[asyncio.Event] = []
    loops: list[asyncio.AbstractEventLoop] = []
    failure: list[BaseException] = []

    async def main() -> None:
        stop = asyncio.Event()
        loops.append(asyncio.get_running_loop())
        await server.start()
        waiting.append(stop)
        started.set()
        await stop.wait()
        await server.stop()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(main())
        except BaseException as error:  # shown by the test that started it
            failure.append(error)
        finally:
            started.set()
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(PATIENCE)
    if failure:
        thread.join()
        raise failure[0]
    client = Client(server.url, server, loops[0])
    try:
        yield client
    finally:
        client.http.close()
        if not done.is_set():
            loops[0].call_soon_threadsafe(waiting[0].set)
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server did not stop"
        if failure:
            raise failure[0]


class NoDatabases:
    """Databases of a server that has none."""

    def get(self, name: str) -> Any:
        raise NotFound(f"there is no database {name!r}")

    def names(self) -> list[str]:
        return []

    def create(self, name: str) -> bool:
        return False

    def drop(self, name: str) -> bool:
        return False

    def stop_statements(self) -> None:
        pass

    def quota(self, name: str) -> QuotasConfig:
        return QuotasConfig()

    def status(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def unread(client: Client, request: str, token: str) -> Iterator[None]:
    """Send a request and wait until its answer begins, but do not read it."""
    first, _, rest = request.partition("\r\n")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(client.server.addresses[0])
        connection.sendall(f"{first}\r\nhost: x\r\nauthorization: Bearer {token}\r\n{rest}".encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        yield
