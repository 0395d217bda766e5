"""The HTTP application: find the route, authenticate the caller, check the request, call the handler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from headwater import __version__
from headwater.config import ServeConfig
from headwater.errors import (
    Forbidden,
    HeadwaterError,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
)
from headwater.model.database_name import real_name
from headwater.model.principal import Principal
from headwater.serve.api import STARTING, Api
from headwater.serve.auth.gate import Access, Gate
from headwater.serve.call import RAW, Aborted, Call, Handler, Handlers, Headers, Receive, Scope, Send
from headwater.serve.gateway.gateway import Gateway
from headwater.serve.http import docs_page, openapi
from headwater.serve.http.cors import Cors
from headwater.serve.http.handlers.queries import QueryHandler
from headwater.serve.http.handlers.rows import RowPages
from headwater.serve.http.not_modified_cache import NotModifiedCache
from headwater.serve.http.query_string import parse_query, ticket_in
from headwater.serve.http.routes import QUERY, ROUTES, Route, find
from headwater.serve.http.security_headers import UNSHARED, with_security_headers
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.request_body import (
    JSON,
    BodyReservation,
    ClientDisconnected,
    RejectedRequest,
    check_type,
    header,
    read_body,
    retry_after,
)
from headwater.serve.limits.slow_reader_limits import drop
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.body_pieces import Pieces, send_body, size_of
from headwater.serve.rpc.envelope import SQL_ID, Reply, Rpc, TooOften, clean, error_body, unexpected
from headwater.serve.rpc.hidden_names import without_hidden_names
from headwater.serve.thread_bridge import Bridge

Answer = Callable[[Principal, bytes, str], Coroutine[Any, Any, Reply]]
Page = Callable[[Principal, Request], Awaitable[Response]]

PROBLEM = b"application/problem+json"
NO_STORE = {"cache-control": "no-store"}


class Application:
    """The ASGI application."""

    def __init__(
        self,
        api: Api,
        gate: Gate,
        bridge: Bridge,
        metrics: Metrics,
        limits: Limits,
        config: ServeConfig,
        handlers: Handlers,
        websockets: Handlers,
    ) -> None:
        self._api, self._gate, self._bridge, self._metrics, self._limits = api, gate, bridge, metrics, limits
        self._max_body, self._ready = config.max_body_bytes, config.ready
        self._readiness: asyncio.Future[tuple[dict[str, str], bool]] | None = None  # shared by concurrent requests
        self._cors = Cors(config.cors_origins, locked=gate.locked)
        self.gateway = Gateway(api, bridge, metrics, limits, gate.sessions, most=self._max_body)
        rpc = Rpc(api, bridge, metrics, limits)
        self._not_modified = NotModifiedCache(api, gate, limits)
        pages: dict[str, Page] = {
            "index": self._index,
            "healthz": self._healthz,
            "readyz": self._readyz,
            "metrics": self._text,
            "openapi": self._openapi,
            "docs": self._docs,
        } | RowPages(api, bridge, gate.recheck, max_body=self._max_body).pages()
        public = api.queries is not None and api.queries.public
        self._handlers: Handlers = {
            "rpc": self._rpc(rpc.envelope),
            "sql": self._rpc(rpc.sql),
            "query": QueryHandler(api, self._not_modified, public=public).query,
            **{name: _page(page) for name, page in pages.items()},
            **handlers,
        }
        self._websockets: Handlers = {"gateway": self.gateway.serve, **websockets}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RAW] = send
        origin = header(scope["headers"], b"origin")
        extra = self._cors.headers(origin) if origin else []
        guarded = _guarded(scope, send, extra)
        if await self._not_modified.answer(scope, guarded if extra else send):
            self._metrics.responded(QUERY, 304)
            return
        send = guarded
        raw_path = scope.get("raw_path") or scope["path"].encode()
        route, values = find(scope["path"], raw_path, scope.get("method", "GET"))
        if scope["type"] == "websocket":
            send = _as_http(send)
        try:
            status = await self._serve(scope, receive, send, route, values)
        except RejectedRequest as refusal:
            status = await _refuse(send, route, refusal)
        except HeadwaterError as error:
            status = await _refuse(send, route, RejectedRequest(error))
        except (ClientDisconnected, Aborted):
            drop(scope)
            return
        except asyncio.CancelledError:
            status = await _refuse(send, route, RejectedRequest(_cut_off()))
        except Exception as error:
            status = await _refuse(send, route, RejectedRequest(unexpected(error, scope["path"])))
        self._metrics.responded("unknown" if route is None else route.path, status)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, route: Route | None, values: dict[str, str]
    ) -> int:
        headers: Headers = scope["headers"]
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and header(headers, b"origin"):
            return await self._preflight(scope, send)
        known = () if route is None else route.query
        access = Access.LOCKED if route is None else route.access
        principal = self._admit(scope, access, known)
        if access is not Access.OPEN:
            self._limits.ask(principal, client_of(scope))
        if route is None:
            raise NotFound(f"there is no route {scope['path'][:200]}", hint="GET / lists the routes.")
        try:
            return await self._serve_to(principal, scope, receive, send, route, values)
        except HeadwaterError as error:
            raise without_hidden_names(error, principal, self._api.databases) from None
        except RejectedRequest as refusal:
            refusal.error = without_hidden_names(refusal.error, principal, self._api.databases)
            raise

    async def _serve_to(
        self, principal: Principal, scope: Scope, receive: Receive, send: Send, route: Route, values: dict[str, str]
    ) -> int:
        known = route.query
        is_strict = known and route.access is not Access.OPEN  # health checks may send any query string
        query = parse_query(scope["query_string"], known, route.path) if is_strict else {}
        call = Call(scope, receive, send, principal, values, query)
        if scope["type"] == "websocket" or (route.websocket and not route.stream):
            self._limits.enter(principal, self._limits.of_path(principal, values))
            return await self._websocket(route, call)
        if not route.takes(scope["method"]):
            allow = [(b"allow", route.allow.encode())]
            hint = f"Send {route.allow.replace(', ', ' or ')}."
            error = InvalidRequest(f"{scope['method'][:20]} is not allowed at {route.path}", hint=hint)
            raise RejectedRequest(error, status=405, headers=allow)
        if scope["query_string"] and not known and route.access is not Access.OPEN:
            raise InvalidRequest(f"{route.path} takes no query string", hint="Omit it.")
        if values:
            self._limits.enter(principal, self._limits.of_path(principal, values))
        handler = _found(self._handlers, route)
        return await (_stream(handler, call, route) if route.stream else handler(call))

    async def _preflight(self, scope: Scope, send: Send) -> int:
        headers = self._cors.preflight(header(scope["headers"], b"origin"))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return 204

    async def _websocket(self, route: Route, call: Call) -> int:
        scope = call.scope
        if scope["type"] != "websocket" or not route.websocket:
            error = InvalidRequest(
                f"{route.path} is {'' if route.websocket else 'not '}a WebSocket",
                hint="Send `Upgrade: websocket`." if route.websocket else "Request it with plain HTTP.",
            )
            raise RejectedRequest(error, status=426 if route.websocket else 400, headers=[(b"upgrade", b"websocket")])
        origin = header(scope["headers"], b"origin")
        if origin and not self._cors.admits(origin):
            raise Forbidden("a web page of this origin may not use this server", hint="Add it to serve.cors_origins.")
        await call.receive()  # websocket.connect
        return await _found(self._websockets, route)(call)

    def _admit(self, scope: Scope, access: Access, known: tuple[str, ...]) -> Principal:
        """Return the caller. Unauthenticated callers get the same answer for every path, known or not."""
        ticket = ticket_in(scope["query_string"])
        try:
            if ticket is None or "ticket" in known:
                return self._gate.admit(scope["headers"], access, ticket)
            return self._admit_without(scope, access, ticket)
        except Unauthorized:
            self._limits.count_rejected_credential(client_of(scope))
            raise

    def _admit_without(self, scope: Scope, access: Access, ticket: str) -> Principal:
        """Return the caller on a route that takes no tickets; an invalid ticket is reported there too."""
        try:
            return self._gate.admit(scope["headers"], access)
        except Unauthorized:
            self._gate.tickets.check(ticket)
            raise

    # --- RPC, without Starlette --------------------------------------------------------------------------------------

    def _rpc(self, answer: Answer) -> Handler:
        async def handle(call: Call) -> int:
            check_type(call.scope["headers"], JSON)
            client = client_of(call.scope)
            try:
                with BodyReservation(client) as memory:
                    asked = await read_body(call.scope, call.receive, self._max_body, memory)
                    self._gate.recheck(call.who)  # the key may have been revoked while the body was received
                    answering = answer(call.who, asked, client)
                    if b"wait" in asked or b"\\u" in asked:  # a call that may wait ends when its client disconnects
                        status, body = await _unless_gone(call.receive, answering)
                    else:
                        status, body = await answering
            except TooOften as refused:
                await _send(call.send, 429, JSON, refused.body, [retry_after(refused.error)])
                return 429
            await _send(call.send, status, JSON, body)
            return status

        return handle

    # --- pages -------------------------------------------------------------------------------------------------------

    async def _index(self, principal: Principal, request: Request) -> Response:
        routes = [{"method": route.method, "path": route.path, "summary": route.summary} for route in ROUTES]
        return JSONResponse({"name": "headwater", "version": __version__, "routes": routes}, headers=NO_STORE)

    async def _healthz(self, principal: Principal, request: Request) -> Response:
        return JSONResponse({"status": "ok"}, headers=NO_STORE)

    async def _readyz(self, principal: Principal, request: Request) -> Response:
        name = request.query_params.get("db")
        if name is not None:  # only authenticated callers may learn which databases exist
            self._admit(request.scope, Access.LOCKED, ("db",)).check_any_scope(real_name(name))
        if self._readiness is None or self._readiness.done():
            self._readiness = asyncio.ensure_future(self._bridge.call(self._api.readiness))
        unready, is_storage_full = await asyncio.shield(self._readiness)
        if name is not None:
            unready = {"": unready.get(real_name(name), "not_found")}
        reasons = sorted({reason for reason in unready.values() if reason}) or ([] if unready else [STARTING])
        enough = any if self._ready == "any" or name is not None else all
        ready = enough(not reason for reason in unready.values()) and bool(unready)
        body = {"ready": ready} | ({"reasons": reasons} if reasons else {})
        if is_storage_full:
            body["storage_full"] = True
        return JSONResponse(body, status_code=200 if ready else 503, headers=NO_STORE)

    async def _docs(self, principal: Principal, request: Request) -> Response:
        return HTMLResponse(docs_page.page(), headers=NO_STORE | {"content-security-policy": docs_page.POLICY})

    async def _text(self, principal: Principal, request: Request) -> Response:
        if principal.scopes is not None:
            raise Forbidden("the metrics cover all databases", hint="Use a credential without scopes.")
        text = await self._bridge.call(self._metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST} | NO_STORE)

    async def _openapi(self, principal: Principal, request: Request) -> Response:
        return JSONResponse(openapi.document(), headers=NO_STORE)


def _found(handlers: Handlers, route: Route) -> Handler:
    handler = handlers.get(route.handler)
    if handler is None:
        raise Unavailable(f"{route.path} is not available", hint="This server has no feeds or no bulk reads.")
    return handler


def _page(page: Page) -> Handler:
    """Return a handler for a page that uses Starlette's request and response."""

    async def handle(call: Call) -> int:
        call.scope["path_params"] = call.values  # where Starlette expects them
        response = await page(call.who, Request(call.scope, call.receive))
        await response(call.scope, call.receive, call.send)
        return response.status_code

    return handle


async def _stream(handler: Handler, call: Call, route: Route) -> int:
    """Call the handler of a stream; an error after its start cuts the connection, so that the client notices."""
    try:
        return await handler(call)
    except (asyncio.CancelledError, Exception) as error:
        if not call.started:
            raise
        if not isinstance(error, (asyncio.CancelledError, Aborted, HeadwaterError)):
            unexpected(error, route.path)
        raise Aborted from None


def _cut_off() -> HeadwaterError:
    """Return the error of a request that was not finished when the server stopped; its write may be queued already."""
    return Unavailable(
        "the server stopped before the request was finished",
        hint="The request may have been executed: check before you repeat it.",
    )


async def _unless_gone(receive: Receive, answer: Coroutine[Any, Any, Reply]) -> Reply:
    """Return the answer; raise ClientDisconnected and cancel the work as soon as the client disconnects."""
    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        leaving.cancel()
        if working.cancel():
            await asyncio.gather(working, return_exceptions=True)


def _guarded(scope: Scope, send: Send, extra: Headers) -> Send:
    """Return a `send` that adds `extra` to every response, and the security headers to every one except a 304."""
    tls = scope["scheme"] in ("https", "wss")
    full = [*extra, UNSHARED] if scope.get("method") in ("GET", "HEAD") else extra

    async def send_guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"].endswith("http.response.start"):
            if message["status"] == 304:
                message["headers"] = [*message["headers"], *extra]
            else:
                message["headers"] = with_security_headers([*message["headers"], *full], tls=tls)
        await send(message)

    return send_guarded


def _as_http(send: Send) -> Send:
    """Return a `send` that sends an HTTP response on a WebSocket that is rejected before it is accepted."""

    async def refused(message: MutableMapping[str, Any]) -> None:
        if message["type"].startswith("http."):
            message = {**message, "type": f"websocket.{message['type']}"}
        await send(message)

    return refused


async def _refuse(send: Send, route: Route | None, refusal: RejectedRequest) -> int:
    if route is not None and route.rpc and refusal.status != 405:
        id = SQL_ID if route.handler == "sql" else None
        await _send(send, refusal.status, JSON, error_body(id, refusal.error), refusal.headers)
    else:
        await _send(send, refusal.status, PROBLEM, problem(refusal.error, refusal.status), refusal.headers)
    return refusal.status


def problem(error: HeadwaterError, status: int) -> bytes:
    """Return `error` as application/problem+json."""
    kind = f"urn:headwater:error:{error.code}"
    body = {"type": kind, "title": error.message, "status": status, "code": error.code}
    if error.hint:
        body["hint"] = error.hint
    return msgspec.json.encode(clean({**body, **error.details, **body}))  # in the order in which a person reads them


async def _send(send: Send, status: int, kind: bytes, body: bytes | Pieces, extra: Headers | None = None) -> None:
    headers = [(b"cache-control", b"no-store"), *(extra or ())]
    if status != 204:
        headers += ((b"content-type", kind), (b"content-length", b"%d" % size_of(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_body(send, body)
