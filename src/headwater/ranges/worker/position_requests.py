"""Requests of the bulk worker to its server for log positions, which only the process that captures knows.

The server listens in the folder of the worker's own socket, which other users cannot enter. A connection carries one
request after another; the state of a read is kept until its connection ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from headwater.database import Database
from headwater.errors import HeadwaterError, NotSupported, SourceMismatch, Unavailable
from headwater.model.table import Table
from headwater.ranges.pull.jobs import Failed, error_in, failed_of
from headwater.sources.read import ServerPositions

PATIENCE = 60.0  # seconds to wait for one answer
DESCRIBE, HEAD, BEGIN, EXACT = "describe", "head", "begin", "exact"
_LENGTH = struct.Struct(">I")


class PositionRequest(msgspec.Struct, frozen=True):
    """A request; `word` is one of the constants above, and `snapshot` is for `exact`."""

    db: str
    generation: str
    word: str
    snapshot: str = ""


class PositionReply(msgspec.Struct, frozen=True):
    """The answer to a request, or an error."""

    tables: dict[str, Table] = {}
    offset: int | None = None
    failed: Failed | None = None


class PositionServer:
    """Answers requests from `open` to `close`, in a thread for each connection."""

    def __init__(self, database: Callable[[str], Database]) -> None:
        self._database = database
        self._listener: socket.socket | None = None

    def open(self, path: str) -> None:
        """Listen at `path`, and stop listening elsewhere."""
        self.close()
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(128)
        accept = partial(accept_connections, listener, self._serve)
        threading.Thread(target=accept, name="headwater-positions", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
            listener.close()

    def _serve(self, connection: socket.socket) -> None:
        # A reader learns of a new generation by the check in `_reply`; the error at the end of its read is redundant.
        with connection, contextlib.suppress(OSError, Unavailable), contextlib.ExitStack() as held:
            while True:  # until the worker closes the connection
                data = _received(connection)
                try:
                    reply = self._reply(msgspec.msgpack.decode(data, type=PositionRequest), held)
                except HeadwaterError as error:
                    reply = PositionReply(failed=failed_of(error))
                _send(connection, msgspec.msgpack.encode(reply))

    def _reply(self, request: PositionRequest, held: contextlib.ExitStack) -> PositionReply:
        database = self._database(request.db)
        source = database.source
        if database.log.generation != request.generation:
            raise SourceMismatch(
                f"the log of {request.db!r} began a new generation", hint="Readers must take a new snapshot."
            )
        if request.word == DESCRIBE:
            return PositionReply(source.describe())
        if request.word == HEAD:
            return PositionReply(offset=source.head())
        positions = source.snapshot_positions
        if positions is None:
            raise NotSupported(f"each read of {request.db!r} carries its offset; the server has no other to give")
        if request.word == BEGIN:
            held.enter_context(positions.reading())
            return PositionReply()
        return PositionReply(offset=positions.exact(request.snapshot))


class PositionClient(ServerPositions):
    """The worker's side, for one database. Thread-safe."""

    def __init__(self, path: str, db: str, generation: str) -> None:
        self._path, self._db, self._generation = path, db, generation
        self._own = threading.local()

    def describe(self) -> dict[str, Table]:
        with self._connected() as connection:
            return self._ask(connection, DESCRIBE).tables

    def head(self) -> int:
        """Return the offset that the newest committed change has or will have; costs one small read."""
        with self._connected() as connection:
            return self._ask(connection, HEAD).offset or 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._connected() as connection:
            self._ask(connection, BEGIN)
            self._own.connection = connection
            try:
                yield
            finally:
                del self._own.connection

    def exact(self, snapshot: str) -> int | None:
        return self._ask(self._own.connection, EXACT, snapshot).offset

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise Unavailable(f"the server does not answer its worker: {error}", hint="Try again.") from error
        return connection

    def _ask(self, connection: socket.socket, word: str, snapshot: str = "") -> PositionReply:
        try:
            _send(connection, msgspec.msgpack.encode(PositionRequest(self._db, self._generation, word, snapshot)))
            data = _received(connection)
        except OSError as error:
            raise Unavailable(f"the server does not answer its worker: {error}", hint="Try again.") from error
        reply = msgspec.msgpack.decode(data, type=PositionReply)
        if reply.failed is not None:
            raise error_in(reply.failed)
        return reply


def accept_connections(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Serve each connection in its own thread, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> bytes:
    return receive_exactly(connection, _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))[0])


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; raise ConnectionResetError if the other side closes the connection before."""
    data = bytearray()
    while len(data) < size:
        got = connection.recv(size - len(data))
        if not got:
            raise ConnectionResetError("the connection was closed")
        data += got
    return bytes(data)
