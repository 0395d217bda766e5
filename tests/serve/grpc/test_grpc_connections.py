"""Connections of gRPC clients between the port and the gRPC library: limits, addresses, backpressure and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.serve.http2 import ACK, CONTINUATION, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, headers
from tests.serve.http2 import field as header
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.serve.grpc import server
from headwater.serve.grpc.calls import AuthInterceptor
from headwater.serve.grpc.connections import acceptor, pipe
from headwater.serve.grpc.connections.acceptor import Acceptor, address_in
from headwater.serve.grpc.connections.http2_frames import MAX_BLOCK, MAX_UNACKNOWLEDGED
from headwater.serve.limits.connection_limits import ConnectionLimits
from headwater.serve.limits.slow_reader_limits import PROGRESS
from headwater.serve.listen_address import bind
from headwater.serve.server.server import loop_factory

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
DATA, PING = 0, 6  # types of frames
EMPTY = frame(DATA, END_STREAM, bytes(5), 1)  # a message without fields
ACKNOWLEDGED = PREFACE + frame(SETTINGS, ACK)


@contextlib.contextmanager
def connected(client: Client, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A raw connection from an address of this machine."""
    host, port = client.server.grpc_addresses[0]
    with socket.create_connection((host, port), PATIENCE, (source, 0)) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return the type and the payload of the first DATA frame of an answer, or of its trailers if it has no data."""
    received = connection.makefile("rb")
    while head := received.read(9):
        payload = received.read(int.from_bytes(head[:3], "big"))
        if head[3] == DATA or (head[3] == HEADERS and head[4] & END_STREAM):
            return head[3], payload
    raise AssertionError("the connection was closed without an answer")


def is_healthy(client: Client, **named: Any) -> bool:
    """Return whether a new connection gets an answer of the health service."""
    with grpc.insecure_channel(client.server.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE, **named)
    return bool(found.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of metadata entries of each call that the gRPC library passes on."""
    found, inherited = list[int](), AuthInterceptor.intercept_service

    async def intercept(self: AuthInterceptor, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        found.append(len(details.invocation_metadata or ()))
        return await inherited(self, continuation, details)

    monkeypatch.setattr(AuthInterceptor, "intercept_service", intercept)
    return found


# --- headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "most"),
    [(PREFACE, MAX_UNACKNOWLEDGED), (ACKNOWLEDGED, MAX_BLOCK)],
    ids=["unacknowledged", "acknowledged"],
)
def test_flood_of_continuation_frames_is_closed_before_its_metadata_are_parsed(
    first: bytes, most: int, called: list[int]
) -> None:
    entry = header(b"a", b"b")
    flood = frame(CONTINUATION, 0, entry * 3000, 1)
    with serving(NoDatabases(), token=Secret("t")) as client, connected(client) as connection:
        connection.sendall(first + frame(HEADERS, 0, headers(CHECK), 1))
        assert is_healthy(client)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):  # 15 MB
                connection.sendall(flood)
            connection.sendall(frame(CONTINUATION, END_HEADERS, b"", 1) + EMPTY)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
        assert is_healthy(client)
    # The library may pass on what it has of a call whose connection ends.
    assert max(called) <= most // len(entry), "of three million entries"


def test_many_refused_connections_leave_others_open() -> None:
    large = PREFACE + frame(HEADERS, 0, bytes(16_384), 1)
    watch = ACKNOWLEDGED + frame(HEADERS, END_HEADERS, headers(WATCH), 1) + EMPTY
    with serving(NoDatabases()) as client, connected(client) as other:
        other.sendall(watch)
        assert answer(other)[0] == DATA
        for _ in range(20):
            with contextlib.ExitStack() as stack, contextlib.suppress(ConnectionError):
                for each in [stack.enter_context(connected(client)) for _ in range(10)]:
                    each.sendall(large)
            assert is_healthy(client)
        other.sendall(frame(PING, 0, b"12345678"))
        assert other.recv(1), "the connection is still open"


def test_headers_split_over_continuation_frames_are_accepted() -> None:
    sent = headers(CHECK) + header(b"a", b"b" * 100)
    with serving(NoDatabases()) as client, connected(client) as connection:
        connection.sendall(ACKNOWLEDGED + frame(HEADERS, 0, sent[:10], 1) + frame(CONTINUATION, 0, sent[10:20], 1))
        connection.sendall(frame(CONTINUATION, END_HEADERS, sent[20:], 1) + EMPTY)
        kind, payload = answer(connection)
    assert kind == DATA and payload[5:] == health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()


def test_call_before_the_acknowledgement_is_answered() -> None:
    with serving(NoDatabases()) as client, connected(client) as connection:
        connection.sendall(PREFACE + frame(HEADERS, END_HEADERS, headers(CHECK), 1) + EMPTY)
        assert answer(connection)[0] == DATA


def test_large_legal_metadata_are_accepted() -> None:
    with serving(NoDatabases()) as client:
        assert is_healthy(client, metadata=[("large", "x" * 7_500)])


# --- addresses and limits ----------------------------------------------------------------------------------------


def test_streams_are_counted_by_the_address_of_the_client() -> None:
    watch = ACKNOWLEDGED + frame(HEADERS, END_HEADERS, headers(WATCH), 1) + EMPTY
    with serving(NoDatabases(), max_streams_per_client=1) as client, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(connected(client)) for _ in range(2))
        first.sendall(watch)
        assert answer(first)[0] == DATA
        second.sendall(watch)
        kind, trailers = answer(second)
        assert kind == HEADERS and b"1 streams and waiting polls are open from 127.0.0.1" in trailers
        try:
            elsewhere = stack.enter_context(connected(client, "127.0.0.2"))
        except OSError:
            pytest.skip("this machine has one loopback address")
        elsewhere.sendall(watch)
        assert answer(elsewhere)[0] == DATA


def test_connections_of_one_address_above_the_limit_are_closed() -> None:
    with serving(NoDatabases(), max_connections_per_client=2) as client, contextlib.ExitStack() as stack:
        for _ in range(2):
            assert stack.enter_context(connected(client)).recv(9), "the settings of the server"
        refused = stack.enter_context(connected(client))
        with contextlib.suppress(ConnectionResetError):
            assert refused.recv(9) == b""


def test_client_address_is_parsed_from_the_peer_name() -> None:
    assert address_in("unix:/tmp/a@b/1f@127.0.0.1") == "127.0.0.1"
    assert address_in("unix:/tmp/x/0@2001:db8::1") == "2001:db8::1"
    assert address_in("unix:/tmp/x/0@fe80::1%25eth0") == "fe80::1%eth0"


# --- the folder of the socket ------------------------------------------------------------------------------------


def test_folder_of_the_socket_is_private_and_removed_at_the_stop() -> None:
    with serving(NoDatabases()) as client:
        folder = Path(client.server._grpc._acceptor.target.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert is_healthy(client)
        assert [each.name for each in folder.iterdir()] == [acceptor.NAME], "names of connections are removed"
    assert not folder.exists()


def test_folders_of_killed_servers_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as place, socket.socket(socket.AF_UNIX) as alive:
        monkeypatch.setattr(tempfile, "tempdir", place)
        folders = {name: Path(place, acceptor.PREFIX + name) for name in ("killed", "alive", "starting")}
        for each in folders.values():
            each.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(folders["killed"] / acceptor.NAME))
        alive.bind(str(folders["alive"] / acceptor.NAME))
        alive.listen()
        new = acceptor._folder()
        assert folders["killed"].exists(), "its server may be about to listen"
        new.cleanup()
        for each in folders.values():
            os.utime(each, (0, 0))
        made = acceptor._folder()
        assert {Path(made.name).parent} | set(Path(place).iterdir()) == {
            Path(place),
            Path(made.name),
            folders["alive"],
            folders["starting"],
        }
        made.cleanup()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        PREFACE,
        ACKNOWLEDGED,
        ACKNOWLEDGED + frame(HEADERS, END_HEADERS, headers(WATCH), 1) + EMPTY,
        ACKNOWLEDGED + frame(HEADERS, END_HEADERS, headers(CHECK), 1),
        ACKNOWLEDGED + frame(HEADERS, END_HEADERS, headers("/sochdb.v1.KvService/Get"), 1),
    ],
    ids=["nothing", "preface", "acknowledged", "watch", "half a check", "no credential"],
)
def test_stop_does_not_wait_for_a_connection_without_an_admitted_call(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(server, "SETTINGS_SECONDS", 3600.0)  # neither this nor an unanswered ping ends the connection
    monkeypatch.setattr(server, "OPTIONS", [each for each in server.OPTIONS if "keepalive" not in each[0]])
    with contextlib.ExitStack() as stack, serving(NoDatabases(), token=Secret("t"), drain_seconds=3600.0) as client:
        connection = stack.enter_context(connected(client))
        connection.sendall(said)
        assert connection.recv(9), "the library has accepted it, and sends its SETTINGS"


def test_server_without_a_temporary_folder_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(acceptor.ConfigError, match="/nowhere") as found:
        acceptor._folder()
    assert "TMPDIR" in found.value.hint


# --- bytes, both ways --------------------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def piped(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[tuple[Acceptor, socket.socket]]:
    """Yield an acceptor in front of `serve`, which replaces the gRPC library, and a connection to it."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername"):
            await serve(reader, writer)
        else:  # a server that starts checks whether this one is alive
            writer.close()

    found = Acceptor(ConnectionLimits(10, 10, reserve=0))
    library = await asyncio.start_unix_server(accept, found.target.removeprefix("unix:"))
    (listening,) = bind(host, 0)
    await found.listen([listening], None, 10)
    connection = socket.socket(listening.family)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(connection, listening.getsockname())
    try:
        yield found, connection
    finally:
        connection.close()
        library.close()
        await found.close()
        await found.end(PATIENCE)


def run(main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE))


async def received(connection: socket.socket) -> bytes:
    """Return all that the connection receives until its end."""
    loop, found = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(connection, 1 << 16):
        found += data
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connection_that_its_client_closed_for_sending_is_answered_and_has_its_address(host: str) -> None:
    sent = ACKNOWLEDGED + frame(DATA, 0, os.urandom(300_000), 1)
    peers: list[str] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        writer.write(await reader.read(-1))  # until the client has closed its direction
        writer.close()

    async def main() -> None:
        async with piped(echo, host) as (_, connection):
            await asyncio.get_running_loop().sock_sendall(connection, sent)
            connection.shutdown(socket.SHUT_WR)
            assert await received(connection) == sent

    try:
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        bind(host, 0)[0].close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    run(main)
    assert [address_in(peer) for peer in peers] == [host]


def test_unread_answers_of_a_client_pause_the_grpc_library() -> None:
    chunk = bytes(64 << 10)

    async def main() -> None:
        opened: list[Acceptor] = []
        stalled, kept, sent = asyncio.Event(), 0, 0

        def is_stalled() -> bool:
            """Return whether the pipe reads nothing from the library."""
            nonlocal kept
            for client in (client for each in opened for client in each._clients):
                if client.other is not None and client.other._is_held and client.transport is not None:
                    kept = client.transport.get_write_buffer_size()
            return kept > 0

        async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            while writer.transport.get_write_buffer_size() <= len(chunk) or not is_stalled():
                if writer.transport.get_write_buffer_size() <= len(chunk):
                    writer.write(chunk)
                    sent += len(chunk)
                await asyncio.sleep(0)
            stalled.set()
            writer.close()

        async with piped(pour) as (found, connection):
            opened.append(found)
            await stalled.wait()
            assert kept <= 2 * pipe.LIBRARY_BYTES
            assert len(await received(connection)) == sent, "nothing is lost"

    run(main)


class Transport:
    """A transport that records what the pipe does with it."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.address = address
        self.done: list[str] = []
        self.unread = 0  # bytes

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        return (self.address, 1)

    def write(self, data: bytes) -> None:
        self.done.append(f"write {len(data)}")

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.done.append("abort")

    def pause_reading(self) -> None:
        self.done.append("pause")

    def resume_reading(self) -> None:
        self.done.append("resume")


def test_requests_that_the_grpc_library_does_not_read_pause_the_client() -> None:
    async def main() -> None:
        outer, inner = Transport(), Transport()
        client = pipe.ClientEnd(pipe.Shared(), lambda _: None, lambda *_: None)
        client.connection_made(outer)
        client.get_buffer(-1)[: len(PREFACE)] = PREFACE
        client.buffer_updated(len(PREFACE))
        assert outer.done == ["pause"], "until the library is connected"
        library = pipe.LibraryEnd(client)
        library.connection_made(inner)
        assert inner.done == [f"write {len(PREFACE)}"] and outer.done == ["pause", "resume"]
        library.pause_writing()
        library.resume_writing()
        client.pause_writing()
        client.resume_writing()
        assert outer.done[2:] == ["pause", "resume"] and inner.done[1:] == ["pause", "resume"]
        client.connection_lost(None)

    asyncio.run(main())


def test_connections_with_too_many_frames_share_the_rate_of_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    pings = frame(PING, 0) * (int(pipe.MAX_AHEAD * pipe.FRAMES_PER_SECOND) - 1)  # and the settings before them

    async def main() -> None:
        loop, now, shared = asyncio.get_running_loop(), 0.0, pipe.Shared()
        monkeypatch.setattr(loop, "time", lambda: now, raising=False)

        def connect(address: str) -> tuple[pipe.ClientEnd, Transport]:
            client, outer = pipe.ClientEnd(shared, lambda _: None, lambda *_: None), Transport(address)
            client.connection_made(outer)
            pipe.LibraryEnd(client).connection_made(Transport())
            receive(client, PREFACE)
            outer.done.clear()
            return client, outer

        def receive(client: pipe.ClientEnd, data: bytes) -> None:
            client.get_buffer(-1)[: len(data)] = data
            client.buffer_updated(len(data))

        async def after(seconds: float) -> None:
            nonlocal now
            now += seconds
            for _ in range(3):
                await asyncio.sleep(0)

        (first, first_outer), (second, second_outer) = connect("192.0.2.1"), connect("192.0.2.1")
        other, other_outer = connect("192.0.2.2")
        receive(first, pings)
        assert not first_outer.done, "it is not above the rate"
        receive(first, pings)
        assert first_outer.done == ["pause"]
        receive(other, pings)
        assert not other_outer.done, "another address has a rate of its own"
        receive(second, pings)
        assert second_outer.done == ["pause"], "half of the rate is left for it"
        first.release()
        assert first_outer.done == ["pause"], "the library takes more, but the rate is exceeded"
        await after(2 * pipe.MAX_AHEAD + 0.001)
        assert first_outer.done == second_outer.done == ["pause", "resume"]
        assert not shared.slowed.total
        receive(first, 2 * pings)
        first.connection_lost(None)
        assert not shared.slowed.total, "a closed connection leaves the rate to others"

    asyncio.run(main())


def test_client_that_reads_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, now, refused = asyncio.get_running_loop(), 0.0, list[str]()
        monkeypatch.setattr(loop, "time", lambda: now, raising=False)
        outer = Transport()
        client = pipe.ClientEnd(pipe.Shared(), lambda _: None, lambda _, why: refused.append(why), 2.0)
        client.connection_made(outer)
        library = pipe.LibraryEnd(client)
        library.connection_made(Transport())
        outer.done.clear()

        async def after(seconds: float) -> list[str]:
            nonlocal now
            now += seconds
            for _ in range(3):
                await asyncio.sleep(0)
            return outer.done

        outer.unread = 3 * PROGRESS
        client.pause_writing()
        outer.unread -= PROGRESS
        assert not await after(2.1), "it has read enough"
        client.resume_writing()
        assert not await after(2.1), "it has read all"
        client.pause_writing()
        assert not await after(1.0)
        client.resume_writing()
        client.pause_writing()
        assert not await after(1.5), "the time began again"
        outer.unread -= PROGRESS - 1
        assert await after(1.0) == ["abort"]
        assert refused == ["it has left its answers unread for 2 s"]
        client.connection_lost(None)

    asyncio.run(main())
