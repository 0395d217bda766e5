"""Taking Headwater out of a file: nothing of it stays behind."""

from __future__ import annotations

from headwater.config import SqliteConfig
from headwater.sources.sqlite.connection import immediate, sqlite_errors
from headwater.sources.sqlite.install import is_installed, meta, uninstall
from headwater.sources.sqlite.lock import FileLock
from headwater.sources.sqlite.opening import open_database


def detach(path: str, *, config: SqliteConfig) -> None:
    """Remove every trace of Headwater from the file at `path`; no server may be attached."""
    lock = FileLock(path)
    try:
        file = open_database(path, vfs=None, config=config)
        own = file.connect()
        with sqlite_errors(path):
            with own.guard.own() as db:
                before = meta(db, "journal_mode_before") if is_installed(db) else ""
            with own.guard.own() as db, immediate(db):
                uninstall(db)
            if before and before != "wal":
                own.guard.run(f"PRAGMA journal_mode = {before}")
        file.close()
    finally:
        lock.release()
