"""Request bodies: content type, size and memory limits, checks on JSON; and the error that rejects a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from headwater.errors import Busy, HeadwaterError, InvalidRequest, RequestTooLarge
from headwater.model.work.usage import Usage
from headwater.serve.call import Headers, Receive, Scope
from headwater.serve.limits.rates import place_of

JSON = b"application/json"
MAX_RECEIVING = 256 << 20  # bytes of all unanswered requests, WebSocket messages included; half of it from one address
UNCOUNTED = 64 << 10  # bytes: smaller bodies are not counted
BODY_SECONDS = 300.0  # limit for the whole body, however steadily it arrives
LARGE = 64 << 10  # bytes: larger bodies are decoded in a thread, not in the event loop
MAX_ELEMENTS = 500_000  # of JSON: commas, colons, and opening brackets and braces
MAX_WRITTEN = 1_000_000  # the same for a request that writes
_HALF = re.compile(rb"\\u[dD](?:[c-fC-F]|[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]))")
_PAIR = 'Send both halves of the pair, or the character itself; send binary data as {"t":"bytes","b64":…}.'


class RejectedRequest(Exception):
    """A rejected request, with the status and headers of its response."""

    def __init__(self, error: HeadwaterError, *, status: int = 0, headers: Headers | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status or error.status
        self.headers = headers or []
        if self.status == 401:
            self.headers.append((b"www-authenticate", b'Bearer realm="headwater"'))
        if self.status in (429, 503):
            self.headers.append(retry_after(error))


def retry_after(error: HeadwaterError) -> tuple[bytes, bytes]:
    """Return the Retry-After header: in whole seconds, at least 1."""
    return b"retry-after", b"%d" % max(-(-int(error.extra.get("retry_after_ms", 0)) // 1000), 1)


class ClientDisconnected(Exception):
    """The client disconnected before the request was complete."""


def no_json(body: bytes, fault: Exception, hint: str) -> InvalidRequest:
    """Return the error for a body on which the JSON parser raised `fault`."""
    if isinstance(fault, RecursionError):
        return InvalidRequest("the body is not JSON: nested too deeply", hint=hint)
    reason = str(fault)
    if "surrogate" in reason or (("truncated" in reason or "escape" in reason) and _has_half(body)):
        return InvalidRequest(
            r"a text in the body holds half a character (a lone surrogate: \ud800 to \udfff)", hint=_PAIR
        )
    return InvalidRequest(f"the body is not JSON: {fault}", hint=hint)


def _has_half(body: bytes) -> bool:
    """Return whether the parser met a lone surrogate, which it reports as truncated input or a bad escape."""
    if len(body) > LARGE:  # a third parse of it would take too long
        return _HALF.search(body) is not None
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)  # accepts lone surrogates
        return True
    return False


def check_elements(body: bytes, most: int) -> None:
    """Raise RequestTooLarge if JSON has more than `most` elements.

    A parser holds the interpreter's lock until it is done: a body of millions of empty lists would stop every other
    request for seconds. Elements are counted by their separators, outside of strings.
    """
    if len(body) <= LARGE or _marks(body) <= most:
        return
    outside = _outside_texts(body, most)
    if outside is not None and _marks(outside) <= most:
        return
    raise RequestTooLarge(
        f"the request has more than {most} JSON values, names and lists", hint="Split it into several requests."
    )


def _outside_texts(body: bytes, most: int) -> bytes | None:
    """Return the JSON without its strings; None if it has no strings, or more than `most`."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    return b"".join(plain.split(b'"')[::2]) if 0 < plain.count(b'"') <= 2 * most else None


def _marks(body: bytes) -> int:
    return body.count(b",") + body.count(b":") + body.count(b"[") + body.count(b"{")


class BodyMemory:
    """Counts the bytes of all bodies that are being received or processed. Not thread-safe."""

    def __init__(self, total: int = MAX_RECEIVING) -> None:
        self.total = total
        self._held: Usage[str] = Usage()  # by client address

    @property
    def used(self) -> int:
        """Return the bytes in use."""
        return self._held.total

    def take(self, place: str, count: int) -> None:
        """Count `count` bytes from one client address. Raises Busy if this address, or all together, have too many."""
        mine = self._held[place]
        if self.used + count > self.total or mine + count > self.total // 2:
            raise Busy(
                f"unfinished requests use {self.used >> 20} MiB, {mine >> 20} MiB of them from your address",
                hint="Retry in a moment, or send fewer large requests in parallel.",
            )
        self._held.add(place, count)

    def release(self, place: str, count: int) -> None:
        """Uncount `count` bytes of one client address."""
        self._held.remove(place, count)


BODIES = BodyMemory()  # shared by all servers of the process


class BodyReservation:
    """The memory of one body from `client`, or of all messages of a WebSocket, until the server has answered."""

    __slots__ = ("_client", "_counted")

    def __init__(self, client: str) -> None:
        self._client, self._counted = client, 0

    def take(self, size: int) -> None:
        """Set the counted bytes of this body to `size`, or 0 if it is small; raise Busy if memory is short."""
        counted = size if size > UNCOUNTED else 0
        if counted > self._counted:
            BODIES.take(place_of(self._client), counted - self._counted)
        elif counted < self._counted:
            BODIES.release(place_of(self._client), self._counted - counted)
        self._counted = counted

    def __enter__(self) -> BodyReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Count no bytes any more."""
        self.take(0)


async def read_body(scope: Scope, receive: Receive, most: int, memory: BodyReservation) -> bytes:
    """Return the body; RejectedRequest or Busy if it exceeds `most` bytes, is too slow, or memory is short."""
    if int(header(scope["headers"], b"content-length") or 0) > most:
        raise await _too_large(scope, receive, most, 0)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > most:
            raise await _too_large(scope, receive, most, len(body), more=False)
        memory.take(len(body))
        return body
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_parts(scope, receive, most, message, memory)
    except TimeoutError:
        slow = InvalidRequest(
            f"the body did not end within {BODY_SECONDS:g} s", hint="Send the request again without pauses."
        )
        raise RejectedRequest(slow, status=408, headers=[(b"connection", b"close")]) from None


async def _read_parts(scope: Scope, receive: Receive, most: int, message: Any, memory: BodyReservation) -> bytes:
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > most:
            raise await _too_large(scope, receive, most, size, more=message.get("more_body", False))
        try:
            memory.take(size)
        except Busy as busy:
            parts.clear()
            if message.get("more_body"):
                await _pass_over(scope, receive, most - size)
            raise RejectedRequest(busy, headers=[(b"connection", b"close")]) from None
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


async def _too_large(scope: Scope, receive: Receive, most: int, seen: int, *, more: bool = True) -> RejectedRequest:
    """Return the error for a body of more than `most` bytes, after reading on, up to twice as many."""
    if more:
        await _pass_over(scope, receive, 2 * most - seen)
    error = RequestTooLarge(f"the body is larger than {most} bytes", hint="Split it into several requests.")
    return RejectedRequest(error, headers=[(b"connection", b"close")])


async def _pass_over(scope: Scope, receive: Receive, most: int) -> None:
    """Read at most `most` more bytes: a client that is still sending would see a reset instead of the refusal."""
    more = not header(scope["headers"], b"expect")
    while more and most >= 0:
        message = await receive()
        most -= len(message.get("body", b""))
        more = message.get("more_body", False)


def header(headers: Headers, wanted: bytes) -> bytes:
    """Return the first header with this name; b"" without one."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def check_type(headers: Headers, *kinds: bytes) -> bytes:
    """Return the content type of the body, one of `kinds`; RejectedRequest with 415 for another, or for an encoding."""
    if header(headers, b"content-encoding").strip().lower() not in (b"", b"identity"):
        coded = InvalidRequest("the body has a content encoding", hint="Send the body without compression.")
        raise RejectedRequest(coded, status=415, headers=[(b"accept-encoding", b"identity")])
    found = header(headers, b"content-type").split(b";")[0].strip().lower()
    if found not in kinds:
        first = kinds[0].decode()
        named = " or ".join(kind.decode() for kind in kinds)
        raise RejectedRequest(
            InvalidRequest(f"the content type is not {named}", hint=f"Send content-type: {first}."), status=415
        )
    return found
