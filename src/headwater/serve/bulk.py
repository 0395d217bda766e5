"""Whole tables over HTTP: a snapshot as of one version, immutable, as NDJSON or Arrow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest, OffsetExpired
from headwater.feeds.asof import read_as_of
from headwater.feeds.database import Database, Databases
from headwater.feeds.formats.images import Image, shown
from headwater.feeds.formats.values import LIT, PLAIN
from headwater.feeds.options import Shape
from headwater.feeds.seat import snapshot_url
from headwater.model.database import real_name
from headwater.model.table import Row, Table
from headwater.serve.call import ARROW_KIND, NDJSON_KIND, Call, wanted_kind

CATCH_UP_SECONDS = 0.25
FOREVER = b"private, max-age=31536000, immutable"
FORMATS = ("plain_json", "objects_json")
Run = Callable[..., Any]


class Snapshots:
    """Answers /api/v1/snapshot. `run` runs a blocking call in a thread."""

    def __init__(self, databases: Databases, run: Run) -> None:
        self._databases, self._run = databases, run

    async def answer(self, call: Call) -> int:
        """One table, or where its present version is."""
        db, table = real_name(call.values["db"]), call.values["table"]
        database = self._databases.database(db)
        kind = wanted_kind(call.header(b"accept"), (NDJSON_KIND, ARROW_KIND))
        format = call.query.get("format", FORMATS[0])
        if format not in FORMATS or (kind == ARROW_KIND and "format" in call.query):
            raise InvalidRequest(f"format {format[:40]!r} is not served here", hint=f"NDJSON comes as {FORMATS}.")
        if "version" not in call.query:
            return await self._redirect(call, database, db, table)
        offset = await self._run(_offset, database, call.query["version"], db, table)
        tag = _tag(db, table, call.query["version"], kind, format)
        if _matches(call.header(b"if-none-match"), tag):
            headers = [(b"etag", tag), (b"cache-control", FOREVER)]
            await call.start(304, headers)
            await call.send({"type": "http.response.body", "body": b""})
            return 304
        pieces = await self._run(_opened, database, db, table, offset, kind, format)
        await self._send(call, pieces, kind, tag, offset)
        return 200

    async def _redirect(self, call: Call, database: Database, db: str, table: str) -> int:
        await self._run(database.catch_up, CATCH_UP_SECONDS)
        url = snapshot_url(db, table, f"{database.log.generation}.{database.log.latest}")
        for name in ("format", "ticket"):  # a browser that came by a ticket has nothing else to come in by
            if name in call.query:
                url += f"&{name}={quote(call.query[name], safe='')}"
        headers = [(b"location", url.encode()), (b"cache-control", b"no-store"), (b"content-length", b"0")]
        await call.start(307, headers)
        await call.send({"type": "http.response.body", "body": b""})
        return 307

    async def _send(self, call: Call, pieces: Iterator[bytes], kind: bytes, tag: bytes, offset: int) -> None:
        headers = [
            (b"content-type", kind),
            (b"etag", tag),
            (b"cache-control", FOREVER),
            (b"vary", b"accept"),
            (b"x-headwater-offset", b"%d" % offset),
        ]
        await call.start(200, headers)
        try:
            while call.scope["method"] != "HEAD" and (piece := await self._run(next, pieces, None)) is not None:
                await call.send({"type": "http.response.body", "body": piece, "more_body": True})
        except HeadwaterError as error:
            # Too late for a status: the body stays without its end, so that nobody takes it for whole.
            body = {"event": "failed", "data": {"code": error.code, "message": error.message}}
            if kind == NDJSON_KIND:
                last = msgspec.json.encode(body) + b"\n"
                await call.send({"type": "http.response.body", "body": last, "more_body": True})
            call.abort()
            return
        finally:
            await self._run(pieces.close)  # type: ignore[attr-defined]
        await call.send({"type": "http.response.body", "body": b""})


def _offset(database: Database, version: str, db: str, table: str) -> int:
    generation, _, text = version.rpartition(".")
    if not generation or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(
            f"version {version[:60]!r} cannot be read", hint="Leave it out to be sent to the present one."
        )
    log, offset = database.log, int(text)
    if generation != log.generation or offset + 1 < log.horizon:
        now = f"{log.generation}.{log.latest}"
        gone = OffsetExpired(offset, log.horizon, log.latest)
        gone.extra["snapshot_url"] = snapshot_url(db, table, now)
        gone.extra["resnapshot_reason"] = (
            "wal_horizon_exceeded" if generation == log.generation else "log_generation_changed"
        )
        raise gone
    return offset


def _opened(database: Database, db: str, table: str, offset: int, kind: bytes, format: str) -> Iterator[bytes]:
    """The pieces of the body, after everything that can be refused was looked at."""
    chunks = read_as_of(database.source, database.log, table, offset)
    return _arrow(chunks, database.source.describe()[table]) if kind == ARROW_KIND else _lines(chunks, db, format)


def _lines(chunks: Iterator[tuple[Table, list[Row]]], db: str, format: str) -> Iterator[bytes]:
    form = LIT if format == "objects_json" else PLAIN
    shape = Shape(db, format, after=True)
    for table, rows in chunks:
        image = Image(table, shown(table, shape), form)
        yield b"".join([image(row, set()) + b"\n" for row in rows])


def _arrow(chunks: Iterator[tuple[Table, list[Row]]], table: Table) -> Iterator[bytes]:
    from headwater.feeds import arrow

    stream = arrow.ArrowStream(arrow.schema(table))
    yield stream.start()
    for _, rows in chunks:
        yield stream.batch(arrow.rows_batch(table, rows))
    yield stream.end()


def _tag(*parts: str | bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update((part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part) + b"\0")
    return b'"s.%s"' % digest.hexdigest().encode()


def _matches(header: bytes, tag: bytes) -> bool:
    named = [part.strip().removeprefix(b"W/") for part in header.split(b",")]
    return tag in named or b"*" in named
