"""Slices of the log as Arrow bytes, kept in files: built once, then read as they are. Bounded; never a source of truth.

A file: head | body | notes. The head says how long the others are and holds a checksum of both; a file that
does not match it is removed, and the slice built again.
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

from headwater.model.table import Table

_HEAD = struct.Struct(">8sQQII")  # mark, bytes of the body, rows, bytes of the notes, checksum
_MARK = b"HWSLICE2"
SUFFIX = ".slice"
BLOCK = 1 << 20

Stop = tuple[int, str]  # an offset that no reader may pass unknowingly, and the reason


class Name(msgspec.Struct, frozen=True):
    """Which slice: of which history, table and shape, and the offset it begins after."""

    db: str
    generation: str
    table: Table
    after: int

    @property
    def folder(self) -> str:
        """Of all slices of one history."""
        return f"{self.db}/{self.generation}"

    @property
    def file(self) -> str:
        """Inside that folder."""
        digest = hashlib.blake2b(msgspec.json.encode(self.table), digest_size=12).hexdigest()
        return f"{digest}-{self.after:020d}{SUFFIX}"


class Slice:
    """An open file that was found to be whole. Close it."""

    def __init__(self, file: BinaryIO, length: int, rows: int, stops: list[Stop]) -> None:
        self.file, self.length, self.rows, self.stops = file, length, rows, stops
        self.start = _HEAD.size

    def body(self) -> bytes:
        """All of it."""
        return os.pread(self.file.fileno(), self.length, self.start)

    def close(self) -> None:
        """Let go of the file, which may be removed by now."""
        self.file.close()


class Writing:
    """A slice on its way into the cache. `add` its bytes, then `done`; or `drop` it."""

    def __init__(self, cache: Cache, target: Path, most: int) -> None:
        self._cache, self._target, self._most = cache, target, most
        self._length = self._rows = self._crc = 0
        descriptor, self._temporary = tempfile.mkstemp(suffix=".tmp", dir=target.parent)
        self._file = os.fdopen(descriptor, "wb")
        self._file.write(b"\0" * _HEAD.size)

    def add(self, data: bytes, rows: int) -> bool:
        """Take a piece of the body; False when the slice is too large to be kept."""
        self._length += len(data)
        self._rows += rows
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)
        return self._length <= self._most

    def done(self, stops: list[Stop]) -> None:
        """Give it its name."""
        notes = msgspec.msgpack.encode(stops)
        self._file.write(notes)
        self._file.seek(0)
        crc = zlib.crc32(notes, self._crc)
        self._file.write(_HEAD.pack(_MARK, self._length, self._rows, len(notes), crc))
        self._file.close()
        os.replace(self._temporary, self._target)
        self._cache.added(self._target, _HEAD.size + self._length + len(notes))

    def drop(self) -> None:
        """Forget it."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


class Cache:
    """The files under one folder, at most `most` bytes of them; those used longest ago go first. From any thread."""

    def __init__(self, folder: Path, most: int, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._folder, self._most, self._clock = folder, most, clock
        self._lock = threading.Lock()  # guards what follows
        self._files: dict[Path, int] = {}  # size, the one used longest ago first
        self._proven: dict[
            Path, tuple[int, int, int]
        ] = {}  # inode, size and time of writing of files once read through
        self.bytes = 0
        self.hits = self.misses = 0
        self._find()

    def _find(self) -> None:
        """What an earlier process left; half-written files go."""
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

    def get(self, name: Name, *, is_new: bool = False) -> Slice | None:
        """The slice, if it is there and whole. One that was put in just now is no hit."""
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
            self._forget(path)
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
        with contextlib.suppress(OSError):  # the time of use, by which it outlives others after a restart
            os.utime(file.fileno(), ns=(self._clock(), status.st_mtime_ns))
        return Slice(file, length, rows, msgspec.msgpack.decode(notes, type=list[Stop]))

    def begin(self, name: Name) -> Writing | None:
        """A new slice; None when nothing can be kept (no space, no folder, no room)."""
        if not self._most:
            return None
        path = self._path(name)
        try:
            if not path.parent.is_dir():
                self._make(path.parent)
            return Writing(self, path, self._most // 4)
        except OSError:
            return None

    def _make(self, folder: Path) -> None:
        """The folder of a history; those of other histories of that database are of no use any more."""
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.parent.iterdir():
            if other != folder:
                with self._lock:
                    for path in [path for path in self._files if path.parent == other]:
                        self._drop(path)
                shutil.rmtree(other, ignore_errors=True)

    def added(self, path: Path, size: int) -> None:
        """A file got its name; others may have to go."""
        with self._lock:
            self.bytes += size - self._files.pop(path, 0)
            self._files[path] = size
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self._most and self._files:
            self._drop(next(iter(self._files)))

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._drop(path)

    def _drop(self, path: Path) -> None:
        self.bytes -= self._files.pop(path, 0)
        self._proven.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def _path(self, name: Name) -> Path:
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
