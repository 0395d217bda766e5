"""The gRPC server: a port of its own in the event loop of HTTP, with health and reflection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headwater.config import ServeConfig
from headwater.errors import Busy, LimitExceeded
from headwater.model.principal import ANONYMOUS
from headwater.serve.grpc.calls import HEALTH, AuthInterceptor, Calls, Service, abort, address_of
from headwater.serve.grpc.connections.acceptor import Acceptor
from headwater.serve.grpc.messages import pool
from headwater.serve.grpc.request_slots import WINDOW
from headwater.serve.grpc.stalled_calls import UnreadAnswers
from headwater.serve.limits.connection_limits import ConnectionLimits
from headwater.serve.limits.limits import Limits
from headwater.serve.tls import Tls

SPARE = 1 << 20  # bytes above the limit up to which a message is rejected with our own error
SETTINGS_SECONDS = 10.0  # for a client to acknowledge SETTINGS
UNKNOWN = "an unknown service"  # under which watchers of all services that do not exist wait
CLOSE_SECONDS = 2.0  # for clients to receive the last bytes when the server stops
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message could become large in memory
    ("grpc.keepalive_time_ms", 30_000),  # detects readers that vanished
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.http2.bdp_probe", 0),  # would let the window of every stream grow to megabytes
    ("grpc.max_connection_idle_ms", 600_000),  # clients reconnect by themselves
)


class GrpcServer:
    """The services on the sockets of one port. Start and stop it in one event loop."""

    def __init__(
        self,
        calls: Calls,
        auth: AuthInterceptor,
        services: list[Service],
        limits: Limits,
        config: ServeConfig,
        connections: ConnectionLimits,
        unread: UnreadAnswers,
    ) -> None:
        self._calls, self._auth, self._services, self._limits = calls, auth, services, limits
        self._config, self._connections, self._unread = config, connections, unread
        self._acceptor: Acceptor | None = None
        self._open = _OpenCalls()
        self._server: Any = None
        self._health: Any = None
        self._cutting: asyncio.Future[None] | None = None  # a reference, so that it is not garbage-collected

    async def start(self, sockets: Sequence[socket.socket], tls: Tls | None, *, backlog: int) -> None:
        """Start to accept calls on these bound sockets."""
        self._acceptor = Acceptor(self._connections, self._config.stall_seconds)
        self._unread.close = self._acceptor.drop
        options = [
            *OPTIONS,
            ("grpc.http2.settings_timeout", int(SETTINGS_SECONDS * 1000)),
            ("grpc.max_receive_message_length", self._config.max_body_bytes + SPARE),
            ("grpc.max_concurrent_streams", self._config.max_streams_per_client),
        ]
        self._server = aio.server(interceptors=[self._auth, self._open], options=options)
        for service in self._services:
            self._server.add_generic_rpc_handlers((_Handlers(service, self._calls),))
        names = [service.service for service in self._services]
        self._health = _Health(self._limits, self._unread)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server, pool=_with_health()
        )
        self._server.add_generic_rpc_handlers((_UnknownMethods(self._calls, names),))  # after all other handlers
        self._server.add_insecure_port(self._acceptor.target)  # TLS ends in the acceptor
        await self._server.start()
        await self._acceptor.listen(sockets, tls, backlog)

    async def stop(self, seconds: float) -> None:
        """Accept no more calls, wait up to `seconds` for open calls to finish, and end the rest."""
        if self._server is not None and self._acceptor is not None:
            await self._acceptor.close()
            for service in self._services:
                service.drain()
            await self._health.enter_graceful_shutdown()
            await self._end_calls(seconds)
            await self._acceptor.end(CLOSE_SECONDS)

    def cut(self) -> None:
        """End open calls without waiting, also during a stop."""
        if self._server is not None and self._acceptor is not None:
            self._cutting = asyncio.ensure_future(self._end_calls(None))

    async def _end_calls(self, seconds: float | None) -> None:
        """End open calls after `seconds`, and cut connections that the library waits for: idle ones and unread ones."""
        assert self._server is not None and self._acceptor is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + (seconds or 0.0) + CLOSE_SECONDS
        ending = asyncio.ensure_future(self._server.stop(seconds))
        if seconds:
            calls = asyncio.ensure_future(self._open.end())
            await asyncio.wait([ending, calls], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            calls.cancel()
            await asyncio.wait([ending], timeout=CLOSE_SECONDS)
            if not ending.done():
                self._acceptor.cut(only_idle=True)
        await asyncio.wait([ending], timeout=until - loop.time())
        if not ending.done():
            self._acceptor.cut()
        await ending


class _OpenCalls(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """The open calls that a stop waits for: every admitted call except health checks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Count the call until its task ends."""
        task = asyncio.current_task()
        if task is not None and not details.method.startswith(HEALTH):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await continuation(details)

    async def end(self) -> None:
        """Wait until no call is open."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined, misc]  # has no stubs
    """The health service, which needs no credential; a watcher counts as a stream."""

    def __init__(self, limits: Limits, unread: UnreadAnswers) -> None:
        super().__init__()
        self._limits, self._unread = limits, unread

    async def Watch(self, request: Any, context: aio.ServicerContext[Any, Any]) -> None:  # named by gRPC
        """Send the health of the requested service, now and after each change."""
        try:
            with self._limits.count_stream(ANONYMOUS, None, address_of(context)):
                await self._watch(request.service if request.service in self._server_status else UNKNOWN, context)
        except (LimitExceeded, Busy) as error:
            await abort(context, error)

    async def _watch(self, service: str, context: aio.ServicerContext[Any, Any]) -> None:
        """Write the status after each change; the inherited method would hold the lock while a client is stalled."""
        changed, last = self._server_watchers[service], None
        self._watcher_count_by_service[service] += 1
        try:
            while True:
                status = self._status_of(service)
                if status != last:
                    with self._unread.sending(context):
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                async with changed:
                    if self._status_of(service) == last:
                        await changed.wait()
        finally:
            self._watcher_count_by_service[service] -= 1
            if not self._watcher_count_by_service[service]:
                del self._server_watchers[service], self._watcher_count_by_service[service]

    def _status_of(self, service: str) -> Any:
        return self._server_status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    """Finds the handlers of the methods of one service."""

    def __init__(self, service: Service, calls: Calls) -> None:
        found = pool().FindServiceByName(service.service)
        self._found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in service.methods().items():
            described = found.FindMethodByName(name)
            path, request = f"/{service.service}/{name}", described.input_type.full_name
            make: Any = calls.many if described.server_streaming else calls.one
            self._found[path] = make(path, request, method)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a method; None if it is not one of this service."""
        return self._found.get(details.method)


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    """Rejects calls of unknown methods like every other rejected call."""

    def __init__(self, calls: Calls, services: list[str]) -> None:
        self._calls, self._services = calls, services

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that rejects the call."""
        return self._calls.none(details.method, self._services)


def _with_health() -> Any:
    """Return our files and those of gRPC's own health and reflection services."""
    from google.protobuf import descriptor_pb2
    from grpc_reflection.v1alpha import reflection_pb2

    found = pool()
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        copied = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copied)
        found.Add(copied)  # adding the same file again has no effect
    return found
