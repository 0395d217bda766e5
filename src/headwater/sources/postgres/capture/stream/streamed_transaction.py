"""A transaction that is sent before it is committed: its messages are put aside until its end is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD
from headwater.sources.postgres.capture.decode.row_plan import Get

NO_FRAME = (0, memoryview(b""))
_FRAME = bytes([DATA]).ljust(DATA_HEAD, b"\0")


class Spill(Protocol):
    """Messages of one unfinished transaction."""

    def append(self, message: bytes) -> None:
        """Keep `message`, after those before."""
        ...

    def read(self) -> Iterator[bytes]:
        """All of them, in order."""
        ...

    def drop(self) -> None:
        """Forget them."""
        ...


class Ahead:
    """What is known of one such transaction."""

    def __init__(self, spill: Spill) -> None:
        self.spill = spill
        self.aborted: set[int] = set()  # subtransactions
        self.told: dict[int, int] = {}  # tables that were described in it, and when by the clock of the relations

    def keep(self, get: Get, most: int) -> tuple[int, memoryview]:
        """Put rows of an open block aside as they come, at most so many; gives the frame after them."""
        for _ in range(most):
            size, frame = get(1)
            if size <= DATA_HEAD or frame[0] != DATA or frame[DATA_HEAD] not in b"IUD":
                return size, frame
            self.spill.append(bytes(frame[DATA_HEAD:]))
        return get(1)

    def frames(self) -> Iterator[tuple[int, memoryview]]:
        """What was kept, as if it came outside of any block; without what was rolled back."""
        for message in self.spill.read():
            if int.from_bytes(message[1:5], "big") not in self.aborted:
                frame = _FRAME + message[:1] + message[5:]
                yield len(frame), memoryview(frame)
