"""One client of the JSON gateway: requests are answered in order, subscriptions are sent concurrently.

    frames ──> inbox (bounded) ──> answers ──┐
                                             ├──> one write at a time ──> socket
    subscriptions, each a cursor ──> pieces ─┘

While a client does not read, nothing is written: its subscriptions stay at their cursors, its requests unread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from headwater.errors import Busy, HeadwaterError, InvalidRequest, LimitExceeded, NotFound, Unauthorized
from headwater.feeds.deliver.end_reason import CLOSED, STOPPING, EndReason
from headwater.feeds.deliver.stream import Stream
from headwater.serve.call import Call
from headwater.serve.gateway.messages import error_payload, event_frames, fragments, frame
from headwater.serve.http import websocket_protocol
from headwater.serve.http.handlers.streams import LARGE_PIECE, closing
from headwater.serve.limits.slow_reader_limits import drop, writable_of
from headwater.serve.limits.stream_limits import client_of
from headwater.serve.limits.unread_answers import Unread
from headwater.serve.rpc.body_pieces import Pieces
from headwater.serve.rpc.envelope import unexpected

MOST_WAITING, MOST_BYTES = 64, 1 << 20  # requests that wait for their turn; beyond it reading stops
UNCOUNTED_PIECE = 16 << 10  # bytes: a smaller piece that waits for its turn is not counted as unread
MOST_SUBSCRIPTIONS = 64  # each may hold a piece while the client does not read
SERVER_STOPS = EndReason(STOPPING, "the server is stopping")
CLOSE_SECONDS = 5.0  # to send the close frame to a client that does not read

Answer = Callable[["GatewaySocket", str | None], Awaitable[None]]


class ReceivedRequest(NamedTuple):
    """The text of a frame (None: a binary frame), and the frame's size in memory."""

    text: str | None
    size: int


class Inbox:
    """A bounded queue of requests."""

    def __init__(self) -> None:
        self._waiting: deque[ReceivedRequest] = deque()
        self._bytes = 0
        self._moved = asyncio.Event()

    async def put(self, received: ReceivedRequest) -> None:
        """Add a request; wait while the queue is full."""
        while len(self._waiting) >= MOST_WAITING or self._bytes >= MOST_BYTES:
            await self._wait()
        self._waiting.append(received)
        self._bytes += received.size
        self._moved.set()

    async def take(self) -> ReceivedRequest:
        """Remove and return the oldest request; wait while the queue is empty."""
        while not self._waiting:
            await self._wait()
        received = self._waiting.popleft()
        self._bytes -= received.size
        self._moved.set()
        return received

    async def _wait(self) -> None:
        self._moved.clear()
        await self._moved.wait()


class GatewaySocket:
    """Serves one client until it disconnects or the server ends it. Not thread-safe."""

    def __init__(self, call: Call, answer: Answer, *, most: int) -> None:
        self.who, self.client = call.who, client_of(call.scope)
        self._call, self._answer, self._most = call, answer, most
        self._inbox = Inbox()
        self._writing = asyncio.Lock()
        self._ended: asyncio.Future[EndReason | None] = asyncio.get_running_loop().create_future()
        self._is_answering = self._is_stopping = False
        self._followed: dict[str | int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Accept the socket and serve it until it ends."""
        with contextlib.suppress(websocket_protocol.Gone):
            await self._call.send({"type": "websocket.accept", websocket_protocol.MOST: self._most})
            tasks = [self._task(self._listen()), self._task(self._work())]
            try:
                why = await self._ended
            finally:
                tasks += self._followed.values()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if why is not None:
                await self._close(why)

    def end(self, why: EndReason | None = None) -> None:
        """End the socket, with the reason that is sent to the client; None if the client has disconnected."""
        if not self._ended.done():
            self._ended.set_result(why)

    def expire(self) -> None:
        """End the socket because its credential is no longer valid, even if the client does not read."""
        drop(self._call.scope)
        self.end(EndReason(Unauthorized.code, "the credential was revoked, or has expired"))

    def drain(self) -> None:
        """End the socket after the request that is being answered: the server stops."""
        self._is_stopping = True
        if not self._is_answering:
            self.end(SERVER_STOPS)

    # --- sending -------------------------------------------------------------------------------------------------

    async def say(self, id: str | int, type: str, payload: bytes | Pieces) -> None:
        """Send one answer, a large one piece by piece; release its memory when the client has received it."""
        if isinstance(payload, bytes):
            await self._send(frame, id, type, payload)
            return
        try:
            async with self._writing:
                for fragment in fragments(id, type, payload):
                    await self._call.raw({"type": websocket_protocol.FRAMES, "frames": fragment})
            await writable_of(self._call.scope).wait()
        finally:
            payload.release()

    async def _send(self, make: Callable[..., bytes], *args: Any) -> None:
        """Send the frames that `make(*args)` returns, one message at a time.

        Otherwise all waiting messages would be written at once when the client reads again. `make` is called only when
        the message is written, so that waiting messages hold no copy.
        """
        async with self._writing:
            await self._call.raw({"type": websocket_protocol.FRAMES, "frames": make(*args)})

    async def _close(self, why: EndReason) -> None:
        last = {"type": "websocket.close", **closing(why)}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._call.send(last), CLOSE_SECONDS)

    # --- subscriptions -------------------------------------------------------------------------------------------

    def check_free(self, id: str | int) -> None:
        """Raise InvalidRequest if the id is in use, LimitExceeded if the socket has too many subscriptions."""
        if id in self._followed:
            raise InvalidRequest(f"a subscription with the id {str(id)[:40]!r} is open", hint="Use another id.")
        if len(self._followed) >= MOST_SUBSCRIPTIONS:
            raise LimitExceeded(
                f"{MOST_SUBSCRIPTIONS} subscriptions are open on this socket, the limit is reached",
                hint="Name several tables in one, or open another socket.",
            )

    def follow(self, id: str | int, stream: Stream, left: Callable[[], object]) -> None:
        """Send the events of `stream`; call `left` when it ends."""
        task = self._followed[id] = self._task(self._pour(id, stream))

        def over(_: Any) -> None:
            if self._followed.get(id) is task:
                del self._followed[id]
            left()

        task.add_done_callback(over)

    def forget(self, id: str | int) -> bool:
        """End a subscription; return whether it existed."""
        task = self._followed.pop(id, None)
        return task is not None and task.cancel()

    async def _pour(self, id: str | int, stream: Stream) -> None:
        unread = Unread(self.who, self.client)
        try:
            while (piece := await stream.next()) is not None:
                if len(piece) > UNCOUNTED_PIECE:
                    unread.hold(len(piece))
                await self._send(event_frames, id, piece)
                if len(piece) > LARGE_PIECE:
                    await writable_of(self._call.scope).wait()
                unread.release()
        except Busy as error:  # the piece was not sent, but the stream is past it
            drop(self._call.scope)
            self.end(EndReason(error.code, error.message))
            return
        finally:
            unread.release()
        if stream.ending is not None and stream.ending.code == CLOSED:
            gone = NotFound("the database was dropped", hint="List the databases with schema.list_databases.")
            await self.say(id, "error", error_payload(gone))

    # --- receiving -----------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while await self._hear():
            pass
        self.end()

    async def _hear(self) -> bool:
        """Receive one message, in a function of its own: a loop variable would keep it alive until the next one."""
        message = await self._call.receive()
        if message["type"] == "websocket.disconnect":
            return False
        await self._inbox.put(ReceivedRequest(message.get("text"), message.get(websocket_protocol.SIZE, 0)))
        return True

    async def _work(self) -> None:
        while not self._is_stopping:
            websocket_protocol.answered(self._call.scope, await self._answer_next())
        self.end(SERVER_STOPS)

    async def _answer_next(self) -> int:
        """Answer the oldest request; return its size."""
        received = await self._inbox.take()
        self._is_answering = True
        await self._answer(self, received.text)
        self._is_answering = False
        return received.size

    def _task(self, work: Any) -> asyncio.Task[None]:
        """Return a task whose failure ends the socket."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.add_done_callback(self._end_on_failure)
        return task

    def _end_on_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, websocket_protocol.Gone):
            self.end()
        elif isinstance(error, Exception):
            self.end(EndReason(HeadwaterError.code, unexpected(error, "the gateway").message))
