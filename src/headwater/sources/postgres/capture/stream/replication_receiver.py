"""Frames from a replication connection. `ThreadReceiver`, where compiled, reads them in a thread without the
interpreter lock. Otherwise `DirectReceiver`: the caller that asks for a frame reads it, and the server waits until
then."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn

from headwater.errors import SourceError
from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.capture.decode.row_plan import Get

FORM = 1  # version of Receiver's interface: a module built for another version is not used
DRAINS = 3
_DONE = -1  # returned by PQgetCopyData at the end


class FrameReceiver(Protocol):
    """A connection that sends frames. For one thread."""

    get: Get  # returns the next frame; size 0: none received yet; below 0: the end
    socket: int  # readable when more was received

    def read(self) -> None:
        """Read the received bytes, once `socket` is readable."""

    def is_ended(self) -> bool:
        """Return whether no more frames follow, though `get` does not show it; raise if the connection broke."""

    def send(self, data: bytes) -> None:
        """Send `data`, such as a status update, to the server."""

    def close(self) -> None:
        """Stop using the connection, which stays with its owner."""


class DirectReceiver(FrameReceiver):
    """A wire read by its caller."""

    def __init__(self, connection: PGconn) -> None:
        self._connection = connection
        self.get: Get = self._drained if connection.ssl_in_use else connection.get_copy_data
        self.socket = connection.socket

    def _drained(self, wait: int = 1) -> tuple[int, memoryview]:
        """Return the next frame, also from bytes inside OpenSSL, which no poll reports: see receiver_compiled."""
        found = self._connection.get_copy_data(wait)
        for _ in range(DRAINS):
            if found[0]:
                break
            self._connection.consume_input()
            found = self._connection.get_copy_data(wait)
        return found

    def read(self) -> None:
        self._connection.consume_input()

    def is_ended(self) -> bool:
        return False  # `get` reports the end

    def send(self, data: bytes) -> None:
        self._connection.put_copy_data(data)
        self._connection.flush()

    def close(self) -> None:
        return


class ThreadReceiver(FrameReceiver):
    """A wire read by a thread of its own. Until `close`, nobody else may use the connection."""

    def __init__(self, connection: PGconn, name: str) -> None:
        made = _made()
        if made is None:
            raise SourceError("the compiled receiver of frames is not available")
        receiver, frames, calls = made
        self._connection = connection
        self._ended = receiver.OPEN
        self._open, self._broken = receiver.OPEN, receiver.BROKEN
        self._waker, wake = socket.socketpair()
        self._news, news = socket.socketpair()
        self._sockets = (self._waker, wake, self._news, news)
        for each in self._sockets:
            each.setblocking(False)
        at = connection.pgconn_ptr  # type: ignore[attr-defined]  # both compiled implementations have it
        self._receiver = receiver.Receiver(at, *calls, connection.socket, wake.fileno(), news.fileno())
        self.get: Get = frames(self._refill)
        self.socket = self._news.fileno()
        self._thread = threading.Thread(target=self._receiver.run, name=f"headwater-wire-{name}", daemon=True)
        self._thread.start()

    def _refill(self) -> bytes:
        frames: bytes
        frames, was_full, state = self._receiver.take()
        if was_full:
            self._waker.send(b"x")
        if not frames:  # frames received before the end are taken first
            self._ended = state
        return frames

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._news.recv(64)

    def is_ended(self) -> bool:
        if self._ended == self._open:
            return False
        if self._ended == _DONE:
            return True
        self.close()
        # Raises the error that the connection reports.
        if self._ended == self._broken:
            self._connection.consume_input()
        else:
            self._connection.get_copy_data(1)
        raise SourceError("the replication connection was lost")

    def send(self, data: bytes) -> None:
        self._receiver.lock()
        try:
            self._connection.put_copy_data(data)
            self._connection.flush()
        finally:
            self._receiver.unlock()

    def close(self) -> None:
        """Stop the thread, too. May be called more than once."""
        if self._thread.is_alive():
            self._receiver.stop()
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"x")
            self._thread.join()
        for each in self._sockets:
            each.close()


def wire(connection: PGconn, name: str) -> FrameReceiver:
    """Return the fastest available receiver for `connection`; `name` is the name of the database."""
    can_receive = row_decoder.twin() is row_decoder.COMPILED and _made() is not None
    return ThreadReceiver(connection, name) if can_receive else DirectReceiver(connection)


_Made = tuple[Any, Callable[[Callable[[], bytes]], Get], tuple[int, int, int]]


@functools.cache
def _made() -> _Made | None:
    """Return the compiled modules and the addresses of libpq's functions; None if one of them is missing."""
    try:
        from headwater.sources.postgres.capture.decode import row_decoder_compiled
        from headwater.sources.postgres.capture.stream import receiver_compiled

        library = ctypes.CDLL(importlib.import_module(pq.PGconn.__module__).__file__)  # linked to psycopg's libpq
        names = ("PQconsumeInput", "PQgetCopyData", "PQfreemem")
        calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (ImportError, OSError, AttributeError):
        return None
    is_ours = receiver_compiled.FORM == FORM and psycopg.pq.__impl__ in ("binary", "c")
    return (receiver_compiled, row_decoder_compiled.Frames, (calls[0], calls[1], calls[2])) if is_ours else None
