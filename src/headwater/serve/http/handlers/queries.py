"""GET of a prepared query: an answer with a tag that any HTTP cache can hold, or 304. Bare ASGI: it is asked often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headwater.errors import InvalidRequest, PreconditionFailed
from headwater.model.literal import Value
from headwater.model.principal import OWNER, VIEWER
from headwater.queries.answers import Answer
from headwater.queries.etag.causality import Token, from_header, to_header, token
from headwater.queries.etag.preconditions import ENCODED, Conditions
from headwater.queries.prepared import Prepared
from headwater.serve.api import Api
from headwater.serve.call import ARROW_KIND, Call, Headers, wanted_kind
from headwater.serve.http.not_modified_cache import Again
from headwater.serve.limits.limits import identity
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.rpc.body_pieces import Pieces, is_small, send_body, size_of
from headwater.serve.rpc.query_body import ARROW, CSV, OBJECTS, PLAIN, ROWS, body_of
from headwater.serve.rpc.query_params import values_of
from headwater.serve.rpc.query_patch import MANIPULATION, PATCHED, has_patches, patched, wants_patch

CAUSALITY = b"x-headwater-causality"
TRUNCATED = (b"x-headwater-truncated", b"true")
MAX_GROUPS = 2_048  # bytes: proxies hold all headers of an answer in 4 or 8 KiB
MAX_ARGS = 8_192  # characters: what proxies let through of a URL
KINDS = {
    b"application/json": ROWS,
    b"application/vnd.headwater.objects+json": OBJECTS,
    b"application/vnd.headwater.plain+json": PLAIN,
    b"text/csv": CSV,
    ARROW_KIND: ARROW,
}
NO_STORE = (b"cache-control", b"no-store")
VARY = (b"vary", b"Accept, A-IM")


class _Reply(NamedTuple):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes | Pieces = b""


def _reply(status: int, headers: Headers, kind: bytes, etag: str | None, body: bytes | Pieces) -> _Reply:
    tag = [] if etag is None else [(b"etag", etag.encode())]
    content = [(b"content-type", kind), (b"content-length", b"%d" % size_of(body))]
    return _Reply(status, [*headers, *tag, *content], body)


class QueryPages:
    """Answers GET and HEAD of /api/v1/q/{query_id}."""

    def __init__(self, api: Api, again: Again, *, public: bool = False) -> None:
        self._api, self._again = api, again
        self._kept = (b"cache-control", b"public, no-cache" if public else b"private, no-cache")

    async def query(self, call: Call) -> int:
        """One request."""
        reply = await self._replied(call)  # which holds no rows any more: a slow reader may take its time
        if isinstance(reply.body, Pieces) and call.who.role != OWNER:
            reply.body.charge(identity(call.who, client_of(call.scope)))
        await call.start(reply.status, reply.headers)
        await send_body(call.send, b"" if call.scope["method"] == "HEAD" else reply.body)
        return reply.status

    async def _replied(self, call: Call) -> _Reply:
        call.who.need(VIEWER, "a query")
        kept = self._api.asking().get(call.who, call.values["query_id"])
        kind = wanted_kind(call.joined(b"accept"), tuple(KINDS))
        conditions = Conditions.of(call.scope["method"], call.scope["headers"])
        args, floor = args_in(call.query.get("args")), _floor(call)
        before = self._api.asking().answering(kept.db).moment()
        answer = await self._asked(call, kept, args, KINDS[kind], conditions, floor)
        headers = self._headers(kept, answer, is_kept=floor is None)
        headers.append((b"cache-status", cache_status(answer, conditions)))
        if answer.read is None:
            headers.append((b"etag", _echoed(conditions, answer)))
            if self._api.asking().answering(kept.db).moment() == before:  # as it was when the answer was found
                self._again.remember(call.scope, call.who, kept, before, headers)
            return _Reply(304, headers)
        if conditions.if_none_match is not None and conditions.if_none_match.any and answer.etag is not None:
            return _Reply(304, [*headers, (b"etag", answer.etag.encode())])
        if wants_patch(call.joined(b"a-im"), KINDS[kind]) and answer.etag is not None and has_patches(answer.read):
            return await self._patched(headers, kind, answer, conditions)
        return await self._full(headers, kind, answer)

    async def _patched(self, headers: Headers, kind: bytes, answer: Answer, conditions: Conditions) -> _Reply:
        asking, known = self._api.asking(), conditions.if_none_match
        tags = [] if known is None else known.opaque
        status, body = await asking.run(patched, asking.results, answer, KINDS[kind], tags)
        if status == PATCHED:  # a cache that does not know what it is must not keep it
            headers = [NO_STORE, *headers[1:], (b"im", MANIPULATION)]
        return _reply(status, headers, kind, answer.etag, body)

    async def _asked(
        self,
        call: Call,
        kept: Prepared,
        args: list[Value] | dict[str, Value],
        format: str,
        conditions: Conditions,
        floor: Token | None,
    ) -> Answer:
        asking = self._api.asking()
        wanted, known = conditions.if_match, conditions.if_none_match
        if wanted is not None and not wanted.any:
            strong = [tag.opaque for tag in wanted.tags if not (tag.weak or tag.opaque.endswith(ENCODED))]
            now = await asking.ask(call.who, kept, args, format=format, tags=strong, floor=floor)
            if not now.not_modified or (now.etag or "W/").startswith("W/"):
                raise PreconditionFailed("the answer is not the one If-Match demands", hint="Ask without it.")
        tags = () if known is None else known.opaque
        return await asking.ask(call.who, kept, args, format=format, tags=tags, floor=floor)

    async def _full(self, headers: Headers, kind: bytes, answer: Answer) -> _Reply:
        assert answer.read is not None
        if is_small(answer.read):
            body = body_of(answer, KINDS[kind])
        else:
            body = await self._api.asking().run(body_of, answer, KINDS[kind])
        if answer.read.truncated:
            headers = [*headers, TRUNCATED]
        return _reply(200, headers, kind, answer.etag, body)

    def _headers(self, kept: Prepared, answer: Answer, *, is_kept: bool) -> Headers:
        seen = token(kept.db, answer.seen)
        headers = [VARY, (CAUSALITY, to_header(seen).encode())]
        if not is_kept or (answer.etag is None and answer.read is not None):
            return [NO_STORE, *headers]
        return [self._kept, *headers, (b"cache-groups", groups(kept.db, answer.instance.analysis.tables))]


def args_in(text: str | None) -> list[Value] | dict[str, Value]:
    """The arguments behind the question mark; plain JSON values or Lits."""
    if text is None:
        return []
    if len(text) > MAX_ARGS:
        raise InvalidRequest(f"args has more than {MAX_ARGS} characters", hint="Use query.execute_prepared.")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if not isinstance(found, (list, dict)):
        raise InvalidRequest("args cannot be read", hint='Send a JSON array, percent-encoded, such as [1,"a"].')
    return values_of(found)


def groups(db: str, tables: Sequence[str]) -> bytes:
    """Cache-Groups (RFC 9875): the tables an answer depends on, as a list of strings that structured fields allow.

    Where they are too many for a header, the database alone.
    """
    found = ", ".join(_group(f"{db}.{name}") for name in tables)
    return (found if len(found) <= MAX_GROUPS else _group(db)).encode()


def _group(name: str) -> str:
    text = name.encode("unicode_escape").decode()
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cache_status(answer: Answer, conditions: Conditions) -> bytes:
    """Cache-Status (RFC 9211): whether the database was asked, why, and whether for this request alone."""
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
    """The asker's own tag: a cache may freshen only what carries the same one."""
    assert conditions.if_none_match is not None
    tag = next(tag for tag in conditions.if_none_match.tags if tag.opaque == answer.matched)
    return str(tag).encode("latin-1")
