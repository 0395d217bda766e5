"""TLS handshakes of both ports, which count as connections from their first byte and have limits of time and number.

asyncio's servers report a connection only after its handshake: clients that never finish one would use sockets that no
limit counts. Each handshake takes the event loop a signature: 1 ms with an RSA key of 2,048 bits, 5 ms with 4,096.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headwater.serve.limits.connection_limits import OVER_LIMIT_SECONDS, ConnectionLimits
from headwater.serve.limits.rates import place_of

HANDSHAKE_SECONDS = 10.0
ANSWER_SECONDS = 5.0  # for a client that has begun its handshake to finish it
CONCURRENT, CONCURRENT_OF_CLIENT = 128, 16  # handshakes, of all clients and of one address; others wait unread
# Bytes that one connection receives at once, with TLS or without. With TLS uvloop has 256 KiB for each, OpenSSL a third
# more, and both keep as much in memory as the largest read took: an idle connection held 700 KB after it had sent 1 MB.
READ_BYTES = 32 << 10
WRITE_BYTES = 64 << 10  # unsent bytes at which a protocol must pause, as without TLS; the default is 512 KiB
PAUSE_SECONDS = 0.5  # after a failed accept: most likely no file descriptor is left
log = logging.getLogger(__name__)

Done = Callable[[], None]


class TlsServer:
    """Accepts connections, performs their TLS handshakes and passes them to a protocol. Not thread-safe.

    `context` returns the context of a new connection. `make` returns the protocol of a connection; its argument is
    called once the protocol counts the connection.
    """

    seconds = HANDSHAKE_SECONDS
    concurrent_of_client = CONCURRENT_OF_CLIENT

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        connections: ConnectionLimits,
        make: Callable[[Done], asyncio.BaseProtocol],
    ) -> None:
        self._context, self._connections, self._make = context, connections, make
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(CONCURRENT)
        self._free_of: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    def listen(self, sockets: Sequence[socket.socket], backlog: int) -> None:
        """Start to accept connections."""
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)  # accepted sockets inherit it
            each.listen(backlog)
            self._begin(self._accept(each))

    def close(self) -> None:
        """Stop accepting, and cancel unfinished handshakes."""
        for task in list(self._tasks):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until accepting and all handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (address, *_) = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # the client closed it before it was accepted
                continue
            except OSError as error:
                log.error("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._connections.add(address)
            if self._connections.is_full(address):
                self._connections.refused += 1
                self._connections.leave(address)
                connection.close()
            else:
                self._begin(self._handshake(connection, address))
            await asyncio.sleep(0)  # lets other tasks run: accept does not suspend while connections wait

    async def _handshake(self, connection: socket.socket, address: str) -> None:
        """Perform one handshake; then the protocol owns the connection."""
        connections, is_counted = self._connections, True
        seconds = min(self.seconds, OVER_LIMIT_SECONDS) if connections.is_over_limit(address) else self.seconds

        def done() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                connections.leave(address)

        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        free = self._free_of.setdefault(place_of(address), asyncio.Semaphore(self.concurrent_of_client))
        try:
            async with asyncio.timeout_at(until) as deadline:
                await _readable(connection)
                async with free, self._free:
                    deadline.reschedule(None)  # from here on the transport has the limit of time
                    left = min(until - loop.time(), ANSWER_SECONDS)
                    transport, _ = await loop.connect_accepted_socket(
                        lambda: self._make(done), connection, ssl=self._context(), ssl_handshake_timeout=max(left, 0.1)
                    )
            if not transport.is_closing():
                transport.set_read_buffer_limits(READ_BYTES)  # type: ignore[attr-defined]  # of a transport of TLS
                transport.set_write_buffer_limits(WRITE_BYTES)
        except (OSError, ssl.SSLError):  # too late, closed, or not TLS
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            done()


async def _readable(connection: socket.socket) -> None:
    """Wait until the client has sent something, or has disconnected."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(connection, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(connection)
