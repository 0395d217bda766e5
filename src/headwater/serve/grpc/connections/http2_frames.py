"""Limits on the header frames of an HTTP/2 client; frames are measured, not decoded. No I/O.

The gRPC library limits the metadata of a call only after the client has acknowledged its SETTINGS, and accepts 16 MiB
before that. It converts them to Python objects in the event loop, for which nothing else runs.
"""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = 9  # bytes of the header of a frame
HEADERS, SETTINGS, PUSH_PROMISE, CONTINUATION = 1, 4, 5, 9  # types of frames
ACK, END_HEADERS = 1, 4  # flags

# Bytes of all header frames before SETTINGS are acknowledged. Each byte may refer to an indexed header: so many take
# the event loop 12 to 25 ms; 64 KiB took 60 to 100 ms. The library accepts no more after the acknowledgement either.
MAX_UNACKNOWLEDGED = 16 << 10
MAX_BLOCK = 64 << 10  # bytes of the header frames of one call after that; the library refuses what is above 16 KiB
MAX_FRAMES = 17  # HEADERS and CONTINUATION frames of one call, empty ones included


class RefusedFrame(Exception):
    """A frame over a limit, or data that is not HTTP/2; the connection must be closed."""


class Http2Frames:
    """Checks the bytes from one client. The library itself checks the order and the length of the frames."""

    def __init__(self) -> None:
        self._preface = PREFACE  # the rest of it that has not been received
        self._part = b""  # of the header of a frame
        self._next = 0  # bytes until the header of the next frame
        self._is_acknowledged = False
        self._bytes = 0  # of header frames, from the first of a call or, before the acknowledgement, of the connection
        self._frames = 0  # header frames of the current call

    def check(self, data: bytes) -> int:
        """Return how many frames begin in the next bytes of the client. Raises RefusedFrame."""
        if self._preface:
            data = self._after_preface(data)
        if self._part:
            data = self._part + data
        at, end, frames = self._next, len(data), 0
        while at + HEAD <= end:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            kind = data[at + 3]
            if kind in (HEADERS, CONTINUATION, PUSH_PROMISE):
                self._count(HEAD + length, data[at + 4])
            elif kind == SETTINGS and data[at + 4] == ACK:
                self._is_acknowledged = True
            at += HEAD + length
            frames += 1
        self._part = data[at:]
        self._next = max(at - end, 0)
        return frames

    def _after_preface(self, data: bytes) -> bytes:
        """Return the part of `data` after the preface; RefusedFrame if another preface is sent."""
        size = min(len(self._preface), len(data))
        if data[:size] != self._preface[:size]:
            raise RefusedFrame("the connection does not begin as HTTP/2")
        self._preface = self._preface[size:]
        return data[size:]

    def _count(self, size: int, flags: int) -> None:
        """Count a header frame; RefusedFrame if it exceeds a limit."""
        self._bytes += size
        self._frames += 1
        if self._frames > MAX_FRAMES:
            raise RefusedFrame(f"the headers of one call have more than {MAX_FRAMES} frames")
        if self._bytes > MAX_BLOCK:
            raise RefusedFrame(f"the headers of one call are larger than {MAX_BLOCK} bytes")
        if self._bytes > MAX_UNACKNOWLEDGED and not self._is_acknowledged:
            raise RefusedFrame(f"the headers before the ACK of SETTINGS are larger than {MAX_UNACKNOWLEDGED} bytes")
        if flags & END_HEADERS:
            self._frames = 0
            if self._is_acknowledged:
                self._bytes = 0
