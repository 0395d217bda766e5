"""Whole tables over HTTP: a snapshot as of one version, immutable, as NDJSON or Arrow."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.database import CATCH_UP_SECONDS, Database, Databases
from headwater.errors import Busy, HeadwaterError, InvalidRequest, OffsetExpired, Unavailable
from headwater.feeds.deliver.backpressure import LOG_GENERATION_CHANGED, WAL_HORIZON_EXCEEDED
from headwater.feeds.deliver.consumer import snapshot_url
from headwater.feeds.fair_threads import submitted
from headwater.feeds.formats.images import Image, image_columns
from headwater.feeds.formats.values import LIT, PLAIN
from headwater.feeds.options import Shape
from headwater.model.control_events import ControlEvent
from headwater.model.database_name import real_name
from headwater.model.formats import OBJECTS
from headwater.model.formats import SNAPSHOT_FORMATS as FORMATS
from headwater.model.table import Table
from headwater.model.work.fair_shares import FairPlaces
from headwater.model.work.work_context import Holder, holder
from headwater.ranges.pull.snapshot import Gone, Piece, read_as_of, shape_of
from headwater.serve.call import ARROW_KIND, NDJSON_KIND, Call, gone, matches, wanted_kind
from headwater.serve.http.handlers.pull_query_string import version_in
from headwater.serve.http.handlers.streams import LARGE_PIECE
from headwater.serve.limits.shares import Shares
from headwater.serve.limits.slow_reader_limits import writable_of
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.limits.unread_answers import Unread

WORKING = 4  # concurrently reading threads; a snapshot that waits for its reader holds none of them
AT_ONCE = 64  # concurrent snapshots; each holds a temporary file
SHARE = 32  # of them for one caller who is not an owner
FOREVER = b"private, max-age=31536000, immutable"
VARY = (b"vary", b"accept, authorization, x-api-key")  # a browser would give the answer to another credential
Run = Callable[..., Any]
Pieces = Generator[bytes, None, None]


class Snapshots:
    """Answers /api/v1/snapshot. `run` runs a short blocking call in a thread; tables are read in separate threads."""

    def __init__(self, databases: Databases, run: Run) -> None:
        self._databases, self._run = databases, run
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="headwater-snapshot")
        self._places = FairPlaces(WORKING)
        self._shares = Shares("snapshots")

    def close(self) -> None:
        """End the threads, after the last request."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def answer(self, call: Call) -> int:
        """Send one table, or redirect to its current version."""
        db, table = real_name(call.values["db"]), call.values["table"]
        call.who.check(db, [table])
        database = self._databases.database(db)
        kind = wanted_kind(call.joined(b"accept"), (NDJSON_KIND, ARROW_KIND))
        format = call.query.get("format", FORMATS[0])
        if format not in FORMATS or (kind == ARROW_KIND and "format" in call.query):
            raise InvalidRequest(
                f"format {format[:40]!r} is not supported",
                hint=f"NDJSON supports {', '.join(FORMATS)}; Arrow has no format.",
            )
        if "version" not in call.query:
            return await self._redirect(call, database, db, table)
        offset = await self._run(_offset, database, call.query["version"], db, table)
        tag = _tag(db, table, call.query["version"], kind, format)
        known = call.joined(b"if-none-match")
        if known == b"*":
            await self._run(shape_of, database.source, table)  # there is a snapshot of it only if it exists
        if known == b"*" or matches(known, tag):
            return await call.reply(304, [(b"etag", tag), (b"cache-control", FOREVER), VARY])
        with self._shares.take(call, AT_ONCE, SHARE):
            read = partial(_opened, database, db, table, offset, kind, format)
            body = _Body(read, partial(self._places.yield_turn, holder()))
            await self._read(call, body, kind, tag, offset)
        return 200

    async def _read(self, call: Call, body: _Body, kind: bytes, tag: bytes, offset: int) -> None:
        leaving = asyncio.ensure_future(gone(call.receive))
        leaving.add_done_callback(lambda _: body.left.set())
        try:
            await self._long(body.open)
            await self._send(call, body, kind, tag, offset)
        except HeadwaterError:
            if body.left.is_set():
                call.abort()  # the client has disconnected
            raise
        finally:
            leaving.cancel()
            body.left.set()
            await self._close(body)

    async def _close(self, body: _Body) -> None:
        try:
            await self._long(body.close)
        except Unavailable:  # the threads have ended: none of them uses the body
            body.close()

    async def _long(self, call: Run) -> Any:
        return await asyncio.wrap_future(submitted(self._threads, self._placed, call, holder()))

    def _placed(self, call: Run, whose: Holder) -> Any:
        with self._places.held(whose):
            return call()

    async def _redirect(self, call: Call, database: Database, db: str, table: str) -> int:
        await self._run(shape_of, database.source, table)
        await self._run(database.catch_up, CATCH_UP_SECONDS)
        url = snapshot_url(db, table, f"{database.log.generation}.{database.log.latest}")
        for name in ("format", "ticket"):  # a browser that authenticated with a ticket has no other credential
            if name in call.query:
                url += f"&{name}={quote(call.query[name], safe='')}"
        headers = [(b"location", url.encode()), (b"cache-control", b"no-store"), (b"content-length", b"0")]
        return await call.reply(307, headers)

    async def _send(self, call: Call, body: _Body, kind: bytes, tag: bytes, offset: int) -> None:
        headers = [
            (b"content-type", kind),
            (b"etag", tag),
            (b"cache-control", FOREVER),
            VARY,
            (b"x-headwater-offset", b"%d" % offset),
        ]
        await call.start(200, headers)
        unread, writable = Unread(call.who, client_of(call.scope)), writable_of(call.scope)
        try:
            while call.scope["method"] != "HEAD" and (piece := await self._long(body.next)) is not None:
                if body.left.is_set():
                    call.abort()
                if len(piece) > LARGE_PIECE and not _is_held(unread, len(piece)):
                    call.abort()  # the client would not read the reason either
                await call.send({"type": "http.response.body", "body": piece, "more_body": True})
                await writable.wait()
                unread.release()
        except HeadwaterError as error:
            # Too late for a status: the body gets no end, so that clients recognise it as incomplete.
            failure = {"event": ControlEvent.FAILED, "data": {"code": error.code, "message": error.message}}
            if kind == NDJSON_KIND:
                last = msgspec.json.encode(failure) + b"\n"
                await call.send({"type": "http.response.body", "body": last, "more_body": True})
            call.abort()
        finally:
            unread.release()
        await call.send({"type": "http.response.body", "body": b""})


def _is_held(unread: Unread, size: int) -> bool:
    """Count a piece of `size` bytes as unread; return False if that exceeds the limit on unread bytes."""
    try:
        unread.hold(size)
    except Busy:
        return False
    return True


class _Body:
    """The pieces of one response. `close` waits for a running step, which the event loop may abandon at any time."""

    def __init__(self, read: Callable[[Gone], Pieces], yield_turn: Callable[[], None]) -> None:
        self._read, self._yield_turn = read, yield_turn
        self._pieces: Pieces | None = None
        self._lock = threading.Lock()
        self.left = threading.Event()  # set when the reader disconnects

    def open(self) -> None:
        """Open the snapshot; every error that can be reported as a status is raised here."""
        with self._lock:
            self._pieces = self._read(self._has_left)

    def _has_left(self) -> bool:
        """Return whether the reader has disconnected; long loops call this, so other snapshots get their turn here."""
        self._yield_turn()
        return self.left.is_set()

    def next(self) -> bytes | None:
        """Return the next piece; None at the end."""
        with self._lock:
            assert self._pieces is not None
            return next(self._pieces, None)

    def close(self) -> None:
        """Release the snapshot."""
        with self._lock:
            if self._pieces is not None:
                self._pieces.close()


def _offset(database: Database, version: str, db: str, table: str) -> int:
    log, (generation, offset) = database.log, version_in(version)
    if generation != log.generation or offset + 1 < log.horizon:
        now = f"{log.generation}.{log.latest}"
        gone = OffsetExpired(offset, log.horizon, log.latest)
        gone.extra["snapshot_url"] = snapshot_url(db, table, now)
        gone.extra["resnapshot_reason"] = (
            WAL_HORIZON_EXCEEDED if generation == log.generation else LOG_GENERATION_CHANGED
        )
        raise gone
    if offset > log.latest:
        raise InvalidRequest(f"offset {offset} does not exist yet; the newest is {log.latest}")
    return offset


def _opened(database: Database, db: str, table: str, offset: int, kind: bytes, format: str, gone: Gone) -> Pieces:
    """Return the pieces of the body, after the request was checked."""
    shape = shape_of(database.source, table)
    chunks = read_as_of(database.source, database.log, shape, offset, gone=gone)
    return _arrow(chunks, shape) if kind == ARROW_KIND else _lines(chunks, db, format)


def _lines(chunks: Iterator[Piece], db: str, format: str) -> Pieces:
    form = LIT if format == OBJECTS else PLAIN
    shape = Shape(db, format, after=True)

    def encoded(chunk: Piece) -> bytes:
        table, rows = chunk
        image = Image(table, image_columns(table, shape), form)
        return b"".join([image(row, set()) + b"\n" for row in rows])

    yield from map(encoded, chunks)


def _arrow(chunks: Iterator[Piece], table: Table) -> Pieces:
    from headwater.model import arrow

    stream = arrow.ArrowStream(arrow.schema(table))
    yield stream.start()
    yield from map(stream.batch, map(arrow.rows_batch, repeat(table), map(itemgetter(1), chunks)))
    yield stream.end()


def _tag(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update((part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part) + b"\0")
    return b'"s.%s"' % digest.hexdigest().encode()
