"""Call: one request for a stream or a body that comes in pieces, as its handler sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headwater.model.principal import Principal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

EVENT_STREAM, NDJSON_KIND = b"text/event-stream", b"application/x-ndjson"
ARROW_KIND = b"application/vnd.apache.arrow.stream"


RAW = "headwater.send"  # where a scope keeps it


class Aborted(Exception):
    """The answer cannot be finished: the connection is cut, so that the reader notices."""


class Call:
    """The ASGI parts of a request, who asks, and what its path and query hold."""

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
        self.raw: Send = scope.get(RAW, send)  # past everything that only the head of an answer needs
        self.who, self.values, self.query = who, values, query
        self.started = False  # whether the answer has begun: then it is too late for a status

    async def start(self, status: int, headers: Headers) -> None:
        """Begin the answer."""
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def header(self, wanted: bytes) -> bytes:
        """The first header of that name."""
        return next((value for name, value in self.scope["headers"] if name == wanted), b"")

    def abort(self) -> None:
        """End without an end."""
        raise Aborted


async def gone(receive: Receive) -> None:
    """Returns when the client is gone. Without it nobody would notice: `send` says nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass


def wanted_kind(accept: bytes, offered: tuple[bytes, ...]) -> bytes:
    """The first of `offered` that the reader names, else the first of all."""
    named = [part.split(b";")[0].strip().lower() for part in accept.split(b",")]
    return next((kind for kind in offered if kind in named), offered[0])


def prefers(accept: bytes, kind: bytes, other: bytes) -> bool:
    """Whether the reader names `kind`, and does not weigh it below `other`."""
    weights = dict(map(_weight, accept.lower().split(b",")))
    return weights.get(kind, 0.0) > 0 and weights[kind] >= weights.get(other, 0.0)


def _weight(part: bytes) -> tuple[bytes, float]:
    """A media type and its `q`, which is 1 unless it is given."""
    kind, *more = (word.strip() for word in part.split(b";"))
    try:
        return kind, next((float(word[2:]) for word in more if word.startswith(b"q=")), 1.0)
    except ValueError:
        return kind, 1.0
