"""How each transport frames what it sends: pure functions from id, word and JSON to bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwater.feeds.formats.frame import Enclosing
from headwater.model.change import Op

RETRY_MS = 2000  # an EventSource waits this long before it connects again
SSE_OPENING = b"retry: %d\n" % RETRY_MS
SSE_PING = b": ping\n"  # a comment, in the block that the next frame ends
SSE_FAREWELL = b"retry: %d\n\n" % RETRY_MS
FRAGMENT = 1 << 20  # bytes, about
_CONTINUATION, _TEXT, _FINAL = 0x00, 0x01, 0x80  # in the first byte of a WebSocket frame


def sse_opening(place: int | None) -> bytes:
    """The first words of a stream that nothing else remembers the place of: a browser that is cut off before the
    first frame comes back with this id."""
    return SSE_OPENING if place is None else SSE_OPENING + b"id: %d\n\n" % place


OPS = frozenset(op.word for op in Op)


class _Sse:
    """One event of a text/event-stream. Compact JSON has no line breaks."""

    enclosing = Enclosing(b"id: ", b"\nevent: ", b"\ndata: ", b"\n\n")

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        if id.__class__ is int:
            return b"id: %d\nevent: %b\ndata: %b\n\n" % (id, word.encode(), data)
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (str(id).encode(), word.encode(), data)


class _Ndjson:
    """A change is a line by itself; what else there is to say is an object with `event`."""

    enclosing = Enclosing(None, None, b"", b"\n")

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        if word in OPS:
            return data + b"\n"
        return b'{"event":"%s","id":%s,"data":%s}\n' % (word.encode(), _id(id), data)


sse, ndjson = _Sse(), _Ndjson()


def websocket(id: int | str, word: str, data: bytes) -> bytes:
    """One whole text frame of the WebSocket protocol, as a server sends it: unmasked."""
    return text_frame(b'{"id":%s,"event":"%s","data":%s}' % (_id(id), word.encode(), data))


def text_frame(payload: bytes, first: int = _FINAL | _TEXT) -> bytes:
    """`payload` as a WebSocket text frame, or as the frame that `first`, its first byte, says."""
    size = len(payload)
    if size < 126:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 0x7E)) + size.to_bytes(2, "big") + payload
    return bytes((first, 0x7F)) + size.to_bytes(8, "big") + payload


def text_fragments(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames of one text message. Control frames may be written between them (RFC 6455 §5.4)."""
    held: list[bytes] = []
    size, kind = 0, _TEXT
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= FRAGMENT:
            yield text_frame(b"".join(held), kind)
            held.clear()
            size, kind = 0, _CONTINUATION
    yield text_frame(b"".join(held), _FINAL | kind)


def _id(id: int | str) -> bytes:
    return b"%d" % id if isinstance(id, int) else b'"%s"' % id.encode()
