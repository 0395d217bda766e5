"""One Headwater per database file: a lock beside it, held while attached, let go by the kernel on kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os

from headwater.errors import SourceMismatch

SUFFIX = "-headwater"


class FileLock:
    """Takes `<path>-headwater`; the file names the holder for whoever comes second."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path) + SUFFIX  # two names of one file share the lock
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._fd, 64).decode(errors="replace").strip()
            os.close(self._fd)
            raise SourceMismatch(
                f"{path} is served by another Headwater (process {holder or 'unknown'})",
                hint="Stop that one first, or send your requests to it.",
            ) from None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, str(os.getpid()).encode())

    def release(self, *, remove: bool = False) -> None:
        """Let go; `remove` the file when nothing of us is to stay."""
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        os.close(self._fd)
