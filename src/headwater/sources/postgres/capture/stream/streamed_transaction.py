"""A transaction that is sent before its commit: its messages are kept until its end is known."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD
from headwater.sources.postgres.capture.decode.row_plan import Get
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill

NO_FRAME = (0, memoryview(b""))
_FRAME = bytes([DATA]).ljust(DATA_HEAD, b"\0")


class StreamedTransaction:
    """The state of a transaction that is sent before its commit."""

    def __init__(self, spill: FileSpill) -> None:
        self.spill = spill
        self.aborted: set[int] = set()  # rolled-back subtransactions
        self.described: dict[int, int] = {}  # tables described in the transaction, each with the relations' clock then

    def keep(self, get: Get, most: int) -> tuple[int, memoryview]:
        """Keep up to `most` received rows of an open block; return the next frame, or the reason there is none."""
        for _ in range(most):
            size, frame = get(1)
            if size <= DATA_HEAD or frame[0] != DATA or frame[DATA_HEAD] not in b"IUD":
                return size, frame
            self.spill.append(bytes(frame[DATA_HEAD:]))
        return get(1)

    def frames(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the kept messages as frames outside of any block, without those rolled back."""
        for message in self.spill.read():
            if int.from_bytes(message[1:5], "big") not in self.aborted:
                frame = _FRAME + message[:1] + message[5:]
                yield len(frame), memoryview(frame)
