"""TLS handshakes of HTTP: each is counted as a connection from its first byte on, and ends within a time.

asyncio's own servers tell of a connection only when its handshake has succeeded: whoever never ends one would take
sockets that no limit counts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headwater.serve.limits.connection_limits import Crowd
from headwater.serve.server.http_protocol import CROWDED_SECONDS

HANDSHAKE_SECONDS = 10.0
PAUSE_SECONDS = 0.5  # after a connection could not be accepted: most likely the process has no descriptor left
log = logging.getLogger(__name__)

Done = Callable[[], None]


class TlsServer:
    """Accept connections, carry out their TLS handshakes and hand them to a protocol. In one loop.

    `make` returns the protocol of a connection; it is given what to call once the protocol counts the connection.
    """

    seconds = HANDSHAKE_SECONDS

    def __init__(self, context: ssl.SSLContext, crowd: Crowd, make: Callable[[Done], asyncio.Protocol]) -> None:
        self._context, self._crowd, self._make = context, crowd, make
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, sockets: Sequence[socket.socket], backlog: int) -> None:
        """Accept from now on."""
        for each in sockets:
            each.listen(backlog)
            self._begin(self._accept(each))

    def close(self) -> None:
        """Accept no more, and give up the handshakes that are going on."""
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
            except ConnectionAbortedError:  # it was given up before we came to it
                continue
            except OSError as error:
                log.error("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self._crowd.add(address)
            if self._crowd.is_full(address):
                self._crowd.refused += 1
                self._crowd.leave(address)
                connection.close()
            else:
                self._begin(self._handshake(connection, address))
            await asyncio.sleep(0)  # asyncio accepts without a pause while others wait

    async def _handshake(self, connection: socket.socket, address: str) -> None:
        """Carry out one handshake; the protocol has its connection from then on."""
        crowd, is_counted = self._crowd, True
        seconds = min(self.seconds, CROWDED_SECONDS) if crowd.is_crowded(address) else self.seconds

        def done() -> None:
            nonlocal is_counted
            if is_counted:
                is_counted = False
                crowd.leave(address)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(done), connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except (OSError, ssl.SSLError):  # too late, cut off, not TLS at all
            connection.close()
        finally:
            done()
