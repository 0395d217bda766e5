"""Storage of unfinished transactions' messages: in memory while they are few, then in a temporary file."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headwater.errors import StorageFull

IN_MEMORY = 1 << 20
CHUNK = 256 << 10  # bytes read or written at a time
_SIZE = struct.Struct("<I")


class FileSpill:
    """Messages in memory, then in a file without a name: nothing remains of it, however the process ends."""

    def __init__(self, folder: Path | None = None, in_memory: int = IN_MEMORY) -> None:
        place = None if folder is None else str(folder)
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory, dir=place)  # noqa: SIM115
        self._waiting, self._together = bytearray(), min(CHUNK, in_memory)  # written once this many bytes wait
        self.bytes = 0

    def append(self, message: bytes) -> None:
        """Append `message`; StorageFull if the file cannot be written."""
        self._waiting += _SIZE.pack(len(message))
        self._waiting += message
        self.bytes += len(message) + _SIZE.size
        if len(self._waiting) >= self._together:
            self._write()

    def _write(self) -> None:
        try:
            self._file.write(self._waiting)
        except OSError as error:
            raise StorageFull(
                f"an unfinished transaction cannot be stored: {error.strerror or type(error).__name__}"
            ) from error
        self._waiting = bytearray()

    def read(self) -> Iterator[bytes]:
        """Yield all messages in order. Nothing may be appended while reading."""
        self._write()
        self._file.seek(0)
        data, at, needed = b"", 0, _SIZE.size
        while chunk := self._file.read(max(CHUNK, needed)):
            data, at = data[at:] + chunk, 0
            while (needed := self._missing(data, at)) <= 0:
                end = len(data) + needed
                yield data[at + _SIZE.size : end]
                at = end

    @staticmethod
    def _missing(data: bytes, at: int) -> int:
        """Return how many bytes the message at `at` still lacks; negative: how many bytes follow it."""
        begin = at + _SIZE.size
        if begin > len(data):
            return begin - len(data)
        return begin + int(_SIZE.unpack_from(data, at)[0]) - len(data)

    def drop(self) -> None:
        """Discard the messages and release their space."""
        self._file.close()
