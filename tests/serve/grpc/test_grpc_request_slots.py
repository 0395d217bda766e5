"""Limits on gRPC requests that are being received: by themselves, and over a real channel."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.errors import Busy, InvalidRequest
from headwater.serve.grpc import calls, request_slots
from headwater.serve.grpc.request_slots import RequestSlots

pytestmark = pytest.mark.slow

LOCKED = {"token": Secret("t"), "http": "127.0.0.1:0"}
CREDENTIAL = (("authorization", "Bearer t"),)
CHECK, GET = "/grpc.health.v1.Health/Check", "/sochdb.v1.KvService/Get"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@contextlib.contextmanager
def unfinished(found: grpc.Channel, path: str) -> Iterator[Any]:
    """Open a call whose request does not arrive."""
    never = threading.Event()

    def requests() -> Iterator[bytes]:
        never.wait()
        yield from ()

    try:
        yield found.stream_stream(path)(requests(), timeout=PATIENCE, metadata=CREDENTIAL)
    finally:
        never.set()


@pytest.mark.parametrize("path", [CHECK, "/grpc.health.v1.Health/Watch", GET, REFLECTION])
def test_request_that_does_not_arrive_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "HEALTH_SECONDS", 0.2)
    monkeypatch.setattr(calls, "REQUEST_SECONDS", 0.2)
    with (
        serving(NoDatabases(), **LOCKED) as client,
        grpc.insecure_channel(client.server.grpc_address) as found,
        unfinished(found, path) as call,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(call)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the request arrived too slowly" in refused.value.details()


def test_unfinished_health_checks_of_one_address_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "HEALTH_SECONDS", PATIENCE)
    with serving(NoDatabases(), **LOCKED) as client, grpc.insecure_channel(client.server.grpc_address) as found:
        with contextlib.ExitStack() as opened:
            held = [opened.enter_context(unfinished(found, CHECK)) for _ in range(100)]
            refused = next(call for call in iter_done(held))
            assert refused.code() == grpc.StatusCode.UNAVAILABLE
            for call in held:
                call.cancel()
        answer = health_pb2_grpc.HealthStub(found).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def iter_done(held: list[Any]) -> Iterator[Any]:
    """Yield the calls in the order in which they end."""
    done: Any = threading.Semaphore(0)
    ended: list[Any] = []
    for call in held:

        def end(call: Any = call) -> None:
            ended.append(call)
            done.release()

        if not call.add_callback(end):
            end()
    for number in range(len(held)):
        assert done.acquire(timeout=PATIENCE)
        yield ended[number]


def test_unread_stream_gets_a_small_window() -> None:
    with serving(NoDatabases(), **LOCKED) as client:
        host, _, port = client.server.grpc_address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            received = connection.makefile("rb")
            head = received.read(9)
            assert head[3] == 4  # SETTINGS
            settings = dict(struct.iter_unpack(">HI", received.read(int.from_bytes(head[:3], "big"))))
    assert settings[4] == request_slots.WINDOW  # SETTINGS_INITIAL_WINDOW_SIZE


class Context:
    """A call whose request arrives when the test says so."""

    def __init__(self) -> None:
        self.reads = 0
        self.arrived = asyncio.Event()

    async def read(self) -> bytes:
        self.reads += 1
        await self.arrived.wait()
        return b"request"


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def start(slots: RequestSlots, key: str, count: int) -> tuple[list[Context], list[asyncio.Task[Any]]]:
    contexts: list[Any] = [Context() for _ in range(count)]
    return contexts, [asyncio.ensure_future(slots.receive(key, each)) for each in contexts]


def test_caller_with_all_its_slots_waits_and_others_do_not() -> None:
    async def run() -> None:
        slots = RequestSlots(total=3, each=2, waiting=2, seconds=PATIENCE)
        contexts, tasks = start(slots, "ada", 4)
        await settle()
        assert [each.reads for each in contexts] == [1, 1, 0, 0]
        with pytest.raises(Busy):
            await slots.receive("ada", Context())  # type: ignore[arg-type]
        others, more = start(slots, "bob", 1)
        await settle()
        assert others[0].reads == 1
        for each in (*contexts, *others):
            each.arrived.set()
        assert await asyncio.gather(*tasks, *more) == [b"request"] * 5

    asyncio.run(run())


def test_slow_request_ends_early_while_another_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "CONTENDED_SECONDS", 0.0)

    async def run() -> None:
        slots = RequestSlots(total=2, each=2, waiting=8, seconds=PATIENCE)
        _, tasks = start(slots, "ada", 4)
        await settle()
        assert not any(each.done() for each in tasks)  # nobody else waits
        others, more = start(slots, "bob", 1)
        others[0].arrived.set()
        assert await more[0] == b"request"
        with pytest.raises(InvalidRequest):
            await tasks[0]
        for each in tasks[1:]:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
