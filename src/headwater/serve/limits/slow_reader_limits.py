"""Patience: how long a connection is held for a client that does not read, and when it must be given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from headwater.serve.call import Scope

CONNECTION = "headwater.connection"  # where a scope keeps it
STALL_SECONDS = 300.0
LINGER_SECONDS = 5.0  # for what is on its way to a client that is being let go
PROGRESS = 64 << 10  # bytes: who reads less in `stall_seconds` reads nothing


class Droppable(Protocol):
    """A connection that can be taken from its client."""

    def drop(self) -> None:
        """The client may not stay. What was sent may still arrive, but not for long."""
        ...


class Patience(asyncio.Protocol):
    """Before a protocol of uvicorn: cuts off a client that reads nothing for `stall_seconds`, or was let go.

    A transport that is closed waits, without an end, for its client to take what was written before.
    """

    stall_seconds = STALL_SECONDS
    linger_seconds = LINGER_SECONDS
    transport: asyncio.Transport
    writable: asyncio.Event  # not set while the client reads too little of what was written
    loop: asyncio.AbstractEventLoop
    _unread: int | None = None  # bytes that waited for the client
    _since = 0.0
    _looking: asyncio.TimerHandle | None = None
    _letting_go: asyncio.TimerHandle | None = None
    _on_lost: Callable[[], object] | None = None

    def pause_writing(self) -> None:
        """As inherited."""
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        """As inherited."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        """As inherited."""
        for timer in (self._looking, self._letting_go):
            if timer is not None:
                timer.cancel()
        if self._on_lost is not None:
            self._on_lost()
        super().connection_lost(exc)

    def drop(self) -> None:
        """See Droppable."""
        if self._letting_go is None:
            self._letting_go = self.loop.call_later(self.linger_seconds, self.transport.abort)

    def watch(self) -> None:
        """From now on the client is to read what waits for it."""
        self._unread, self._since = self.transport.get_write_buffer_size(), self.loop.time()
        if self._looking is None and self._unread:  # one timer for however many pauses
            self._looking = self.loop.call_later(self.stall_seconds, self._look)

    def _look(self) -> None:
        self._looking = None
        if self._unread is None:
            return
        left = self._since + self.stall_seconds - self.loop.time()
        if left > 0:
            self._looking = self.loop.call_later(left, self._look)
        elif self._unread - self.transport.get_write_buffer_size() >= PROGRESS:
            self.watch()
        else:
            self.transport.abort()


def drop(scope: Scope) -> None:
    """Let the client of this request go, where the server knows how."""
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
