"""Questions of the bulk worker to its server: where a read stands in the log, only who follows the database knows.

The server listens beside the worker's own socket, in a folder that nobody else can enter. One connection is asked one
thing after another; what a read needs to be remembered is remembered until its connection ends.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec

from headwater.database import Database
from headwater.errors import HeadwaterError, NotSupported, SourceMismatch, Unavailable
from headwater.model.table import Table
from headwater.ranges.pull.jobs import Failed, error_in, failed_of

PATIENCE = 60.0  # for one answer
DESCRIBE, HEAD, BEGIN, EXACT = "describe", "head", "begin", "exact"
_LENGTH = struct.Struct(">I")


class Question(msgspec.Struct, frozen=True):
    """One of the words above; `exact` is about a snapshot."""

    db: str
    generation: str
    word: str
    snapshot: str = ""


class Reply(msgspec.Struct, frozen=True):
    """What was asked for, or why not."""

    tables: dict[str, Table] = {}
    offset: int | None = None
    failed: Failed | None = None


class Desk:
    """Answers, in a thread for each connection. From `open` to `close`."""

    def __init__(self, database: Callable[[str], Database]) -> None:
        self._database = database
        self._listener: socket.socket | None = None

    def open(self, path: str) -> None:
        """Listen there, and nowhere else any more."""
        self.close()
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), name="headwater-questions", daemon=True).start()

    def close(self) -> None:
        """Take no more questions."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # who accepts is woken
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Who reads across a new beginning is told by the generation; the end of its reading says it once more.
        with connection, contextlib.suppress(OSError, Unavailable), contextlib.ExitStack() as held:
            while (data := _received(connection)) is not None:
                try:
                    reply = self._reply(msgspec.msgpack.decode(data, type=Question), held)
                except HeadwaterError as error:
                    reply = Reply(failed=failed_of(error))
                _send(connection, msgspec.msgpack.encode(reply))

    def _reply(self, question: Question, held: contextlib.ExitStack) -> Reply:
        database = self._database(question.db)
        source = database.source
        if database.log.generation != question.generation:
            raise SourceMismatch(f"{question.db!r} began a new history", hint="Readers need a new snapshot of it.")
        if question.word == DESCRIBE:
            return Reply(source.describe())
        if question.word == HEAD:
            return Reply(offset=source.head())
        positions = source.snapshot_positions
        if positions is None:
            raise NotSupported(f"each read of {question.db!r} carries its own offset")
        if question.word == BEGIN:
            held.enter_context(positions.reading())
            return Reply()
        return Reply(offset=positions.exact(question.snapshot))


class Asked:
    """The worker's side, about one database. Fulfils `ServerPositions`. Thread-safe."""

    def __init__(self, path: str, db: str, generation: str) -> None:
        self._path, self._db, self._generation = path, db, generation
        self._own = threading.local()

    def describe(self) -> dict[str, Table]:
        """See Source."""
        with self._connected() as connection:
            return self._ask(connection, DESCRIBE).tables

    def head(self) -> int:
        """See Source."""
        with self._connected() as connection:
            return self._ask(connection, HEAD).offset or 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See SnapshotPositions."""
        with self._connected() as connection:
            self._ask(connection, BEGIN)
            self._own.connection = connection
            try:
                yield
            finally:
                del self._own.connection

    def exact(self, snapshot: str) -> int | None:
        """See SnapshotPositions; inside `reading`."""
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

    def _ask(self, connection: socket.socket, word: str, snapshot: str = "") -> Reply:
        try:
            _send(connection, msgspec.msgpack.encode(Question(self._db, self._generation, word, snapshot)))
            data = _received(connection)
        except OSError as error:
            raise Unavailable(f"the server does not answer its worker: {error}", hint="Try again.") from error
        if data is None:
            raise Unavailable("the server does not answer its worker", hint="Try again in a moment.")
        reply = msgspec.msgpack.decode(data, type=Reply)
        if reply.failed is not None:
            raise error_in(reply.failed)
        return reply


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> bytes | None:
    """The next message; None when the other side left."""
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        got = connection.recv(size - len(data))
        if not got:
            return None
        data += got
    return bytes(data)
