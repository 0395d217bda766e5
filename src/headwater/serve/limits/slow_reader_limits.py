"""Cut-off of clients that do not read their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from headwater.serve.call import Scope

CONNECTION = "headwater.connection"  # the key of the connection in an ASGI scope
STALL_SECONDS = 300.0
LINGER_SECONDS = 5.0  # time to deliver the last bytes to a client that is being disconnected
PROGRESS = 64 << 10  # bytes: a client that reads fewer in `stall_seconds` counts as stalled


class SlowReaderLimits(asyncio.Protocol):
    """Mixin for uvicorn protocols: disconnects a client that reads nothing for `stall_seconds`, or was dropped.

    Without it a closed transport waits for ever for its client to read the buffered data.
    """

    stall_seconds = STALL_SECONDS
    linger_seconds = LINGER_SECONDS
    transport: asyncio.Transport
    writable: asyncio.Event  # cleared while the client reads too little of the written data
    loop: asyncio.AbstractEventLoop
    _unread: int | None = None  # bytes in the write buffer at the last check
    _since = 0.0
    _stall_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _on_lost: Callable[[], object] | None = None

    def pause_writing(self) -> None:
        """Start the stall timer, and pause as uvicorn does."""
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        """Resume as uvicorn does; stop counting unread bytes if the buffer is empty."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and close as uvicorn does."""
        for timer in (self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self._on_lost is not None:
            self._on_lost()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Disconnect the client after a short time in which sent data may still arrive."""
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(self.linger_seconds, self.transport.abort)

    def watch(self) -> None:
        """Start to measure whether the client reads the buffered data."""
        self._unread, self._since = self.transport.get_write_buffer_size(), self.loop.time()
        if self._stall_timer is None and self._unread:  # one timer for any number of pauses
            self._stall_timer = self.loop.call_later(self.stall_seconds, self._check_stall)

    def _check_stall(self) -> None:
        self._stall_timer = None
        if self._unread is None:
            return
        left = self._since + self.stall_seconds - self.loop.time()
        if left > 0:
            self._stall_timer = self.loop.call_later(left, self._check_stall)
        elif self._unread - self.transport.get_write_buffer_size() >= PROGRESS:
            self.watch()
        else:
            self.transport.abort()


def drop(scope: Scope) -> None:
    """Disconnect the client of this request, if its connection supports it."""
    connection: Any = scope.get(CONNECTION)
    if connection is not None:
        connection.drop()


def writable_of(scope: Scope) -> asyncio.Event:
    """Return the event that is set while more can be written to the client of this request."""
    connection: Any = scope.get(CONNECTION)
    if connection is not None:
        found: asyncio.Event = connection.writable
        return found
    always = asyncio.Event()
    always.set()
    return always
