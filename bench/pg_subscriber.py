"""A subscriber of our server: reads server-sent events as fast as they arrive, and counts changes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from bench.generator import http_get

MARK = b"\nid: "


def changes(port: int, path: str) -> Iterator[int]:
    """Yield how many changes have arrived, after each read."""
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(http_get(port, path, Accept="text/event-stream"))
        buffer, count, kept = bytearray(1 << 20), 0, b""
        while size := wire.recv_into(buffer):
            data = kept + buffer[:size]
            count += data.count(MARK)
            kept = bytes(data[-len(MARK) + 1 :])
            yield count
    raise RuntimeError(f"the stream ended after {count} changes")


def events(port: int, path: str) -> Iterator[bytes]:
    """Yield the data of each change; control events, which have no image, are left out."""
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.sendall(http_get(port, path, Accept="text/event-stream"))
        kept = b""
        while data := wire.recv(1 << 16):
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                if line.startswith(b'data: {"before"'):
                    yield line[6:].rstrip(b"\r")


def until(port: int, path: str, count: int) -> float:
    """Return the monotonic time at which `count` changes had arrived."""
    for found in changes(port, path):
        if found >= count:
            break
    return time.monotonic()
