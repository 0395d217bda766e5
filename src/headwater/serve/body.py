"""The body of a request: of a type that is taken, and read whole within bounds; and how a request is refused."""

from __future__ import annotations

import contextlib
import json

from headwater.errors import HeadwaterError, InvalidRequest, RequestTooLarge
from headwater.serve.call import Headers, Receive, Scope

JSON = b"application/json"
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
    if "surrogate" in str(fault) or ("truncated" in str(fault) and _is_whole(body)):
        return InvalidRequest(
            r"a text in the body holds half a character (a lone surrogate: \ud800 to \udfff)", hint=_PAIR
        )
    return InvalidRequest(f"the body is not JSON: {fault}", hint=hint)


def _is_whole(body: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body)  # it lets such halves pass
        return True
    return False


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body; RequestTooLarge as soon as it is known to be larger than `most` bytes."""
    if int(header(scope["headers"], b"content-length") or 0) > most:
        raise await _too_large(scope, receive, most, 0)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > most:
            raise await _too_large(scope, receive, most, size)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _too_large(scope: Scope, receive: Receive, most: int, seen: int) -> Refusal:
    """The refusal, after reading a little more: a client that is still sending would see a reset instead."""
    more = not header(scope["headers"], b"expect")
    while more and seen <= 2 * most:
        message = await receive()
        seen += len(message.get("body", b""))
        more = message.get("more_body", False)
    error = RequestTooLarge(f"the body is larger than {most} bytes", hint="Send less, in several requests.")
    return Refusal(error, headers=[(b"connection", b"close")])


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
