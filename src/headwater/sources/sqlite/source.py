"""The SQLite source: one file, captured by triggers, read by a pool of connections, written by one thread."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from headwater.sources.capture_stream import LogNotes
from headwater.sources.file_lock import FileLock, InodeLock
from headwater.sources.read import BulkAddress
from headwater.sources.sqlite.capture.capture import SqliteCapture
from headwater.sources.sqlite.capture.power_loss import ShutdownNotes
from headwater.sources.sqlite.capture.trigger_installation import capturable
from headwater.sources.sqlite.connection_pool import Pool
from headwater.sources.sqlite.database_file import File, open_database
from headwater.sources.sqlite.query.analysis.analysis import Analyses
from headwater.sources.sqlite.query.queries import SqliteQueries
from headwater.sources.sqlite.query.where import Predicates
from headwater.sources.sqlite.read.reads import SqliteReads
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.wal_size import OpenReads, WalLimit
from headwater.sources.sqlite.write.writes import SqliteWrites

READERS = 8  # read connections; on two cores more would only wait for each other


class SqliteSource(SqliteCapture, SqliteReads, SqliteQueries, SqliteWrites):
    """Implementation of `Source`: each base class implements one protocol, and uses only its constructor arguments.

    Usable once `prove` returned "" or `restart` was called.
    """

    snapshot_positions = None  # each read carries its own offset

    def __init__(self, name: str, path: str, *, notes: LogNotes, config: SqliteConfig, vfs: str | None = None) -> None:
        self.name, self.path, self._notes, self._config, self._vfs = name, os.path.abspath(path), notes, config, vfs
        self._lock, self._shutdown_notes, self._is_open = FileLock(self.path), ShutdownNotes(notes), False
        self._predicates, self._analyses = Predicates(), Analyses(lambda: self._vouched)
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        with ExitStack() as undo:
            self._inode = InodeLock(self.path)
            undo.callback(self._inode.release)
            file = open_database(self.path, vfs=self._vfs, config=self._config)
            undo.callback(file.close)
            self._assemble(file)
            undo.pop_all()
        self._is_open = True

    def _assemble(self, file: File) -> None:
        """Build the parts on `file`: at the start, and again each time another file replaces it at the path."""
        self.inode = file.inode
        reads = OpenReads()
        pool = Pool(file.connect, READERS, lambda reader: file.disconnect(reader.db), reads)
        SqliteWrites.__init__(self, file, self._config, lambda: self.wake(), lambda: self._follower.known_good, reads)
        SqliteCapture.__init__(
            self,
            self.name,
            file,
            self._lock,
            self._shutdown_notes,
            self._writer.submit,
            self._guard,
            notes=self._notes,
            config=self._config,
        )
        SqliteReads.__init__(self, pool, self._predicates, self._check_history)
        SqliteQueries.__init__(self, file, pool, self._analyses)
        self._wal_limit = WalLimit(file, reads)

    def bulk_address(self) -> BulkAddress:
        """Return the file for the bulk worker."""
        return BulkAddress("sqlite", self.path, self.inode)

    def remedy(self, table: str) -> str:
        """Return "": changes carry whole rows."""
        return ""

    def status(self) -> dict[str, Any]:
        """Return numbers for the status page and metrics."""
        with self._pool.read() as reader:
            head = reader.offset()
            reader.catalog.refresh()
            active = sorted(layout.table.name for layout in reader.catalog.layouts.values() if layout.active)
            with reader.guard.own() as db:
                _, refused = capturable(db, self._config.tables)
        return {
            "path": self.path,
            "head": head,
            "tables": active,
            "uncaptured": refused,
            "capture_rows": head - self._trimmer.trimmed,
            "writes_waiting": self._writer.waiting,
            "commits": self._writer.groups,
            "writes": self._writer.members,
            "open_transactions": len(self._transactions),
        }

    def reopen(self) -> None:
        """Finish queued writes, close the file, and open the file that replaced it at the path."""
        self._shut()
        self._open()

    def close(self) -> None:
        """Finish queued writes, note a clean stop, and release the file."""
        self._shut()
        self._shutdown_notes.end()
        self._lock.release()

    def _shut(self) -> None:
        if not self._is_open:  # an earlier attempt to reopen the file failed
            return
        self._is_open = False
        self.finish_writes()
        self._pool.close()
        self._waker.close()
        self._wal_limit.stop()
        self._file.close()
        self._inode.release()
