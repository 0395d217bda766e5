"""Authentication, limits, request decoding and error reporting for the methods of all gRPC services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc
from grpc import aio

from headwater.config import ServeConfig
from headwater.database import ManagedDatabases
from headwater.errors import (
    HeadwaterError,
    InvalidRequest,
    LimitExceeded,
    NotSupported,
    RequestTooLarge,
    Unauthorized,
    Unavailable,
)
from headwater.model.principal import ANONYMOUS, Principal
from headwater.model.work.work_context import CALLER
from headwater.serve.auth.gate import Gate
from headwater.serve.grpc import errors
from headwater.serve.grpc.connections.acceptor import address_in
from headwater.serve.grpc.messages import LARGE, decode
from headwater.serve.grpc.request_slots import RequestSlots
from headwater.serve.grpc.stalled_calls import StalledCalls, UnreadAnswers
from headwater.serve.limits.limits import Limits, identity
from headwater.serve.limits.rates import place_of
from headwater.serve.limits.request_body import BodyReservation
from headwater.serve.limits.unread_answers import Unread
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.envelope import unexpected
from headwater.serve.rpc.hidden_names import without_hidden_names
from headwater.serve.thread_bridge import Bridge

HEALTH = "/grpc.health.v1.Health/"  # needs no credential
HEALTH_SECONDS = 10.0  # limit for receiving a health request
REQUEST_SECONDS = 60.0  # limit for receiving any other request
MAX_OPEN_REQUEST = 1 << 10  # bytes of a message to health or reflection, which may keep it as long as the call
GRACE_SECONDS = 5.0  # time to deliver the current message and the status to a caller that is cut off

MAX_METADATA = 200  # entries of one call; gRPC itself limits their bytes, but not before a client acknowledges SETTINGS
SMALL = 16 << 10  # bytes: smaller messages are not counted, because the call itself takes more

_who: ContextVar[Principal] = ContextVar("who")  # of the call of this task


class Caller(NamedTuple):
    """The caller of a method, the call, and `cut`, which ends the call with an error even if it waits for its caller.

    `hold` counts the bytes of the page from which a stream sends, in place of the page before; it raises Busy.
    """

    who: Principal
    address: str
    context: aio.ServicerContext[Any, Any]
    cut: Callable[[HeadwaterError], None]
    hold: Callable[[int], None] = lambda size: None


Answer = Callable[[Caller, Any], Awaitable[Any]]  # one request, one answer: a message, or its bytes
Pour = Callable[[Caller, Any], AsyncIterator[Any]]  # one request, many answers


class Service:
    """A service: its name in the .proto file, and its methods."""

    service: str

    def methods(self) -> Mapping[str, Answer | Pour]:
        """Return the methods by name; the .proto file defines which of them stream."""
        raise NotImplementedError

    def drain(self) -> None:
        """End every stream that does not end on its own, after its last message."""


class AuthInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Authenticates every caller before the method is looked up."""

    def __init__(self, gate: Gate, limits: Limits, unread: UnreadAnswers) -> None:
        self._gate, self._limits, self._unread = gate, limits, unread
        self._health = RequestSlots(total=8, each=4, waiting=64, seconds=HEALTH_SECONDS)
        self._reflection = RequestSlots(total=16, each=4, waiting=64, seconds=REQUEST_SECONDS)

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of the method, or one that rejects the call."""
        if (sent := len(details.invocation_metadata or ())) > MAX_METADATA:
            hint = f"Send at most {MAX_METADATA}."
            return _refusing(RequestTooLarge(f"the call has {sent} metadata entries", hint=hint), self._limits)
        if details.method.startswith(HEALTH):
            found = await continuation(details)
            return receive_by(self._health, found, lambda context: place_of(address_of(context)), self._unread)
        try:
            who = self._gate.admit_call(_headers(details))
        except HeadwaterError as error:
            return _refusing(error, self._limits)
        _who.set(who)
        found = await continuation(details)

        def admit(context: aio.ServicerContext[Any, Any]) -> None:
            self._limits.ask(self._gate.recheck(who), address_of(context))

        key: Key = lambda context: identity(who, address_of(context))  # noqa: E731
        return receive_by(self._reflection, found, key, self._unread, admit)


Key = Callable[[aio.ServicerContext[Any, Any]], Hashable]


def receive_by(
    slots: RequestSlots,
    handler: Any,
    key: Key,
    unread: UnreadAnswers,
    admit: Callable[[aio.ServicerContext[Any, Any]], None] = lambda context: None,
) -> Any:
    """Return a handler that receives small requests by `slots`, and answers INVALID_ARGUMENT to undecodable ones.

    `admit` is called for each request, and raises an error if the caller may not send it.

    For the health and reflection services: gRPC itself would wait for their requests without a limit, and would log a
    traceback for each malformed one.
    """
    if handler is None or handler.request_deserializer is None:
        return handler

    async def receive(context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            data = await slots.receive(key(context), context)
            if data is not None:
                admit(context)
        except HeadwaterError as error:
            await abort(context, error)
        if data is None:
            return None
        if len(data) > MAX_OPEN_REQUEST:
            await abort(context, RequestTooLarge(f"the message is larger than {MAX_OPEN_REQUEST} bytes"))
        try:
            return handler.request_deserializer(data)
        except Exception:
            await abort(context, InvalidRequest("the request is not a message of this method"))

    async def answer_one(_: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        request = await receive(context)
        if request is None:
            await abort(context, InvalidRequest("the request has no message"))
        if handler.unary_unary is None:
            return await handler.unary_stream(request, context)
        answer = await handler.unary_unary(request, context)
        try:
            unread.add(context, 0)
        except HeadwaterError as error:
            await abort(context, error)
        return answer

    async def answer_stream(_: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[Any]:
            while (request := await receive(context)) is not None:
                yield request

        try:
            async for answer in handler.stream_stream(requests(), context):
                with unread.sending(context):
                    yield answer
        except HeadwaterError as error:
            await abort(context, error)

    # A handler for a stream of requests fits a call of any kind, and reads the requests itself.
    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(answer_one, response_serializer=handler.response_serializer)
    answer = answer_one if handler.unary_stream is not None else answer_stream
    return grpc.stream_stream_rpc_method_handler(answer, response_serializer=handler.response_serializer)


class Calls:
    """Turns the methods of the services into handlers of gRPC."""

    def __init__(
        self,
        gate: Gate,
        limits: Limits,
        metrics: Metrics,
        databases: ManagedDatabases,
        bridge: Bridge,
        config: ServeConfig,
        unread: UnreadAnswers,
    ) -> None:
        self._gate, self._limits, self._metrics, self._max_bytes = gate, limits, metrics, config.max_body_bytes
        self._databases, self._bridge, self._unread = databases, bridge, unread
        self._stalls = StalledCalls(config.stall_seconds)
        waiting = config.max_streams_per_client
        self._slots = RequestSlots(total=16, each=6, waiting=waiting, seconds=REQUEST_SECONDS)

    def one(self, name: str, request: str, answer: Answer) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method with one answer."""

        async def handle(_: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            async with _Call(name, context, self._metrics, self._max_bytes) as call:
                caller = self._admitted(context, call)
                asked = await self._asked(caller, call, request)
                db = await self._limits.of_call(asked)
                self._limits.enter(caller.who, db)
                waits = bool(getattr(asked, "wait_ms", 0))
                with self._limits.count_stream(caller.who, db, caller.address) if waits else nullcontext():
                    call.answer = _bytes(await answer(caller, asked))
                if waits:
                    self._gate.recheck(caller.who)  # the credential may have ended before the answer was ready
                if len(call.answer) > SMALL:
                    call.hold()
                self._unread.add(context, len(call.answer))
            return call.answer

        return grpc.stream_unary_rpc_method_handler(handle, response_serializer=_bytes)  # reads the request itself

    def many(self, name: str, request: str, pour: Pour) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method with a stream of answers, which ends with the caller's credential."""

        async def handle(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            async with _Call(name, context, self._metrics, self._max_bytes, self._unread.close) as call:
                caller = self._admitted(context, call)
                asked = await self._asked(caller, call, request)
                db = await self._limits.of_call(asked)
                self._limits.enter(caller.who, db)
                staying = self._limits.count_stream(caller.who, db, caller.address)
                with staying, self._gate.sessions.during(caller.who, call.expire), self._stalls.watch(call):
                    answers = pour(caller, asked)
                    del asked  # the stream may stay open for long
                    try:
                        async for each in answers:
                            await call.write(_bytes(each))
                            del each  # the caller has received it, and the next one may follow much later
                    finally:
                        call.page.release()
                        await answers.aclose()  # type: ignore[attr-defined]  # every one is a generator

        return grpc.stream_stream_rpc_method_handler(handle, response_serializer=_bytes)  # reads the request itself

    def none(self, path: str, services: Sequence[str]) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of an unknown method. Unauthenticated callers must not learn which methods exist."""
        is_open = path.startswith(HEALTH)
        hint = (
            "It has Check and Watch." if is_open else f"Services are {', '.join(services)}; reflection lists methods."
        )
        error = NotSupported(f"there is no method {path[:200]}", hint=hint)

        async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
            async with _Call("unknown", context, self._metrics, self._max_bytes) as call:
                if not is_open:
                    self._admitted(context, call)
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)  # fits a call of any kind

    def _admitted(self, context: aio.ServicerContext[Any, Any], call: _Call) -> Caller:
        """Return the caller; Unauthorized if the credential has ended, LimitExceeded if the caller exceeds its rate."""
        caller = Caller(self._gate.recheck(_who.get()), address_of(context), context, call.cut, call.hold_page)
        call.redact = lambda error: without_hidden_names(error, caller.who, self._databases)
        call.unread, call.page = (Unread(caller.who, caller.address) for _ in range(2))
        self._limits.ask(caller.who, caller.address)
        return caller

    async def _asked(self, caller: Caller, call: _Call, request: str) -> Any:
        """Return the request as a message; a large one is decoded in a thread."""
        data = await self._received(caller)
        if len(data) <= LARGE:
            return call.read(request, data)
        call.body = BodyReservation(caller.address)
        call.body.take(len(data))
        CALLER.set(caller.who.account)
        asked = await self._bridge.call(call.read, request, data)
        self._gate.recheck(caller.who)  # the credential may have ended while a thread decoded the request
        return asked

    async def _received(self, caller: Caller) -> bytes:
        """Return the request. Raises Busy, InvalidRequest, and Unauthorized if the credential has ended."""
        data = await self._slots.receive(identity(caller.who, caller.address), caller.context)
        if data is None:
            raise InvalidRequest("the request has no message", hint="Send one message, which may be empty.")
        self._gate.recheck(caller.who)
        return bytes(data)


class _Call:
    """One call: counts it, and reports its failure to the caller."""

    def __init__(
        self,
        name: str,
        context: aio.ServicerContext[Any, Any],
        metrics: Metrics,
        max_bytes: int,
        close: Callable[[str, str], None] = lambda peer, why: None,
    ) -> None:
        self._name, self._context, self._metrics, self._max_bytes = name, context, metrics, max_bytes
        self._close = close  # closes a connection
        self._task = asyncio.current_task()
        self._cut: HeadwaterError | None = None
        self._writing = False
        self._written = 0  # messages
        self._last: asyncio.TimerHandle | None = None  # ends the call if the current message is not received in time
        self.body: BodyReservation | None = None  # of a large request, which a stream keeps until it ends
        self.answer = b""
        self.unread = self.page = Unread(ANONYMOUS, "")  # until the caller is known
        self.redact: Callable[[HeadwaterError], HeadwaterError] = lambda error: error  # removes hidden names

    def read(self, message: str, data: bytes) -> Any:
        """Return the decoded request; InvalidRequest if it is invalid or too large."""
        if len(data) > self._max_bytes:
            raise RequestTooLarge(
                f"the message is larger than {self._max_bytes} bytes", hint="Split it into several calls."
            )
        try:
            return decode(message, data)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def hold(self) -> None:
        """Count the answer until gRPC has sent it, or the call has ended. Raises Busy if too many bytes are unread."""
        self.unread.hold(len(self.answer))
        done: Any = lambda _: self.unread.release()  # noqa: E731  # the stubs name its argument
        self._context.add_done_callback(done)

    def hold_page(self, size: int) -> None:
        """Count a page of `size` bytes besides the current message, in place of the previous page; raise Busy."""
        self.page.release()
        if size > SMALL:
            self.page.hold(size)

    def expire(self) -> None:
        """End the call because its credential is no longer valid."""
        self.cut(Unauthorized("the credential was revoked, or has expired", expired=True))

    async def write(self, message: bytes) -> None:
        """Send one answer of a stream, counted until it is sent. Raises Busy if too many bytes are unread."""
        if len(message) > SMALL:
            self.unread.hold(len(message))
        self._writing = True
        try:
            await self._context.write(message)
        except aio.InternalError as error:  # the caller has disconnected
            raise asyncio.CancelledError from error
        finally:
            self.unread.release()
        self._writing = False
        self._written += 1
        if self._cut is not None:
            raise self._cut

    @property
    def pending(self) -> int | None:
        """Return the number of the message that the caller has not received yet; None if there is none."""
        return self._written if self._writing else None

    def cut(self, error: HeadwaterError) -> None:
        """End the call with `error` after the message being written; if that takes too long, close the connection."""
        if self._cut is None and self._task is not None:
            self._cut = error
            if self._writing:
                self._last = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._close_unread, self._task)
            else:
                self._task.cancel()

    def _close_unread(self, task: asyncio.Task[Any]) -> None:
        """End the call with its connection: until that ends, the gRPC library would keep the unread message."""
        task.cancel()
        self._close(self._context.peer(), "it has left a message of a stream unread")

    async def __aenter__(self) -> _Call:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._last is not None:
            self._last.cancel()
        if self.body is not None:
            self.body.release()
        if error is None or isinstance(error, aio.AbortError):
            self._metrics.called(self._name, "OK" if error is None else "aborted")
            return
        if isinstance(error, asyncio.CancelledError):
            if self._cut is None or self._writing:
                self._metrics.called(self._name, "CANCELLED")
                return  # the caller disconnected or does not read, or the server stops
            if self._task is not None:
                self._task.uncancel()
            error = self._cut
        if not isinstance(error, HeadwaterError):
            error = Unavailable("the server is stopping") if isinstance(error, aio.UsageError) else _defect(error)
        error = self.redact(error)
        self._metrics.called(self._name, error.grpc_status)
        await abort(self._context, error)


async def abort(context: aio.ServicerContext[Any, Any], error: HeadwaterError) -> None:
    """End the call with `error`, unless gRPC has ended it already, as it does for a message over its size limit."""
    try:
        await context.abort(errors.status(error), errors.text(error), errors.trailers(error))
    except aio.InternalError as ended:
        raise asyncio.CancelledError from ended  # gRPC logs a traceback for any other error


def _defect(error: BaseException) -> HeadwaterError:
    if not isinstance(error, Exception):
        raise error
    return unexpected(error, "gRPC")


def address_of(context: aio.ServicerContext[Any, Any]) -> str:
    """Return the address of the caller."""
    return address_in(context.peer())


def _headers(details: grpc.HandlerCallDetails) -> list[tuple[bytes, bytes]]:
    pairs = details.invocation_metadata or ()
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in pairs]


def _refusing(error: HeadwaterError, limits: Limits) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        why = error
        try:
            limits.count_rejected_credential(address_of(context))
        except LimitExceeded as too_often:
            why = too_often
        await abort(context, why)

    return grpc.stream_stream_rpc_method_handler(refuse)  # fits a call of any kind


def _bytes(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())
