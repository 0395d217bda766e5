"""A database file open for capture: its checks, its journal mode and its connections."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import cast

import apsw
import msgspec

from headwater.errors import SourceUnfit, Unavailable
from headwater.sources.sqlite.capture.triggers import CAPTURE
from headwater.sources.sqlite.catalog import Catalog
from headwater.sources.sqlite.connection import file_name, open_file, sqlite_errors
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.settings import SqliteConfig

logger = logging.getLogger("headwater.sqlite")

BUSY_SECONDS = 5.0
KEPT_WAL = 64 << 20  # bytes to which SQLite shortens the `-wal` file when it begins it again
_BUSY_STEP = 0.0005  # short and constant: a foreign writer in a loop leaves only short gaps


class GuardedConnection(msgspec.Struct, frozen=True):
    """A connection with its authorizer and its catalog."""

    db: apsw.Connection
    guard: Guard
    catalog: Catalog

    def offset(self) -> int:
        """Return the newest offset, in the current transaction if there is one."""
        return cast(int, next(self.guard.run(f"SELECT coalesce(max(seq), 0) FROM {CAPTURE}"))[0])


class File:
    """A database file that passed the checks, and its open connections."""

    def __init__(self, path: str, *, vfs: str | None, config: SqliteConfig, journal_mode: str, is_new: bool) -> None:
        self.path, self.name, self._vfs, self._config = path, file_name(path), vfs, config
        self._journal_mode = journal_mode
        self.journal_mode_before = "" if is_new else journal_mode
        self._lock = threading.Lock()  # guards _connections
        self._connections: list[apsw.Connection] | None = []  # None once closed
        self.is_stopping = threading.Event()  # callers' statements end
        self.inode = os.stat(path).st_ino  # to detect another file at the path

    def connect(self) -> GuardedConnection:
        """Open a connection for callers' statements; Unavailable if the file was replaced or is closed."""
        db = self.connect_bare()
        guard = Guard(db, self._config.statement_seconds, self.is_stopping)
        return GuardedConnection(db, guard, Catalog(guard))

    def connect_bare(self) -> apsw.Connection:
        """Open a connection for our own statements only; Unavailable as for `connect`."""
        db = open_file(self.path, vfs=self._vfs)
        if not self.is_there():  # existing connections keep using the old file, to which the log belongs
            db.close()
            raise Unavailable(f"{self.name} was replaced by another file", hint="Try again in a moment.")
        db.pragma("foreign_keys", self._config.foreign_keys)
        db.pragma("journal_size_limit", KEPT_WAL)
        db.set_busy_handler(wait_for_lock(BUSY_SECONDS))
        with self._lock:
            if self._connections is None:
                db.close()
                raise Unavailable(f"{self.name} is being reopened", hint="Try again in a moment.")
            self._connections.append(db)
        return db

    def is_there(self) -> bool:
        """Return whether the file is still at its path."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def enter_wal(self) -> None:
        """Switch the file to WAL mode if needed; SourceUnfit if that fails. Before this call the file is unchanged."""
        if self._journal_mode == "wal":
            return
        with contextlib.closing(open_file(self.path, vfs=self._vfs)) as db, sqlite_errors(self.path):
            self._journal_mode = str(db.pragma("journal_mode", "wal"))
        if self._journal_mode != "wal":
            hint = "WAL needs a local disk and no open transaction."
            raise SourceUnfit(f"{self.name} cannot use WAL", hint=hint)

    def disconnect(self, db: apsw.Connection) -> None:
        """Close one connection that `connect` opened; see `close_when_idle`."""
        with self._lock:
            if self._connections and db in self._connections:
                self._connections.remove(db)
        close_when_idle(db)

    def close(self) -> None:
        """Close every connection, interrupting statements; `connect` then fails."""
        with self._lock:
            for db in self._connections or ():
                close_when_idle(db)
            self._connections = None


def close_when_idle(db: apsw.Connection) -> None:
    """Interrupt statements on the connection and close it; leave it open if one does not end in BUSY_SECONDS."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.close()
            return
        except apsw.ThreadingViolationError:
            if time.monotonic() > until:
                logger.warning("a statement does not end: its connection is left open")
                return
            with contextlib.suppress(apsw.ConnectionClosedError):
                db.interrupt()
            time.sleep(0.005)


def wait_for_lock(seconds: float) -> Callable[[int], bool]:
    """Return a busy handler that waits up to `seconds` for a lock."""
    started = 0.0

    def wait(attempt: int) -> bool:
        nonlocal started
        if attempt == 0:
            started = time.monotonic()
        if time.monotonic() - started > seconds:
            return False
        time.sleep(_BUSY_STEP)
        return True

    return wait


def open_database(path: str, *, vfs: str | None, config: SqliteConfig) -> File:
    """Open the file at `path`, or create it; SourceUnfit if it cannot be captured."""
    fresh = not os.path.exists(path) or os.path.getsize(path) == 0
    with contextlib.closing(open_file(path, vfs=vfs)) as db, sqlite_errors(path):
        encoding, mode = str(db.pragma("encoding")), str(db.pragma("journal_mode"))
    if encoding != "UTF-8":
        raise SourceUnfit(
            f"{file_name(path)} stores text as {encoding}",
            hint="Rebuild it with PRAGMA encoding = 'UTF-8' (VACUUM INTO).",
        )
    if mode != "wal" and not fresh and not config.wal:
        raise SourceUnfit(
            f"{file_name(path)} has journal mode {mode!r}; capture needs WAL",
            hint="Start with --wal to let Headwater change it; `headwater source detach` changes it back.",
        )
    return File(path, vfs=vfs, config=config, journal_mode=mode, is_new=fresh)
