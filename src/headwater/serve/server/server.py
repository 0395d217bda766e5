"""The server: sockets, uvicorn in the caller's loop, and a stop that lets open requests finish."""

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
from headwater.queries.dependencies.subscribed_instances import Subscribed
from headwater.queries.queries import Prepares
from headwater.ranges.worker.process import Bulk
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate, grpc_address, is_loopback, split_address
from headwater.serve.call import Handlers
from headwater.serve.gateway.gateway import Gateway
from headwater.serve.http.cors import Cors
from headwater.serve.http.handlers.pulls import Pulls
from headwater.serve.http.handlers.streams import Streams
from headwater.serve.http.handlers.table_snapshots import Snapshots
from headwater.serve.http.websocket_protocol import FramedWebSocket
from headwater.serve.limits.connection_limits import Crowd, connections_for, raise_open_files, spare_files
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.stream_limits import Places
from headwater.serve.listen_address import bind, joined
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.methods import METHODS
from headwater.serve.server.application import Application
from headwater.serve.server.http_protocol import BoundedHttp
from headwater.serve.server.tls_handshakes import Done, TlsServer
from headwater.serve.thread_bridge import Bridge
from headwater.serve.tls import Tls

READ_THREADS = 8  # SQLite releases the GIL while it reads; more would only queue on it
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which proxies drop an idle connection
BACKLOG = 2048
MAX_FRAME = 64 << 10  # bytes a WebSocket client may send at a time
log = logging.getLogger(__name__)
T = TypeVar("T")


class Server:
    """HTTP on the address of `config`, answered by `api`. Start and stop it in one loop."""

    def __init__(
        self,
        config: ServeConfig,
        api: Api,
        open_feeds: Callable[[], Feeds] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._config = config
        self._api = api
        self._open_feeds = open_feeds  # in the loop that serves
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
        self._hurried = False  # a stop does not wait for anybody
        self.addresses: list[tuple[str, int]] = []  # as bound, so port 0 shows the real one
        self.grpc_addresses: list[tuple[str, int]] = []  # none: gRPC is off

    @property
    def url(self) -> str:
        """Where to reach it from here."""
        return f"{'http' if self._tls is None else 'https'}://{joined(*self.addresses[0])}"

    @property
    def grpc_address(self) -> str:
        """Where to reach gRPC from here."""
        return joined(*self.grpc_addresses[0])

    def bind(self) -> None:
        """Take the address, before anything else is touched; ConfigError if it cannot be had."""
        self._sockets = bind(*split_address(self._config.http))
        self.addresses = [each.getsockname()[:2] for each in self._sockets]
        address = grpc_address(self._config)
        if address is not None and self._speaks_grpc():
            try:
                self._grpc_sockets = bind(*split_address(address))
            except ConfigError as error:
                self.unbind()
                hint = "Choose another address for gRPC with --grpc, or none: --grpc off."
                raise ConfigError(f"gRPC {error.message}", hint=hint) from None
            self.grpc_addresses = [each.getsockname()[:2] for each in self._grpc_sockets]
        self._warn()

    def _warn(self) -> None:
        """Of an address that others reach, where what they send can be read on its way."""
        for host, port in (*self.addresses, *self.grpc_addresses):
            if self._tls is None and not is_loopback(host):
                log.warning("%s is reached without TLS: set serve.tls_cert, or let a proxy do it", joined(host, port))

    def _speaks_grpc(self) -> bool:
        """Whether the library is here; ConfigError if it is not, and gRPC was asked for."""
        if importlib.util.find_spec("grpc") is not None:
            return True
        if self._config.grpc != ServeConfig().grpc:
            raise ConfigError("gRPC needs the library grpcio", hint="pip install 'headwater[grpc]'")
        log.info("gRPC is off: pip install 'headwater[grpc]'")
        return False

    def unbind(self) -> None:
        """Give the addresses back if nobody listens on them yet."""
        for each in (*self._sockets, *self._grpc_sockets):
            each.close()
        self._sockets, self._grpc_sockets = [], []

    async def start(self) -> None:
        """Accept; binds first unless that is done."""
        if not self._sockets:
            self.bind()
        files = self._limit_connections()
        sockets, self._sockets = self._sockets, []
        self._bridge = Bridge(threads=READ_THREADS)
        self._api.gate, self._api.run = self._gate, self._bridge.call
        self._api.transactions.check_credential = self._gate.still
        self._api.feeds = None if self._open_feeds is None else self._open_feeds()
        databases = self._api.databases
        self._api.queries = databases.open_queries(self._bridge.call) if isinstance(databases, Prepares) else None
        if self._api.feeds is not None and self._api.queries is not None:
            self._api.feeds.serve_queries(Subscribed(self._api.queries))
        limits = Limits(self._config, self._api, Places(self._config.max_streams_per_client))
        limits.crowd.is_lowered = self._is_lowered
        metrics = self._metrics(self._api.feeds, limits)
        application = self._application(self._bridge, self._api.feeds, metrics, limits)
        self._gateway = application.gateway
        if self.grpc_addresses:
            await self._start_grpc(metrics, limits)
        settings = _settings(application, self._config, limits.crowd, files)
        self._uvicorn = _Uvicorn(settings, self._tls, limits.crowd)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=sockets))
        ready = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task

    def _limit_connections(self) -> int:
        """Lower `serve.max_connections` to what the limit of open files allows; return that limit."""
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

    async def _start_grpc(self, metrics: Metrics, limits: Limits) -> None:
        """Faces on the address that was kept for them."""
        from headwater.serve.grpc.services import open_faces  # imported late: grpcio is not everybody's

        for each in self._grpc_sockets:
            each.close()
        self._grpc_sockets = []
        assert self._bridge is not None
        self._grpc = open_faces(self._api, self._gate, self._bridge, limits, metrics, self._config)
        await self._grpc.start(self.grpc_addresses, self._tls)

    def _metrics(self, feeds: Feeds | None, limits: Limits) -> Metrics:
        self._pulls = None if feeds is None else self._open_pulls(feeds)
        return Metrics(self._api.databases.status, feeds, self._pulls, self._api.queries, limits, methods=METHODS)

    def _application(self, bridge: Bridge, feeds: Feeds | None, metrics: Metrics, limits: Limits) -> Application:
        config = self._config
        handlers: Handlers = {}
        websockets: Handlers = {}
        if feeds is not None:
            self._snapshots = Snapshots(feeds.databases, feeds.run)
            streams = Streams(feeds, limits, self._gate.sessions)
            pulls = {} if self._pulls is None else self._pulls.handlers()
            handlers = streams.handlers() | streams.downloads({"snapshot": self._snapshots.answer, **pulls})
            websockets = streams.websockets()
        return Application(
            self._api,
            self._gate,
            bridge,
            metrics,
            max_body=config.max_body_bytes,
            limits=limits,
            cors=Cors(config.cors_origins, locked=self._gate.locked),
            handlers=handlers,
            websockets=websockets,
            public=self._api.queries is not None and self._api.queries.public,
            ready=config.ready,
        )

    def _open_pulls(self, feeds: Feeds) -> Pulls | None:
        bulk = self._api.databases
        if not isinstance(bulk, Bulk):
            return None
        return Pulls(feeds.databases, bulk, lambda *named: self._api.pulling().find(*named), feeds.run)

    async def stop(self) -> None:
        """Stop accepting, let open requests finish for at most `drain_seconds`, then cut them off."""
        if self._uvicorn is None or self._task is None or self._bridge is None:
            return
        if self._api.feeds is not None:
            self._api.feeds.readers.stop()  # streams have no end of their own to wait for
        if self._api.ranges is not None:
            self._api.ranges.drain()
        left = await self._drain_gateway(self._config.drain_seconds)
        self._uvicorn.config.timeout_graceful_shutdown = left  # type: ignore[assignment]  # as in _settings
        self._uvicorn.should_exit = True
        if self._grpc is not None:
            await self._grpc.stop(0.0 if self._hurried else left)
        await self._task
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
        """Before uvicorn closes its WebSockets, which it does at once; how much time is left for the others."""
        began = time.monotonic()
        if self._gateway is not None:
            await self._gateway.drain(seconds)
        return max(seconds - (time.monotonic() - began), 0.0)

    def reload(self) -> bool:
        """Read the certificate again; whether it is good. Open streams go on."""
        return self._tls is None or self._tls.reload()

    async def serve(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Start, wait for SIGTERM or SIGINT, stop. A second signal does not wait for open requests.

        With TLS, SIGHUP reads the certificate again; without, it ends the process, as it always did.
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
        """Cut off what is open, on both ports."""
        self._hurried = True
        if self._uvicorn is not None:
            self._uvicorn.force_exit = True
        if self._gateway is not None:
            self._gateway.cut()
        if self._grpc is not None:
            self._grpc.cut()
        if self._gateway is not None:
            self._gateway.cut()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, with our TLS, and with a moment at which it is known to accept."""

    def __init__(self, config: uvicorn.Config, tls: Tls | None, crowd: Crowd) -> None:
        super().__init__(config)
        self._tls, self._crowd = tls, crowd
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            encrypted = TlsServer(self._tls.context, self._crowd, self._protocol)
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
    """For asyncio.Runner: uvloop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _patient(kind: type[T], config: ServeConfig) -> type[T]:
    return type(kind.__name__, (kind,), {"stall_seconds": config.stall_seconds})


def _settings(application: Application, config: ServeConfig, crowd: Crowd, files: int) -> uvicorn.Config:
    http, framed = _patient(BoundedHttp, config), _patient(FramedWebSocket, config)
    return uvicorn.Config(
        application,
        http=functools.partial(http, crowd=crowd),  # type: ignore[arg-type]  # is only called
        ws=framed,
        ws_max_size=MAX_FRAME,
        ws_per_message_deflate=False,  # a compressed frame would be one reader's own
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # a forwarded header is a claim of the caller
        server_header=False,
        backlog=min(BACKLOG, spare_files(files) // 2),  # all of it is accepted before the first one is counted
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=config.drain_seconds,  # type: ignore[arg-type]  # goes to wait_for, which takes floats
    )
