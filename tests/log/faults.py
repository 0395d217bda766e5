"""A disk that can be made to fail: an SQLite VFS with switches, for tests that use APSW."""

from __future__ import annotations

import itertools
from typing import Any

import apsw

_numbers = itertools.count(1)


class FaultyVFS(apsw.VFS):
    """The default file system until a switch is set. Pass `name` as `vfs=`; call `unregister()` at the end.

    full:       every write fails as on a full disk.
    fail_sync:  every fsync fails, as on a dying disk.
    fail_read:  every read fails.
    syncs:      how many fsyncs were asked for.
    """

    def __init__(self) -> None:
        self.name = f"faulty-{next(_numbers)}"
        self.full = self.fail_sync = self.fail_read = False
        self.syncs = 0
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> FaultyFile:
        """Open a file whose reads, writes and fsyncs can fail."""
        return FaultyFile(self, name, flags)


class FaultyFile(apsw.VFSFile):
    """One open file of a FaultyVFS."""

    def __init__(self, disk: FaultyVFS, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk

    def xRead(self, amount: int, offset: int) -> bytes:
        """Read, or fail if `fail_read` is set."""
        if self._disk.fail_read:
            raise apsw.IOError("injected: read failed")
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        """Write, or fail if `full` is set."""
        if self._disk.full:
            raise apsw.FullError("injected: disk full")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        """Count the fsync, and fail if `fail_sync` is set."""
        self._disk.syncs += 1
        if self._disk.fail_sync:
            raise apsw.IOError("injected: fsync failed")
        super().xSync(flags)

    def xLock(self, level: int) -> None:
        """Lock; a read-only file is reported as busy, because the last reader to close tries to lock it."""
        try:
            super().xLock(level)
        except apsw.IOError as error:
            raise apsw.BusyError("read-only file") from error
