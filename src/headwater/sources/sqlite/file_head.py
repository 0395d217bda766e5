"""Newest offset and schema version of a SQLite file, read in microseconds without waiting for a lock."""

from __future__ import annotations

import threading

import apsw

from headwater.sources.read import SourceHead
from headwater.sources.sqlite.database_file import File, GuardedConnection
from headwater.sources.sqlite.query.analysis.analysis import Analyses


class HeadReader:
    """Reads the newest offset and the schema version on a connection of its own. Thread-safe."""

    def __init__(self, file: File, analyses: Analyses) -> None:
        self._file, self._analyses = file, analyses
        self._lock = threading.Lock()  # guards _reader
        self._reader: GuardedConnection | None = None

    def read(self) -> SourceHead | None:
        """Return the head of the file; None if another thread is reading it, or SQLite fails, as on a lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._reader is None:
                self._reader = self._file.connect()
                self._reader.db.set_busy_handler(None)
            return self._analyses.peek_head(self._reader)
        except apsw.Error:
            return None
        finally:
            self._lock.release()
