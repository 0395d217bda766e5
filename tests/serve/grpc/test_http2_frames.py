"""Limits on the header frames of an HTTP/2 client, however its bytes are cut."""

import pytest
from tests.serve.http2 import ACK, CONTINUATION, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

from headwater.serve.grpc.connections.http2_frames import (
    HEAD,
    MAX_BLOCK,
    MAX_FRAMES,
    MAX_UNACKNOWLEDGED,
    Http2Frames,
    RefusedFrame,
)

DATA = 0
ACKNOWLEDGED = PREFACE + frame(SETTINGS, ACK)


def block(size: int, stream: int = 1) -> bytes:
    """Return the header frames of one call, `size` bytes with the headers of the frames."""
    sizes = [16_384 + HEAD] * (size // (16_384 + HEAD)) + [size % (16_384 + HEAD)]
    assert sizes[-1] >= HEAD
    kinds = [HEADERS] + [CONTINUATION] * (len(sizes) - 1)
    flags = [0] * (len(sizes) - 1) + [END_HEADERS]
    parts = zip(kinds, flags, sizes, strict=True)
    return b"".join(frame(kind, flag, bytes(each - HEAD), stream) for kind, flag, each in parts)


def is_refused(data: bytes, step: int) -> bool:
    """Return whether `data` is refused, received in pieces of `step` bytes."""
    frames = Http2Frames()
    try:
        for start in range(0, len(data), step):
            frames.check(data[start : start + step])
    except RefusedFrame:
        return True
    return False


LEGAL = {
    "preface": PREFACE,
    "call before the acknowledgement": PREFACE + block(MAX_UNACKNOWLEDGED),
    "calls before the acknowledgement": PREFACE + block(MAX_UNACKNOWLEDGED // 2) * 2,
    "large calls after it": ACKNOWLEDGED + block(MAX_BLOCK) * 3,
    "continuations": ACKNOWLEDGED
    + (frame(HEADERS, 0, b"x") + frame(CONTINUATION, 0) * (MAX_FRAMES - 2) + frame(CONTINUATION, END_HEADERS)) * 2,
    "header frames inside of data": PREFACE + frame(DATA, 0, frame(HEADERS, 0, bytes(100)) * 1000, 1),
    "many calls after it": ACKNOWLEDGED + block(1000) * 1000,
}
ILLEGAL = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00",
    "large call before the acknowledgement": PREFACE + block(MAX_UNACKNOWLEDGED + 1),
    "many calls before the acknowledgement": PREFACE + block(MAX_UNACKNOWLEDGED // 4) * 5,
    "acknowledgement of the client's own settings": PREFACE + frame(SETTINGS, 0) + block(MAX_UNACKNOWLEDGED + 1),
    "large call after it": ACKNOWLEDGED + block(MAX_BLOCK + 1),
    "large call after another one": ACKNOWLEDGED + block(MAX_BLOCK) + block(MAX_BLOCK + 1),
    "headers of 16 MiB that only begin": ACKNOWLEDGED + frame(HEADERS, 0, bytes((1 << 24) - 1))[:HEAD],
    "empty continuations": ACKNOWLEDGED + frame(HEADERS, 0, b"x") + frame(CONTINUATION, 0) * MAX_FRAMES,
    "headers that never end": ACKNOWLEDGED + frame(HEADERS, 0, b"x") * (MAX_FRAMES + 1),
}


@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 24])
@pytest.mark.parametrize("name", LEGAL)
def test_legal_frames_are_accepted(name: str, step: int) -> None:
    assert not is_refused(LEGAL[name], step)


@pytest.mark.parametrize("step", [1, 7, 1000, 1 << 24])
@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_bytes_are_refused(name: str, step: int) -> None:
    assert is_refused(ILLEGAL[name], step)


@pytest.mark.parametrize("step", [1, 5, 9, 1000])
def test_every_frame_is_counted_once(step: int) -> None:
    sent, frames = ACKNOWLEDGED + (frame(DATA, 0, bytes(20), 1) + frame(DATA, 0, b"", 1)) * 50, Http2Frames()
    assert sum(frames.check(sent[start : start + step]) for start in range(0, len(sent), step)) == 102
