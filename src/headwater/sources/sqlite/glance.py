"""Glance: where a file stands, in a few microseconds and without waiting for anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable

import apsw

from headwater.sources.source import Look
from headwater.sources.sqlite.opening import File
from headwater.sources.sqlite.triggers import CAPTURE

# One statement, so both are of one moment.
_SQL = f"SELECT (SELECT coalesce(max(seq), 0) FROM {CAPTURE}), (SELECT schema_version FROM pragma_schema_version)"


class Glance:
    """A connection of its own, that gives up where others wait. From any thread."""

    def __init__(self, file: File, vouched: Callable[[], int]) -> None:
        self._file, self._vouched = file, vouched
        self._lock = threading.Lock()  # guards _db
        self._db: apsw.Connection | None = None

    def look(self) -> Look | None:
        """Where the file stands; None where that takes longer."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._db is None:
                self._db = self._file.connect_bare()
                self._db.set_busy_handler(None)
            ((head, version),) = self._db.execute(_SQL).fetchall()
            return Look(int(str(head)), int(str(version)), settled=version == self._vouched())
        except apsw.Error:
            return None
        finally:
            self._lock.release()
