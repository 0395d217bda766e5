"""Frames off a replication connection. `Received` where it was compiled: a thread takes them without the interpreter's
lock. Else `Plain`: whoever asks for a frame takes it, and the server waits while nobody does."""

from __future__ import annotations

import contextlib
import ctypes
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

FORM = 1  # of Receiver: one that was built for another is not used
DRAINS = 3
_DONE = -1  # said by PQgetCopyData


class Wire(Protocol):
    """One connection that sends frames. For one thread."""

    get: Get  # the next frame; its size is 0 where none came yet, below that at the end
    socket: int  # readable when more came

    def read(self) -> None:
        """Take in what came, once `socket` is readable."""
        ...

    def is_ended(self) -> bool:
        """Whether no frame comes any more, though `get` does not say so; raises where the connection broke."""
        ...

    def send(self, data: bytes) -> None:
        """A word to the server."""
        ...

    def close(self) -> None:
        """Leave the connection to its owner."""
        ...


class Plain:
    """See Wire."""

    def __init__(self, connection: PGconn) -> None:
        self._connection = connection
        self.get: Get = self._drained if connection.ssl_in_use else connection.get_copy_data
        self.socket = connection.socket

    def _drained(self, wait: int = 1) -> tuple[int, memoryview]:
        """No poll sees what OpenSSL has already: see DRAINS in receiver_compiled."""
        found = self._connection.get_copy_data(wait)
        for _ in range(DRAINS):
            if found[0]:
                break
            self._connection.consume_input()
            found = self._connection.get_copy_data(wait)
        return found

    def read(self) -> None:
        """See Wire."""
        self._connection.consume_input()

    def is_ended(self) -> bool:
        """See Wire: `get` says so."""
        return False

    def send(self, data: bytes) -> None:
        """See Wire."""
        self._connection.put_copy_data(data)
        self._connection.flush()

    def close(self) -> None:
        """See Wire."""


class Received:
    """See Wire. Between `send` and `close` nobody else may use the connection."""

    def __init__(self, connection: PGconn, name: str) -> None:
        made = _made()
        if made is None:
            raise SourceError("frames cannot be received here without the interpreter's lock")
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
        if not frames:  # what came before the end is taken first
            self._ended = state
        return frames

    def read(self) -> None:
        """See Wire."""
        with contextlib.suppress(BlockingIOError):
            self._news.recv(64)

    def is_ended(self) -> bool:
        """See Wire."""
        if self._ended == self._open:
            return False
        if self._ended != _DONE:
            self._raise()
        return True

    def _raise(self) -> None:
        """What the connection has to say for itself."""
        self.close()
        if self._ended == self._broken:
            self._connection.consume_input()
        else:
            self._connection.get_copy_data(1)
        raise SourceError("the connection broke")

    def send(self, data: bytes) -> None:
        """See Wire."""
        self._receiver.lock()
        try:
            self._connection.put_copy_data(data)
            self._connection.flush()
        finally:
            self._receiver.unlock()

    def close(self) -> None:
        """See Wire. Once or more."""
        if self._thread.is_alive():
            self._receiver.stop()
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"x")
            self._thread.join()
        for each in self._sockets:
            each.close()


def wire(connection: PGconn, name: str) -> Wire:
    """The best there is for `connection`; `name` is that of the database."""
    can_receive = row_decoder.twin() is row_decoder.COMPILED and _made() is not None
    return Received(connection, name) if can_receive else Plain(connection)


_Made = tuple[Any, Callable[[Callable[[], bytes]], Get], tuple[int, int, int]]
_found: list[_Made | None] = []


def _made() -> _Made | None:
    """The compiled modules, and where libpq has its functions; None where one of them is missing."""
    if not _found:
        _found.append(_look())
    return _found[0]


def _look() -> _Made | None:
    try:
        from headwater.sources.postgres.capture.decode import row_decoder_compiled
        from headwater.sources.postgres.capture.stream import receiver_compiled

        library = ctypes.CDLL(importlib.import_module(pq.PGconn.__module__).__file__)  # it leads to the libpq it uses
        names = ("PQconsumeInput", "PQgetCopyData", "PQfreemem")
        calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    except (ImportError, OSError, AttributeError):
        return None
    is_ours = receiver_compiled.FORM == FORM and psycopg.pq.__impl__ in ("binary", "c")
    return (receiver_compiled, row_decoder_compiled.Frames, (calls[0], calls[1], calls[2])) if is_ours else None
