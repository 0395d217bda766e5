"""Cache of log slices as Arrow bytes in files, limited in size.

A file is head | body | notes. The head has the lengths of both and a checksum over both; a file that does not match
is deleted, and the slice is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from headwater.errors import StorageFull
from headwater.model.table import Table

_HEAD = struct.Struct(">8sQQII")  # mark, bytes of the body, rows, bytes of the notes, checksum
_MARK = b"HWSLICE2"
SUFFIX = ".slice"
BLOCK = 1 << 20

Stop = tuple[int, str]  # an offset at which a reader of the table must stop, and the reason


class SliceName(msgspec.Struct, frozen=True):
    """The identity of a slice: generation, table version, and the offset after which it begins."""

    db: str
    generation: str
    table: Table
    after: int

    @property
    def folder(self) -> str:
        """Return the folder of all slices of one generation."""
        return f"{self.db}/{self.generation}"

    @property
    def file(self) -> str:
        """Return the file name inside the folder."""
        digest = hashlib.blake2b(msgspec.json.encode(self.table), digest_size=12).hexdigest()
        return f"{digest}-{self.after:020d}{SUFFIX}"


class Slice:
    """An open, verified file of a slice. The user closes it."""

    def __init__(self, file: BinaryIO, length: int, rows: int, stops: list[Stop], start: int = _HEAD.size) -> None:
        self.file, self.length, self.rows, self.stops, self.start = file, length, rows, stops, start

    def read(self, place: int, size: int) -> bytes:
        """Return at most `size` bytes of the body from its byte `place` on."""
        return os.pread(self.file.fileno(), min(size, self.length - place), self.start + place)

    def close(self) -> None:
        """Close the file, which may have been deleted."""
        self.file.close()


class SliceWriter:
    """A slice that is being written. Call `add` with its bytes, then `done`, or `drop`."""

    def __init__(self, cache: Cache, target: Path, most: int) -> None:
        self._cache, self._target, self._most = cache, target, most
        self._length = self._rows = self._crc = 0
        descriptor, self._temporary = tempfile.mkstemp(suffix=".tmp", dir=target.parent)
        self._file = os.fdopen(descriptor, "wb")
        self._file.write(b"\0" * _HEAD.size)

    def add(self, data: bytes, rows: int) -> bool:
        """Append `rows` rows of the body; return False if the slice has become too large for the cache."""
        self._length += len(data)
        self._rows += rows
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)
        return self._length <= self._most

    def done(self, stops: list[Stop]) -> None:
        """Complete the file and add it to the cache."""
        notes = msgspec.msgpack.encode(stops)
        self._file.write(notes)
        self._file.seek(0)
        crc = zlib.crc32(notes, self._crc)
        self._file.write(_HEAD.pack(_MARK, self._length, self._rows, len(notes), crc))
        self._file.close()
        os.replace(self._temporary, self._target)
        self._cache.added(self._target, _HEAD.size + self._length + len(notes))

    def drop(self) -> None:
        """Delete the unfinished file."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


class Cache:
    """The files under one folder, at most `most` bytes; the least recently used are evicted first. Thread-safe."""

    def __init__(self, folder: Path, most: int, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._most, self._clock = folder, most, clock
        self._lock = threading.Lock()  # guards all fields below
        self._files: dict[Path, int] = {}  # sizes, the least recently used file first
        # Inode, size and modification time of files whose checksum was verified.
        self._proven: dict[Path, tuple[int, int, int]] = {}
        self.bytes = 0
        self.hits = self.misses = 0
        self._find()

    def _find(self) -> None:
        """Find the files of an earlier process, and delete unfinished ones."""
        found = []
        for path in self._folder.glob("*/*/*"):
            with contextlib.suppress(OSError):
                if path.suffix == SUFFIX:
                    status = path.stat()
                    found.append((status.st_atime_ns, path, status.st_size))
                else:
                    path.unlink()
        for _, path, size in sorted(found):
            self._files[path] = size
            self.bytes += size
        self._shrink()

    def get(self, name: SliceName, *, is_new: bool = False) -> Slice | None:
        """Return the slice if it is cached and intact, else None; with `is_new` count neither a hit nor a miss."""
        path = self._path(name)
        found = self._opened(path)
        with self._lock:
            if not is_new:
                self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
            if found is not None:
                size = self._files.pop(path, None)
                self._files[path] = _HEAD.size + found.length if size is None else size
                self.bytes += self._files[path] if size is None else 0
        return found

    def _opened(self, path: Path) -> Slice | None:
        try:
            file = path.open("rb")
        except OSError:
            return None
        try:
            found = self._checked(path, file)
        except OSError:
            found = None
        if found is None:
            file.close()
            with self._lock:
                self._drop(path)
        return found

    def _checked(self, path: Path, file: BinaryIO) -> Slice | None:
        status = os.fstat(file.fileno())
        head = os.pread(file.fileno(), _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        mark, length, rows, notes_length, crc = _HEAD.unpack(head)
        if mark != _MARK or status.st_size != _HEAD.size + length + notes_length:
            return None
        notes = os.pread(file.fileno(), notes_length, _HEAD.size + length)
        proof = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._proven.get(path) != proof:
            if _checksum(file.fileno(), _HEAD.size, length + notes_length) != crc:
                return None
            self._proven[path] = proof
        with contextlib.suppress(OSError):  # the access time keeps the order of eviction over a restart
            os.utime(file.fileno(), ns=(self._clock(), status.st_mtime_ns))
        return Slice(file, length, rows, msgspec.msgpack.decode(notes, type=list[Stop]))

    def begin(self, name: SliceName) -> SliceWriter | None:
        """Start writing a slice; return None if the cache is off or the file cannot be created."""
        if not self._most:
            return None
        path = self._path(name)
        try:
            if not path.parent.is_dir():
                self._make(path.parent)
            return SliceWriter(self, path, self._most // 4)
        except OSError:
            return None

    def temporary(self, data: bytes, rows: int) -> Slice:
        """Return `data` as a slice in a file that is deleted when it is closed; StorageFull if it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file: BinaryIO = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # the user closes it
            file.write(data)
            file.flush()
        except OSError as error:
            raise StorageFull(f"no space left for pulls that are not read: {error.strerror}") from error
        return Slice(file, len(data), rows, [], start=0)

    def _make(self, folder: Path) -> None:
        """Create the folder of a generation, and delete those of other generations of the database."""
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if other != folder:
                with self._lock:
                    for path in [path for path in self._files if path.parent == other]:
                        self._drop(path)
                shutil.rmtree(other, ignore_errors=True)

    def added(self, path: Path, size: int) -> None:
        """Add a complete file, and evict others if necessary."""
        with self._lock:
            self.bytes += size - self._files.pop(path, 0)
            self._files[path] = size
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self._most and self._files:
            self._drop(next(iter(self._files)))

    def _drop(self, path: Path) -> None:
        self.bytes -= self._files.pop(path, 0)
        self._proven.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def _path(self, name: SliceName) -> Path:
        return self._folder / name.folder / name.file


def _checksum(descriptor: int, start: int, length: int) -> int:
    crc, place, end = 0, start, start + length
    while place < end:
        data = os.pread(descriptor, min(BLOCK, end - place), place)
        if not data:
            break
        crc = zlib.crc32(data, crc)
        place += len(data)
    return crc
