"""The server: sockets, uvicorn in the caller's loop, and a stop that lets open requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.feeds.feeds import Feeds
from headwater.queries.queries import Prepares
from headwater.queries.subscribed import Subscribed
from headwater.ranges.process import Bulk
from headwater.serve.api import Api
from headwater.serve.auth import Gate, split_address
from headwater.serve.bridge import Bridge
from headwater.serve.bulk import Snapshots
from headwater.serve.connection import BoundedHttp
from headwater.serve.cors import Cors
from headwater.serve.http import Application
from headwater.serve.metrics import Metrics
from headwater.serve.places import Places
from headwater.serve.pulls import Pulls
from headwater.serve.sockets import FramedWebSocket
from headwater.serve.streams import Streams

READ_THREADS = 8  # SQLite releases the GIL while it reads; more would only queue on it
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which proxies drop an idle connection
BACKLOG = 2048
MAX_FRAME = 64 << 10  # bytes a WebSocket client may send at a time


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
        self._bridge: Bridge | None = None
        self._snapshots: Snapshots | None = None
        self._pulls: Pulls | None = None
        self._uvicorn: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._sockets: list[socket.socket] = []  # bound, not yet handed to uvicorn
        self.addresses: list[tuple[str, int]] = []  # as bound, so port 0 shows the real one

    @property
    def url(self) -> str:
        """Where to reach it from here."""
        host, port = self.addresses[0]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def bind(self) -> None:
        """Take the address, before anything else is touched; ConfigError if it cannot be had."""
        self._sockets = _bind(*split_address(self._config.http))
        self.addresses = [each.getsockname()[:2] for each in self._sockets]

    def unbind(self) -> None:
        """Give the address back if nobody listens on it yet."""
        for each in self._sockets:
            each.close()
        self._sockets = []

    async def start(self) -> None:
        """Accept; binds first unless that is done."""
        if not self._sockets:
            self.bind()
        sockets, self._sockets = self._sockets, []
        self._bridge = Bridge(threads=READ_THREADS)
        self._api.gate = self._gate
        self._api.feeds = None if self._open_feeds is None else self._open_feeds()
        databases = self._api.databases
        self._api.queries = databases.open_queries(self._bridge.call) if isinstance(databases, Prepares) else None
        if self._api.feeds is not None and self._api.queries is not None:
            self._api.feeds.ask(Subscribed(self._api.queries))
        application = self._application(self._bridge, self._api.feeds)
        self._uvicorn = _Uvicorn(_settings(application, self._config.drain_seconds))
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=sockets))
        ready = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task

    def _application(self, bridge: Bridge, feeds: Feeds | None) -> Application:
        config, places = self._config, Places(self._config.max_streams_per_client)
        streams = None
        if feeds is not None:
            self._snapshots = Snapshots(feeds.databases, feeds.run)
            self._pulls = self._open_pulls(feeds)
            streams = Streams(feeds, self._snapshots, places, self._pulls, self._gate.sessions)
        return Application(
            self._api,
            self._gate,
            bridge,
            Metrics(self._api.databases.status, feeds, self._pulls, self._api.queries),
            max_body=config.max_body_bytes,
            places=places,
            cors=Cors(config.cors_origins, locked=self._gate.locked),
            streams=streams,
            public=self._api.queries is not None and self._api.queries.public,
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
            self._api.feeds.drain()  # streams have no end of their own to wait for
        if self._api.ranges is not None:
            self._api.ranges.drain()
        self._uvicorn.should_exit = True
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

    async def serve(self, *, started: Callable[[], None] = lambda: None) -> None:
        """Start, wait for SIGTERM or SIGINT, stop. A second signal does not wait for open requests."""
        await self.start()
        started()
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, asked)
        try:
            await asked.wait()
            await self.stop()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, asked: asyncio.Event) -> None:
        if asked.is_set() and self._uvicorn is not None:
            self._uvicorn.force_exit = True
        asked.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, and with a moment at which it is known to accept."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For asyncio.Runner: uvloop where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _settings(application: Application, drain_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=BoundedHttp,
        ws=FramedWebSocket,
        ws_max_size=MAX_FRAME,
        ws_per_message_deflate=False,  # a compressed frame would be one reader's own
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # a forwarded header is a claim of the caller
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,  # type: ignore[arg-type]  # goes to wait_for, which takes floats
    )


def _bind(host: str, port: int) -> list[socket.socket]:
    """One listening socket per address of `host`, all on one port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", hint="Use an IP address.") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if sockets and port == 0:
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                continue  # the name has an IPv6 address and this machine has no IPv6
            for other in sockets:
                other.close()
            raise _cannot_bind(host, port, error) from None
        bound.setblocking(False)
        sockets.append(bound)
    if not sockets:
        raise ConfigError(f"cannot listen on {host}: no address of it is on this machine")
    return sockets


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    hint = "Another server uses this port: stop it or choose another." if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", hint=hint)
