"""The HTTP application: finds the route, asks the gate, reads the body, hands on, answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headwater import __version__
from headwater.errors import (
    HeadwaterError,
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
)
from headwater.model.principal import Principal
from headwater.serve import openapi
from headwater.serve.api import Api
from headwater.serve.auth import Access, Gate
from headwater.serve.bridge import Bridge
from headwater.serve.metrics import Metrics
from headwater.serve.routes import BY_PATH, ROUTES, Route
from headwater.serve.rpc import SQL_ID, Reply, Rpc, clean, error_body, unexpected

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Answer = Callable[[Principal, bytes], Awaitable[Reply]]
Page = Callable[[Principal, Request], Awaitable[Response]]

JSON = b"application/json"
PROBLEM = b"application/problem+json"


class Refusal(Exception):
    """A request that goes no further, with the status and headers to say so."""

    def __init__(self, error: HeadwaterError, *, status: int = 0, headers: Headers | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status or error.status
        self.headers = headers or []


class Gone(Exception):
    """The client left: there is nobody to answer."""


class Application:
    """The ASGI application. RPC routes are bare ASGI, the others use Starlette's requests and responses."""

    def __init__(self, api: Api, gate: Gate, bridge: Bridge, metrics: Metrics, *, max_body: int) -> None:
        self._api = api
        self._gate = gate
        self._bridge = bridge
        self._metrics = metrics
        self._max_body = max_body
        rpc = Rpc(api, bridge, metrics)
        self._answers: dict[str, Answer] = {"rpc": rpc.envelope, "sql": rpc.sql}
        self._pages: dict[str, Page] = {
            "index": self._index,
            "healthz": self._healthz,
            "readyz": self._readyz,
            "metrics": self._text,
            "openapi": self._openapi,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "no WebSocket here"})
            return
        route = BY_PATH.get(scope["path"])
        try:
            status = await self._serve(scope, receive, send, route)
        except Refusal as refusal:
            status = await _refuse(send, route, refusal)
        except HeadwaterError as error:
            status = await _refuse(send, route, Refusal(error))
        except Gone:
            return
        except asyncio.CancelledError:
            status = await _refuse(send, route, Refusal(_cut_off()))
        except Exception as error:
            status = await _refuse(send, route, Refusal(unexpected(error, scope["path"])))
        self._metrics.responded("unknown" if route is None else route.path, status)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, route: Route | None) -> int:
        headers: Headers = scope["headers"]
        principal = self._admit(headers, Access.LOCKED if route is None else route.access)
        if route is None:
            raise NotFound(f"there is nothing at {scope['path'][:200]}", hint="GET / lists what there is.")
        if not route.takes(scope["method"]):
            allow = [(b"allow", route.allow.encode())]
            error = InvalidRequest(f"{scope['method'][:20]} is not served at {route.path}")
            raise Refusal(error, status=405, headers=allow)
        if scope["query_string"] and route.access is not Access.OPEN:
            raise InvalidRequest(f"{route.path} takes no query string", hint="Leave it out.")
        if route.rpc:
            return await self._rpc(scope, receive, send, principal, self._answers[route.handler])
        response = await self._pages[route.handler](principal, Request(scope, receive))
        await response(scope, receive, send)
        return response.status_code

    def _admit(self, headers: Headers, access: Access) -> Principal:
        try:
            return self._gate.admit(headers, access)
        except Unauthorized as error:
            raise Refusal(error, headers=[(b"www-authenticate", b'Bearer realm="headwater"')]) from None

    # --- the busy routes, without Starlette --------------------------------------------------------------

    async def _rpc(self, scope: Scope, receive: Receive, send: Send, principal: Principal, answer: Answer) -> int:
        _check_json(scope["headers"])
        status, body = await answer(principal, await read_body(scope, receive, self._max_body))
        await _send(send, status, JSON, body)
        return status

    # --- the ordinary routes -----------------------------------------------------------------------------

    async def _index(self, principal: Principal, request: Request) -> Response:
        doors = [{"method": route.method, "path": route.path, "summary": route.summary} for route in ROUTES]
        return JSONResponse({"name": "headwater", "version": __version__, "routes": doors})

    async def _healthz(self, principal: Principal, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, principal: Principal, request: Request) -> Response:
        ready = await self._bridge.call(self._api.ready)
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    async def _text(self, principal: Principal, request: Request) -> Response:
        text = await self._bridge.call(self._metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _openapi(self, principal: Principal, request: Request) -> Response:
        return JSONResponse(openapi.document())


def _cut_off() -> HeadwaterError:
    """For a request that outlasted the drain. Its write may be in the queue of the source already."""
    return Unavailable(
        "the server stopped before the request was done",
        hint="It may or may not have been carried out: look before you repeat it.",
    )


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body; RequestTooLarge as soon as it is known to be larger than `most` bytes."""
    if int(_header(scope["headers"], b"content-length") or 0) > most:
        raise await _too_large(scope, receive, most, 0)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > most:
            raise await _too_large(scope, receive, most, size)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _too_large(scope: Scope, receive: Receive, most: int, seen: int) -> Refusal:
    """The refusal, after reading a little more: a client that is still sending would see a reset instead."""
    more = not _header(scope["headers"], b"expect")
    while more and seen <= 2 * most:
        message = await receive()
        seen += len(message.get("body", b""))
        more = message.get("more_body", False)
    error = RequestTooLarge(f"the body is larger than {most} bytes", hint="Send less, in several requests.")
    return Refusal(error, headers=[(b"connection", b"close")])


def _header(headers: Headers, wanted: bytes) -> bytes:
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def _check_json(headers: Headers) -> None:
    found = _header(headers, b"content-type")
    if found != JSON and found.split(b";")[0].strip().lower() != JSON:
        error = InvalidRequest("the body is not application/json", hint="Send content-type: application/json.")
        raise Refusal(error, status=415)


async def _refuse(send: Send, route: Route | None, refusal: Refusal) -> int:
    if route is not None and route.rpc and refusal.status != 405:
        id = SQL_ID if route.handler == "sql" else None
        await _send(send, refusal.status, JSON, error_body(id, refusal.error), refusal.headers)
    else:
        await _send(send, refusal.status, PROBLEM, problem(refusal.error, refusal.status), refusal.headers)
    return refusal.status


def problem(error: HeadwaterError, status: int) -> bytes:
    """`error` as application/problem+json."""
    body = {"type": f"urn:headwater:error:{error.code}", "title": error.message, "status": status}
    return msgspec.json.encode(clean({**error.details, **body, "code": error.code}))


async def _send(send: Send, status: int, kind: bytes, body: bytes, extra: Headers | None = None) -> None:
    headers = [(b"cache-control", b"no-store"), *(extra or ())]
    if status != 204:
        headers += ((b"content-type", kind), (b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
