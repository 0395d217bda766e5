"""Removal of every trace of Headwater from a file."""

from __future__ import annotations

import contextlib

import apsw

from headwater.errors import Busy, HeadwaterError
from headwater.sources.file_lock import FileLock, InodeLock
from headwater.sources.sqlite.capture.trigger_installation import is_installed, meta, uninstall
from headwater.sources.sqlite.connection import immediate, sqlite_errors
from headwater.sources.sqlite.database_file import open_database
from headwater.sources.sqlite.settings import SqliteConfig

BUSY_MS = 5_000


def _leave_wal(db: apsw.Connection, path: str, mode: str) -> None:
    db.set_busy_handler(None)  # a program that has the file open will not close it soon, so waiting is useless
    try:
        changed = str(db.pragma("journal_mode", mode))
    except apsw.BusyError:
        changed = "wal"
    finally:
        db.set_busy_timeout(BUSY_MS)
    if changed != mode:
        raise Busy(
            f"{path} is open in another program, so its journal mode cannot be changed back to {mode!r}",
            hint="Nothing was changed. Close the file there, then detach again.",
        )


def detach(path: str, *, config: SqliteConfig) -> None:
    """Remove every trace of Headwater from the file at `path`; no server may be attached."""
    with contextlib.ExitStack() as undo:
        undo.callback(FileLock(path).release)
        undo.callback(InodeLock(path).release)
        file = open_database(path, vfs=None, config=config)
        undo.callback(file.close)
        with file.connect().guard.own() as db:
            with sqlite_errors(path):
                before = meta(db, "journal_mode_before") if is_installed(db) else ""
            # First, because this step fails while other programs have the file open, and then nothing is changed.
            if before and before != "wal":
                _leave_wal(db, path, before)
            try:
                with sqlite_errors(path), immediate(db):
                    uninstall(db)
            except HeadwaterError:
                if before and before != "wal":
                    with contextlib.suppress(apsw.Error):
                        db.pragma("journal_mode", "wal")  # restores the mode
                raise
