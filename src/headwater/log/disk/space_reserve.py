"""A reserve of disk space: a server that starts on a full disk needs a little space before it can read."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 4 << 20
PLENTY = 8 * RESERVE_BYTES  # free, so that the reserve takes nothing that others would miss
_FULL = 64 << 10  # bytes: with less than that free, a disk is full


class SpaceReserve:
    """A file without content that occupies disk space: removed while the server starts, then created again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"
        self._released = 0  # bytes that were given up

    @property
    def is_storage_full(self) -> bool:
        """Return whether the disk has less than 64 KiB free, too little for writes."""
        return self._free < _FULL

    def release(self) -> None:
        """Delete the file, if there is one, so that its space is free."""
        self._released = self._size
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def take(self) -> bool:
        """Allocate the whole reserve if 32 MiB are free, else what `release` freed; return whether it is whole.

        It never raises: on a full disk there is no reserve.
        """
        wanted = RESERVE_BYTES if self._free >= PLENTY else min(self._released, self._free)
        with contextlib.suppress(OSError):
            if wanted > self._size:
                self._allocate(wanted)
            self._released = 0
        return self._size >= RESERVE_BYTES

    def _allocate(self, size: int) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            else:  # macOS has none
                os.write(fd, bytes(size))
        finally:
            os.close(fd)

    @property
    def _free(self) -> int:
        try:
            return shutil.disk_usage(self._path.parent).free
        except OSError:  # the folder was removed: reads and writes there report that
            return PLENTY

    @property
    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0
