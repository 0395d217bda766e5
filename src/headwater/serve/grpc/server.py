"""The gRPC server: its port beside HTTP, in the same loop, with health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headwater.errors import ConfigError, LimitExceeded
from headwater.model.principal import ANONYMOUS
from headwater.serve.grpc import errors
from headwater.serve.grpc.calls import Answer, Calls, Doorman, Pour, address_of
from headwater.serve.grpc.messages import pool
from headwater.serve.grpc.request_slots import WINDOW
from headwater.serve.limits.limits import Limits
from headwater.serve.listen_address import joined
from headwater.serve.tls import Pems, Tls

SPARE = 1 << 20  # bytes by which a message may be too large and still be refused in our own words
OPTIONS = (
    ("grpc.so_reuseport", 0),  # else two servers would share the port, and each see half of the calls
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),  # finds readers that are gone without a word
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.http2.bdp_probe", 0),  # it would let the window of every stream grow to megabytes
    ("grpc.max_connection_idle_ms", 600_000),  # clients come back by themselves
)


class Face(Protocol):
    """A service: its name in the .proto file, and what answers its methods."""

    service: str

    def methods(self) -> Mapping[str, Answer | Pour]:
        """By the name of the method; the .proto file tells which of them stream."""
        ...


@runtime_checkable
class Drains(Protocol):
    """A service with streams that have no end of their own."""

    def drain(self) -> None:
        """Let every reader say good-bye."""
        ...


class GrpcServer:
    """The faces on one address. Start and stop it in one loop."""

    def __init__(
        self,
        calls: Calls,
        doorman: Doorman,
        faces: list[Face],
        limits: Limits,
        *,
        max_bytes: int,
        max_streams: int,
        max_connections: int,
    ) -> None:
        self._calls, self._doorman, self._faces, self._limits = calls, doorman, faces, limits
        self._max_bytes, self._max_streams = max_bytes, max_streams  # of a message, of a connection
        self._max_connections = max_connections
        self._server: Any = None
        self._health: Any = None
        self._cutting: asyncio.Future[None] | None = None  # kept, or it might be forgotten before it is done

    async def start(self, addresses: list[tuple[str, int]], tls: Tls | None = None) -> None:
        """Accept on these addresses, all of which were free a moment ago."""
        options = [
            *OPTIONS,
            ("grpc.max_receive_message_length", self._max_bytes + SPARE),
            ("grpc.max_concurrent_streams", self._max_streams),
            ("grpc.max_allowed_incoming_connections", self._max_connections),  # unfinished TLS handshakes included
        ]
        self._server = aio.server(interceptors=[self._doorman], options=options)
        for face in self._faces:
            self._server.add_generic_rpc_handlers((_Handlers(face, self._calls),))
        names = [face.service for face in self._faces]
        self._health = _Health(self._limits)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server, pool=_with_health()
        )
        self._server.add_generic_rpc_handlers((_Nothing(self._calls, names),))  # the last to be asked
        credentials = None if tls is None else _credentials(tls)
        for host, port in addresses:
            where = joined(host, port)
            try:
                if credentials is None:
                    bound = self._server.add_insecure_port(where)
                else:
                    bound = self._server.add_secure_port(where, credentials)
            except RuntimeError:
                bound = 0
            if not bound:
                raise ConfigError(f"cannot listen on {where} for gRPC", hint="Choose another with --grpc.")
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """No more calls; those that are open may finish for so long."""
        if self._server is not None:
            for face in self._faces:
                if isinstance(face, Drains):
                    face.drain()
            await self._health.enter_graceful_shutdown()
            await self._server.stop(seconds)

    def cut(self) -> None:
        """Do not wait for open calls, also if a stop does already."""
        if self._server is not None:
            self._cutting = asyncio.ensure_future(self._server.stop(None))


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined, misc]  # has no stubs
    """Health for everybody; who watches it takes a place, as who reads any other stream."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    async def Watch(self, request: Any, context: aio.ServicerContext[Any, Any]) -> None:  # named by gRPC
        """What the health is, now and whenever it changes."""
        try:
            with self._limits.stay(ANONYMOUS, None, address_of(context)):
                await self._watch(request.service, context)
        except LimitExceeded as error:
            await context.abort(errors.status(error), errors.text(error), errors.trailers(error))

    async def _watch(self, service: str, context: aio.ServicerContext[Any, Any]) -> None:
        """Write the status whenever it changed. Inherited, a client that reads nothing held the lock for all others."""
        changed, last = self._server_watchers[service], None
        self._watcher_count_by_service[service] += 1
        try:
            while True:
                status = self._status_of(service)
                if status != last:
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
    """Finds the methods of one face."""

    def __init__(self, face: Face, calls: Calls) -> None:
        found = pool().FindServiceByName(face.service)
        self._found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for name, method in face.methods().items():
            described = found.FindMethodByName(name)
            path, request = f"/{face.service}/{name}", described.input_type.full_name
            make: Any = calls.many if described.server_streaming else calls.one
            self._found[path] = make(path, request, method)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Its handler."""
        return self._found.get(details.method)


class _Nothing(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    """Finds no method: says so as every other refusal is said."""

    def __init__(self, calls: Calls, services: list[str]) -> None:
        self._calls, self._services = calls, services

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """One that refuses."""
        return self._calls.none(details.method, self._services)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Of the certificate that `tls` has at the moment of each connection."""
    shown = tls.pems

    def again() -> Any:
        """Called in a thread of gRPC before each handshake; None: what it has is still right."""
        nonlocal shown
        if tls.pems is shown:
            return None
        shown = tls.pems
        return _configuration(shown)

    asks = tls.pems.authorities is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), again, require_client_authentication=asks)


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.authorities)


def _with_health() -> Any:
    """Our files, and those of the two services that come with gRPC."""
    from google.protobuf import descriptor_pb2
    from grpc_reflection.v1alpha import reflection_pb2

    found = pool()
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        copied = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copied)
        found.Add(copied)  # the same again is nothing new
    return found
