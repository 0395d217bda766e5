"""uvicorn's HTTP protocol with limits on the size of request headers and on the time that each part may take."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headwater.errors import HeadwaterError, InvalidRequest, LimitExceeded, RequestTooLarge
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.serve.call import Receive, Scope, Send
from headwater.serve.http.security_headers import with_security_headers
from headwater.serve.limits.connection_limits import HEALTH, OVER_LIMIT_SECONDS, ConnectionLimits
from headwater.serve.limits.request_body import RejectedRequest, header
from headwater.serve.limits.slow_reader_limits import CONNECTION, SlowReaderLimits
from headwater.serve.server.application import PROBLEM, problem
from headwater.serve.server.bounded_reads import BoundedReads
from headwater.serve.tls_handshakes import READ_BYTES

MAX_PIPELINED = 16  # parsed requests that wait for the response to the previous one
MAX_PARSED = 16 << 10  # bytes given to the parser at once, unless they belong to a body of known length
TURN_STEPS = 500  # calls of the parser, and parts of bodies, after which other connections get their turn
MAX_BLANK = 16  # bytes of line breaks before a request; RFC 9112 §2.2 asks servers to ignore one line
MAX_FRAMING = 64 << 10  # bytes of a chunked body that are not data, plus half a byte for each byte of data
MAX_UNREAD = 64 << 10  # bytes of a chunked body that are parsed after its request was answered
MAX_SKIPPED = 16 << 20  # the same for a body of known length, which needs no parsing
HEADER_BYTES = 256  # added to name and value of each header: more than its three Python objects take

_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")


class ThrottledLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs a repeated warning at most once a minute: any client can cause one by sending invalid HTTP."""

    repeats = LogThrottle()

    @property
    def level(self) -> int:
        """Return the logger's level."""
        return self.logger.level

    def warning(self, msg: object, *args: object, **named: Any) -> None:
        """Log the warning with the number of suppressed repeats, at most once a minute."""
        left_out = self.repeats.again(str(msg), time.monotonic())
        if left_out is not None:
            super().warning(counted(str(msg), left_out), *args, **named)


class HeldFlow(FlowControl):
    """Flow control that resumes reading only while `may_read()` is true; `release` resumes it later.

    uvicorn resumes reading whenever a response ends or an application asks for its body, although pipelined requests
    are still queued: a client that reads no responses could queue requests without end.
    """

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read
        self._is_wanted = False  # a caller tried to resume reading

    @property
    def writable(self) -> asyncio.Event:
        """Return the event that is set while the client reads its responses."""
        return self._is_writable_event

    def pause_reading(self) -> None:
        """Pause as uvicorn does, and cancel a wanted resume."""
        self._is_wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume as uvicorn does, or remember that it is wanted."""
        self._is_wanted = not self._may_read()
        if not self._is_wanted:
            super().resume_reading()

    def hold(self) -> None:
        """Pause reading until `release`, unless it is paused already."""
        if not self.read_paused:
            super().pause_reading()
            self._is_wanted = True

    def release(self) -> None:
        """Resume reading if that was wanted before and is allowed now."""
        if self._is_wanted:
            self.resume_reading()


class BoundedHttp(SlowReaderLimits, HttpToolsProtocol):
    """Closes a connection whose request headers are too large or too slow, or whose body arrives too slowly.

    Slow readers of responses are cut off as in SlowReaderLimits.

    At most MAX_PIPELINED requests are queued. Received bytes behind them stay unparsed, and nothing more is read, until
    the queue is empty. Received bytes that take more than TURN_STEPS to parse are parsed in several turns of the event
    loop. A client is disconnected if it sends many blank lines between requests, bodies of tiny chunks, or much of a
    body that no handler read.
    """

    max_head = 64 << 10  # bytes
    head_seconds = 10.0  # from the first byte of the headers to the last
    body_seconds = 20.0  # the same for a body, plus one second for each
    body_rate = 1_000  # received bytes

    def __init__(
        self,
        *args: Any,
        connections: ConnectionLimits | None = None,
        handshake_done: Callable[[], None] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self.logger = ThrottledLogger(self.logger)  # type: ignore[assignment]
        self._connections, self._handshake_done = connections, handshake_done
        self._over_limit: LimitExceeded | None = None  # set if the connection is over a limit
        self._upgraded = False  # the connection is a WebSocket now, and another protocol's
        self._in_head = False
        self._head = 0  # bytes of target and headers that the parser has reported
        self._unparsed = 0  # bytes received since the headers began: the parser does not report half a header
        self._too_slow: asyncio.TimerHandle | None = None
        self._body_until = 0.0  # deadline of the body; 0: no body is being received
        self._body_timer: asyncio.TimerHandle | None = None

        self._unparsed_data = b""  # received after the queued requests, or left for the next turn
        self._is_scheduled = False  # parsing continues in the next turn
        self._steps = 0  # of the parser in this turn
        self._blank = 0  # bytes of line breaks since the last request
        self._in_body = False
        self._body_left = 0  # bytes; 0 if the body is chunked
        self._is_chunked = False
        self._body_size = 0  # bytes of data received of the body
        self._body_wire = 0  # bytes received of the body, with the framing of its chunks
        self._ignored = 0  # bytes of the body received after the response
        self._is_stopping = False  # the server stops, and closes the connection after its response
        self._running: Any = None  # the cycle that is being answered; `cycle` is the one that was parsed last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start as uvicorn does; a connection without a first request counts as idle."""
        super().connection_made(transport)
        self.flow: HeldFlow = HeldFlow(transport, self._may_read)
        self.writable = self.flow.writable
        if self._connections is not None:
            self._enter(self._connections)
        self._idle()

    def _enter(self, connections: ConnectionLimits) -> None:
        address = "" if self.client is None else self.client[0]
        if self._handshake_done is not None:  # the handshake counted the connection until now
            self._handshake_done()
        self._over_limit = connections.enter(address)
        self._on_lost = lambda: connections.leave(address)
        if self._over_limit is not None:
            self.head_seconds = self.timeout_keep_alive = OVER_LIMIT_SECONDS
            self.app = _only_health(self.app, self._over_limit)
            if connections.is_full(address):
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close as uvicorn does, and stop the timers."""
        self._head_ended()
        self._body_ended()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._unparsed_data = b""
        if self._running is not None and not self._running.response_complete:  # uvicorn notifies only the last cycle
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse as uvicorn does, but keep the bytes after a queued request, or after too many steps, for later."""
        if self._unparsed_data or self.pipeline:
            self._unparsed_data += data
            self.flow.pause_reading() if self.pipeline else self.flow.hold()
            return
        self._parse_turn(data)

    def _parse_turn(self, data: bytes) -> None:
        """Parse `data` until a request is queued or TURN_STEPS are done; the rest stays for later."""
        start = self._steps = 0
        while start < len(data) and self._steps < TURN_STEPS and not self.pipeline and self._may_parse():
            end = self._end_of_part(data, start)
            self._parse(data if end - start == len(data) else data[start:end])
            start = end
        if not self._may_parse():
            return
        self._unparsed_data = data[start:]
        # After a full read more is likely to wait, and the event loop would read it before it serves other connections.
        if (self._unparsed_data or len(data) >= READ_BYTES) and not self.pipeline:
            self.flow.hold()
            self._schedule()

    def _may_parse(self) -> bool:
        return not self._upgraded and not self.transport.is_closing()

    def _end_of_part(self, data: bytes, start: int) -> int:
        """Return where the next slice to parse ends: at the end of a body of known length, or see _end_of_heads."""
        if self._in_body and self._body_left:  # a body has no requests that must be counted
            return min(len(data), start + self._body_left)
        return _end_of_heads(data, start)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._read_on)

    def resume_writing(self) -> None:
        """Resume as uvicorn does, and continue to parse."""
        super().resume_writing()
        self._read_on()

    def _may_read(self) -> bool:
        return not self.pipeline and not self._unparsed_data and not self.flow.write_paused

    def _read_on(self) -> None:
        """Parse the stored bytes and resume reading, once no request is queued and the client reads its responses."""
        self._is_scheduled = False
        if self.pipeline or self.flow.write_paused or not self._may_parse():
            return
        data, self._unparsed_data = self._unparsed_data, b""
        self._parse_turn(data)
        self.flow.release()

    def _parse(self, data: bytes) -> None:
        """Parse as uvicorn does, then check whether request headers are incomplete: mostly they are not."""
        self._steps += 1
        was_in_body = self._in_body
        if not self._in_head and not was_in_body:
            self._blank += len(data) - len(data.lstrip(b"\r\n"))
            if self._blank > MAX_BLANK:
                self._refuse(400, InvalidRequest("too many blank lines", hint="Send requests without lines between."))
                return
        super().data_received(data)
        if self._in_head:
            self._head_goes_on(len(data))
        elif self._body_until or self._in_body:
            self._body_goes_on(len(data))
            if was_in_body and self._in_body:
                self._check_body(len(data))
        elif not self._upgraded and (self.cycle is None or self.cycle.response_complete):
            self._idle()  # blank lines, or the rest of a body that no handler read

    def _check_body(self, size: int) -> None:
        """Disconnect a client that sends mostly framing, or much of a body that no handler reads."""
        self._body_wire += size
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:
            self._ignored += size
            if self._ignored > (MAX_UNREAD if self._is_chunked else MAX_SKIPPED):
                self.transport.close()
                self.drop()
                return
        if self._body_wire - self._body_size > MAX_FRAMING + self._body_size // 2:
            many = InvalidRequest("the body has too many small chunks", hint="Send larger chunks, or a Content-Length.")
            self._refuse_body(400, many)

    def handle_websocket_upgrade(self) -> None:
        """Upgrade as uvicorn does, unless a request waits for its response or the connection is over a limit."""
        if self._over_limit is not None:
            self._refuse(429, self._over_limit)
            return
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # its response would be written between the frames
            self._refuse(400, InvalidRequest("an earlier request waits for its response", hint="Upgrade another one."))
            return
        self._upgraded = True
        received = self.transport.get_protocol()
        super().handle_websocket_upgrade()
        framed: Any = self.transport.get_protocol()
        framed._on_lost, self._on_lost = self._on_lost, None
        if isinstance(received, BoundedReads):
            received.protocol = framed
            self.transport.set_protocol(received)

    def on_response_complete(self) -> None:
        """Continue as uvicorn does, and parse stored bytes."""
        self._forget(self._running)
        super().on_response_complete()
        if self.transport.is_closing():
            self.watch()
            if self._is_stopping and not self._unread:
                self.drop()
        elif not self.pipeline and (self._unparsed_data or self.flow.read_paused):
            self._schedule()  # later, because this runs inside an application's send

    def shutdown(self) -> None:
        """Close as uvicorn does; a stop waits for requests, but not for an idle client to read or to end TLS."""
        super().shutdown()
        self._is_stopping = True
        if self.transport.is_closing():
            self.drop()

    def _forget(self, cycle: Any) -> None:
        """Drop the request that was answered: uvicorn would keep it while the connection is idle."""
        if self.scope is cycle.scope:  # no other request has begun
            self.scope, self.headers, self.url = {}, [], b""  # type: ignore[typeddict-item]
        cycle.scope, cycle.body = {}, bytearray()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection as uvicorn does, and watch whether the client reads."""
        super().timeout_keep_alive_handler()
        self.watch()

    def drop(self) -> None:
        """Disconnect the client as SlowReaderLimits does, and run no more of its requests."""
        for cycle in (self.cycle, self._running):
            if cycle is not None:
                cycle.keep_alive = False
        super().drop()

    def _head_goes_on(self, size: int) -> None:
        if self.transport.is_closing():
            return
        if self._too_slow is None:  # the bytes before the first one of the headers may belong to the previous request
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

    def _body_goes_on(self, size: int) -> None:
        """Extend the deadline of the body by the received bytes."""
        if not self._in_body or self.transport.is_closing():
            self._body_ended()
        elif not self._body_until:
            self._body_until = self.loop.time() + self.body_seconds
            self._body_timer = self.loop.call_later(self.body_seconds, self._give_up_body)
        else:
            self._body_until += size / self.body_rate

    def _body_ended(self) -> None:
        self._body_until = 0.0
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up_body(self) -> None:
        """Check whether the body is late: every received byte moves its deadline."""
        self._body_timer = None
        if self.transport.is_closing():
            return
        left = self._body_until - self.loop.time()
        if self.flow.read_paused:  # the server itself paused reading
            left, self._body_until = self.body_seconds, self.loop.time() + self.body_seconds
        if left > 0:
            self._body_timer = self.loop.call_later(left, self._give_up_body)
            return
        slow = InvalidRequest("the body arrived too slowly", hint="Send the request again without pauses.")
        self._refuse_body(408, slow)

    def _idle(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later

    # --- parser callbacks --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request as uvicorn does."""
        super().on_message_begin()
        self._in_head = True
        self._head = self._unparsed = self._blank = 0

    def on_url(self, url: bytes) -> None:
        """Add to the target as uvicorn does, and count its bytes."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header as uvicorn does; ignore trailers of a chunked body: the request is already dispatched."""
        self._count(len(name) + len(value) + HEADER_BYTES)
        if self._in_head:
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self.max_head:
            raise ValueError("the head is too large")  # stops the parser, which calls send_400_response

    def on_headers_complete(self) -> None:
        """Dispatch as uvicorn does. RFC 9112 §3.2.2: the authority in the target replaces the Host header."""
        self._head_ended()
        if len(self.pipeline) >= MAX_PIPELINED:  # _end_of_heads prevents it for usual line ends
            raise ValueError("too many requests are pipelined")
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        if self.url[:1] != b"/" and (absolute := _ABSOLUTE.match(self.url)) is not None:
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", absolute[1]))
        self._body_left = int(header(self.headers, b"content-length") or 0)  # the parser has checked it
        self._is_chunked = not self._body_left
        self._body_size = self._body_wire = self._ignored = 0
        super().on_headers_complete()
        self._in_body = self.cycle is not None and self.cycle.scope is self.scope  # an upgrade has no cycle

    def on_body(self, body: bytes) -> None:
        """Add to the body as uvicorn does, and count its bytes."""
        if not self._in_body:
            raise ValueError("an upgrade has a body")  # stops the parser: no limit would hold for it
        self._steps += 1
        self._body_size += len(body)
        if not self._is_chunked:
            self._body_left -= len(body)
        if not self.cycle.response_complete:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete the request as uvicorn does."""
        self._in_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _unchunked(cycle, app))

    # --- refusals ----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Reply to a malformed or oversized request."""
        if self._head > self.max_head:
            self._refuse(431, _too_large(self.max_head))
        else:
            self._refuse(
                400, InvalidRequest("the received data is not an HTTP/1.1 request", hint="Check protocol and port.")
            )

    def _give_up(self) -> None:
        if self.flow.read_paused:  # pipelined: the server itself paused reading
            self._watch()
            return
        slow = InvalidRequest(
            f"the headers did not end within {self.head_seconds:g} s", hint="Send the request again without pauses."
        )
        self._refuse(408, slow)

    def _refuse(self, status: int, error: HeadwaterError) -> None:
        self._head_ended()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would be written inside another response
            self._write_refusal(status, error)
        received = self.transport.get_protocol()
        if isinstance(received, BoundedReads):
            received.discard(self.transport.get_extra_info("socket").fileno())
        self.transport.close()
        self.drop()

    def _refuse_body(self, status: int, error: HeadwaterError) -> None:
        """Reply to the request whose body is being received, unless a response was started; disconnect its client."""
        cycle = self.cycle
        if not cycle.response_started:
            if cycle is self._running:  # else it would be written inside another response
                self._write_refusal(status, error)
            cycle.disconnected = True  # no other response may be sent
            cycle.message_event.set()
        self.transport.close()
        self.drop()

    def _write_refusal(self, status: int, error: HeadwaterError) -> None:
        refusal = RejectedRequest(
            error, status=status, headers=[(b"connection", b"close"), (b"cache-control", b"no-store")]
        )
        body = problem(error, status)
        head = [(b"content-type", PROBLEM), (b"content-length", b"%d" % len(body)), *refusal.headers]
        head = with_security_headers(head, tls=self.scheme == "https")
        self.transport.write(STATUS_LINE[status] + b"".join(b"%s: %s\r\n" % pair for pair in head) + b"\r\n" + body)


def _end_of_heads(data: bytes, start: int) -> int:
    """Return where to stop parsing `data` from `start`: after MAX_PIPELINED requests or MAX_PARSED bytes."""
    most = min(len(data), start + MAX_PARSED)
    end = start
    for _ in range(MAX_PIPELINED - 1):  # one more may have begun before `start`, its last line break cut in two
        found = data.find(b"\r\n\r\n", end, most)
        if found < 0:
            return most
        end = found + 4
    return end


def _only_health(app: Any, error: LimitExceeded) -> Any:
    """Return `app` for a connection over the limit: it answers the health routes only."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH:
            await app(scope, receive, send)
            return
        body = problem(error, error.status)
        headers = RejectedRequest(error, headers=[(b"connection", b"close"), (b"content-type", PROBLEM)]).headers
        headers += [(b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
        headers = with_security_headers(headers, tls=scope["scheme"] == "https")
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return run


def _too_large(most: int) -> HeadwaterError:
    return RequestTooLarge(f"target and headers are larger than {most} bytes", hint="Send fewer or shorter headers.")


def _unchunked(cycle: Any, app: Any) -> Any:
    """Return `app` for HTTP/1.0, which has no chunks: a body of unknown length ends with the connection."""

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
