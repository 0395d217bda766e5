"""The HTTP protocol of uvicorn with bounds: how large the head of a request may be, and how long it may take."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headwater.errors import HeadwaterError, InvalidRequest, RequestTooLarge
from headwater.serve.call import Receive, Scope, Send
from headwater.serve.http import PROBLEM, problem

_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")


class BoundedHttp(HttpToolsProtocol):
    """As inherited, but a head (target and headers) ends soon and is small, or the connection does."""

    max_head = 64 << 10  # bytes
    head_seconds = 10.0  # from its first byte to its last

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._upgraded = False  # the connection is a WebSocket now, and not ours
        self._in_head = False
        self._head = 0  # bytes of target and headers that the parser told of
        self._unparsed = 0  # bytes that came since the head began: the parser keeps half a header to itself
        self._too_slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As inherited; who never asks anything is as idle as who asked before."""
        super().connection_made(transport)
        self._idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """As inherited."""
        self._head_ended()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As inherited, and looks whether a head is still open afterwards: mostly it is not."""
        super().data_received(data)
        if self._in_head:
            self._head_goes_on(len(data))
        elif not self._upgraded and (self.cycle is None or self.cycle.response_complete):
            self._idle()  # blank lines, or the rest of a body that nobody wanted

    def handle_websocket_upgrade(self) -> None:
        """As inherited."""
        self._upgraded = True
        super().handle_websocket_upgrade()

    def _head_goes_on(self, size: int) -> None:
        if self.transport.is_closing():
            return
        if self._too_slow is None:  # what came with its first byte may belong to the request before
            self._watch()
            return
        self._unparsed += size
        if self._unparsed > self.max_head:
            self._refuse(431, _too_large(self.max_head))

    def _watch(self) -> None:
        self._too_slow = self.loop.call_later(self.head_seconds, self._give_up)

    def _head_ended(self) -> None:
        self._in_head = False
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None

    def _idle(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later

    # --- what the parser tells ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """As inherited."""
        super().on_message_begin()
        self._in_head = True
        self._head = self._unparsed = 0

    def on_url(self, url: bytes) -> None:
        """As inherited."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As inherited."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self.max_head:
            raise ValueError("the head is too large")  # ends the parser, which asks for send_400_response

    def on_headers_complete(self) -> None:
        """As inherited. RFC 9112 §3.2.2: the authority in the target counts, not the Host header."""
        self._head_ended()
        if self.url[:1] != b"/" and (absolute := _ABSOLUTE.match(self.url)) is not None:
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", absolute[1]))
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _unchunked(cycle, app))

    # --- refusals ----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, or too much of it."""
        if self._head > self.max_head:
            self._refuse(431, _too_large(self.max_head))
        else:
            self._refuse(400, InvalidRequest("this is not a request of HTTP/1.1", hint="Look at what was sent."))

    def _give_up(self) -> None:
        if self.flow.read_paused:  # pipelined: it is we who read no further
            self._watch()
            return
        slow = InvalidRequest(
            f"the headers did not end within {self.head_seconds:g} s", hint="Send the request again, in one go."
        )
        self._refuse(408, slow)

    def _refuse(self, status: int, error: HeadwaterError) -> None:
        self._head_ended()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would land inside another answer
            body = problem(error, status)
            head = b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (PROBLEM, len(body))
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def _too_large(most: int) -> HeadwaterError:
    return RequestTooLarge(f"target and headers are larger than {most} bytes", hint="Send fewer or shorter headers.")


def _unchunked(cycle: Any, app: Any) -> Any:
    """`app` for HTTP/1.0, which knows no chunks: a body of unknown length goes as it is and ends the connection."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        unknown = False

        async def raw(message: Any) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unknown:
                    cycle.chunked_encoding = False
            elif unknown:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts it down
            await send(message)

        await app(scope, receive, raw)

    return run
