"""The WebSocket protocol of uvicorn, taught to write frames that were made before, once for all readers."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from headwater.serve.patience import CONNECTION, Patience

FRAMES = "headwater.frames"  # our own ASGI message: whole frames, ready to be written
MOST = "headwater.most"  # beside an accept: bytes of a message of this client, where the usual limit is too small


class FramedWebSocket(Patience, WebSocketsSansIOProtocol):
    """As inherited, and with the message FRAMES. Without compression a frame is the same for every reader."""

    async def send(self, message: Any) -> None:
        """As inherited; frames wait, like any other message, while the reader's buffer is full."""
        if message["type"] != FRAMES:
            if self.conn.eof_sent:  # uvicorn, as it stops, has answered by itself
                raise ClientDisconnected
            if message["type"] == "websocket.accept" and MOST in message:
                self.conn.max_message_size = message[MOST]
            await super().send(message)
            if self.close_timer is not None and message["type"] == "websocket.close":
                self.close_timer.cancel()
                self.close_timer = self.loop.call_later(self.close_timeout, self._close)
            if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
                self.handshake_complete = True  # refused with a status: uvicorn would call that an error of ours
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        self.transport.write(message["frames"])

    def handle_connect(self, event: Any) -> None:
        """As inherited."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope[CONNECTION] = self  # type: ignore[literal-required]  # before its task runs

    def keepalive_timeout(self) -> None:
        """As inherited."""
        super().keepalive_timeout()
        self.drop()

    def _close(self) -> None:
        """The client did not answer our good-bye."""
        self.transport.close()
        self.watch()

    def send_receive_event_to_app(self) -> None:
        """As inherited; text that is none ends the connection. Inherited, it wrote a traceback for each."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(1007, "text frames are UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def send_500_response(self) -> None:
        """To who has no answer yet while the server stops: come again. Inherited, it said 500, and fell over twice."""
        if self.initial_response or self.handshake_complete or self.conn.eof_sent:
            return
        self.conn.send_response(self.conn.reject(503, "The server is stopping.\n"))
        self.transport.write(b"".join(self.conn.data_to_send()))


Gone = ClientDisconnected
