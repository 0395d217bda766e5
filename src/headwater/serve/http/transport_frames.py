"""Framing of events for each transport: pure functions from id, event name and JSON to bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwater.feeds.formats.frame import FrameTemplate
from headwater.model.change import Op

RETRY_MS = 2000  # how long an EventSource waits before it reconnects
SSE_OPENING = b"retry: %d\n" % RETRY_MS
SSE_PING = b": ping\n"  # a comment; the next frame ends its block
SSE_FAREWELL = b"retry: %d\n\n" % RETRY_MS
FRAGMENT = 1 << 20  # approximate bytes
_CONTINUATION, _TEXT, _FINAL = 0x00, 0x01, 0x80  # in the first byte of a WebSocket frame


def sse_opening(offset: int | None) -> bytes:
    """Return the first bytes of a stream without a stored position, with its current offset as id.

    A browser that is disconnected before the first event reconnects with this id.
    """
    return SSE_OPENING if offset is None else SSE_OPENING + b"id: %d\n\n" % offset


OPS = frozenset(op.word for op in Op)


class _Sse:
    """Frames an event of a text/event-stream. Compact JSON has no line breaks."""

    enclosing = FrameTemplate(b"id: ", b"\nevent: ", b"\ndata: ", b"\n\n")

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        if id.__class__ is int:
            return b"id: %d\nevent: %b\ndata: %b\n\n" % (id, word.encode(), data)
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (str(id).encode(), word.encode(), data)


class _Ndjson:
    """Frames a change as a line of its own, and every other event as an object with `event`."""

    enclosing = FrameTemplate(None, None, b"", b"\n")

    def __call__(self, id: int | str, word: str, data: bytes) -> bytes:
        if word in OPS:
            return data + b"\n"
        return b'{"event":"%s","id":%s,"data":%s}\n' % (word.encode(), _id(id), data)


sse, ndjson = _Sse(), _Ndjson()


def websocket(id: int | str, word: str, data: bytes) -> bytes:
    """Return one unmasked text frame of the WebSocket protocol."""
    return text_frame(b'{"id":%s,"event":"%s","data":%s}' % (_id(id), word.encode(), data))


def text_frame(payload: bytes, first: int = _FINAL | _TEXT) -> bytes:
    """Return `payload` as a WebSocket text frame, or as the kind of frame in the byte `first`."""
    size = len(payload)
    if size < 126:
        return bytes((first, size)) + payload
    if size < 1 << 16:
        return bytes((first, 0x7E)) + size.to_bytes(2, "big") + payload
    return bytes((first, 0x7F)) + size.to_bytes(8, "big") + payload


def text_fragments(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames of one text message. Control frames may be written between them (RFC 6455 §5.4)."""
    buffered: list[bytes] = []
    size, kind = 0, _TEXT
    for piece in pieces:
        buffered.append(piece)
        size += len(piece)
        if size >= FRAGMENT:
            yield text_frame(b"".join(buffered), kind)
            buffered.clear()
            size, kind = 0, _CONTINUATION
    yield text_frame(b"".join(buffered), _FINAL | kind)


def _id(id: int | str) -> bytes:
    return b"%d" % id if isinstance(id, int) else b'"%s"' % id.encode()
