"""One Headwater per database file: a lock beside it, held while attached, let go by the kernel on kill -9."""

from __future__ import annotations

import fcntl
import os

from headwater.errors import SourceMismatch, SourceUnfit

SUFFIX = "-headwater"


class FileLock:
    """Takes `<path>-headwater`; the file names the holder for whoever comes second, and goes when it lets go."""

    def __init__(self, path: str, *, what: str = "", hint: str = "") -> None:
        self._path = os.path.realpath(path) + SUFFIX  # two names of one file share the lock
        while not self._try(what or path, hint or "Stop that one first, or send your requests to it."):
            continue
        os.ftruncate(self._fd, 0)
        os.write(self._fd, str(os.getpid()).encode())

    def _try(self, what: str, hint: str) -> bool:
        """Take the lock; False if the file was removed by a holder that let go meanwhile."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
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
        """Whether the file we hold is still the one others would find."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let go and leave nothing behind."""
        if self.is_held:
            os.unlink(self._path)
        os.close(self._fd)
