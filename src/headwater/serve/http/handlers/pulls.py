"""Bulk pulls over HTTP: rows of a key range as of one version, and changes of an offset range, as Arrow."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote, urlencode

from msgspec.structs import replace

from headwater.database import CATCH_UP_SECONDS, Database, Databases
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.feeds.deliver.backpressure import LOG_GENERATION_CHANGED, WAL_HORIZON_EXCEEDED
from headwater.model.database_name import real_name
from headwater.model.keys.key import Span
from headwater.model.work.work_context import CALLER
from headwater.ranges.pull.jobs import Job, LogJob, SnapshotJob, TablesJob
from headwater.ranges.pull.jobs import changes_gone as lost
from headwater.ranges.pull.snapshot import shape_of
from headwater.ranges.worker.process import Answer, BulkDatabases
from headwater.serve.call import ARROW_KIND, Call, Handlers, Headers, gone, matches
from headwater.serve.http.handlers.pull_query_string import (
    compression_in,
    names_in,
    offset_in,
    pick_in,
    range_in,
    rest_of,
    span_in,
    version_in,
)
from headwater.serve.http.handlers.table_snapshots import FOREVER, VARY
from headwater.serve.http.query_string import number
from headwater.serve.limits.shares import Shares

AT_ONCE = 64  # concurrent pulls; each holds a thread of the worker and a piece of its response
SHARE = 32  # of them for one caller who is not an owner

Run = Callable[..., Any]
Find = Callable[[str, str, int, int], Span]


class Pulls:
    """The handlers of /api/v1/pull. `run` runs a blocking call in a thread; `find` returns the keys of a range."""

    def __init__(self, databases: Databases, bulk: BulkDatabases, find: Find, run: Run) -> None:
        self._databases, self._bulk, self._find, self._run = databases, bulk, find, run
        self._worker = bulk.open_worker()
        self.numbers = self._worker.numbers  # for metrics
        self._shares = Shares("pulls")

    async def close(self) -> None:
        """Close the worker, after the last request."""
        await self._worker.stop()

    # --- the routes ------------------------------------------------------------------------------------------

    def handlers(self) -> Handlers:
        """Return the handlers of the routes."""
        return {"pull_snapshot": self.snapshot, "pull_log": self.log, "pull_tables": self.tables}

    async def snapshot(self, call: Call) -> int:
        """Send rows as of one version, or redirect to the current version."""
        db, table = _asked(call)
        database = self._databases.database(db)
        if "version" not in call.query:
            return await self._redirect(call, database, table)
        generation, offset = version_in(call.query["version"])
        _check_retained(database, generation, offset)
        _check_where(call, database)
        span = rest_of(await self._span(call, db, table), call.query)
        pick = pick_in(call.query, span, is_restricted=call.who.tables(db) is not None)
        tag = _tag(db, table, *(item for item in sorted(call.query.items()) if item[0] != "ticket"))
        headers = [(b"etag", tag), (b"cache-control", FOREVER), VARY, (b"x-headwater-offset", b"%d" % offset)]
        if matches(call.joined(b"if-none-match"), tag):
            return await call.reply(304, headers)
        return await self._pour(call, SnapshotJob(await self._run(self._bulk.place, db), table, offset, pick), headers)

    async def log(self, call: Call) -> int:
        """Send the changes of one table in (after, upto]."""
        db, table = _asked(call)
        database = self._databases.database(db)
        _check_where(call, database)
        after, upto = self._offsets(call, database)
        is_restricted = call.who.tables(db) is not None
        shape, pick = number(call.query, "shape"), pick_in(call.query, span_in(call.query), is_restricted=is_restricted)
        compression, place = compression_in(call.query), await self._run(self._bulk.place, db)
        return await self._pour(
            call, LogJob(place, table, after, upto, shape, pick, compression), _offset_headers(upto)
        )

    async def tables(self, call: Call) -> int:
        """Send the changes of several tables in (after, upto]."""
        db = real_name(call.values["db"])
        names = names_in(call.query, "tables") or ()
        wanted = () if names in ((), ("*",)) else names
        call.who.check(db, wanted or None)
        after, upto = self._offsets(call, self._databases.database(db))
        place = await self._run(self._bulk.place, db)
        job = TablesJob(place, wanted, after, upto, hides_ddl=call.who.tables(db) is not None)
        return await self._pour(call, job, _offset_headers(upto))

    def _offsets(self, call: Call, database: Database) -> tuple[int, int]:
        """Return the requested offsets; raise an error unless the log holds, durably, the changes between them."""
        after, upto = offset_in(call.query, "after"), offset_in(call.query, "upto")
        log = database.log
        if upto < after:
            raise InvalidRequest(f"`upto` {upto} is before `after` {after}", hint="Send after=N&upto=M with N ≤ M.")
        _check_retained(database, call.query.get("generation", log.generation), after)
        if upto > log.durable:
            raise InvalidRequest(
                f"offset {upto} is not in the log yet; the newest there is {log.durable}",
                hint="Wait for it with pull.describe with `after` and `wait_ms`.",
            )
        return after, upto

    async def _span(self, call: Call, db: str, table: str) -> Span:
        named, span = range_in(call.query), span_in(call.query)
        if named is None:
            return span
        found: Span = await self._run(self._find, call.who, db, table, *named)
        both = found.intersect(span)
        if both is None:
            raise InvalidRequest("range and span have no key in common", hint="Send one of them.")
        return both

    async def _redirect(self, call: Call, database: Database, table: str) -> int:
        await self._run(shape_of, database.source, table)
        await self._run(database.catch_up, CATCH_UP_SECONDS)
        query = {**call.query, "version": f"{database.log.generation}.{database.log.latest}"}
        path = "/".join(quote(call.values[name], safe="", errors="surrogateescape") for name in ("db", "table"))
        url = f"/api/v1/pull/{path}/snapshot?{urlencode(query)}"
        headers = [(b"location", url.encode()), (b"cache-control", b"no-store"), (b"content-length", b"0")]
        return await call.reply(307, headers)

    # --- the body --------------------------------------------------------------------------------------------

    async def _pour(self, call: Call, job: Job, headers: Headers) -> int:
        with self._shares.take(call, AT_ONCE, SHARE):
            answers: list[Answer] = []
            leaving = asyncio.ensure_future(gone(call.receive))
            leaving.add_done_callback(lambda _: _leave(answers))
            try:
                pieces, first = await self._begun(call, replace(job, caller=CALLER.get()), answers)
                await self._send(call, pieces, first, headers)
            finally:
                leaving.cancel()
                _leave(answers)
        return 200

    async def _begun(self, call: Call, job: Job, answers: list[Answer]) -> tuple[AsyncIterator[bytes], bytes]:
        """Start the job; return its pieces and the first, before a status is sent. Retry once if the worker died."""
        while True:
            answers.append(await self._worker.answer(job))
            pieces = answers[-1].pieces()
            try:
                return pieces, await anext(pieces)
            except HeadwaterError:
                if answers[-1].has_left:
                    call.abort()  # the client has disconnected
                if not answers[-1].died or len(answers) > 1 or not await self._worker.is_dead():
                    raise

    async def _send(self, call: Call, pieces: AsyncIterator[bytes], first: bytes, headers: Headers) -> None:
        await call.start(200, [(b"content-type", ARROW_KIND), *headers])
        if call.scope["method"] != "HEAD":
            try:
                await call.raw({"type": "http.response.body", "body": first, "more_body": True})
                async for piece in pieces:
                    await call.raw({"type": "http.response.body", "body": piece, "more_body": True})
            except HeadwaterError:
                call.abort()  # too late for a status: without its end mark the body is recognised as incomplete
        await call.send({"type": "http.response.body", "body": b""})


def _asked(call: Call) -> tuple[str, str]:
    """Return the database and the table of a route, after checking that the caller may see them."""
    db, table = real_name(call.values["db"]), call.values["table"]
    call.who.check(db, [table])
    return db, table


def _leave(answers: list[Answer]) -> None:
    for answer in answers:
        answer.leave()


def _check_where(call: Call, database: Database) -> None:
    """Raise Forbidden if the caller may not send SQL. The worker checks `where` for the shape that it reads."""
    if "where" in call.query:
        database.source.check_sql(call.who.role)


def _check_retained(database: Database, generation: str, after: int) -> None:
    log = database.log
    if generation != log.generation:
        raise lost(after, log.horizon, log.latest, LOG_GENERATION_CHANGED, "the log began a new generation since")
    if after + 1 < log.horizon:
        raise lost(after, log.horizon, log.latest, WAL_HORIZON_EXCEEDED)
    if after > log.latest:
        raise InvalidRequest(f"offset {after} does not exist yet; the newest is {log.latest}")


def _offset_headers(upto: int) -> Headers:
    return [(b"cache-control", b"no-store"), (b"x-headwater-offset", b"%d" % upto)]


def _tag(*parts: object) -> bytes:
    # Weak: the boundaries between batches depend on the current table, the rows do not.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=12)
    return b'W/"p.%s"' % digest.hexdigest().encode()
