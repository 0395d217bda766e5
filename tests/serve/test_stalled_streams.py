"""Streams of clients that do not read: what they hold, and how a server stops around them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server.test_websocket_limits import CLOSE, frame, web_socket
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.feeds.deliver.stream import Stream
from headwater.feeds.filters.row_filter import Rule
from headwater.serve.http.handlers.streams import _carry
from headwater.serve.http.websocket_protocol import FramedWebSocket
from headwater.serve.limits.slow_reader_limits import CONNECTION, SlowReaderLimits

MANY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 400) "
MANY += "INSERT INTO t(note) SELECT printf('%.1000c', 'x') FROM n"


class Paused:
    """Notes the connections to which the server cannot write at the moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connections: set[SlowReaderLimits] = set()
        inherited = SlowReaderLimits.pause_writing, SlowReaderLimits.resume_writing

        def pause(connection: SlowReaderLimits) -> None:
            self.connections.add(connection)
            inherited[0](connection)

        def resume(connection: SlowReaderLimits) -> None:
            self.connections.discard(connection)
            inherited[1](connection)

        monkeypatch.setattr(SlowReaderLimits, "pause_writing", pause)
        monkeypatch.setattr(SlowReaderLimits, "resume_writing", resume)

    def fill(self, client: Client, kind: type[SlowReaderLimits]) -> SlowReaderLimits:
        """Write until a connection of that kind is paused for good, and return it."""

        def paused() -> SlowReaderLimits | None:
            client.ok("sql.exec", sql=MANY)
            return next((each for each in list(self.connections) if isinstance(each, kind)), None)

        wait_until(lambda: paused() is not None and paused() is not None, "a client that does not read stalls")
        found = paused()
        assert found is not None
        return found


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with Whole(tmp_path) as whole, serving(whole, drain_seconds=0.5) as client:
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, note TEXT)")
        yield client


def test_server_stops_while_a_client_does_not_read_after_its_close_frame(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, closing = Paused(monkeypatch), threading.Event()
    inherited = FramedWebSocket.handle_close

    def handle_close(connection: FramedWebSocket, event: Any) -> None:
        inherited(connection, event)
        closing.set()

    monkeypatch.setattr(FramedWebSocket, "handle_close", handle_close)
    with web_socket(client, "stream", buffer=4096) as open:
        connection = paused.fill(client, FramedWebSocket)
        open.sendall(frame(CLOSE, b"\x03\xe8"))
        assert closing.wait(PATIENCE)
        assert connection.transport.is_closing() and connection.transport.get_write_buffer_size()
        stopped = asyncio.run_coroutine_threadsafe(client.server.stop(), client.loop)
        stopped.result(PATIENCE)


class Endless:
    """A stream that always has another piece."""

    def __init__(self) -> None:
        self.taken = 0

    def ready(self) -> bytes:
        self.taken += 1
        return b"piece"


def test_stream_is_not_read_while_its_connection_cannot_be_written() -> None:
    stream, sent = Endless(), list[dict[str, Any]]()

    async def work() -> None:
        writable, stalled = asyncio.Event(), asyncio.Event()
        writable.set()

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)
            sent.append(message)
            if len(sent) == 3:
                writable.clear()
                stalled.set()

        call: Any = Mock(raw=send, scope={CONNECTION: Mock(writable=writable)})
        carrying = asyncio.ensure_future(_carry(call, cast(Stream, stream), {"more_body": True}, "body"))
        await stalled.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert stream.taken == len(sent) == 3
        writable.set()
        while len(sent) == 3:
            await asyncio.sleep(0)
        carrying.cancel()

    asyncio.run(work())
    assert sent[0] == {"more_body": True, "body": b"piece"}


@pytest.mark.parametrize("accept", ["application/vnd.apache.arrow.stream", "application/x-ndjson", "text/event-stream"])
def test_filter_of_every_kind_of_stream_is_compiled_in_a_thread(
    client: Client, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, inherited = set[int](), Rule.__init__

    def compile(rule: Rule, *args: Any) -> None:
        threads.add(threading.get_ident())
        inherited(rule, *args)

    monkeypatch.setattr(Rule, "__init__", compile)
    loop = asyncio.run_coroutine_threadsafe(_ident(), client.loop).result(PATIENCE)

    def insert(id: int) -> int:
        client.ok("sql.exec", sql=f"INSERT INTO t(id) VALUES ({id})")
        wait_until(lambda: latest(client) >= id, "the change is in the log")
        return latest(client)

    def reading(where: str, accept: str, offset: int) -> Any:
        path = f"/api/v1/changes/main/t?from_offset={offset}&where={where}"
        return client.http.stream("GET", path, headers={"accept": accept})

    with reading("id%3E0", "text/event-stream", 0) as plain:
        changes = plain.iter_raw()
        for id in (1, 2):  # the hub compiles filters for tables that are new to it in a thread
            at = insert(id)
            next(changes)
        with reading("id%3E1", accept, at) as response:
            insert(3)
            assert next(response.iter_raw())
    assert threads and loop not in threads


def latest(client: Client) -> int:
    return int(client.ok("stats.snapshot")["cdc"]["latest_offset"])


async def _ident() -> int:
    return threading.get_ident()
