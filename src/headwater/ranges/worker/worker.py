"""The bulk worker: a separate process that encodes rows and changes as Arrow, to keep this work out of the server.

Each connection is one job: the server sends the job, the worker sends the frames of the answer as fast as they are
read. Closing the connection ends the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Generator, Iterator

import msgspec

from headwater.errors import Busy, HeadwaterError, InvalidRequest
from headwater.model.arrow import release_unused
from headwater.model.work.answer_limits import AnswerMemory
from headwater.model.work.fair_shares import FairPlaces
from headwater.model.work.work_context import CALLER, Holder
from headwater.ranges.pull import jobs
from headwater.ranges.pull.arrow_pieces import BodyPiece, snapshot_pieces, tables_pieces
from headwater.ranges.pull.log_slices import log_pieces
from headwater.ranges.pull.slice_cache import Cache, Slice
from headwater.ranges.worker.open_databases import Databases, OpenDatabase, OpenReader
from headwater.ranges.worker.position_requests import accept_connections, receive_exactly

logger = logging.getLogger("headwater.worker")

AT_ONCE = 8  # jobs that compute concurrently; a job that waits for a slow reader does not count
CALLER_SHARE = 3  # of these jobs for one caller: fewer than a PostgreSQL reader has connections for conditions
FRAME = 1 << 20  # largest body of one frame, in bytes: the server buffers about one frame per answer
UNREAD = 64 << 20  # bytes of all pieces over one frame that are sent from memory; other pieces wait in files


class Worker:
    """Answers jobs, each in its own thread."""

    def __init__(self, open_reader: OpenReader, cache: Cache) -> None:
        self._databases, self._cache = Databases(open_reader), cache
        self._places = FairPlaces(AT_ONCE, CALLER_SHARE)
        self._unread = AnswerMemory()
        self._unread.configure(max_bytes=0, max_memory=UNREAD)

    def serve(self, listener: socket.socket) -> None:
        """Answer jobs, in a thread each, until the listener is closed. Blocks."""
        accept_connections(listener, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the reader closed the connection
            try:
                self._run(connection, _read_job(connection))
                done = jobs.CacheCounters(self._cache.hits, self._cache.misses, self._cache.bytes)
                connection.sendall(jobs.encode_end(done))
            except HeadwaterError as error:
                connection.sendall(jobs.encode_end(error))
            except OSError:
                raise
            except Exception as error:
                logger.exception("a bulk job failed")
                failure = HeadwaterError(f"the bulk worker failed: {type(error).__name__}")
                connection.sendall(jobs.encode_end(failure))

    def _run(self, connection: socket.socket, job: jobs.Job) -> None:
        CALLER.set(job.caller)  # for this thread, which runs only this job
        with (
            self._databases.use(job.place) as opened,
            contextlib.closing(self._pieces(connection, job, opened)) as pieces,
        ):
            while (piece := self._next(pieces, whose_job(job))) is not None:
                try:
                    _send(connection, piece)
                finally:
                    self._unread.release(_counted(piece))
                del piece  # the next one is made without it

    def _next(self, pieces: Iterator[BodyPiece], whose: Holder) -> BodyPiece | None:
        """Return the next piece; in a file if it does not fit into the memory for pieces. None at the end."""
        with self._places.held(whose):
            piece = next(pieces, None)
        if piece is not None:
            try:
                self._unread.reserve(_counted(piece))
            except Busy:
                assert isinstance(piece.data, bytes)
                piece = BodyPiece(self._cache.temporary(piece.data, piece.rows), piece.rows)
                release_unused()
        return piece

    def _pieces(
        self, connection: socket.socket, job: jobs.Job, opened: OpenDatabase
    ) -> Generator[BodyPiece, None, None]:
        def left() -> bool:
            """Return whether the reader left. Every long loop calls this, so other jobs get their turn here."""
            self._places.yield_turn(whose_job(job))
            return _has_left(connection)

        match job:
            case jobs.SnapshotJob():
                yield from snapshot_pieces(opened.reader, opened.log, job, left)
            case jobs.LogJob():
                yield from log_pieces(opened.reader, opened.log, self._cache, job, left)
            case _:
                yield from tables_pieces(opened.reader, opened.log, job, left)


def whose_job(job: jobs.Job) -> Holder:
    """Return the database and the caller whose share `job` uses."""
    return job.place.db, job.caller


def _read_job(connection: socket.socket) -> jobs.Job:
    length = int.from_bytes(receive_exactly(connection, jobs.JOB_HEAD), "big")
    if length > jobs.MAX_JOB:
        raise InvalidRequest(
            f"the request exceeds {jobs.MAX_JOB} bytes", hint="Select fewer columns, or use a shorter condition."
        )
    try:
        return jobs.decode_job(receive_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the job cannot be decoded: {error}") from None


def _has_left(connection: socket.socket) -> bool:
    """Return whether the other side closed the connection: it sends nothing after its job."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _counted(piece: BodyPiece) -> int:
    """Return the bytes of memory that a piece counts as while it is sent."""
    return len(piece.data) if isinstance(piece.data, bytes) and len(piece.data) > FRAME else 0


def _send(connection: socket.socket, piece: BodyPiece) -> None:
    if isinstance(piece.data, Slice):
        with contextlib.closing(piece.data):
            _send_file(connection, piece.data)
        return
    body, rows = memoryview(piece.data), piece.rows
    for place in range(0, len(body), FRAME):
        part = body[place : place + FRAME]
        connection.sendall(jobs.HEAD.pack(jobs.PIECE, rows, len(part)))
        connection.sendall(part)
        rows = 0


def _send_file(connection: socket.socket, kept: Slice) -> None:
    """Send a slice from the page cache to the socket, without copying it into this process."""
    place, end, rows = kept.start, kept.start + kept.length, kept.rows
    while place < end:
        edge = min(place + FRAME, end)
        connection.sendall(jobs.HEAD.pack(jobs.PIECE, rows, edge - place))
        while place < edge:
            sent = os.sendfile(connection.fileno(), kept.file.fileno(), place, edge - place)
            if not sent:
                raise ConnectionResetError("the slice is shorter than its header says")
            place += sent
        rows = 0
