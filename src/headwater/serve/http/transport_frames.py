"""How each transport frames what it sends: pure functions from id, word and JSON to bytes."""

from __future__ import annotations

from headwater.feeds.deliver.frame import Enclosing
from headwater.model.change import Op

RETRY_MS = 2000  # an EventSource waits this long before it connects again
SSE_OPENING = b"retry: %d\n" % RETRY_MS
SSE_PING = b": ping\n"  # a comment, in the block that the next frame ends
SSE_FAREWELL = b"retry: %d\n\n" % RETRY_MS


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


def text_frame(payload: bytes) -> bytes:
    """`payload` as a WebSocket text frame."""
    size = len(payload)
    if size < 126:
        return bytes((0x81, size)) + payload
    if size < 1 << 16:
        return b"\x81\x7e" + size.to_bytes(2, "big") + payload
    return b"\x81\x7f" + size.to_bytes(8, "big") + payload


def _id(id: int | str) -> bytes:
    return b"%d" % id if isinstance(id, int) else b'"%s"' % id.encode()
