"""The row routes: one row per URL, with an ETag and the conditional requests of RFC 9110."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headwater.errors import InvalidRequest, PreconditionFailed, Unavailable
from headwater.model import json_decoder
from headwater.model.database_name import real_name
from headwater.model.principal import EDITOR, OWNER, VIEWER, Principal
from headwater.model.work.answer_limits import UNCOUNTED, weight
from headwater.queries.answers import Answering
from headwater.queries.etag.causality import WHOLE, Token, demand, floor_of, from_header, lacking, to_header, token
from headwater.queries.etag.preconditions import Conditions, Verdict
from headwater.queries.rows.row_resource import Address, Body, ReadRow, Resources, lits_etag
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.serve.api import Api
from headwater.serve.call import Receive, Scope, Send, list_header, wanted_kind
from headwater.serve.http.routes import key_parts
from headwater.serve.limits.limits import identity
from headwater.serve.limits.request_body import (
    JSON,
    LARGE,
    MAX_ELEMENTS,
    BodyReservation,
    check_elements,
    check_type,
    no_json,
    read_body,
)
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.rpc.body_pieces import Pieces, send_body
from headwater.serve.rpc.results import OBJECTS, row_body
from headwater.serve.thread_bridge import Bridge

CAUSALITY = "x-headwater-causality"
CACHED = {"cache-control": "private, no-cache", "vary": "Accept"}
NO_STORE = {"cache-control": "no-store", "vary": "Accept"}
HINT = 'Send the columns as an object, such as {"name": "Ada"}.'

Page = Callable[[Principal, Request], Awaitable[Response]]
Store = Callable[[Principal, Address, Body, Conditions], PendingAnswer[ReadRow]]


class RowPages:
    """Answers the row routes."""

    def __init__(self, api: Api, bridge: Bridge, recheck: Callable[[Principal], object], *, max_body: int) -> None:
        """`recheck` raises Unauthorized if the credential of a caller is no longer valid."""
        self._api, self._rows = api, Resources(api.databases, api.transactions)
        self._bridge, self._recheck, self._max_body = bridge, recheck, max_body

    def pages(self) -> dict[str, Page]:
        """Return the pages by handler name."""
        return {"get_row": self._get, "put_row": self._put, "patch_row": self._patch, "delete_row": self._delete}

    async def _get(self, who: Principal, request: Request) -> Response:
        _admit(who, VIEWER, request)
        conditions = Conditions.of(request.method, request.scope["headers"])
        address, floor = _address(request), _floor(request)
        shown = await self._bridge.call(self._read, who, address, self._answering(address))
        headers = CACHED if floor is None else NO_STORE
        if shown.causality is not None:
            headers = headers | {CAUSALITY: to_header(shown.causality)}
        self._demand(floor, address, shown.offset)
        lits = _wants_lits(request)
        etag = lits_etag(shown.etag) if lits else shown.etag
        outcome = conditions.decide(request.method, etag)
        if outcome.verdict is Verdict.FAILED:
            raise PreconditionFailed("the row does not match If-Match", hint="Read the row again without the header.")
        if outcome.verdict is Verdict.NOT_MODIFIED:
            return Response(status_code=304, headers={**headers, "etag": outcome.tag or etag})
        if weight(shown.row) <= UNCOUNTED:
            return await self._row(shown, lits, 200, headers)
        body = Pieces()
        body.reserve(weight(shown.row), None if who.role == OWNER else identity(who, client_of(request.scope)))
        try:
            response = await self._row(shown, lits, 200, headers)
        except BaseException:
            body.release()
            raise
        if request.method == "HEAD":
            body.release()
            return response
        body.fill(bytes(response.body))
        return _InPieces(body, response)

    async def _row(self, shown: ReadRow, lits: bool, status: int, headers: dict[str, str]) -> Response:
        """Return the row as a response. A large row is encoded in a thread."""
        if weight(shown.row) <= LARGE:
            body = row_body(shown.table, shown.row, lits=lits)
        else:
            body = await self._bridge.call(functools.partial(row_body, shown.table, shown.row, lits=lits))
        kind, etag = (OBJECTS, lits_etag(shown.etag)) if lits else (JSON.decode(), shown.etag)
        return Response(body, status, {**headers, "etag": etag, "content-type": kind})

    def _answering(self, address: Address) -> Answering | None:
        """Return the query state of the database of `address`; None on a server without queries."""
        queries = self._api.queries
        return None if queries is None else queries.answering(real_name(address.db))

    def _read(self, who: Principal, address: Address, known: Answering | None) -> ReadRow:
        shown = self._rows.get(who, address)
        if known is None:
            return shown
        known.tables.advance()
        seen = token(real_name(address.db), known.tables.at([address.table], shown.offset))
        return msgspec.structs.replace(shown, causality=seen)

    async def _check_floor(self, request: Request) -> None:
        """Raise an error if the database is behind the causality token of a write; waiting would not advance it."""
        floor, address = _floor(request), _address(request)
        if floor is not None:
            source_head = await self._bridge.call(self._api.databases.get(real_name(address.db)).read_head)
            if not source_head.settled:
                self._check_logged(floor, address)
            self._demand(floor, address, source_head.head)

    def _check_logged(self, floor: Token, address: Address) -> None:
        """Raise Unavailable if the token is newer than the log, and the head of the database is unknown."""
        known = self._answering(address)
        logged = 0 if known is None else known.database.log.latest
        if lacking(floor_of(floor, address.db, [address.table]), {address.table: logged, WHOLE: logged}):
            raise Unavailable("the head of the database is not known at the moment", hint="Retry in a moment.")

    def _demand(self, floor: Token | None, address: Address, offset: int) -> None:
        """Raise PreconditionFailed unless the database, which is at `offset`, has reached the token."""
        if floor is None:
            return
        known = self._answering(address)
        began = 1 if known is None else known.database.log.generation_first
        wanted = floor_of(floor, address.db, [address.table])
        demand(wanted, {address.table: offset, WHOLE: offset}, began=began)

    async def _put(self, who: Principal, request: Request) -> Response:
        _admit(who, EDITOR, request)
        if "content-range" in request.headers:
            raise InvalidRequest("PUT with Content-Range is not supported", hint="Send the whole row, or use PATCH.")
        return await self._store(who, request, self._rows.put)

    async def _patch(self, who: Principal, request: Request) -> Response:
        _admit(who, EDITOR, request)
        return await self._store(who, request, self._rows.patch)

    async def _store(self, who: Principal, request: Request, store: Store) -> Response:
        conditions = Conditions.of(request.method, request.scope["headers"])
        await self._check_floor(request)
        with BodyReservation(client_of(request.scope)) as memory:
            body = await self._body(who, request, memory)
            return await self._written(request, store(who, _address(request), body, conditions))

    async def _delete(self, who: Principal, request: Request) -> Response:
        _admit(who, EDITOR, request)
        conditions = Conditions.of("DELETE", request.scope["headers"])
        with BodyReservation(client_of(request.scope)) as memory:
            body = await read_body(request.scope, request.receive, self._max_body, memory)
        if body:
            raise InvalidRequest("DELETE takes no body", hint="Omit it, and send conditions in headers.")
        await self._check_floor(request)
        self._recheck(who)
        pending = self._rows.delete(who, _address(request), conditions)
        deleted = pending.finish(await self._bridge.wait(pending.future))
        seen = {} if deleted.causality is None else {CAUSALITY: to_header(deleted.causality)}
        return Response(status_code=204, headers={"cache-control": "no-store", **seen})

    async def _written(self, request: Request, pending: PendingAnswer[ReadRow]) -> Response:
        shown = pending.finish(await self._bridge.wait(pending.future))
        here = request.scope["raw_path"].decode("latin-1")
        # The ETag belongs to the row in this response, which may differ in form from the request.
        headers = NO_STORE | {"content-location": here}
        if shown.created:
            headers["location"] = here
        if shown.causality is not None:
            headers[CAUSALITY] = to_header(shown.causality)
        return await self._row(shown, _wants_lits(request), 201 if shown.created else 200, headers)

    async def _body(self, who: Principal, request: Request, memory: BodyReservation) -> Body:
        kind = check_type(request.scope["headers"], JSON, OBJECTS.encode())
        body = await read_body(request.scope, request.receive, self._max_body, memory)
        self._recheck(who)  # the credential may have ended while the body was received
        columns = await self._bridge.call(_columns, body) if len(body) > LARGE else _columns(body)
        self._recheck(who)  # or while a thread decoded it
        return Body(columns, kind != JSON)


class _InPieces(Response):
    """A response whose body is sent piece by piece, and counts as unread until then."""

    def __init__(self, body: Pieces, like: Response) -> None:
        super().__init__(status_code=like.status_code)
        self.raw_headers, self._pieces = like.raw_headers, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response and release its memory."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_body(send, self._pieces)


def _address(request: Request) -> Address:
    values = request.path_params
    return Address(values["db"], values["table"], key_parts(request.scope["raw_path"]))


def _wants_lits(request: Request) -> bool:
    accept = list_header(request.scope["headers"], b"accept")
    return wanted_kind(accept, (OBJECTS.encode(), JSON), default=JSON) != JSON


def _admit(who: Principal, role: str, request: Request) -> None:
    """Raise Forbidden unless the caller has `role`, and a scope with the table of the request."""
    who.need(role, f"{request.method} of a row")
    who.check(real_name(request.path_params["db"]), [request.path_params["table"]])


def _columns(body: bytes) -> dict[str, Any]:
    check_elements(body, MAX_ELEMENTS)
    try:
        found = json_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise no_json(body, error, HINT) from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body is not a JSON object", hint=HINT)
    return found


def _floor(request: Request) -> Token | None:
    """Return the causality token of the request, if it has one."""
    given = request.headers.get(CAUSALITY)
    return None if given is None else from_header(given)
