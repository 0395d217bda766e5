"""The server: sockets, uvicorn in the caller's event loop, and a stop that lets open requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.feeds.feeds import Feeds
from headwater.queries.dependencies.subscribed_instances import SubscribedInstances
from headwater.queries.queries import Prepares
from headwater.ranges.worker.process import BulkDatabases
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate, grpc_address, is_loopback, split_address
from headwater.serve.call import Handlers
from headwater.serve.gateway.gateway import Gateway
from headwater.serve.http.handlers.pulls import Pulls
from headwater.serve.http.handlers.streams import Streams
from headwater.serve.http.handlers.table_snapshots import Snapshots
from headwater.serve.http.websocket_protocol import FramedWebSocket
from headwater.serve.limits.connection_limits import ConnectionLimits, connections_for, raise_open_files, spare_files
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.stream_limits import StreamCounts
from headwater.serve.listen_address import bind, joined
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.methods import METHODS
from headwater.serve.server.application import Application
from headwater.serve.server.bounded_reads import BoundedReads
from headwater.serve.server.http_protocol import BoundedHttp
from headwater.serve.thread_bridge import Bridge
from headwater.serve.tls import Tls
from headwater.serve.tls_handshakes import READ_BYTES, Done, TlsServer

READ_THREADS = 8  # SQLite releases the GIL while it reads; more threads would only queue for it
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which proxies drop an idle connection
BACKLOG = 2048
MAX_FRAME = 64 << 10  # bytes of a frame from a WebSocket client
log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """HTTP and gRPC on the addresses of `config`, answered by `api`. Start and stop it in one event loop."""

    def __init__(
        self,
        config: ServeConfig,
        api: Api,
        open_feeds: Callable[[], Feeds] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._config = config
        self._api = api
        self._open_feeds = open_feeds  # called in the event loop of the server
        self._gate = Gate.of(config, folder)
        self._tls = Tls.of(config)
        self._bridge: Bridge | None = None
        self._snapshots: Snapshots | None = None
        self._pulls: Pulls | None = None
        self._uvicorn: _Uvicorn | None = None
        self._gateway: Gateway | None = None
        self._task: asyncio.Task[None] | None = None
        self._sockets: list[socket.socket] = []  # bound, not yet handed to uvicorn
        self._grpc_sockets: list[socket.socket] = []
        self._grpc: Any = None
        self._is_lowered = False  # whether the limit of open files lowered max_connections
        self._hurried = False  # a stop does not wait for open requests
        self.addresses: list[tuple[str, int]] = []  # as bound: with port 0 the real port
        self.grpc_addresses: list[tuple[str, int]] = []  # empty if gRPC is off

    @property
    def url(self) -> str:
        """Return the URL of the server on this machine."""
        return f"{'http' if self._tls is None else 'https'}://{joined(*self.addresses[0])}"

    @property
    def grpc_address(self) -> str:
        """Return the address of gRPC on this machine."""
        return joined(*self.grpc_addresses[0])

    def bind(self) -> None:
        """Bind the addresses before anything else is touched; ConfigError if that is not possible."""
        self._sockets = bind(*split_address(self._config.http))
        self.addresses = [each.getsockname()[:2] for each in self._sockets]
        address = grpc_address(self._config)
        if address is not None and self._speaks_grpc():
            try:
                self._grpc_sockets = bind(*split_address(address))
            except ConfigError as error:
                self.unbind()
                hint = "Choose another address for gRPC with --grpc, or turn it off: --grpc off."
                raise ConfigError(f"gRPC {error.message}", hint=hint) from None
            self.grpc_addresses = [each.getsockname()[:2] for each in self._grpc_sockets]
        self._warn()

    def _warn(self) -> None:
        """Warn about an address that other machines reach without encryption."""
        for host, port in (*self.addresses, *self.grpc_addresses):
            if self._tls is None and not is_loopback(host):
                log.warning(
                    "%s is reachable without TLS: set serve.tls_cert, or terminate TLS in a proxy", joined(host, port)
                )

    def _speaks_grpc(self) -> bool:
        """Return whether grpcio is installed; ConfigError if it is not, and gRPC is configured."""
        if importlib.util.find_spec("grpc") is not None:
            return True
        if self._config.grpc != ServeConfig().grpc:
            raise ConfigError("gRPC needs the package grpcio", hint="pip install 'headwater[grpc]'")
        log.info("gRPC is off, grpcio is not installed: pip install 'headwater[grpc]'")
        return False

    def unbind(self) -> None:
        """Close bound sockets that no server listens on yet."""
        for each in (*self._sockets, *self._grpc_sockets):
            each.close()
        self._sockets, self._grpc_sockets = [], []

    async def start(self) -> None:
        """Start to accept connections; binds the addresses first unless `bind` was called."""
        if not self._sockets:
            self.bind()
        files = self._limit_connections()
        sockets, self._sockets = self._sockets, []
        self._bridge = Bridge(threads=READ_THREADS)
        self._api.gate, self._api.run = self._gate, self._bridge.call
        self._api.transactions.check_credential = self._gate.recheck
        self._api.feeds = None if self._open_feeds is None else self._open_feeds()
        databases = self._api.databases
        self._api.queries = databases.open_queries(self._bridge.call) if isinstance(databases, Prepares) else None
        if self._api.feeds is not None and self._api.queries is not None:
            self._api.feeds.serve_queries(SubscribedInstances(self._api.queries))
        limits = Limits(self._config, self._api, StreamCounts(self._config.max_streams_per_client))
        limits.connections.is_lowered = self._is_lowered
        feeds, queries = self._api.feeds, self._api.queries
        self._pulls = None if feeds is None else self._open_pulls(feeds)
        metrics = Metrics(databases.status, feeds, self._pulls, queries, limits, methods=METHODS)
        application = self._application(self._bridge, self._api.feeds, metrics, limits)
        self._gateway = application.gateway
        if self.grpc_addresses:
            await self._start_grpc(metrics, limits, files)
        settings = _settings(application, self._config, limits.connections, files)
        self._uvicorn = _Uvicorn(settings, self._tls, limits.connections)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=sockets))
        ready = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task

    def _limit_connections(self) -> int:
        """Lower `serve.max_connections` to what the limit of open files allows; return the limit of open files."""
        files, most = raise_open_files(), self._config.max_connections
        allowed = connections_for(files, ports=2 if self.grpc_addresses else 1)
        is_noticed = most != ServeConfig().max_connections or allowed < self._config.max_connections_per_client
        if allowed < most and is_noticed:
            log.warning(
                "serve.max_connections is %d and counts as %d: the process may open %d files (ulimit -n, LimitNOFILE=)",
                most,
                allowed,
                files,
            )
        self._config = dataclasses.replace(self._config, max_connections=min(most, allowed))
        self._is_lowered = allowed < most
        return files

    async def _start_grpc(self, metrics: Metrics, limits: Limits, files: int) -> None:
        """Start the gRPC services on the sockets bound for them."""
        from headwater.serve.grpc.connections.acceptor import FILES
        from headwater.serve.grpc.services import open_services  # imported late: grpcio is optional

        assert self._bridge is not None
        most = min(self._config.max_connections, max(connections_for(files, ports=2) // FILES, 1))
        connections = ConnectionLimits(most, self._config.max_connections_per_client, reserve=0)
        connections.is_lowered = self._is_lowered or most < self._config.max_connections
        self._grpc = open_services(self._api, self._gate, self._bridge, limits, metrics, self._config, connections)
        await self._grpc.start(self._grpc_sockets, self._tls, backlog=_backlog(files))
        self._grpc_sockets = []

    def _application(self, bridge: Bridge, feeds: Feeds | None, metrics: Metrics, limits: Limits) -> Application:
        handlers: Handlers = {}
        websockets: Handlers = {}
        if feeds is not None:
            self._snapshots = Snapshots(feeds.databases, feeds.run)
            streams = Streams(feeds, limits, self._gate.sessions)
            pulls = {} if self._pulls is None else self._pulls.handlers()
            handlers = streams.handlers() | streams.downloads({"snapshot": self._snapshots.answer, **pulls})
            websockets = streams.websockets()
        return Application(self._api, self._gate, bridge, metrics, limits, self._config, handlers, websockets)

    def _open_pulls(self, feeds: Feeds) -> Pulls | None:
        bulk = self._api.databases
        if not isinstance(bulk, BulkDatabases):
            return None
        return Pulls(feeds.databases, bulk, lambda *named: self._api.pulling().find(*named), feeds.run)

    async def stop(self) -> None:
        """Stop accepting, let open requests finish for at most `drain_seconds`, then cut them off."""
        if self._uvicorn is None or self._task is None or self._bridge is None:
            return
        if self._api.feeds is not None:
            self._api.feeds.readers.stop()  # streams would not end on their own
        if self._api.ranges is not None:
            self._api.ranges.drain()
        left = await self._drain_gateway(self._config.drain_seconds)
        self._uvicorn.config.timeout_graceful_shutdown = left  # type: ignore[assignment]  # as in _settings
        self._uvicorn.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(0.0 if self._hurried else left)
        await self._task
        await asyncio.to_thread(self._api.databases.stop_statements)
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.close)
        if self._pulls is not None:
            await self._pulls.close()
        if self._api.feeds is not None:
            await self._api.feeds.close()
        if self._api.queries is not None:
            await self._bridge.call(self._api.queries.close)
        self._api.transactions.close()
        await asyncio.to_thread(self._bridge.close)
        self._uvicorn = None

    async def _drain_gateway(self, seconds: float) -> float:
        """Drain the gateway, because uvicorn closes WebSockets immediately; return the seconds left."""
        began = time.monotonic()
        if self._gateway is not None:
            await self._gateway.drain(seconds)
        return max(seconds - (time.monotonic() - began), 0.0)

    def reload(self) -> bool:
        """Reload the certificate for new connections; return False, and keep the old one, if it is not valid."""
        return self._tls is None or self._tls.reload()

    async def serve(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Start, wait for SIGTERM or SIGINT, stop. A second signal does not wait for open requests.

        With TLS, SIGHUP reloads the certificate; without TLS it ends the process.
        """
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], object]] = {
            number: lambda: self._on_signal(asked) for number in (signal.SIGTERM, signal.SIGINT)
        }
        if self._tls is not None:
            handlers[signal.SIGHUP] = self.reload
        await self.start()
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        started()
        try:
            await asked.wait()
            await self.stop()
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _on_signal(self, asked: asyncio.Event) -> None:
        if asked.is_set():
            self._hurry()
        asked.set()

    def _hurry(self) -> None:
        """Close open requests and streams on both ports."""
        self._hurried = True
        if self._uvicorn is not None:
            self._uvicorn.force_exit = True
        if self._gateway is not None:
            self._gateway.cut()
        if self._grpc is not None:
            self._grpc.cut()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, with our TLS server, and with an event that is set once it accepts."""

    def __init__(self, config: uvicorn.Config, tls: Tls | None, connections: ConnectionLimits) -> None:
        super().__init__(config)
        self._tls, self._connections = tls, connections
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self._tls
        if tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            encrypted = TlsServer(lambda: tls.context, self._connections, self._protocol)
            encrypted.listen(sockets or [], self.config.backlog)
            self.servers.append(encrypted)  # type: ignore[arg-type]  # is closed and waited for
        self.ready.set()

    def _protocol(self, handshake_done: Done) -> asyncio.Protocol:
        config, state = self.config, self.server_state
        make: Any = config.http_protocol_class
        return make(config=config, server_state=state, app_state={}, handshake_done=handshake_done)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the loop factory for asyncio.Runner: uvloop if it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _backlog(files: int) -> int:
    """Return the backlog of a socket, all of which is accepted before the first connection is counted."""
    return min(BACKLOG, spare_files(files) // 2)


def _patient(kind: type[T], config: ServeConfig) -> type[T]:
    return type(kind.__name__, (kind,), {"stall_seconds": config.stall_seconds})


def _settings(
    application: Application, config: ServeConfig, connections: ConnectionLimits, files: int
) -> uvicorn.Config:
    framed = _patient(FramedWebSocket, config)
    http: Callable[..., BoundedHttp] = functools.partial(_patient(BoundedHttp, config), connections=connections)
    buffer = bytearray(READ_BYTES)
    return uvicorn.Config(
        application,
        http=http if config.tls_cert else lambda **named: BoundedReads(http(**named), buffer),  # type: ignore[arg-type]
        ws=framed,
        ws_max_size=MAX_FRAME,
        ws_per_message_deflate=False,  # a compressed frame could not be shared between readers
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the client could forge a forwarded header
        server_header=False,
        backlog=_backlog(files),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=config.drain_seconds,  # type: ignore[arg-type]  # goes to wait_for, which takes floats
    )
