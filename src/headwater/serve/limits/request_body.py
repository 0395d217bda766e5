"""The body of a request: of a type that is taken, and read whole within bounds; and how a request is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from headwater.errors import Busy, HeadwaterError, InvalidRequest, RequestTooLarge
from headwater.serve.call import Headers, Receive, Scope
from headwater.serve.limits.rates import place_of

JSON = b"application/json"
MAX_RECEIVING = 256 << 20  # bytes of all unanswered requests, messages of WebSockets included; half from one address
UNCOUNTED = 64 << 10  # bytes: what came of a smaller body is not counted
BODY_SECONDS = 300.0  # in which a body arrives, however steadily it comes
LARGE = 256 << 10  # bytes: a body that is not decoded in the loop
MAX_ELEMENTS = 500_000  # of JSON: marks between values and names, and beginnings of lists and objects
MAX_WRITTEN = 1_000_000  # the same of a request that writes
MAX_EXPONENTS = 1_000  # numbers with an exponent of three digits
_EXPONENT = re.compile(rb"[0-9.][eE][+-]?0*[1-9][0-9]{2}")
_HALF = re.compile(rb"\\u[dD](?:[c-fC-F]|[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]))")
_PAIR = 'Send both halves of the pair, or the character itself; what is no text goes as {"t":"bytes","b64":…}.'


class Refusal(Exception):
    """A request that goes no further, with the status and headers to say so."""

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
    """The header that tells when to come again: in whole seconds, and a second where nothing better is known."""
    return b"retry-after", b"%d" % max(-(-int(error.extra.get("retry_after_ms", 0)) // 1000), 1)


class Gone(Exception):
    """The client left: there is nobody to answer."""


def no_json(body: bytes, fault: Exception, hint: str) -> InvalidRequest:
    """What to say of a body of which our parser said `fault`."""
    if isinstance(fault, RecursionError):
        return InvalidRequest("the body is not JSON: nested too deeply", hint=hint)
    told = str(fault)
    if "surrogate" in told or (("truncated" in told or "escape" in told) and _has_half(body)):
        return InvalidRequest(
            r"a text in the body holds half a character (a lone surrogate: \ud800 to \udfff)", hint=_PAIR
        )
    return InvalidRequest(f"the body is not JSON: {fault}", hint=hint)


def _has_half(body: bytes) -> bool:
    """Return whether the parser met half a character: it calls that truncated, or a bad escape."""
    if len(body) > LARGE:  # a third parse of it would take too long
        return _HALF.search(body) is not None
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)  # it lets such halves pass
        return True
    return False


def check_elements(body: bytes, most: int) -> None:
    """Raise RequestTooLarge if JSON has more than `most` elements.

    A parser holds the interpreter's lock until it is done: a body of millions of empty lists would stop every other
    request for seconds. Elements are counted by the marks that separate them, outside of texts.
    """
    if len(body) <= LARGE or _marks(body) <= most:
        return
    outside = _outside_texts(body, most)
    if outside is not None and _marks(outside) <= most:
        return
    raise RequestTooLarge(
        f"the request has more than {most} values, names and lists", hint="Send less, in several requests."
    )


def check_exponents(body: bytes) -> None:
    """Raise RequestTooLarge if JSON has many numbers such as 1e308: the parser takes 0.1 ms for each of them."""
    if len(body) <= MAX_EXPONENTS * len("1e308,") or _exponents(body) <= MAX_EXPONENTS:
        return
    outside = _outside_texts(body, MAX_WRITTEN)
    if outside is not None and _exponents(outside) <= MAX_EXPONENTS:
        return
    raise RequestTooLarge(
        f"the request has more than {MAX_EXPONENTS} numbers with an exponent of three digits",
        hint="Send fewer of them in one request, or write them without an exponent.",
    )


def _outside_texts(body: bytes, most: int) -> bytes | None:
    """Return what is outside the texts of JSON, if there are at most `most` of them, and any."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    return b"".join(plain.split(b'"')[::2]) if 0 < plain.count(b'"') <= 2 * most else None


def _exponents(body: bytes) -> int:
    return len(_EXPONENT.findall(body))


def _marks(body: bytes) -> int:
    return body.count(b",") + body.count(b":") + body.count(b"[") + body.count(b"{")


class BodyMemory:
    """Count the bytes of all bodies that are being received or worked on. Use it in one loop."""

    def __init__(self, total: int = MAX_RECEIVING) -> None:
        self.total = total
        self._used = 0
        self._by_place: dict[str, int] = {}  # no entries of 0

    @property
    def used(self) -> int:
        """Return the bytes in use."""
        return self._used

    def take(self, place: str, count: int) -> None:
        """Count `count` bytes from one client address. Raises Busy where it or all addresses have too many."""
        mine = self._by_place.get(place, 0)
        if self._used + count > self.total or mine + count > self.total // 2:
            raise Busy(
                f"{self._used >> 20} MiB of unfinished requests are held, {mine >> 20} MiB of them from your address",
                hint="Try again in a moment, or send fewer large requests at a time.",
            )
        self._used += count
        self._by_place[place] = mine + count

    def release(self, place: str, count: int) -> None:
        """Give `count` bytes back."""
        self._used -= count
        left = self._by_place.pop(place, 0) - count
        if left > 0:
            self._by_place[place] = left


BODIES = BodyMemory()  # one process has one memory


class BodyReservation:
    """The memory of one body from `client`, or of all messages of a WebSocket, until they are answered."""

    __slots__ = ("_client", "_counted")

    def __init__(self, client: str) -> None:
        self._client, self._counted = client, 0

    def take(self, size: int) -> None:
        """Hold `size` bytes in all, more or fewer than before; few of them are not counted. Raises Busy."""
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
        """Give the memory back."""
        self.take(0)


async def read_body(scope: Scope, receive: Receive, most: int, memory: BodyReservation) -> bytes:
    """The whole body; a refusal as soon as it is larger than `most` bytes, comes too slowly, or finds no memory."""
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
        slow = InvalidRequest(f"the body did not end within {BODY_SECONDS:g} s", hint="Send it again, in one go.")
        raise Refusal(slow, status=408, headers=[(b"connection", b"close")]) from None


async def _read_parts(scope: Scope, receive: Receive, most: int, message: Any, memory: BodyReservation) -> bytes:
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise Gone
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
            raise Refusal(busy, headers=[(b"connection", b"close")]) from None
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


async def _too_large(scope: Scope, receive: Receive, most: int, seen: int, *, more: bool = True) -> Refusal:
    """The refusal, after reading a little more."""
    if more:
        await _pass_over(scope, receive, 2 * most - seen)
    error = RequestTooLarge(f"the body is larger than {most} bytes", hint="Send less, in several requests.")
    return Refusal(error, headers=[(b"connection", b"close")])


async def _pass_over(scope: Scope, receive: Receive, most: int) -> None:
    """Read at most so many bytes more: a client that is still sending would see a reset instead of a refusal."""
    more = not header(scope["headers"], b"expect")
    while more and most >= 0:
        message = await receive()
        most -= len(message.get("body", b""))
        more = message.get("more_body", False)


def header(headers: Headers, wanted: bytes) -> bytes:
    """The first header of that name."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def check_type(headers: Headers, *kinds: bytes) -> bytes:
    """The type of the body, which is one of `kinds`; a refusal with 415."""
    found = header(headers, b"content-type").split(b";")[0].strip().lower()
    if found not in kinds:
        first = kinds[0].decode()
        named = " or ".join(kind.decode() for kind in kinds)
        raise Refusal(InvalidRequest(f"the body is not {named}", hint=f"Send content-type: {first}."), status=415)
    return found
