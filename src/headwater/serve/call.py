"""One HTTP request or WebSocket, as its handler sees it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headwater.model.principal import Principal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

EVENT_STREAM, NDJSON_KIND = b"text/event-stream", b"application/x-ndjson"
ARROW_KIND = b"application/vnd.apache.arrow.stream"

_WEIGHT = re.compile(rb"q=(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\Z")

MAX_ITEMS = 256  # commas and semicolons of a list header
RAW = "headwater.send"  # the key of the unwrapped `send` in a scope


class Aborted(Exception):
    """The response cannot be completed; the connection is cut, so that the client notices."""


class Call:
    """The ASGI parts of a request, its caller, and the values in its path and query string."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        who: Principal,
        values: dict[str, str],
        query: dict[str, str],
    ) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.raw: Send = scope.get(RAW, send)  # without the wrappers that add response headers
        self.who, self.values, self.query = who, values, query
        self.started = False  # whether the response has begun: then no other status can be sent

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def reply(self, status: int, headers: Headers) -> int:
        """Send a response without a body; return its status."""
        await self.start(status, headers)
        await self.send({"type": "http.response.body", "body": b""})
        return status

    def header(self, wanted: bytes) -> bytes:
        """Return the first header with this name; b"" without one."""
        return next((value for name, value in self.scope["headers"] if name == wanted), b"")

    def joined(self, wanted: bytes) -> bytes:
        """Return all headers with this name, joined by commas; see `list_header`."""
        return list_header(self.scope["headers"], wanted)

    def abort(self) -> None:
        """Raise Aborted, so that the connection is cut."""
        raise Aborted


Handler = Callable[[Call], Awaitable[int]]  # answers a request; returns the status of the response
Handlers = dict[str, Handler]  # by the names in `Route.handler`


def list_header(headers: Headers, wanted: bytes) -> bytes:
    """Return all headers with this name, joined by commas; b"" if the list is too long to be parsed in the event loop.

    RFC 9110 allows a server to ignore Accept, A-IM and If-None-Match: the full answer in the default format is correct.
    """
    found = b",".join(value for name, value in headers if name == wanted)
    return found if found.count(b",") + found.count(b";") <= MAX_ITEMS else b""


def matches(if_none_match: bytes, tag: bytes) -> bool:
    """Return whether the header If-None-Match names `tag`, by the weak comparison (RFC 9110 §13.1.2).

    `*` does not match: the tag is made of the request, which may be for a table that does not exist.
    """
    named = [part.strip().removeprefix(b"W/") for part in if_none_match.split(b",")]
    return tag.removeprefix(b"W/") in named


async def gone(receive: Receive) -> None:
    """Wait until the client has disconnected, which `send` does not report; ignore everything received before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def wanted_kind(accept: bytes, offered: tuple[bytes, ...], default: bytes | None = None) -> bytes:
    """Return the media type of `offered` that an `Accept` header prefers, by its weights (RFC 9110 §12.5.1).

    At equal weights a type in the header precedes one matched by a range (`text/*`, `*/*`). Of several named types
    the first of `offered` wins, of several matched types the default, which is the first of `offered` unless given.
    If no type is acceptable, return the default, unless `q=0` excludes it and another type is not excluded.
    """
    default = default or offered[0]
    weights = _weights(accept)
    found = {kind: _weight_of(weights, kind) for kind in offered}
    ranked = [
        (weight, named, not named and kind == default, -place, kind)
        for place, (kind, (weight, named)) in enumerate(found.items())
        if weight
    ]
    if ranked:
        return max(ranked)[-1]
    left = [kind for kind, (weight, _) in found.items() if weight is None]
    return left[0] if left and default not in left else default


def _weights(accept: bytes) -> dict[bytes, float]:
    """Return the weight of each media range, the largest if it is repeated, and 1 if it cannot be parsed."""
    weights: dict[bytes, float] = {}
    for part in filter(None, map(bytes.strip, accept.lower().split(b","))):
        kind, *more = (word.strip() for word in part.split(b";"))
        given = next((float(found[1]) for word in more if (found := _WEIGHT.match(word))), 1.0)
        weights[kind] = max(given, weights.get(kind, 0.0))
    return weights


def _weight_of(weights: dict[bytes, float], kind: bytes) -> tuple[float | None, bool]:
    """Return the weight of the most specific matching range, and whether it is `kind` itself; None without a match."""
    for name in (kind, kind.split(b"/")[0] + b"/*", b"*/*"):
        if name in weights:
            return weights[name], name == kind
    return None, False
