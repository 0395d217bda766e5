"""Health and reflection: what a caller without a credential may keep in the server, and how its watchers wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.serve.grpc.calls import MAX_OPEN_REQUEST
from headwater.serve.grpc.server import UNKNOWN, _Health
from headwater.serve.grpc.stalled_calls import UnreadAnswers
from headwater.serve.limits.limits import Limits

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def named(path: str, size: int) -> bytes:
    """Return a request of `size` bytes."""
    name = "x" * (size - 3)  # the tag of a field, and its length in two bytes
    if path == REFLECTION:
        return reflection_pb2.ServerReflectionRequest(file_by_filename=name).SerializeToString()
    return health_pb2.HealthCheckRequest(service=name).SerializeToString()


def refusal(address: str, path: str, request: bytes, compression: grpc.Compression) -> grpc.RpcError | None:
    """Return the error of a call; None if it has an answer."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(iter([request]), timeout=PATIENCE, compression=compression)
        try:
            next(call)
        except grpc.RpcError as error:
            return error
        call.cancel()
        return None


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION])
def test_large_request_to_a_built_in_service_is_refused(path: str) -> None:
    with serving(NoDatabases()) as client:
        address = client.server.grpc_address
        fits = refusal(address, path, named(path, MAX_OPEN_REQUEST), grpc.Compression.NoCompression)
        assert fits is None or fits.code() is grpc.StatusCode.NOT_FOUND
        over = refusal(address, path, named(path, MAX_OPEN_REQUEST + 1), grpc.Compression.NoCompression)
        assert over is not None and over.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION, "/sochdb.v1.KvService/Get"])
def test_compressed_request_is_refused(path: str) -> None:
    with serving(NoDatabases()) as client:
        found = refusal(client.server.grpc_address, path, named(CHECK, 200), grpc.Compression.Gzip)
    assert found is not None and found.code() is grpc.StatusCode.UNIMPLEMENTED


class Context:
    """A call whose client takes messages only while `reads` is set."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads, self.found = asyncio.Event(), list[int]()
        if reads:
            self.reads.set()

    def peer(self) -> str:
        return "unix:/library@127.0.0.1"

    async def write(self, message: Any) -> None:
        await self.reads.wait()
        self.found.append(message.status)


class Uncounted:
    """Limits that admit every call and count none."""

    def count_stream(self, *_: Any) -> AbstractContextManager[None]:
        return nullcontext()


def test_stalled_health_watcher_does_not_block_others() -> None:
    async def main() -> None:
        health = _Health(cast(Limits, None), UnreadAnswers(PATIENCE))
        reads, stalled = Context(), Context(reads=False)
        watching = [asyncio.ensure_future(health._watch("", cast(Any, each))) for each in (stalled, reads)]
        while reads.found != [SERVING]:
            await asyncio.sleep(0)
        await health.enter_graceful_shutdown()
        while reads.found != [SERVING, NOT_SERVING]:
            await asyncio.sleep(0)
        stalled.reads.set()
        while stalled.found != [SERVING, NOT_SERVING]:
            await asyncio.sleep(0)
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        assert not health._server_watchers and not health._watcher_count_by_service

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_watchers_of_unknown_services_are_kept_under_one_name() -> None:
    async def main() -> None:
        health = _Health(cast(Any, Uncounted()), UnreadAnswers(PATIENCE))
        contexts = [Context() for _ in range(3)]
        asked = [health_pb2.HealthCheckRequest(service=f"unknown {number}") for number in range(3)]
        watching = [
            asyncio.ensure_future(health.Watch(request, cast(Any, context)))
            for request, context in zip(asked, contexts, strict=True)
        ]
        while not all(each.found for each in contexts):
            await asyncio.sleep(0)
        assert [each.found for each in contexts] == [[health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]] * 3
        assert list(health._server_watchers) == [UNKNOWN]
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        assert not health._server_watchers

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_reflection_ends_with_the_credential(tmp_path: Path) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    revoked = threading.Event()

    def requests() -> Iterator[bytes]:
        yield asked
        revoked.wait(PATIENCE)
        yield asked

    with serving(NoDatabases(), folder=tmp_path, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        made = client.ok("security.token.create", name="ada", role="viewer")
        with grpc.insecure_channel(client.server.grpc_address) as channel:
            metadata = [("x-api-key", made["token"])]
            call: Any = channel.stream_stream(REFLECTION)(requests(), timeout=PATIENCE, metadata=metadata)
            assert next(call)
            client.ok("security.token.revoke", id=made["id"])
            revoked.set()
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_requests_to_reflection_count_towards_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, ask = list[str](), Limits.ask

    def noted(self: Limits, who: Any, address: str) -> None:
        counted.append(address)
        ask(self, who, address)

    monkeypatch.setattr(Limits, "ask", noted)
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    with serving(NoDatabases()) as client, grpc.insecure_channel(client.server.grpc_address) as channel:
        call: Any = channel.stream_stream(REFLECTION)(iter([asked] * 3), timeout=PATIENCE)
        assert len(list(call)) == 3
    assert counted == ["127.0.0.1"] * 3
