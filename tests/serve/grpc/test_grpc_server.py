"""The gRPC server over a real channel: health, reflection, authentication, and its stop."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret, ServeConfig
from headwater.errors import ConfigError
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate, grpc_address
from headwater.serve.grpc import server as grpc_server
from headwater.serve.grpc.calls import receive_by
from headwater.serve.grpc.messages import FOLDER
from headwater.serve.grpc.request_slots import RequestSlots
from headwater.serve.grpc.server import GrpcServer
from headwater.serve.grpc.stalled_calls import UnreadAnswers
from headwater.serve.server.server import Server

LOCKED = {"token": Secret("t"), "http": "127.0.0.1:0"}
NOBODY = "Authentication required. Provide a Bearer token or API key."


def test_connections_above_the_limit_are_closed() -> None:
    with serving(NoDatabases(), http="127.0.0.1:0", max_connections=3) as client:
        host, _, port = client.server.grpc_address.rpartition(":")
        with contextlib.ExitStack() as held:
            kept = [held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)) for _ in range(3)]
            for each in kept:
                assert each.recv(9)  # the settings frame of HTTP/2: the connection was accepted
            refused = held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            with contextlib.suppress(ConnectionResetError):
                assert refused.recv(9) == b""


OPEN_METHODS = {
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.health.v1.Health/Watch": "unary_stream",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}


@pytest.mark.parametrize("path", OPEN_METHODS)
def test_malformed_request_of_built_in_service_is_refused_without_traceback(
    path: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(NoDatabases(), http="127.0.0.1:0") as client, channel(client) as found:
        method = getattr(found, OPEN_METHODS[path])(path)
        with pytest.raises(grpc.RpcError) as refused:
            if OPEN_METHODS[path] == "unary_unary":
                method(b"\xff\xff\xff", timeout=PATIENCE)
            else:
                sent = b"\xff\xff\xff" if OPEN_METHODS[path] == "unary_stream" else iter([b"\xff\xff\xff"])
                list(method(sent, timeout=PATIENCE))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text + capfd.readouterr().err


class EndedCall:
    """A call that gRPC has ended before the handler reads its request."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        return aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

    async def abort(self, *status: Any) -> None:
        raise aio.InternalError("the call has ended")


def test_abort_of_a_call_that_grpc_has_ended_cancels_the_handler() -> None:
    def decode(data: bytes) -> Any:
        raise AssertionError("no message arrived")

    async def run() -> None:
        slots = RequestSlots(total=1, each=1, waiting=1, seconds=PATIENCE)
        answering: Any = lambda request, context: None  # noqa: E731
        method = grpc.unary_unary_rpc_method_handler(answering, decode)
        handler = receive_by(slots, method, lambda context: "key", UnreadAnswers(PATIENCE))
        with pytest.raises(asyncio.CancelledError):  # gRPC logs a traceback for any other error
            await handler.stream_unary(None, EndedCall())

    asyncio.run(run())


@pytest.mark.parametrize(
    ("compression", "status"),
    [
        (grpc.Compression.NoCompression, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.Compression.Gzip, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_message_over_the_limit_is_refused_without_traceback(
    compression: grpc.Compression, status: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(NoDatabases(), http="127.0.0.1:0", max_body_bytes=1 << 20) as client, channel(client) as found:
        check = found.unary_unary("/grpc.health.v1.Health/Check")
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as refused:
                check(bytes(8 << 20), timeout=PATIENCE, compression=compression)
            assert refused.value.code() == status
    assert "Traceback" not in caplog.text


def channel(client: Any) -> grpc.Channel:
    return grpc.insecure_channel(client.server.grpc_address)


def services(found: grpc.Channel, **more: Any) -> list[str]:
    """Return the services that reflection lists."""
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(found)
    (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=PATIENCE, **more)
    return sorted(each.name for each in answer.list_services_response.service)


def test_health_needs_no_credential() -> None:
    with serving(NoDatabases(), **LOCKED) as client, channel(client) as found:
        answer = health_pb2_grpc.HealthStub(found).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("x-api-key", "T"),)])
def test_unauthenticated_call_does_not_reveal_methods(metadata: Any) -> None:
    with serving(NoDatabases(), **LOCKED) as client, channel(client) as found:
        for path in ("/sochdb.v1.KvService/Get", "/no.such/Method"):
            with pytest.raises(grpc.RpcError) as failure:
                found.unary_unary(path)(b"", timeout=PATIENCE, metadata=metadata)
            assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert failure.value.details() == NOBODY
        with pytest.raises(grpc.RpcError) as failure:
            services(found, metadata=metadata)
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("metadata", [(("authorization", "Bearer t"),), (("x-api-key", "t"),)])
def test_reflection_lists_the_services(metadata: Any) -> None:
    with serving(NoDatabases(), **LOCKED) as client, channel(client) as found:
        assert "grpc.health.v1.Health" in services(found, metadata=metadata)


def test_unknown_method_is_unimplemented() -> None:
    with serving(NoDatabases()) as client, channel(client) as found:
        with pytest.raises(grpc.RpcError) as failure:
            found.unary_unary("/no.such/Method")(b"", timeout=PATIENCE)
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        trailers = dict(failure.value.trailing_metadata())
        assert "/no.such/Method" in failure.value.details() and trailers["headwater-code"] == "not_supported"
        assert "headwater.v1.ChangeFeedService" in trailers["headwater-hint"]
        with pytest.raises(grpc.RpcError) as failure:
            found.stream_stream("/sochdb.v1.KvService/Nothing")(iter([b"", b""]), timeout=PATIENCE).next()
        assert dict(failure.value.trailing_metadata())["headwater-code"] == "not_supported"


def test_unknown_health_method_does_not_reveal_services() -> None:
    with serving(NoDatabases(), **LOCKED) as client, channel(client) as found:
        with pytest.raises(grpc.RpcError) as failure:
            found.unary_unary("/grpc.health.v1.Health/Nothing")(b"", timeout=PATIENCE)
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "v1.ChangeFeedService" not in str(failure.value.trailing_metadata())


class StuckLibrary:
    """A gRPC library whose stop waits until all connections are cut."""

    def __init__(self) -> None:
        self.is_cut, self.grace, self.is_idle = asyncio.Event(), list[float | None](), False

    async def stop(self, grace: float | None) -> None:
        self.grace.append(grace)
        await self.is_cut.wait()

    async def close(self) -> None:
        """Accept no more connections."""

    async def end(self, seconds: float) -> None:
        assert self.is_cut.is_set()

    def cut(self, *, only_idle: bool = False) -> None:
        if self.is_idle or not only_idle:
            self.is_cut.set()

    async def enter_graceful_shutdown(self) -> None:
        """Report the stop to watchers of the health."""


def stuck() -> tuple[GrpcServer, StuckLibrary]:
    """Return a server whose library is stuck."""
    none, library = cast(Any, None), cast(Any, StuckLibrary())
    server = GrpcServer(none, none, [], none, ServeConfig(), none, none)
    server._server = server._acceptor = server._health = library
    return server, library


def test_stop_cuts_connections_whose_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CLOSE_SECONDS", 0.01)

    async def main() -> None:
        server, library = stuck()
        await server.stop(0.01)
        assert library.is_cut.is_set() and library.grace == [0.01]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Watch", "/sochdb.v1.KvService/Get"])
def test_stop_waits_for_open_calls_but_not_for_health_or_idle_connections(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(grpc_server, "CLOSE_SECONDS", 0.0)

    async def main() -> None:
        server, library = stuck()
        library.is_idle, go_on = True, asyncio.Event()

        async def found(details: Any) -> Any:
            """Handle the call in the task that looked up its method, as the library does."""

        async def call() -> None:
            await server._open.intercept_service(found, cast(Any, SimpleNamespace(method=method)))
            await go_on.wait()

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(server.stop(3600.0))
        if "Health" not in method:
            for _ in range(100):
                await asyncio.sleep(0)
            assert library.grace == [3600.0] and not library.is_cut.is_set()
            go_on.set()
        await stopping
        go_on.set()
        await calling

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_second_signal_cuts_connections_whose_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "CLOSE_SECONDS", 0.01)

    async def main() -> None:
        server, library = stuck()
        stopping = asyncio.ensure_future(server.stop(3600.0))
        while not library.grace:
            await asyncio.sleep(0)
        server.cut()
        await stopping
        assert library.is_cut.is_set() and library.grace == [3600.0, None]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_two_servers_do_not_share_a_port() -> None:
    with serving(NoDatabases()) as client:
        taken = client.server.grpc_address
        second = Server(ServeConfig(http="127.0.0.1:0", grpc=taken), Api.over(NoDatabases()))
        with pytest.raises(ConfigError) as found:
            second.bind()
    assert taken in found.value.message and "--grpc" in found.value.hint


def test_grpc_on_all_interfaces_without_a_credential_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        Gate.of(ServeConfig(grpc="0.0.0.0:0"))
    Gate.of(ServeConfig(grpc="0.0.0.0:0", token=Secret("t" * 16)))


def test_grpc_address_follows_the_settings() -> None:
    assert grpc_address(ServeConfig()) == "127.0.0.1:7172"
    assert grpc_address(ServeConfig(http="127.0.0.1:0")) == "127.0.0.1:0"
    assert grpc_address(ServeConfig(http="127.0.0.1:0", grpc="127.0.0.1:9")) == "127.0.0.1:9"
    assert grpc_address(ServeConfig(grpc="off")) is None


def test_grpc_off_opens_no_port() -> None:
    with serving(NoDatabases(), grpc="off") as client:
        assert client.server.grpc_addresses == []


def test_compiled_protos_match_the_proto_files(tmp_path: Path) -> None:
    files = sorted(str(path) for path in Path(str(FOLDER)).glob("*.proto"))
    made = tmp_path / "protos.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(FOLDER), f"--descriptor_set_out={made}", *files]
    subprocess.run(command, check=True)
    kept, fresh = (descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (_kept(), made))
    assert kept == fresh, "run make protos"


def _kept() -> Path:
    return Path(str(FOLDER)) / "protos.bin"
