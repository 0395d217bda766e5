"""Locks by which one Headwater serves a database file or a data folder. The kernel releases them on kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from typing import ClassVar

from headwater.errors import SourceMismatch, SourceUnfit, Unavailable

SUFFIX = "-headwater"


class FileLock:
    """Take `<path>-headwater`; the file holds the process id of the holder, and is removed by `release`."""

    def __init__(self, path: str, *, what: str = "", hint: str = "") -> None:
        self._path = os.path.realpath(path) + SUFFIX  # two names of one file share the lock
        while not self._try(what or path, hint or "Stop that one first, or send your requests to it."):
            continue
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # a full disk: the error of a second server names no process id
            os.write(self._fd, str(os.getpid()).encode())

    def _try(self, what: str, hint: str) -> bool:
        """Take the lock; False if its holder removed the file concurrently."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SourceUnfit(
                f"{what}: {error.strerror}", hint="Check that the folder exists and is writable."
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._fd, 64).decode(errors="replace").strip()
            os.close(self._fd)
            raise SourceMismatch(
                f"{what} is served by another Headwater (process {holder or 'unknown'})", hint=hint
            ) from None
        if not self.is_held:
            os.close(self._fd)
            return False
        return True

    @property
    def is_held(self) -> bool:
        """Whether the file we hold is still the one at the path."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self.is_held:
            os.unlink(self._path)
        os.close(self._fd)


class InodeLock:
    """Lock the file itself, by device and inode: a hard link is another name of the same file. Creates a missing one.

    Take it before this process opens the file with SQLite, and release it after SQLite has closed the file: closing a
    file drops all locks that the process has on it, SQLite's too.
    """

    _lock = threading.Lock()  # guards _held
    _held: ClassVar[set[tuple[int, int]]] = set()  # by this process

    def __init__(self, path: str) -> None:
        try:
            with self._lock:
                self._take(path)
        except OSError as error:
            hint = "Check that the folder exists, and that this user may read and write the file."
            raise Unavailable(f"{path} cannot be opened: {error.strerror}", hint=hint) from None

    def _take(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            if (found.st_dev, found.st_ino) in self._held:
                raise _linked(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise _linked(path) from None
        found = os.fstat(self._fd)
        self._inode = found.st_dev, found.st_ino
        self._held.add(self._inode)

    def release(self) -> None:
        """Release the lock."""
        with self._lock:
            self._held.discard(self._inode)
            os.close(self._fd)


def _linked(path: str) -> SourceMismatch:
    return SourceMismatch(
        f"{path} is a hard link of a file that a Headwater serves under another name",
        hint="Serve it once, under one name.",
    )
