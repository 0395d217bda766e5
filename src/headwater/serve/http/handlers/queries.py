"""GET of a prepared query: its answer with an ETag that any HTTP cache can store, or 304."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headwater.errors import InvalidRequest, PreconditionFailed
from headwater.model import json_decoder
from headwater.model.formats import ARROW, CSV, OBJECTS, PLAIN, ROWS
from headwater.model.literal import Value
from headwater.model.principal import OWNER, VIEWER, Principal
from headwater.queries.answers import Answer
from headwater.queries.etag.causality import Token, from_header, to_header, token
from headwater.queries.etag.preconditions import ENCODED, Conditions
from headwater.queries.prepared import PreparedQuery
from headwater.serve.api import Api
from headwater.serve.call import ARROW_KIND, Call, Headers, wanted_kind
from headwater.serve.http.not_modified_cache import NotModifiedCache
from headwater.serve.limits.limits import identity
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.rpc.body_pieces import Pieces, is_small, send_body, size_of
from headwater.serve.rpc.query_body import body_of
from headwater.serve.rpc.query_params import values_of
from headwater.serve.rpc.query_patch import MANIPULATION, PATCHED, has_patches, patched, wants_patch

CAUSALITY = b"x-headwater-causality"
TRUNCATED = (b"x-headwater-truncated", b"true")
MAX_GROUPS = 2_048  # bytes: proxies limit all headers of a response to 4 or 8 KiB
MAX_ARGS = 8_192  # characters: the limit of proxies for a URL
KINDS = {
    b"application/json": ROWS,
    b"application/vnd.headwater.objects+json": OBJECTS,
    b"application/vnd.headwater.plain+json": PLAIN,
    b"text/csv": CSV,
    ARROW_KIND: ARROW,
}
NO_STORE = (b"cache-control", b"no-store")
VARY = (b"vary", b"Accept, A-IM")


class _Request(NamedTuple):
    """A parsed request."""

    who: Principal
    prepared: PreparedQuery
    args: list[Value] | dict[str, Value]
    kind: bytes  # the content type of the answer
    conditions: Conditions
    floor: Token | None  # the answer must be as new as this
    patch: bool  # the client accepts a patch

    @property
    def format(self) -> str:
        return KINDS[self.kind]


class _Reply(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes | Pieces = b""


class QueryHandler:
    """The handler of GET and HEAD of /api/v1/q/{query_id}: parse, answer, render, send."""

    def __init__(self, api: Api, not_modified: NotModifiedCache, *, public: bool = False) -> None:
        self._api, self._not_modified = api, not_modified
        self._cached = (b"cache-control", b"public, no-cache" if public else b"private, no-cache")

    async def query(self, call: Call) -> int:
        """Answer a GET or HEAD of a prepared query; return the status."""
        reply = await self._reply(call)  # holds no rows: a slow reader may take its time
        if isinstance(reply.body, Pieces) and call.who.role != OWNER:
            reply.body.charge(identity(call.who, client_of(call.scope)))
        await call.start(reply.status, reply.headers)
        await send_body(call.send, b"" if call.scope["method"] == "HEAD" else reply.body)
        return reply.status

    async def _reply(self, call: Call) -> _Reply:
        request = self._parse(call)
        answering = self._api.asking().answering(request.prepared.db)
        before = answering.moment()
        answer = await self._answer(request)
        reply = await self._render(request, answer)
        if answer.read is None and answering.moment() == before:  # nothing was committed while the query ran
            self._not_modified.remember(call.scope, call.who, request.prepared, before, reply.headers)
        return reply

    # --- parse -------------------------------------------------------------------------------------------------------

    def _parse(self, call: Call) -> _Request:
        call.who.need(VIEWER, "a query")
        prepared = self._api.asking().get(call.who, call.values["query_id"])
        kind = wanted_kind(call.joined(b"accept"), tuple(KINDS))
        conditions = Conditions.of(call.scope["method"], call.scope["headers"])
        patch = wants_patch(call.joined(b"a-im"), KINDS[kind])
        return _Request(call.who, prepared, args_in(call.query.get("args")), kind, conditions, _floor(call), patch)

    # --- answer ------------------------------------------------------------------------------------------------------

    async def _answer(self, request: _Request) -> Answer:
        """Return the answer, without rows if one of the client's ETags is still valid."""
        wanted, known = request.conditions.if_match, request.conditions.if_none_match
        if wanted is not None and not wanted.any:
            strong = [tag.opaque for tag in wanted.tags if not (tag.weak or tag.opaque.endswith(ENCODED))]
            now = await self._ask(request, strong)
            if not now.not_modified or (now.etag or "W/").startswith("W/"):
                raise PreconditionFailed("the result does not match If-Match", hint="Omit the header.")
        return await self._ask(request, () if known is None else known.opaque)

    async def _ask(self, request: _Request, tags: Sequence[str]) -> Answer:
        who, prepared, args = request.who, request.prepared, request.args
        return await self._api.asking().ask(who, prepared, args, format=request.format, tags=tags, floor=request.floor)

    # --- render ------------------------------------------------------------------------------------------------------

    async def _render(self, request: _Request, answer: Answer) -> _Reply:
        headers, conditions = self._headers(request, answer), request.conditions
        if answer.read is None:
            return _Reply(304, [*headers, (b"etag", _echoed(conditions, answer))])
        etag = [] if answer.etag is None else [(b"etag", answer.etag.encode())]
        if conditions.if_none_match is not None and conditions.if_none_match.any and etag:
            return _Reply(304, [*headers, *etag])
        if request.patch and etag and has_patches(answer.read):
            status, body = await self._patch(request, answer)
            if status == PATCHED:  # a cache that does not support patches must not store it
                headers = [NO_STORE, *headers[1:], (b"im", MANIPULATION)]
        else:
            status, body = 200, await self._body(request, answer)
            if answer.read.truncated:
                headers.append(TRUNCATED)
        content = [(b"content-type", request.kind), (b"content-length", b"%d" % size_of(body))]
        return _Reply(status, [*headers, *etag, *content], body)

    async def _patch(self, request: _Request, answer: Answer) -> tuple[int, bytes | Pieces]:
        asking, known = self._api.asking(), request.conditions.if_none_match
        tags = [] if known is None else known.opaque
        made: tuple[int, bytes | Pieces] = await asking.run(patched, asking.results, answer, request.format, tags)
        return made

    async def _body(self, request: _Request, answer: Answer) -> bytes | Pieces:
        assert answer.read is not None
        if is_small(answer.read):
            return body_of(answer, request.format)
        body: bytes | Pieces = await self._api.asking().run(body_of, answer, request.format)
        return body

    def _headers(self, request: _Request, answer: Answer) -> Headers:
        prepared = request.prepared
        headers = [VARY, (CAUSALITY, to_header(token(prepared.db, answer.seen)).encode())]
        if request.floor is not None or (answer.etag is None and answer.read is not None):
            headers.insert(0, NO_STORE)
        else:
            tables = answer.instance.analysis.tables
            headers = [self._cached, *headers, (b"cache-groups", groups(prepared.db, tables))]
        return [*headers, (b"cache-status", cache_status(answer, request.conditions))]


def args_in(text: str | None) -> list[Value] | dict[str, Value]:
    """Return the arguments in the query string: plain JSON values or Lits."""
    if text is None:
        return []
    if len(text) > MAX_ARGS:
        raise InvalidRequest(f"args has more than {MAX_ARGS} characters", hint="Use query.execute_prepared.")
    try:
        found = json_decoder.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if not isinstance(found, (list, dict)):
        raise InvalidRequest("args cannot be read", hint='Send a JSON array, percent-encoded, such as [1,"a"].')
    return values_of(found)


def groups(db: str, tables: Sequence[str]) -> bytes:
    """Return Cache-Groups (RFC 9875): the tables of a result, as a list of strings that structured fields allow.

    If they do not fit in a header, return the database alone.
    """
    found = ", ".join(_group(f"{db}.{name}") for name in tables)
    return (found if len(found) <= MAX_GROUPS else _group(db)).encode()


def _group(name: str) -> str:
    text = name.encode("unicode_escape").decode()
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cache_status(answer: Answer, conditions: Conditions) -> bytes:
    """Return Cache-Status (RFC 9211): whether the database was queried, why, and whether requests shared the answer."""
    if answer.read is None:
        return b"headwater; hit"
    if not answer.instance.analysis.is_cacheable:
        why = b"bypass"
    else:
        known = conditions.if_none_match
        why = b"stale" if known is not None and known.tags else b"miss"
    return b"headwater; fwd=" + why + (b"; collapsed" if answer.shared else b"")


def _floor(call: Call) -> Token | None:
    text = call.header(CAUSALITY)
    return from_header(text.decode("latin-1")) if text else None


def _echoed(conditions: Conditions, answer: Answer) -> bytes:
    """Return the client's own ETag: a cache may freshen only a stored response with the same tag."""
    assert conditions.if_none_match is not None
    tag = next(tag for tag in conditions.if_none_match.tags if tag.opaque == answer.matched)
    return str(tag).encode("latin-1")
