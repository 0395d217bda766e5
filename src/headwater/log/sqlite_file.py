"""Own files: SQLite files that we alone write, recognised before they are touched, and what their errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import msgspec

from headwater.errors import Busy, HeadwaterError, LogDamaged, StorageFull, Unavailable
from headwater.model.sqlite_memory import count_memory

count_memory()

_LATER = "Nothing was changed. Check the disk and the system log; work goes on once the disk answers."


def file_error(named: str, error: apsw.Error, *, aside: str = "") -> HeadwaterError:
    """What SQLite's `error` means for the file that people call `named`; `aside` says how to go on without it."""
    match error:
        case apsw.FullError():
            return StorageFull(f"no space left for {named}")
        case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
            return StorageFull(f"no space left beside {named} for its -shm")
        case apsw.NotADBError() | apsw.CorruptError() | apsw.SQLError():  # the last: a table is missing
            return LogDamaged(f"{named} is damaged: {error}", hint=aside)
        case apsw.BusyError() | apsw.LockedError():
            return Busy(f"{named} is locked by another process")
        case apsw.NoMemError():
            return Busy(f"there is no memory left for {named}")
        case apsw.CantOpenError() | apsw.PermissionsError() | apsw.ReadOnlyError():
            hint = "Check that the folder exists and that this user may read and write it."
            return Unavailable(f"{named} cannot be opened: {error}", hint=hint)
    return Unavailable(f"{named} cannot be used: {error}", hint=_LATER)


class OwnFile(msgspec.Struct, frozen=True):
    """A kind of file: what it holds, how it is told from others, and its tables."""

    holds: str
    application_id: int
    format: int  # user_version
    schema: str
    aside: str  # what happens when it is moved aside
    upgrades: dict[int, str] = {}  # by an older format: the SQL that makes it the next one

    def error(self, path: Path, error: apsw.Error) -> HeadwaterError:
        """What SQLite's `error` means."""
        return file_error(self._named(path), error, aside=self.aside)

    @contextmanager
    def errors(self, path: Path) -> Iterator[None]:
        """Turns SQLite's errors into ours, naming the file."""
        try:
            yield
        except apsw.Error as error:
            raise self.error(path, error) from error

    def connect(self, path: Path, *, vfs: str | None = None) -> apsw.Connection:
        """The one connection to the file, which is created if it is not there. Raises apsw errors."""
        connection = apsw.Connection(str(path), vfs=vfs)
        try:
            connection.set_busy_timeout(5000)
            version = self._version(path, connection)  # before anything is written to a file that may not be ours
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if version != self.format:
                with connection:
                    if version is None:
                        connection.execute(self.schema)
                        connection.execute(f"PRAGMA application_id = {self.application_id}")
                    for older in range(version or self.format, self.format):
                        connection.execute(self.upgrades[older])
                    connection.execute(f"PRAGMA user_version = {self.format}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _version(self, path: Path, connection: apsw.Connection) -> int | None:
        """The format of the file; None for a new one, LogDamaged when it is another's."""
        application, version = connection.pragma("application_id"), connection.pragma("user_version")
        if application == version == 0 and not connection.execute("SELECT count(*) FROM sqlite_schema").get:
            return None
        if application != self.application_id:
            hint = "Move it out of the data folder; it was left untouched."
            raise LogDamaged(f"{path} is an SQLite file, but does not hold {self.holds}", hint=hint)
        if version > self.format:
            raise LogDamaged(
                f"{self._named(path)} has format {version}; this Headwater reads up to {self.format}",
                hint=f"Start the newer Headwater again. {self.aside}",
            )
        return int(version)

    def _named(self, path: Path) -> str:
        return f"the file of {self.holds} ({path.name})"
