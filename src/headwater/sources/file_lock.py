"""Locks that allow one Headwater per database file or data folder. The kernel releases them on kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from typing import ClassVar

from headwater.errors import SourceMismatch, SourceUnfit, Unavailable

SUFFIX = "-headwater"


class FileLock:
    """Lock file `<path>-headwater` with its holder's process id; SourceMismatch if another process holds the lock."""

    def __init__(self, path: str, *, what: str = "", hint: str = "") -> None:
        self._path = os.path.realpath(path) + SUFFIX  # two names of one file share the lock
        while not self._try(what or path, hint or "Stop that server first, or send your requests to it."):
            continue
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the error of a second server names no process id
            os.write(self._fd, str(os.getpid()).encode())

    def _try(self, what: str, hint: str) -> bool:
        """Take the lock; return False if its holder removed the file concurrently."""
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
        """Return whether the lock file at the path is still the one we hold."""
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
    """Lock on the file itself, by device and inode, so that a hard link shares the lock; creates a missing file.

    Take the lock before this process opens the file with SQLite, and release it after SQLite has closed the file:
    closing any descriptor of a file drops all locks of the process on that file, SQLite's included.
    """

    _lock = threading.Lock()  # guards _held
    _held: ClassVar[set[tuple[int, int]]] = set()  # held by this process

    def __init__(self, path: str) -> None:
        try:
            with self._lock:
                self._take(path)
        except OSError as error:
            hint = "Check that the folder exists, and that this user may read and write the file."
            raise Unavailable(f"{os.path.basename(path)} cannot be opened: {error.strerror}", hint=hint) from None

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
        """Release the lock and close the file."""
        with self._lock:
            self._held.discard(self._inode)
            os.close(self._fd)


def _linked(path: str) -> SourceMismatch:
    return SourceMismatch(
        f"{os.path.basename(path)} is a hard link of a file that a Headwater serves under another name",
        hint="Serve the file once, under one name.",
    )
