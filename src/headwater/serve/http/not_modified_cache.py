"""Cache of requests that were answered by 304: an identical request is answered by 304 while nothing was committed.

Each time, the database's head and the caller's credential are checked; everything else is determined by the bytes of
the request, which are the same.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.bounded_cache import BoundedCache
from headwater.model.principal import Principal
from headwater.queries.prepared import PreparedQuery
from headwater.serve.api import Api
from headwater.serve.auth.gate import Gate
from headwater.serve.call import Headers, Scope, Send
from headwater.serve.http.query_string import ticket_in
from headwater.serve.limits.limits import Limits

MAX_REQUESTS = 10_000
MAX_BYTES = 32 << 20  # of all requests
MAX_HEAD = 8 << 10  # bytes of one request, including `HEADER` bytes per header
HEADER = 128  # bytes of memory that a header takes besides its text
PREFIX = "/api/v1/q/"


class CachedNotModified(msgspec.Struct, frozen=True):
    """A request that was answered by 304, and what the answer depends on."""

    who: Principal
    prepared: PreparedQuery
    moment: Hashable  # the head of the database at that time
    headers: Headers


class NotModifiedCache:
    """The last requests that were answered by 304. Not thread-safe."""

    def __init__(self, api: Api, gate: Gate, limits: Limits) -> None:
        self._api, self._gate, self._limits = api, gate, limits
        self._known: BoundedCache[Hashable, CachedNotModified] = BoundedCache(MAX_REQUESTS, MAX_BYTES)

    def remember(
        self, scope: Scope, who: Principal, prepared: PreparedQuery, moment: Hashable, headers: Headers
    ) -> None:
        """Remember a request that was answered by 304 with `headers`."""
        if moment is None or ticket_in(scope["query_string"]) is not None:  # a ticket expires
            return
        size = _size(scope)
        if size <= MAX_HEAD:
            self._known.put(_key(scope), CachedNotModified(who, prepared, moment, headers), size)

    async def answer(self, scope: Scope, send: Send) -> bool:
        """Answer by 304 and return True, if the request is cached and its answer is still valid."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            return False
        key = _key(scope)
        found = self._known.get(key)
        if found is None:
            return False
        if not self._is_current(found, scope):
            self._known.pop(key)
            return False
        await send({"type": "http.response.start", "status": 304, "headers": found.headers})
        await send({"type": "http.response.body", "body": b""})
        return True

    def _is_current(self, found: CachedNotModified, scope: Scope) -> bool:
        try:
            asking = self._api.asking()
            is_same = (
                self._gate.recheck(found.who) is found.who
                and asking.get(found.who, found.prepared.id) is found.prepared
                and asking.answering(found.prepared.db).moment() == found.moment
            )
            if is_same:
                self._limits.again(found.who, found.prepared.db, scope)
        except HeadwaterError:
            return False  # the handler reports the error
        if is_same:
            asking.numbers.again()
        return is_same


def _size(scope: Scope) -> int:
    """Return the approximate memory of the request in bytes."""
    text = sum(len(name) + len(value) for name, value in scope["headers"])
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + text + HEADER * len(scope["headers"])


def _key(scope: Scope) -> Hashable:
    return scope.get("raw_path"), scope["query_string"], scope["method"], tuple(scope["headers"])
