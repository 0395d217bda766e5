"""The stream routes: each opens a stream of the feeds and sends its pieces to one reader."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import MutableMapping
from typing import Annotated, Any

import msgspec

from headwater.errors import Busy, HeadwaterError, InvalidRequest, LimitExceeded, Unauthorized
from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.end_reason import CLOSED, COMPLETE, RESNAPSHOT_REQUIRED, STOPPING, EndReason
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import ReaderPosition, Transport
from headwater.feeds.feeds import Feeds
from headwater.feeds.groups.group import PIECE
from headwater.feeds.snapshot import Position
from headwater.model import json_decoder
from headwater.model.principal import VIEWER
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.serve.auth.open_sessions import ENDED, Sessions
from headwater.serve.call import (
    ARROW_KIND,
    EVENT_STREAM,
    NDJSON_KIND,
    Aborted,
    Call,
    Handler,
    Handlers,
    Headers,
    Send,
    gone,
    wanted_kind,
)
from headwater.serve.http import transport_frames, websocket_protocol
from headwater.serve.http.handlers.queries import args_in
from headwater.serve.http.query_string import changes_asked, number
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.slow_reader_limits import drop, writable_of
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.limits.unread_answers import Unread
from headwater.serve.rpc.query_params import lits_of

SSE = Transport("sse", transport_frames.sse, ping=transport_frames.SSE_PING, farewell=transport_frames.SSE_FAREWELL)
WS = Transport("websocket", transport_frames.websocket)
NDJSON = Transport("ndjson", transport_frames.ndjson, ping=b"\n")
UNBUFFERED: Headers = [(b"cache-control", b"no-store, no-transform"), (b"x-accel-buffering", b"no")]

LARGE_PIECE = 2 * PIECE  # bytes: only a piece with large rows has more
_LAST_ID = re.compile(r"\d{1,18}|s:[A-Za-z0-9_-]{1,4096}", re.ASCII)
BAD_FRAME = "bad_frame"  # the stream ended because its client sent an invalid frame
CLOSE = {CLOSED: 1000, COMPLETE: 1000, STOPPING: 1012, RESNAPSHOT_REQUIRED: 4410, BAD_FRAME: 1008}
CLOSE |= {Unauthorized.code: 4401, LimitExceeded.code: 4429}
_cut = LogThrottle()
logger = logging.getLogger("headwater.serve")
OTHER_CLOSE = 4400  # ended by an error, which was sent before


class Frame(msgspec.Struct, forbid_unknown_fields=True):
    """A message from a WebSocket client."""

    ack: Annotated[int, msgspec.Meta(ge=0)] | str | None = None
    pause: bool | None = None


_frames = json_decoder.decoder(Frame)


class Streams:
    """The handlers of streams over HTTP and WebSocket."""

    def __init__(self, feeds: Feeds, limits: Limits, sessions: Sessions | None = None) -> None:
        self._feeds, self._limits, self._sessions = feeds, limits, sessions or Sessions()

    def handlers(self) -> Handlers:
        """Return the handlers of the HTTP routes."""
        found: Handlers = {"sse": self._sse, "query_events": self._query_events, "changes": self._changes}
        return {name: self._limited(handler) for name, handler in found.items()}

    def websockets(self) -> Handlers:
        """Return the handlers of the WebSocket routes."""
        found: Handlers = {"ws": self._subscription_socket, "query_events": self._query_socket}
        return {name: self._limited(handler) for name, handler in found.items()}

    def downloads(self, handlers: Handlers) -> Handlers:
        """Return `handlers`, wrapped so that their answers count as streams and end with the caller's credential."""

        def guarded(handler: Handler) -> Handler:
            async def answer(call: Call) -> int:
                with self._sessions.cancelling(call.who, lambda: drop(call.scope), lambda: call.started):
                    return await handler(call)

            return answer

        return {name: self._limited(guarded(handler)) for name, handler in handlers.items()}

    def _limited(self, handler: Handler) -> Handler:
        async def answer(call: Call) -> int:
            call.who.need(VIEWER, "a stream")
            with self._limits.count_stream(
                call.who, self._limits.of_path(call.who, call.values), client_of(call.scope)
            ):
                return await handler(call)

        return answer

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _sse(self, call: Call) -> int:
        stream = await self._feeds.open(call.who, call.values["sub_id"], SSE, begin(call))
        return await self._pour(call, stream, EVENT_STREAM, transport_frames.SSE_OPENING)

    async def _query_events(self, call: Call) -> int:
        stream = await self._open_query(call, SSE)
        return await self._pour(call, stream, EVENT_STREAM, transport_frames.sse_opening(stream.log_offset))

    async def _open_query(self, call: Call, opening: Transport) -> Stream:
        args = lits_of(args_in(call.query.get("args")))
        return await self._feeds.open_query(call.who, call.values["query_id"], args, opening, begin(call))

    async def _changes(self, call: Call) -> int:
        params, upto = changes_asked(call.values, call.query)
        kind = wanted_kind(call.joined(b"accept"), (EVENT_STREAM, NDJSON_KIND, ARROW_KIND))
        if kind == ARROW_KIND:
            batches = await self._feeds.open_batches(call.who, params, begin(call), upto=upto)
            return await self._pour(call, batches, kind, b"")
        opening = SSE if kind == EVENT_STREAM else NDJSON
        stream = await self._feeds.open_changes(call.who, params, opening, begin(call), upto=upto)
        first = transport_frames.sse_opening(stream.log_offset) if kind == EVENT_STREAM else b""
        return await self._pour(call, stream, kind, first)

    async def _pour(self, call: Call, stream: Stream | Batches, kind: bytes, first: bytes) -> int:
        """Send the pieces of the stream until it ends or the reader disconnects."""
        send = call.send
        leaving = asyncio.ensure_future(gone(call.receive))
        leaving.add_done_callback(lambda _: stream.leave())
        try:
            headers = [(b"content-type", kind), *UNBUFFERED]
            await call.start(200, headers)
            if call.scope["method"] == "HEAD":
                stream.leave()
            elif first:
                await send({"type": "http.response.body", "body": first, "more_body": True})
            with self._sessions.during(call.who, lambda: _expire(call, stream)):
                await _carry(call, stream, {"type": "http.response.body", "more_body": True}, "body")
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()
            self._feeds.close_stream(stream)
        return 200

    # --- WebSocket ---------------------------------------------------------------------------------------------------

    async def _subscription_socket(self, call: Call) -> int:
        return await self._websocket(call, await self._feeds.open(call.who, call.values["sub_id"], WS, begin(call)))

    async def _query_socket(self, call: Call) -> int:
        return await self._websocket(call, await self._open_query(call, WS))

    async def _websocket(self, call: Call, stream: Stream) -> int:
        """Accept the WebSocket and send the stream's frames until it ends."""
        try:
            await call.send({"type": "websocket.accept"})
            listening = asyncio.ensure_future(self._listen(call, stream))
            try:
                with self._sessions.during(call.who, lambda: _expire(call, stream)):
                    await _carry(call, stream, {"type": websocket_protocol.FRAMES}, "frames")
                await call.send({"type": "websocket.close", **closing(stream.ending)})
            finally:
                listening.cancel()
        except websocket_protocol.Gone:
            pass
        finally:
            self._feeds.close_stream(stream)
        return 101

    async def _listen(self, call: Call, stream: Stream) -> None:
        """Receive the client's messages: acks and pauses."""
        while True:
            message = await call.receive()
            if message["type"] == "websocket.disconnect":
                stream.leave()
                return
            try:
                await self._obey(call, message)
            except (InvalidRequest, msgspec.MsgspecError, ValueError) as error:
                stream.refuse(BAD_FRAME, f"{getattr(error, 'message', error)}")
                return
            except HeadwaterError as error:
                stream.refuse(error.code, error.message)
                return
            websocket_protocol.answered(call.scope, message.get(websocket_protocol.SIZE, 0))

    async def _obey(self, call: Call, message: MutableMapping[str, Any]) -> None:
        text = message.get("text")
        if text is None:
            raise InvalidRequest('frames are JSON text, such as {"ack": 17}')
        frame = _frames.decode(text)
        if "sub_id" not in call.values:
            raise InvalidRequest("this stream has no subscription that can be acknowledged or paused")
        self._limits.ask(call.who, client_of(call.scope))
        self._limits.enter(call.who, self._limits.of_path(call.who, call.values))
        if frame == Frame():
            raise InvalidRequest('the frame has no field; send, for example, {"ack": 17} or {"pause": true}')
        id, subscriptions = call.values["sub_id"], self._feeds.subscriptions
        if isinstance(frame.ack, str):
            place = frame.ack.removeprefix("s:")
            await self._feeds.run(subscriptions.ack, call.who, id, None, place)
        elif frame.ack is not None:
            await self._feeds.run(subscriptions.ack, call.who, id, frame.ack, None)
        if frame.pause is not None:
            await self._feeds.run(subscriptions.pause, call.who, id, frame.pause)


def _expire(call: Call, stream: Stream | Batches) -> None:
    """End a stream whose credential is no longer valid, with an error if the transport allows it."""
    drop(call.scope)
    if isinstance(stream, Stream):
        stream.stop(Unauthorized(ENDED))
    else:
        stream.leave()


async def _carry(call: Call, stream: Stream | Batches, frame: dict[str, Any], field: str) -> None:
    """Send every piece of `stream` in a task of its own, for cheap wake-ups; Aborted if too much is unread."""
    unread = Unread(call.who, client_of(call.scope))
    carrying = asyncio.ensure_future(_pieces(call.raw, stream, frame, field, writable_of(call.scope), unread))
    try:
        await carrying
    except Busy as error:
        # The piece was not sent, but the stream is past it: a clean end would hide that from the reader.
        if (left_out := _cut.again("cut", time.monotonic())) is not None:
            logger.warning(counted(f"a stream of {call.who.name!r} was cut: {error.message}", left_out))
        raise Aborted from None
    finally:
        carrying.cancel()
        unread.release()


async def _pieces(
    send: Send, stream: Stream | Batches, frame: dict[str, Any], field: str, writable: asyncio.Event, unread: Unread
) -> None:
    """Send pieces, taking each only when it can be written: a stalled reader then holds no further piece.

    Pieces with large rows are counted until the reader has taken them. Raises Busy if too many are unread.
    """
    ready, is_counted = stream.ready, False
    while True:
        if not writable.is_set():
            piece = None  # HTTP has written a copy
            await writable.wait()
        if is_counted:
            unread.release()
            is_counted = False
        piece = ready()
        if piece is None:
            piece = await stream.next()
            if piece is None:
                return
        if piece:
            if len(piece) > LARGE_PIECE:
                unread.hold(len(piece))
                is_counted = True
            await send({**frame, field: piece})
        else:
            await stream.news()


def begin(call: Call) -> ReaderPosition:
    """Return the reader's position in `from_offset` and Last-Event-ID; an empty header counts as none."""
    offset = number(call.query, "from_offset")
    last_id = call.header(b"last-event-id").decode("latin-1").strip()
    if last_id and not _LAST_ID.fullmatch(last_id):
        raise InvalidRequest("invalid Last-Event-ID header", hint="Send the id of the last frame you received.")
    found = ReaderPosition(offset, last_id)
    if found.snapshot_cursor:
        Position.parse(found.snapshot_cursor)  # rejected here, whether or not there is a snapshot to resume
    return found


def closing(ending: EndReason | None) -> dict[str, Any]:
    """Return the close code and reason of a WebSocket."""
    assert ending is not None
    reason = f"{ending.code}: {ending.message}".encode()[:120].decode("utf-8", "ignore")
    return {"code": CLOSE.get(ending.code, OTHER_CLOSE), "reason": reason}
