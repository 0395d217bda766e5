"""The JSON gateway, `GET /api/v1/ws`: SQL, keys and values, and changes in JSON messages over one WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from headwater.errors import Busy, HeadwaterError, InvalidRequest, NotFound, Unavailable
from headwater.feeds.deliver.stream_request import ReaderPosition, Transport
from headwater.feeds.formats.gateway import GATEWAY, text_field
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.model.principal import OWNER, VIEWER, Principal
from headwater.model.work.answer_limits import UNCOUNTED
from headwater.model.work.work_context import CALLER
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.sql import Outcome
from headwater.serve.api import Api
from headwater.serve.auth.open_sessions import Sessions
from headwater.serve.call import Call
from headwater.serve.gateway import messages
from headwater.serve.gateway.kv import Entry, Kv
from headwater.serve.gateway.messages import bytes_of
from headwater.serve.gateway.sochdb_refusals import in_sequences, overrun
from headwater.serve.gateway.socket import SERVER_STOPS, GatewaySocket
from headwater.serve.http.websocket_protocol import Gone
from headwater.serve.limits.limits import Limits, identity
from headwater.serve.limits.request_body import LARGE
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.body_pieces import SMALL, Pieces, is_small
from headwater.serve.rpc.envelope import unexpected
from headwater.serve.rpc.hidden_names import without_hidden_names
from headwater.serve.rpc.methods import METHODS
from headwater.serve.rpc.params import Nothing
from headwater.serve.rpc.query_params import values_of
from headwater.serve.thread_bridge import Bridge
from headwater.sources.write import Result, WriteResult

OPENING = Transport("gateway", messages.line, format=GATEWAY)
SQL = METHODS["sql.exec"]

Handler = Callable[[GatewaySocket, str | int, Any], Awaitable[bytes | Pieces | None]]  # None: the handler has answered


class Gateway:
    """Answers the messages of all gateway sockets. Not thread-safe."""

    def __init__(
        self, api: Api, bridge: Bridge, metrics: Metrics, limits: Limits, sessions: Sessions, *, most: int
    ) -> None:
        self._api, self._bridge, self._metrics = api, bridge, metrics
        self._limits, self._sessions, self._most = limits, sessions, most
        self._kv = Kv(api, bridge)
        self._open: dict[GatewaySocket, asyncio.Task[Any]] = {}  # with the task that serves it
        self._is_stopping = False
        self._handlers: dict[str, Handler] = {
            "sql": self._sql,
            "kv_get": self._get,
            "kv_put": self._put,
            "kv_delete": self._delete,
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "ping": self._ping,
        }

    async def serve(self, call: Call) -> int:
        """Serve one socket until it closes and return 101, its status; raise the error of a socket that is refused."""
        call.who.need(VIEWER, "the gateway")
        if self._is_stopping:
            raise Unavailable("the server is stopping", hint="Reconnect in a moment.")
        with self._limits.count_stream(call.who, None, client_of(call.scope)):
            socket = GatewaySocket(call, self._answer, most=self._most)
            task = asyncio.current_task()
            assert task is not None
            self._open[socket] = task
            try:
                with self._sessions.during(call.who, socket.expire):
                    await socket.run()
            finally:
                del self._open[socket]
        return 101

    async def drain(self, seconds: float) -> None:
        """Close each socket after its current answer, with a code that asks to reconnect; wait at most `seconds`."""
        self._is_stopping = True
        for socket in list(self._open):
            socket.drain()
        if self._open:
            await asyncio.wait(list(self._open.values()), timeout=seconds)

    def cut(self) -> None:
        """Close every socket without waiting for answers."""
        for socket in list(self._open):
            socket.end(SERVER_STOPS)

    async def _answer(self, socket: GatewaySocket, text: str | None) -> None:
        """Send exactly one answer to one frame of a client."""
        is_large, code = text is not None and len(text) > LARGE, "ok"
        request = messages.undecoded(text) if is_large else messages.read(text)
        try:
            self._limits.ask(socket.who, socket.client)
            if is_large:
                CALLER.set(socket.who.account)
                request = await self._bridge.call(messages.read, text)
            if request.error is not None:
                raise request.error
            self._limits.enter(socket.who, self._limits.of_message(request.payload))
            payload = await self._handlers[request.type](socket, request.id, request.payload)
            if payload is not None:
                await socket.say(request.id, "pong" if request.type == "ping" else "result", payload)
        except HeadwaterError as error:
            code = error.code
            known = without_hidden_names(error, socket.who, self._api.databases)
            await socket.say(request.id, "error", messages.error_payload(known))
        except (RecursionError, MemoryError):
            large = InvalidRequest("the request or its answer is too large", hint="Request fewer or smaller values.")
            code = large.code
            await socket.say(request.id, "error", messages.error_payload(large))
        except Gone:
            raise
        except Exception as error:
            code = HeadwaterError.code
            await socket.say(request.id, "error", messages.error_payload(unexpected(error, f"gateway {request.type}")))
        self._metrics.gateway_answered(request.type or "unknown", code)

    # --- SQL -----------------------------------------------------------------------------------------------------

    async def _sql(self, socket: GatewaySocket, id: str | int, request: messages.Sql) -> bytes | Pieces:
        socket.who.need(SQL.role, "sql", SQL.instead)
        result = await self._bridge.call(self._execute, socket.who, request)
        if not isinstance(result, PendingAnswer):
            return _charged(socket, result)
        written = await self._bridge.wait(result.future)
        if isinstance(written, WriteResult) and isinstance(written.value, Result) and not is_small(written.value):
            payload = await self._bridge.call(lambda: messages.rows_payload(result.finish(written)))
            return _charged(socket, payload, is_written=True)
        return messages.rows_payload(result.finish(written))

    def _execute(self, who: Principal, request: messages.Sql) -> bytes | Pieces | PendingAnswer[Outcome]:
        """Run the statement and encode its result, in a thread: a large answer would block the event loop."""
        args = values_of(request.params, "params")
        result = self._api.statement.execute(who, request.query, args, db=request.namespace)
        return result if isinstance(result, PendingAnswer) else messages.rows_payload(result)

    # --- keys and values -----------------------------------------------------------------------------------------

    async def _get(self, socket: GatewaySocket, id: str | int, request: messages.KvKey) -> bytes | Pieces:
        key = bytes_of("key", request.key, request.key_base64)
        value = await self._kv.get(socket.who, request.namespace, key)
        if value is None:
            return b'{"found":false}'
        return _found(value) if len(value) <= SMALL else _charged(socket, await self._bridge.call(_found, value))

    async def _put(self, socket: GatewaySocket, id: str | int, request: messages.KvPut) -> bytes:
        key = bytes_of("key", request.key, request.key_base64)
        value = bytes_of("value", request.value, request.value_base64)
        await self._kv.put(socket.who, request.namespace, [Entry(key, value, request.ttl_seconds)])
        return b'{"ok":true}'

    async def _delete(self, socket: GatewaySocket, id: str | int, request: messages.KvKey) -> bytes:
        key = bytes_of("key", request.key, request.key_base64)
        there = await self._kv.delete(socket.who, request.namespace, key)
        return b'{"deleted":true}' if there else b'{"deleted":false}'

    # --- changes -------------------------------------------------------------------------------------------------

    async def _subscribe(self, socket: GatewaySocket, id: str | int, request: messages.Subscribe) -> None:
        socket.check_free(id)
        feeds = self._api.feeding()
        wanted = SubscribeTable(
            db=request.namespace,
            tables=request.tables or None,
            ops=request.operations or None,
            where=request.where,
        )
        begin = ReaderPosition(request.start_sequence - 1 if request.start_sequence else None)
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(
                self._limits.count_stream(socket.who, self._limits.of_message(request), socket.client)
            )
            try:
                stream = await feeds.open_changes(socket.who, wanted, OPENING, begin)
            except InvalidRequest as error:
                raise in_sequences(error, request.start_sequence, messages.FIELDS) from None
            cleanup.callback(feeds.close_stream, stream)
            if stream.cursor + 1 < stream.consumer.log.horizon:
                raise overrun(stream)
            await socket.say(id, "result", b'{"subscribed":true}')
            socket.follow(id, stream, cleanup.pop_all().close)

    async def _unsubscribe(self, socket: GatewaySocket, id: str | int, request: messages.Unsubscribe) -> bytes:
        if not socket.forget(request.id):
            raise NotFound(
                f"no subscription {str(request.id)[:40]!r} on this socket", hint="Send the id of its `subscribe`."
            )
        return b'{"unsubscribed":true}'

    async def _ping(self, socket: GatewaySocket, id: str | int, request: Nothing) -> bytes:
        return b'{"ts":%d}' % (time.time_ns() // 1_000_000)


def _found(value: bytes) -> bytes | Pieces:
    payload = b'{"found":true%b}' % text_field("value", value)
    return payload if len(payload) <= UNCOUNTED else Pieces.of(payload)


def _charged(socket: GatewaySocket, payload: bytes | Pieces, *, is_written: bool = False) -> bytes | Pieces:
    """Return `payload`, charged to its reader. Raises Busy, unless `is_written`: a commit must be answered."""
    if isinstance(payload, Pieces) and socket.who.role != OWNER:
        try:
            payload.charge(identity(socket.who, socket.client))
        except Busy:
            if not is_written:
                payload.release()  # the error may keep a reference to this payload
                raise
    return payload
