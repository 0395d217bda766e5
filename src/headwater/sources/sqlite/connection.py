"""SQLite connections, quoted names, and conversion of SQLite's errors to ours: no apsw error leaves this folder."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from headwater.errors import (
    Busy,
    DuplicateKey,
    HeadwaterError,
    InvalidRequest,
    SourceError,
    SourceUnfit,
    StorageFull,
    Unavailable,
)
from headwater.model.work.log_throttle import LogThrottle, counted
from headwater.model.work.sqlite_memory import count_memory

logger = logging.getLogger("headwater.sqlite")

count_memory()
OURS = "_headwater_"  # prefix of every object that we create in the user's file
ROWID_NAMES = ("rowid", "_rowid_", "oid")

CHECK = "Check the statement and its arguments."
_MISSING = re.compile(r"no such table: (?:main\.)?(.+)", re.DOTALL)
_UNIQUE = {
    apsw.SQLITE_CONSTRAINT_UNIQUE,
    apsw.SQLITE_CONSTRAINT_PRIMARYKEY,
    apsw.SQLITE_CONSTRAINT_ROWID,
}


HEAP = 768 << 20  # bytes for values: a value of 64 MiB is captured with its old and new image, and copied on the way
READ_HEAP = HEAP // 4 * 3  # above this a read-only statement is stopped: the rest is reserved for writes and capture
HEAP_PER_CONNECTION = 4 << 20  # bytes for pages and prepared statements


class Heap:
    """Limit on the memory that SQLite uses in this process, for any statement. Thread-safe.

    Above the limit an allocation fails: the statement ends with an error, and the process continues.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _connections
        self._connections: weakref.WeakSet[apsw.Connection] = weakref.WeakSet()

    def add(self, connection: apsw.Connection) -> None:
        """Raise the limit for one more connection."""
        with self._lock:
            self._connections.add(connection)
            apsw.hard_heap_limit(HEAP + HEAP_PER_CONNECTION * len(self._connections))


_HEAP = Heap()
_REPEATS, _REPEATS_LOCK = LogThrottle(), threading.Lock()


def ident(name: str) -> str:
    """Return `name` quoted for SQL; every name in SQL text must pass through here."""
    if "\0" in name:
        raise InvalidRequest("a name cannot hold a NUL character")
    return '"' + name.replace('"', '""') + '"'


def file_name(path: str) -> str:
    """Return the name of the file at `path` for errors: callers must not learn in which folder it is."""
    return os.path.basename(path)


def _log_path(path: str, error: apsw.Error) -> None:
    """Log an error of the file with its path, at most once a minute."""
    with _REPEATS_LOCK:
        left_out = _REPEATS.again(path, time.monotonic())
    if left_out is not None:
        logger.warning(counted("%s: %s", left_out), path, error)


def open_file(path: str, *, vfs: str | None = None, read_only: bool = False) -> apsw.Connection:
    """Open a connection with our pragmas, which waits up to 5 s for locks; tests use `vfs` to simulate a bad disk."""
    flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    with sqlite_errors(path):
        connection = apsw.Connection(path, flags=flags, vfs=vfs, statementcachesize=200)
        connection.set_busy_timeout(5_000)
        # Double-quoted strings would turn a misspelt column into text (WIRE §11.25).
        connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
        connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 0)
        connection.pragma("synchronous", "FULL")
    _HEAP.add(connection)
    return connection


def to_error(error: apsw.Error, what: str = "") -> HeadwaterError:
    """Return our error for an error of SQLite."""
    text = f"{what}: {error}" if what else str(error)
    extended = getattr(error, "extendedresult", 0)
    match error:
        case apsw.ConstraintError():
            hint = "The statement breaks a constraint of the table; nothing was kept."
            refused = DuplicateKey(text) if extended in _UNIQUE else InvalidRequest(text, hint=hint)
            refused.names_tables = True
            return refused
        case apsw.BusyError() | apsw.LockedError():
            return Busy(text)
        case apsw.FullError():
            return StorageFull(text)
        case apsw.IOError() if extended == apsw.SQLITE_IOERR_SHMSIZE:
            return StorageFull(f"{text}: no space left for the file {what}-shm" if what else text)
        case apsw.IOError() | apsw.CantOpenError() | apsw.PermissionsError():
            return Unavailable(text, hint="Check the disk and the permissions of the database file.")
        case apsw.NotADBError() | apsw.CorruptError():
            return SourceUnfit(text, hint="The file is damaged or not a SQLite database; restore it from a backup.")
        case apsw.ReadOnlyError():
            return SourceUnfit(text, hint="Make the database file and its folder writable.")
        case apsw.AuthError():
            return InvalidRequest(
                text,
                hint="Transaction control, ATTACH, PRAGMA and Headwater's own tables are not allowed in statements.",
            )
        case apsw.SQLError() if missing := _MISSING.fullmatch(str(error)):
            found = InvalidRequest(text, hint=CHECK)
            found.missing_table = missing[1]
            return found
        case apsw.SQLError() | apsw.MismatchError() | apsw.TooBigError() | apsw.BindingsError() | apsw.RangeError():
            return InvalidRequest(text, hint=CHECK)
        case apsw.NoMemError():
            return Busy(text, hint="SQLite has no memory left for the statement. Try again in a moment.")
        case apsw.AbortError() | apsw.InterruptError():
            return InvalidRequest(text, hint="The statement was cancelled; nothing was written.")
        case _:
            return SourceError(text, hint="SQLite refused; the server's log has the details.")


@contextmanager
def sqlite_errors(path: str = "") -> Iterator[None]:
    """Convert SQLite's errors to ours inside the block; they name the file, and the log its path."""
    try:
        yield
    except apsw.Error as error:
        if path and not isinstance(error, apsw.BusyError | apsw.LockedError | apsw.InterruptError):
            _log_path(path, error)
        raise to_error(error, file_name(path)) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("the database contains text that is not UTF-8", hint="CAST the text to BLOB.") from error


@contextmanager
def immediate(db: apsw.Connection) -> Iterator[None]:
    """Run the block in a write transaction of our own."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
