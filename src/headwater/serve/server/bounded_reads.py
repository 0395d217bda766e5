"""Limit on the bytes that a connection without TLS receives at once: event loops read up to 256 KiB.

A protocol that pauses reading must keep all that it has received.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

MAX_DISCARDED = 256 << 10  # bytes


class BoundedReads(asyncio.BufferedProtocol):
    """Passes the events of a connection to `protocol`, with at most as many received bytes at a time as `buffer` has.

    All connections of one event loop share `buffer`: it is empty between two events.
    """

    def __init__(self, protocol: asyncio.Protocol, buffer: bytearray) -> None:
        self.protocol, self._buffer = protocol, buffer

    def discard(self, fd: int) -> None:
        """Drop what has arrived: a socket closed with unread bytes is reset, and its client loses the answer."""
        with contextlib.suppress(OSError):
            os.read(fd, MAX_DISCARDED)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the event on."""
        self.protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the event on."""
        self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass the event on."""
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass the event on."""
        self.protocol.resume_writing()

    def eof_received(self) -> bool | None:
        """Pass the event on."""
        return self.protocol.eof_received()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer for the next data."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass the received data on."""
        self.protocol.data_received(bytes(memoryview(self._buffer)[:nbytes]))
