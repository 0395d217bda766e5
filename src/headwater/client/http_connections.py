"""HTTP of the sync client: keep-alive connections on http.client; every failure is a HeadwaterError."""

from __future__ import annotations

import http.client
import selectors
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from headwater.client.arrow_stream import ReceivedBatch, read_batches
from headwater.client.protocol import Request, Server, broken, distrusted, refusal, unreachable
from headwater.client.tls_trust import tls_context
from headwater.errors import HeadwaterError

TRANSPORT_ERRORS = (OSError, http.client.HTTPException)
PIECE = 1 << 16

Answer = tuple[int, Mapping[str, str], bytes]


class Response:
    """A response whose body is read as it arrives."""

    def __init__(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self._response, self._socket = response, connection.sock
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    def answer(self) -> Answer:
        """Return status, headers and the complete body."""
        return self.status, self.headers, self.read()

    def read(self, size: int | None = None) -> bytes:
        """Return exactly `size` bytes (None: all), fewer only at the end; Unavailable if the connection breaks."""
        try:
            return self._response.read(size)
        except TRANSPORT_ERRORS as error:
            raise broken(error) from None

    def pieces(self) -> Iterator[bytes]:
        """Yield bytes as they arrive, until the end of the body; Unavailable if the connection breaks."""
        try:
            while piece := self._response.read1(PIECE):
                yield piece
        except TRANSPORT_ERRORS as error:
            raise broken(error) from None

    def batches(self) -> Iterator[ReceivedBatch]:
        """Yield the batches of an Arrow body."""
        yield from read_batches(self.read)
        with suppress(HeadwaterError):
            self.read(1)  # only a body that was read to its end leaves a connection to keep

    def hang_up(self) -> None:
        """End the connection, from any thread; a read that waits fails."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """Connections to one server; a request takes an idle one or opens one. Not thread-safe."""

    def __init__(self, server: Server, token: str | None, timeout: float, tls: ssl.SSLContext | None) -> None:
        self._server, self._timeout = server, timeout
        self._tls = tls or (tls_context() if server.scheme == "https" else None)
        self._credential = {} if token is None else {"authorization": f"Bearer {token}"}
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def exchange(self, request: Request) -> Answer:
        """Send a request and return status, headers and body of its response, whatever its status."""
        with self.respond(request) as response:
            return response.answer()

    @contextmanager
    def opened(self, request: Request) -> Iterator[Response]:
        """Send a request and open its response with status 200; raise the error of any other response."""
        with self.respond(request) as response:
            if response.status != 200:
                raise refusal(*response.answer())
            yield response

    @contextmanager
    def respond(self, request: Request) -> Iterator[Response]:
        """Send a request and open its response, whatever its status."""
        connection = self._take()
        kept = False
        try:
            response = self._send(connection, request)
            yield Response(response, connection)
            kept = response.isclosed() and connection.sock is not None  # read to its end, and the server keeps it open
        finally:
            if kept:
                self._idle.append(connection)
            else:
                connection.close()

    def _take(self) -> http.client.HTTPConnection:
        while self._idle:
            connection = self._idle.pop()
            if not _has_ended(connection):
                return connection
            connection.close()
        if self._server.scheme == "https":
            return http.client.HTTPSConnection(
                self._server.host, self._server.port, timeout=self._timeout, context=self._tls
            )
        return http.client.HTTPConnection(self._server.host, self._server.port, timeout=self._timeout)

    def _send(self, connection: http.client.HTTPConnection, request: Request) -> http.client.HTTPResponse:
        sent = False
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(self._timeout + request.wait_seconds)
            connection.request(request.method, request.path, request.body, {**request.headers, **self._credential})
            sent = True  # not earlier: a server does not carry out half a request
            return connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise distrusted(self._server, error) from None
        except TRANSPORT_ERRORS as error:
            raise unreachable(self._server, error, sent=sent) from None


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server closed an idle connection: checked before a write is sent, a retry costs nothing."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return bool(selector.select(0))
