"""Accepts gRPC connections, counts them, and connects each to the gRPC library by a Unix socket.

The library listens in a folder that only this user may enter, so that no client reaches it without the checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from headwater.errors import ConfigError
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.serve.grpc.connections.pipe import ClientEnd, LibraryEnd, Shared
from headwater.serve.limits.connection_limits import ConnectionLimits
from headwater.serve.limits.slow_reader_limits import STALL_SECONDS
from headwater.serve.tls import Tls
from headwater.serve.tls_handshakes import Done, TlsServer

PREFIX = "headwater-grpc-"  # of the folder
MAX_FOLDER = 24  # characters: the path of a Unix socket has at most 103 on some systems
NAME = "library"
START_SECONDS = 60.0  # in which a server must have begun to listen in its folder
FILES = 3  # file descriptors of one connection: of the client, and both of the Unix socket
log = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections within the limits of `connections`. Start and stop it in one event loop."""

    def __init__(self, connections: ConnectionLimits, stall_seconds: float = STALL_SECONDS) -> None:
        self._connections, self._stall_seconds = connections, stall_seconds
        self._folder = _folder()
        self._numbers, self._shared = itertools.count(), Shared()
        self._clients: set[ClientEnd] = set()
        self._named: dict[str, ClientEnd] = {}  # by the name of the socket to the library
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: Sequence[socket.socket] = ()
        self._plain: list[asyncio.AbstractServer] = []
        self._encrypted: TlsServer | None = None
        self._repeats = LogThrottle()
        self._empty = asyncio.Event()  # set when the last connection has ended

    @property
    def target(self) -> str:
        """Return the address on which the gRPC library must listen."""
        return f"unix:{self._folder.name}/{NAME}"

    async def listen(self, sockets: Sequence[socket.socket], tls: Tls | None, backlog: int) -> None:
        """Start to accept connections, with TLS if `tls` is given."""
        self._sockets = sockets
        if tls is not None:
            self._encrypted = TlsServer(lambda: tls.grpc_context, self._connections, self._protocol)
            self._encrypted.listen(sockets, backlog)
            return
        loop = asyncio.get_running_loop()
        for each in sockets:
            self._plain.append(await loop.create_server(self._protocol, sock=each, backlog=backlog))

    async def close(self) -> None:
        """Accept no more connections; open ones continue."""
        for server in self._plain:
            server.close()
        if self._encrypted is not None:
            self._encrypted.close()
            await self._encrypted.wait_closed()
        for each in self._sockets:
            each.close()

    async def end(self, seconds: float) -> None:
        """Wait for connections that the library has closed, at most for `seconds`, then cut them and clean up."""
        self._empty.clear()
        if self._clients:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        self.cut()
        self._folder.cleanup()

    def cut(self, *, only_idle: bool = False) -> None:
        """Close all connections at once, or with `only_idle` only those without unsent bytes for their client."""
        for client in list(self._clients):
            if not only_idle or client.has_nothing_unsent:
                client.abort()

    def drop(self, peer: str, why: str) -> None:
        """Close a connection at once, by the name that the gRPC library has for its other end."""
        client = self._named.get(unquote(peer).removeprefix("unix:"))
        if client is not None:
            self._refused(client, why)
            client.abort()

    def _protocol(self, handshake_done: Done = lambda: None) -> ClientEnd:
        def accepted(client: ClientEnd) -> None:
            handshake_done()  # the handshake counted the connection until now
            self._accepted(client)

        return ClientEnd(self._shared, accepted, self._refused, self._stall_seconds)

    def _accepted(self, client: ClientEnd) -> None:
        self._clients.add(client)
        client.lost = lambda: self._lost(client)
        over_limit = self._connections.enter(client.address)
        if over_limit is not None:
            self._refused(client, f"too many are open. {over_limit.hint}")
            client.abort()
            return
        task = asyncio.ensure_future(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self, client: ClientEnd) -> None:
        self._connections.leave(client.address)
        self._clients.discard(client)
        self._named.pop(client.name, None)
        if not self._clients:
            self._empty.set()

    async def _connect(self, client: ClientEnd) -> None:
        """Connect a client to the library, by a socket whose name tells the library the client's address."""
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            name = f"{self._folder.name}/{next(self._numbers):x}@{client.address}"
            if client in self._clients:
                client.name, self._named[name] = name, client
            connection.bind(name)
            os.unlink(name)  # the socket keeps its name
            connection.connect(f"{self._folder.name}/{NAME}")
            # Not create_unix_connection: if the transport is closed before that returns, uvloop 0.23 closes the file
            # descriptor twice, and the second time it may be another connection's.
            await asyncio.get_running_loop().connect_accepted_socket(lambda: LibraryEnd(client), connection)
        except OSError as error:
            if connection is not None:
                connection.close()
            self._refused(client, f"the gRPC library does not accept it: {error.strerror}")
            client.abort()

    def _refused(self, client: ClientEnd, why: str) -> None:
        left_out = self._repeats.again(why, time.monotonic())
        if left_out is not None:
            log.warning(counted("a gRPC connection from %s was closed: %s", left_out), client.address, why)


def address_in(peer: str) -> str:
    """Return the address of the client from the name that the gRPC library has for the other end of a connection."""
    return unquote(peer).rpartition("@")[2]


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder that only this user may enter; remove those of servers that were killed."""
    try:
        place = tempfile.gettempdir()
        if len(place) > MAX_FOLDER:
            place = "/tmp"
        for old in Path(place).glob(f"{PREFIX}*"):
            if _is_stale(old):
                shutil.rmtree(old, ignore_errors=True)
        return tempfile.TemporaryDirectory(prefix=PREFIX, dir=place)
    except OSError as error:
        raise ConfigError(
            f"gRPC cannot create a folder for its socket: {error.strerror}: {error.filename}",
            hint="Set TMPDIR to a folder that the server may write, or turn gRPC off: --grpc off.",
        ) from None


def _is_stale(folder: Path) -> bool:
    """Return whether a folder is ours, and no process listens in it or may be about to."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        status = folder.lstat()
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < START_SECONDS:
            return False
        probe.setblocking(False)
        try:
            probe.connect(str(folder / NAME))
        except ConnectionRefusedError:
            return True
    return False
