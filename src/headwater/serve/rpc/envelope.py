"""The RPC envelope: decodes a request, calls its method and encodes the answer or the error."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec

from headwater.errors import Forbidden, HeadwaterError, InvalidRequest, UnsupportedVersion
from headwater.model import json_decoder
from headwater.model.principal import OWNER, VIEWER, Principal
from headwater.model.work.answer_limits import UNCOUNTED
from headwater.model.work.work_context import CALLER
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.serve.api import Api
from headwater.serve.limits.limits import Limits, identity
from headwater.serve.limits.request_body import LARGE as LARGE_BODY
from headwater.serve.limits.request_body import MAX_ELEMENTS, MAX_WRITTEN, check_elements, no_json
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc import params
from headwater.serve.rpc.body_pieces import Pieces, encode_with, is_small
from headwater.serve.rpc.hidden_names import without_hidden_names
from headwater.serve.rpc.methods import METHODS, Method, refusal
from headwater.serve.thread_bridge import Bridge
from headwater.sources.write import Result, WriteResult

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = "1.0"
SQL_ID = "sql.exec.http"
LARGE = 8 << 10  # bytes of parameters: converting more would block the event loop
_EXAMPLE = 'Send one JSON object, such as {"id": 1, "method": "system.ping", "params": {}}.'
_SQL_EXAMPLE = 'Send one JSON object, such as {"sql": "SELECT 1", "args": []}.'
MAX_ID = 4_096  # characters; the id is sent back with every answer

Id = Annotated[str, msgspec.Meta(max_length=MAX_ID)] | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None
Reply = tuple[int, bytes | Pieces]  # HTTP status and body


class TooOften(Exception):
    """A request over the rate limit of its database; `body` is the error response."""

    def __init__(self, error: HeadwaterError, body: bytes) -> None:
        super().__init__(error.message)
        self.error, self.body = error, body


class Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """A request. Without an id (or with null) it is a notification, and gets no answer."""

    method: str
    skeinql: msgspec.Raw = msgspec.Raw(b'"1.0"')  # not decoded: it can have millions of elements
    id: Id = None
    params: msgspec.Raw = msgspec.Raw(b"")


class _RequestId(msgspec.Struct):
    """The id of a request whose other fields cannot be decoded."""

    id: Id = None


class _Object(msgspec.Struct):
    """Any JSON object."""


_envelopes = json_decoder.decoder(Envelope)
_ids, _objects = json_decoder.decoder(_RequestId), json_decoder.decoder(_Object)
_whole = msgspec.json.Decoder(msgspec.Raw)
_encode = msgspec.json.Encoder().encode
_PARAMS = {method.name: json_decoder.decoder(method.params) for method in METHODS.values()}
_BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


def error_body(id: str | int | None, error: HeadwaterError) -> bytes:
    """Return an error envelope."""
    body: dict[str, Any] = {"code": error.code, "message": clean(error.message)}
    if error.details:
        body["details"] = clean(error.details)
    return _encode({"id": id, "ok": False, "error": body})


def unexpected(error: Exception, doing: str) -> HeadwaterError:
    """Log a defect of the server and return the error for the caller, which names only the log entry."""
    request = uuid.uuid4().hex
    log.error("request %s failed in %s", request, doing, exc_info=error)
    return HeadwaterError("internal error", hint="Search the server's log for the request_id.", request_id=request)


class Rpc:
    """Answers envelopes. Raises nothing but cancellation and TooOften."""

    def __init__(self, api: Api, bridge: Bridge, metrics: Metrics, limits: Limits) -> None:
        self._api = api
        self._bridge = bridge
        self._metrics = metrics
        self._limits = limits

    async def envelope(self, who: Principal, body: bytes, client: str) -> Reply:
        """Return the answer to the request in `body`."""
        try:
            request = await self._decode(who, len(body) > LARGE_BODY, _envelope, body)
        except HeadwaterError as error:  # the threads are busy or stopped
            return error.status, error_body(None, error)
        if isinstance(request, tuple):
            return request
        status, reply = await self._answer(who, request, client)
        return (204, b"") if request.id is None else (status, reply)

    async def sql(self, who: Principal, body: bytes, client: str) -> Reply:
        """Return the answer to `body`, the bare parameters of sql.exec."""
        method = METHODS["sql.exec"]
        try:
            who.need(method.role, method.name, method.instead)
            fault = await self._decode(who, len(body) > LARGE_BODY, _no_object, body, _SQL_EXAMPLE)
        except Forbidden:
            return await self._answer(who, Envelope(method.name, id=SQL_ID), client)  # rejects and counts it
        except HeadwaterError as error:  # the threads are busy or stopped
            return error.status, error_body(SQL_ID, error)
        if fault is not None:
            return 400, error_body(SQL_ID, fault)
        return await self._answer(who, Envelope(method.name, id=SQL_ID, params=msgspec.Raw(body)), client)

    async def _decode(self, who: Principal, in_thread: bool, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, which decodes JSON, in a thread if `in_thread`."""
        if not in_thread:
            return function(*args)
        CALLER.set(who.account)
        return await self._bridge.call(function, *args)

    async def _answer(self, who: Principal, request: Envelope, client: str) -> Reply:
        started = time.perf_counter()
        code, refused = "ok", None
        try:
            result = await self._call(who, request, client)
            reply: bytes | Pieces = encode_with({"id": request.id, "ok": True, "result": result})
            if isinstance(reply, bytes) and len(reply) > UNCOUNTED and _is_read(request.method):
                reply = Pieces.of(reply)
            if isinstance(reply, Pieces) and who.role != OWNER:
                reply.charge(identity(who, client))
        except HeadwaterError as error:
            code, reply = error.code, error_body(request.id, without_hidden_names(error, who, self._api.databases))
            refused = error if "retry_after_ms" in error.extra else None
        except RecursionError:
            deep = InvalidRequest("the request is nested too deeply", hint="Send a request with fewer nested levels.")
            code, reply = deep.code, error_body(request.id, deep)
        except MemoryError:
            large = InvalidRequest("the answer does not fit in memory", hint="Request fewer or smaller values.")
            code, reply = large.code, error_body(request.id, large)
        except Exception as error:
            code, reply = "internal", error_body(request.id, unexpected(error, request.method))
        self._metrics.answered(request.method, code, time.perf_counter() - started)
        if refused is not None and request.id is not None:
            assert isinstance(reply, bytes)
            raise TooOften(refused, reply)
        return 200, reply

    async def _call(self, who: Principal, request: Envelope, client: str) -> Any:
        version = _version(request.skeinql)
        if version != VERSION:
            raise UnsupportedVersion(f"skeinql version {str(version)[:40]!r} is not supported")
        method = METHODS.get(request.method)
        if method is None:
            raise refusal(request.method)
        who.need(method.role, method.name, method.instead)
        with memoryview(request.params) as view:
            size = view.nbytes
        found = await self._decode(who, size > LARGE_BODY, _params, method, request.params)
        db = self._limits.of_params(who, found)
        self._limits.enter(who, db)
        if isinstance(found, (params.Poll, params.PullDescribe, params.PullChangedTables)) and found.wait_ms:
            with self._limits.count_stream(who, db, client):
                result = await self._run(who, method, found)
                self._check_credential(who)  # the credential may have ended during the wait
                return result
        return await self._run(who, method, found, is_large=size > LARGE)

    async def _run(self, who: Principal, method: Method, found: params.Params, *, is_large: bool = False) -> Any:
        if method.blocking:
            if isinstance(found, (params.Ack, params.Seek, params.Subscription)):
                await self._api.feeding().check_subscription(who, found.sub_id)  # needs the event loop
            result = await self._bridge.call(self._block, who, method, found)
        elif is_large:
            result = await self._bridge.call(self._call_in_thread, who, method, found)
        else:
            result = method.call(self._api, who, found)
        if isinstance(result, PendingAnswer):
            value = await self._bridge.wait(result.future)
            if isinstance(value, WriteResult) and isinstance(value.value, Result) and not is_small(value.value):
                return await self._bridge.call(result.finish, value)
            return result.finish(value)
        return await result if isinstance(result, Coroutine) else result

    def _check_credential(self, who: Principal) -> None:
        if self._api.gate is not None:
            self._api.gate.recheck(who)

    def _call_in_thread(self, who: Principal, method: Method, found: params.Params) -> Any:
        """Call a method in a thread: before its first await, it converts parameters that are large."""
        self._check_credential(who)  # the credential may have ended while the call waited for a thread
        return method.call(self._api, who, found)

    def _block(self, who: Principal, method: Method, found: params.Params) -> Any:
        """Call a blocking method and encode its result, in a thread: a large answer would block the event loop."""
        self._check_credential(who)  # the credential may have ended while the call waited for a thread
        result = method.call(self._api, who, found)
        if isinstance(result, PendingAnswer):
            return result
        encoded = encode_with(result)
        return encoded if isinstance(encoded, Pieces) else msgspec.Raw(encoded)


def _version(raw: msgspec.Raw) -> Any:
    """Return the decoded version; if it is too long to be ours, or is not a value, the first 40 bytes of its JSON."""
    with memoryview(raw) as view:
        begin = bytes(view[:40])
    if len(begin) <= len(r'"\u0031\u002e\u0030"'):
        with suppress(*_BAD_JSON):  # the envelope's decoder does not check a raw value
            return msgspec.json.decode(begin)
    return begin.decode(errors="replace")


def _is_read(name: str) -> bool:
    """Return whether the method only reads: the answer to a finished write must not be rejected."""
    return name in METHODS and METHODS[name].role == VIEWER


def _params(method: Method, raw: msgspec.Raw) -> params.Params:
    with memoryview(raw) as view:
        absent = view.nbytes <= 4 and bytes(view) in (b"", b"null")
        if view.nbytes > LARGE_BODY:
            check_elements(bytes(view), MAX_ELEMENTS if method.role == VIEWER else MAX_WRITTEN)
    try:
        found: params.Params = params.decode(_PARAMS[method.name], b"{}" if absent else raw)
    except InvalidRequest:
        if absent:
            hint = f"{method.name} needs a `params` object: {params.shape(method.params)}."
            raise InvalidRequest("missing params", hint=hint) from None
        raise
    return found


def _envelope(body: bytes) -> Envelope | Reply:
    """Return the request in `body`, or an error response if it contains none."""
    try:
        return _envelopes.decode(body)
    except _BAD_JSON as error:
        return _no_envelope(body, error)


def _no_envelope(body: bytes, error: Exception) -> Reply:
    """Return the error for a `body` that is not a request: status 400, or 200 with the request's id for an object."""
    fault = _no_object(body, _EXAMPLE)
    if fault is not None:
        return 400, error_body(None, fault)
    try:
        id = _ids.decode(body).id
    except _BAD_JSON:
        id = None
    return 200, error_body(id, params.explain(error, "request", Envelope))


def _no_object(body: bytes, hint: str) -> InvalidRequest | None:
    """Return an error if `body` is not a JSON object; a large one is checked without building its values."""
    try:
        if len(body) <= LARGE_BODY:
            json_decoder.decode(body)
        else:
            _whole.decode(body)
        _objects.decode(body)
    except msgspec.ValidationError:
        return InvalidRequest("the body is not a JSON object", hint=hint)
    except _BAD_JSON as fault:
        return no_json(body, fault, hint)
    return None


def clean(found: Any) -> Any:
    """Return `found` with every text valid for JSON: a name in the database need not be valid Unicode."""
    if isinstance(found, dict):
        return {name: clean(value) for name, value in found.items()}
    return found.encode("utf-8", "backslashreplace").decode() if isinstance(found, str) else found
