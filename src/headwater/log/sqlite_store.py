"""SQLite files that Headwater alone writes: their formats with numbered migrations, and one store for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import msgspec

from headwater.errors import Busy, HeadwaterError, InvalidRequest, LogDamaged, StorageFull, Unavailable
from headwater.model.work.sqlite_memory import count_memory

count_memory()

_WAL_KEPT = 64 << 20  # after a huge transaction the -wal file shrinks back to this
_LATER = "Nothing was changed. Check the disk and the system log; work continues once the disk does."


class FileFormat(msgspec.Struct, frozen=True):
    """The content of one kind of file, its marks of recognition, and the SQL that creates and upgrades its tables."""

    holds: str
    application_id: int
    migrations: tuple[str, ...]  # the first makes format 1 (PRAGMA user_version), each next one the next format
    aside: str = ""  # hint: the result of moving the file aside
    additions: str = ""  # IF NOT EXISTS statements, run by each open: an older Headwater can use the file with them
    title: str = "the file of {holds} ({path.name})"

    @contextmanager
    def errors(self, path: Path) -> Iterator[None]:
        """Turn SQLite's errors in the block into Headwater's, which name the file by `title`."""
        try:
            yield
        except apsw.Error as error:
            raise self._error(self._named(path), error) from error

    def _error(self, named: str, error: apsw.Error) -> HeadwaterError:
        match error:
            case apsw.FullError():
                return StorageFull(f"no space left for {named}")
            case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
                return StorageFull(f"no space left beside {named} for its -shm")
            case apsw.NotADBError() | apsw.CorruptError() | apsw.SQLError():  # the last: a table is missing
                return LogDamaged(f"{named} is damaged: {error}", hint=self.aside)
            case apsw.BusyError() | apsw.LockedError():
                return Busy(f"{named} is locked by another process")
            case apsw.NoMemError():
                return Busy(f"there is no memory left for {named}")
            case apsw.CantOpenError() | apsw.PermissionsError() | apsw.ReadOnlyError():
                hint = "Check that the folder exists and that this user may read and write it."
                return Unavailable(f"{named} cannot be opened: {error}", hint=hint)
        return Unavailable(f"{named} cannot be used: {error}", hint=_LATER)

    def connect(self, path: Path, *, read_only: bool = False, vfs: str | None = None) -> apsw.Connection:
        """Connect to a file of this format, or to a new one; nothing is written. Raises apsw errors and LogDamaged."""
        flags = apsw.SQLITE_OPEN_READONLY if read_only else apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        connection = apsw.Connection(str(path), flags=flags, vfs=vfs)
        try:
            connection.set_busy_timeout(5000)
            self._check(path, connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, path: Path, connection: apsw.Connection) -> None:
        """Raise LogDamaged if the file is another program's or a newer Headwater's."""
        application, version = connection.pragma("application_id"), connection.pragma("user_version")
        if application == version == 0 and not connection.execute("SELECT count(*) FROM sqlite_schema").get:
            return
        if application != self.application_id:
            hint = "Name another file, or move this one aside; it was left untouched."
            raise LogDamaged(f"{path} is an SQLite file, but does not hold {self.holds}", hint=hint)
        if version > len(self.migrations):
            raise LogDamaged(
                f"{self._named(path)} has format {version}; this Headwater reads up to {len(self.migrations)}",
                hint=f"Start the newer Headwater again, or go on here: {self.aside or LogDamaged.default_hint}",
            )

    def migrate(self, connection: apsw.Connection, fill: Callable[[apsw.Connection], None] | None) -> bool:
        """Upgrade the file to the newest format in one step; `fill` a new one. Return whether the file was new."""
        version = connection.pragma("user_version")
        if version < len(self.migrations):
            with connection:
                for migration in self.migrations[version:]:
                    connection.execute(migration)
                if version == 0:
                    connection.execute(f"PRAGMA application_id = {self.application_id}")
                    if fill is not None:
                        fill(connection)
                connection.execute(f"PRAGMA user_version = {len(self.migrations)}")
        connection.execute(self.additions)
        return bool(version == 0)

    def _named(self, path: Path) -> str:
        return self.title.format(holds=self.holds, path=path)


class SqliteStore:
    """The one writing connection to a file, which is created with mode 0600 if it is missing. For any thread.

    Raises LogDamaged when the file has another format, a newer one, or is broken. Errors of opening name the path, as
    `title` says; later ones only the name of the file, because clients see them.
    """

    def __init__(
        self,
        format: FileFormat,
        path: Path,
        *,
        fill: Callable[[apsw.Connection], None] | None = None,
        vfs: str | None = None,
    ) -> None:
        self.path = path
        self._format, self._name = format, Path(path.name)
        self.lock = threading.RLock()  # held by the thread that uses the connection; re-entrant
        if path.name != ":memory:":
            with suppress(OSError):  # SQLite reports a folder that is missing or not writable
                path.touch(mode=0o600, exist_ok=False)
        with format.errors(path):
            self._connection: apsw.Connection | None = format.connect(path, vfs=vfs)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT}")
                self.created = format.migrate(self._connection, fill)
            except BaseException:
                self._connection.close()
                raise

    @contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        """Yield the connection, with the lock held, outside a transaction: for reads and single statements."""
        with self.lock, self._format.errors(self._name):
            yield self._open_connection()

    def _open_connection(self) -> apsw.Connection:
        if self._connection is None:
            raise Unavailable(f"{self._name} is closed", hint="The server is stopping. Try again when it is back.")
        return self._connection

    @contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Write in one transaction: durable at the end of the block, undone if the block or the commit raises."""
        with self.lock, self._format.errors(self._name):
            connection = self._open_connection()
            if connection.in_transaction:
                raise InvalidRequest(f"{self._name} cannot be written to from inside its own transaction")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(apsw.Error):  # SQLite may have rolled back; the first error is the one to report
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the connection; later uses raise Unavailable."""
        with self.lock, self._format.errors(self._name):
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


def take_next_id(connection: apsw.Connection) -> int:
    """Return the number in the row `next_id` of the table `meta`, and raise it by one in the open transaction."""
    sql = "UPDATE meta SET value = value + 1 WHERE name = 'next_id' RETURNING value - 1"
    return int(str(connection.execute(sql).get))
