"""uvicorn's WebSocket protocol, extended to write frames that are encoded once for all readers."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from headwater.errors import Busy
from headwater.serve.call import Scope
from headwater.serve.limits import request_body
from headwater.serve.limits.slow_reader_limits import CONNECTION, SlowReaderLimits

FRAMES = "headwater.frames"  # our own ASGI message: encoded frames
MOST = "headwater.most"  # in an accept: the maximum bytes of a message from this client, if larger than usual
SIZE = "headwater.size"  # in a received message: bytes that are counted until the application calls `answered`
PARSED_BYTES = 4 << 10  # given to the parser at once: it turns all of them into frames of at least six bytes
TURN_FRAMES = 200  # after which other connections get their turn
MAX_SHORT_FRAGMENTS = 1_000  # of one message
SHORT_FRAGMENT = 1 << 10  # bytes; longer fragments are limited by the size of their message
MAX_CONTROL_FRAMES = 500  # pings and pongs of a client within a second
INVALID_DATA, POLICY_VIOLATION, TRY_AGAIN_LATER = 1007, 1008, 1013  # close codes


class FramedWebSocket(SlowReaderLimits, WebSocketsSansIOProtocol):
    """Adds the message FRAMES and limits on received data. Without compression a frame is the same for every reader.

    Received bytes are parsed a few at a time, and only while the application has taken all messages before them. A
    client that sends endless fragments or pings is closed, and so is one whose message does not end in time.

    Received bytes count as those of HTTP bodies do, until the application has answered their message.
    """

    _memory: request_body.BodyReservation  # of all received and unanswered data
    _unanswered = 0  # bytes in memory of the messages that the application has, or will receive
    _deadline: asyncio.TimerHandle | None = None  # of the message that is being received

    _unparsed = b""  # received, and not given to the parser yet
    _is_scheduled = False  # parsing continues in the next turn
    _short_fragments = 0  # of the message that is being received
    _control_frames = 0  # received in the second that began at the next field
    _control_since = 0.0
    _pong = b""  # waits until the client reads again

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect as uvicorn does, and start to count memory."""
        super().connection_made(transport)
        self._memory = request_body.BodyReservation(self.client[0] if self.client else "")

    def data_received(self, data: bytes) -> None:
        """Parse as uvicorn does, but in small parts and several turns."""
        if not self.handshake_initiated:
            super().data_received(data)
            if not self.handshake_initiated:  # the library rejected the request; uvicorn would not send its response
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
                self.drop()
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        if not self._is_scheduled:
            self._parse()

    def _parse(self) -> None:
        """Parse received data for one turn; the rest waits for the next turn or for the application."""
        self._is_scheduled = False
        frames, start, data = 0, 0, self._unparsed
        while start < len(data) and self._may_parse() and frames < TURN_FRAMES:
            self.conn.receive_data(data[start : start + PARSED_BYTES])
            start += PARSED_BYTES
            frames += len(self.conn.events)
            if self.conn.parser_exc is not None:
                self.handle_parser_exception()
            else:
                self.handle_events()
        self._unparsed = data[start:]
        self._count()
        if self._unparsed:
            self._pause_reading()
            if self._may_parse():
                self._is_scheduled = True
                self.loop.call_soon(self._parse)
        elif self.read_paused and self._may_parse():
            self.read_paused = False
            self.transport.resume_reading()

    def _may_parse(self) -> bool:
        """Return whether the handshake is over, and the application has received all messages or wants no more."""
        is_wanted = self.queue.empty() or self.close_sent
        return self.handshake_complete and is_wanted and not self.transport.is_closing()

    def _pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _count(self) -> None:
        """Count all bytes in memory and set the deadline of an unfinished message; close if memory is short."""
        if not self.handshake_complete:  # one read at most
            return
        if self.disconnected or self.transport.is_closing():  # received data is not parsed any more
            self._unparsed, self.frames = b"", []
            self.conn.reader.discard()
            self._message_ended()
            self._memory.take(self._unanswered)
            return
        unfinished = len(self.conn.reader.buffer) + (self.conn.current_size or 0)
        try:
            self._memory.take(self._unanswered + len(self._unparsed) + unfinished)
        except Busy as busy:
            self._refuse(f"{busy.code}: {busy.message}", TRY_AGAIN_LATER)
            return
        if not unfinished:
            self._message_ended()
        elif self._deadline is None and self._may_parse():  # else the server itself paused reading
            self._deadline = self.loop.call_later(request_body.BODY_SECONDS, self._give_up)

    def _message_ended(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self._refuse(f"a message did not end within {request_body.BODY_SECONDS:g} s")

    def answered(self, size: int) -> None:
        """Stop counting a message of `size` bytes."""
        self._unanswered -= size
        self._count()

    async def run_asgi(self) -> None:
        """Run the application as uvicorn does, then drop the messages that it did not receive."""
        try:
            await super().run_asgi()
        finally:
            while not self.queue.empty():
                self.queue.get_nowait()
            self._unanswered = 0
            self._count()

    async def receive(self) -> Any:
        """Receive as uvicorn does; data after the message is parsed before more is read."""
        message = await self.queue.get()
        if not self._is_scheduled:
            self._parse()
        return message

    async def send(self, message: Any) -> None:
        """Send as uvicorn does; FRAMES, like other messages, wait while the client's buffer is full."""
        if message["type"] != FRAMES:
            if self.conn.eof_sent:  # uvicorn has already closed the connection, because it stops
                raise ClientDisconnected
            if message["type"] == "websocket.accept" and MOST in message:
                self.conn.max_message_size = message[MOST]
            await super().send(message)
            if message["type"] in ("websocket.accept", "websocket.close") and not self._is_scheduled:
                self._parse()
            if self.close_timer is not None and message["type"] == "websocket.close":
                self.close_timer.cancel()
                self.close_timer = self.loop.call_later(self.close_timeout, self._close)
            if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
                self.handshake_complete = True  # rejected with a status: uvicorn would log that as an application error
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        self.transport.write(message["frames"])

    def handle_connect(self, event: Any) -> None:
        """Connect as uvicorn does, and add the connection to the scope."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]  # before its task runs

    def handle_text(self, event: Any) -> None:
        """Handle text as uvicorn does, and release the frame."""
        self._short_fragments = 0
        super().handle_text(event)
        event.data = b""  # the parser keeps the event until the next frame arrives

    def handle_bytes(self, event: Any) -> None:
        """Handle bytes as uvicorn does, and release the frame."""
        self._short_fragments = 0
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Any) -> None:
        """Handle a fragment as uvicorn does; close if it is empty, or if too many are short."""
        self._short_fragments += len(event.data) < SHORT_FRAGMENT
        if not event.data and not event.fin:
            self._refuse("a fragment is empty")
        elif self._short_fragments > MAX_SHORT_FRAGMENTS:
            self._refuse(f"a message has more than {MAX_SHORT_FRAGMENTS} fragments under {SHORT_FRAGMENT} bytes")
        else:
            super().handle_cont(event)
        event.data = b""

    def handle_ping(self) -> None:
        """Answer as uvicorn does. While the client does not read, keep the last pong only, as RFC 6455 §5.5.3 allows.

        Reading continues: a slow client's pongs, which keep its connection open, must be read.
        """
        output = self.conn.data_to_send()  # of all pings that were parsed together
        if self.transport.is_closing():
            return
        if self.writable.is_set() or self.conn.close_sent is not None:  # then the output contains a close
            self.transport.write(b"".join(output))
        elif output:
            self._pong = output[-1]
        self._count_control_frame()

    def handle_pong(self, event: Any) -> None:
        """Handle a pong as uvicorn does, and count it."""
        super().handle_pong(event)
        self._count_control_frame()

    def resume_writing(self) -> None:
        """Resume as uvicorn does, and send the pong that waits."""
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong and not self.close_sent and not self.transport.is_closing():
            self.transport.write(pong)

    def connection_lost(self, exc: Exception | None) -> None:
        """Close as uvicorn does, and release memory and timers."""
        super().connection_lost(exc)
        self._count()

    def _count_control_frame(self) -> None:
        now = self.loop.time()
        if now - self._control_since >= 1.0:
            self._control_since, self._control_frames = now, 0
        self._control_frames += 1
        if self.conn.current_size is None:  # the message that is being received began after this frame
            self._message_ended()
        if self._control_frames > MAX_CONTROL_FRAMES:
            self._refuse(f"more than {MAX_CONTROL_FRAMES} pings and pongs in a second")

    def _refuse(self, reason: str, code: int = POLICY_VIOLATION) -> None:
        """Close the connection of a client that exceeds a limit."""
        if not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        """Close as uvicorn does; the client has a moment to read the reason."""
        super().handle_parser_exception()
        self.drop()
        self._count()

    def shutdown(self) -> None:
        """Shut down as uvicorn does, except on a closing connection: uvicorn would raise, and not shut down the others.

        A client that does not read delays the shutdown for a moment only.
        """
        if self.handshake_complete and self.conn.state is not State.OPEN:
            self.close_sent = True
        super().shutdown()
        self.drop()

    def keepalive_timeout(self) -> None:
        """Time out as uvicorn does, and disconnect the client."""
        super().keepalive_timeout()
        self.drop()

    def _close(self) -> None:
        """Close the transport of a client that did not answer the close frame; abort it if the client does not read."""
        self.transport.close()
        self.watch()

    def send_receive_event_to_app(self) -> None:
        """Deliver a message as uvicorn does, with SIZE; close on invalid UTF-8, where uvicorn would log a traceback."""
        self._message_ended()
        data, self.frames = b"".join(self.frames), []
        if self.close_sent:
            return
        message: Any = {"type": "websocket.receive", "bytes": data}
        size = len(data)
        if self.curr_msg_data_type == "text":
            try:
                message = {"type": "websocket.receive", "text": data.decode()}
            except UnicodeDecodeError:
                self._refuse("text frames are UTF-8", INVALID_DATA)
                return
            if not message["text"].isascii():  # a str takes up to 4 bytes per character, and a parser keeps its UTF-8
                size += sys.getsizeof(message["text"])
        try:
            self._memory.take(self._unanswered + size)
        except Busy as busy:
            self._refuse(f"{busy.code}: {busy.message}", TRY_AGAIN_LATER)
            return
        self._unanswered += size
        message[SIZE] = size
        self.queue.put_nowait(message)
        self._pause_reading()

    def send_500_response(self) -> None:
        """Reply 503 to a handshake that is unanswered while the server stops; uvicorn would reply 500 and raise."""
        if self.initial_response or self.handshake_complete or self.conn.eof_sent:
            return
        self.conn.send_response(self.conn.reject(503, "The server is stopping.\n"))
        self.transport.write(b"".join(self.conn.data_to_send()))


def answered(scope: Scope, size: int) -> None:
    """Stop counting a received message of `size` bytes, which the application has answered."""
    connection: Any = scope.get(CONNECTION)
    if connection is not None:
        connection.answered(size)


Gone = ClientDisconnected
