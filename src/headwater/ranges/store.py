"""The file in which ranges and the leases of pulls are kept, so that neither is forgotten by a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import apsw
import msgspec

from headwater.errors import Busy, HeadwaterError, LogDamaged, StorageFull, Unavailable
from headwater.model.key import Span
from headwater.ranges.range import Range

APPLICATION_ID = 0x48575247  # "HWRG"
FORMAT = 1  # user_version
ASIDE = "Move the file aside and start again: tables are cut anew, and pipelines register anew."

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta VALUES ('next_id', 1);
CREATE TABLE cut (
  db TEXT NOT NULL,
  tab TEXT NOT NULL,
  generation TEXT NOT NULL,
  version INTEGER NOT NULL,
  target INTEGER NOT NULL,
  at INTEGER NOT NULL,
  PRIMARY KEY (db, tab)
) STRICT, WITHOUT ROWID;
-- One row for every epoch a range has had since its table was cut: who holds an old one is told what became of it.
CREATE TABLE range (
  id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  db TEXT NOT NULL,
  tab TEXT NOT NULL,
  live INTEGER NOT NULL,
  start BLOB NOT NULL,
  end BLOB,
  rows INTEGER NOT NULL,
  bytes INTEGER NOT NULL,
  PRIMARY KEY (id, epoch)
) STRICT, WITHOUT ROWID;
CREATE INDEX range_of ON range (db, tab, live);
CREATE TABLE lease (
  db TEXT NOT NULL,
  subscriber TEXT NOT NULL,
  tab TEXT NOT NULL,
  range INTEGER NOT NULL,
  generation TEXT NOT NULL,
  kept INTEGER NOT NULL,
  until_ms INTEGER NOT NULL,
  PRIMARY KEY (db, subscriber, tab, range)
) STRICT, WITHOUT ROWID;
"""
_RANGE = "id, epoch, start, end, rows, bytes"
_LIVE = f"SELECT {_RANGE} FROM range WHERE db = ? AND tab = ? AND live ORDER BY start"


class Cut(msgspec.Struct, frozen=True):
    """What the ranges of a table were cut for: another generation or version has other keys, or another order."""

    generation: str
    version: int
    target: int  # bytes of a range
    at: int  # the offset when they were last measured

    def fits(self, generation: str, version: int) -> bool:
        """Whether the ranges hold for the table as it is."""
        return (self.generation, self.version) == (generation, version)


class Pull(msgspec.Struct, frozen=True):
    """A lease: the log after `kept` stays for the sake of `subscriber`."""

    db: str
    subscriber: str
    table: str
    range: int  # 0 for the whole table
    generation: str
    kept: int
    until_ms: int

    @property
    def name(self) -> str:
        """What the log calls it."""
        return f"pull:{self.subscriber}\0{self.table}\0{self.range}"


class Store:
    """Open it with `Store.open`. From any thread; what a method returned from survives kill -9."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self._path = path
        self._lock = threading.Lock()  # held by whoever uses the connection
        self._db = connection

    @classmethod
    def open(cls, path: str | PathLike[str], *, vfs: str | None = None) -> Store:
        """Open the file at `path`, or create it. LogDamaged when it is not ours, newer than us, or broken."""
        place = Path(path)
        with _errors(place):
            return cls(place, _connect(place, vfs))

    def close(self) -> None:
        """Release the file."""
        with self._lock, _errors(self._path):
            self._db.close()

    @contextmanager
    def _step(self) -> Iterator[apsw.Connection]:
        with self._lock, _errors(self._path), self._db:
            yield self._db

    # --- ranges ----------------------------------------------------------------------------------------------

    def cut(self, db: str, table: str) -> Cut | None:
        """What the ranges of `table` were cut for; None before the first time."""
        with self._step() as file:
            sql = "SELECT generation, version, target, at FROM cut WHERE db = ? AND tab = ?"
            row: Any = file.execute(sql, (db, table)).fetchone()
            return None if row is None else Cut(*row)

    def ranges(self, db: str, table: str) -> list[Range]:
        """The ranges of `table`, in order."""
        with self._step() as file:
            return _live(file, db, table)

    def begin(self, db: str, table: str, cut: Cut, ranges: Callable[[Callable[[], int]], list[Range]]) -> None:
        """Cut anew, unless somebody else just did; `ranges` makes the new ones, given where ids come from."""
        with self._step() as file:
            held = file.execute("SELECT generation, version FROM cut WHERE db = ? AND tab = ?", (db, table)).fetchone()
            if held == (cut.generation, cut.version):
                return
            file.execute("DELETE FROM range WHERE db = ? AND tab = ?", (db, table))
            _put(file, db, table, ranges(lambda: _next_id(file)))
            _put_cut(file, db, table, cut)

    def change(
        self,
        db: str,
        table: str,
        cut: Cut,
        old: Sequence[Range],
        new: Callable[[Callable[[], int]], list[Range]],
    ) -> bool:
        """Put `new` in place of `old`; False, and nothing is done, if these are not the ranges any more."""
        with self._step() as file:
            if [(one.id, one.epoch) for one in _live(file, db, table)] != [(one.id, one.epoch) for one in old]:
                return False
            file.execute("UPDATE range SET live = 0 WHERE db = ? AND tab = ? AND live", (db, table))
            _put(file, db, table, new(lambda: _next_id(file)))
            _put_cut(file, db, table, cut)
            return True

    def heirs(self, db: str, table: str, id: int, epoch: int) -> list[Range] | None:
        """The ranges that hold the keys which range `id` had; None if `table` never had one of that id."""
        with self._step() as file:
            known: list[Any] = file.execute(
                "SELECT db, tab, epoch, start, end FROM range WHERE id = ?", (id,)
            ).fetchall()
            ours = [(its_epoch, Span(start, end)) for d, t, its_epoch, start, end in known if (d, t) == (db, table)]
            if not ours and (known or not 0 < id < int(str(_next(file)))):
                return None
            live = _live(file, db, table)
        held = [span for its_epoch, span in ours if its_epoch == epoch] or [span for _, span in ours]
        if not held:  # of an earlier cut, whose keys may have had another order
            return live
        return [one for one in live if any(one.span.overlaps(span) for span in held)]

    # --- leases ----------------------------------------------------------------------------------------------

    def put_lease(self, pull: Pull, *, now_ms: int, most: int) -> bool:
        """Keep a lease, in place of the one of the same name; False if there are `most` of others."""
        with self._step() as file:
            file.execute("DELETE FROM lease WHERE until_ms <= ?", (now_ms,))
            file.execute(
                "DELETE FROM lease WHERE db = ? AND subscriber = ? AND tab = ? AND range = ?",
                (pull.db, pull.subscriber, pull.table, pull.range),
            )
            if int(str(file.execute("SELECT count(*) FROM lease").get)) >= most:
                return False
            file.execute("INSERT INTO lease VALUES (?, ?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(pull))
            return True

    def leases(self, db: str) -> list[Pull]:
        """Those of one database."""
        with self._step() as file:
            rows: list[Any] = file.execute("SELECT * FROM lease WHERE db = ?", (db,)).fetchall()
            return [Pull(*row) for row in rows]

    def drop_leases(self, db: str, table: str, subscriber: str) -> list[Pull]:
        """Forget those of one subscriber on one table, and say which they were."""
        with self._step() as file:
            sql = "DELETE FROM lease WHERE db = ? AND tab = ? AND subscriber = ? RETURNING *"
            rows: list[Any] = file.execute(sql, (db, table, subscriber)).fetchall()
            return [Pull(*row) for row in rows]

    def drop_database(self, db: str) -> None:
        """Forget everything of one database but that its ids were given out."""
        with self._step() as file:
            for name in ("cut", "range", "lease"):
                file.execute(f"DELETE FROM {name} WHERE db = ?", (db,))


def _next(file: apsw.Connection) -> object:
    return file.execute("SELECT value FROM meta WHERE name = 'next_id'").get


def _next_id(file: apsw.Connection) -> int:
    sql = "UPDATE meta SET value = value + 1 WHERE name = 'next_id' RETURNING value - 1"
    return int(str(file.execute(sql).get))


def _live(file: apsw.Connection, db: str, table: str) -> list[Range]:
    rows: list[Any] = file.execute(_LIVE, (db, table)).fetchall()
    return [Range(id, epoch, Span(start, end), rows, bytes) for id, epoch, start, end, rows, bytes in rows]


def _put(file: apsw.Connection, db: str, table: str, ranges: Sequence[Range]) -> None:
    file.executemany(
        f"INSERT OR REPLACE INTO range ({_RANGE}, db, tab, live) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)",
        [(one.id, one.epoch, one.span.start, one.span.end, one.rows, one.bytes, db, table) for one in ranges],
    )


def _put_cut(file: apsw.Connection, db: str, table: str, cut: Cut) -> None:
    file.execute(
        "INSERT OR REPLACE INTO cut VALUES (?, ?, ?, ?, ?, ?)",
        (db, table, cut.generation, cut.version, cut.target, cut.at),
    )


# --- the file --------------------------------------------------------------------------------------------


def _connect(path: Path, vfs: str | None) -> apsw.Connection:
    connection = apsw.Connection(str(path), vfs=vfs)
    try:
        connection.set_busy_timeout(5000)
        is_new = _check_header(path, connection)  # before anything is written to a file that may not be ours
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if is_new:
            with connection:
                connection.execute(_SCHEMA)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_header(path: Path, connection: apsw.Connection) -> bool:
    """Whether the file is new; LogDamaged when it is another's."""
    application, version = connection.pragma("application_id"), connection.pragma("user_version")
    if application == version == 0 and not connection.execute("SELECT count(*) FROM sqlite_schema").get:
        return True
    if application != APPLICATION_ID:
        hint = "Move it out of the data folder; it was left untouched."
        raise LogDamaged(f"{path} is an SQLite file, but does not hold ranges", hint=hint)
    if version > FORMAT:
        raise LogDamaged(
            f"the ranges in {path} have format {version}; this Headwater reads up to {FORMAT}",
            hint="Start the newer Headwater again, or move the file aside.",
        )
    return False


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise _ours(path, error) from error


def _ours(path: Path, error: apsw.Error) -> HeadwaterError:
    match error:
        case apsw.FullError():
            return StorageFull(f"no space left for the ranges in {path}")
        case apsw.NotADBError() | apsw.CorruptError() | apsw.SQLError():  # the last: a table is missing
            return LogDamaged(f"the ranges in {path} are damaged: {error}", hint=ASIDE)
        case apsw.BusyError() | apsw.LockedError():
            return Busy(f"the ranges in {path} are locked by another process")
        case apsw.CantOpenError() | apsw.PermissionsError() | apsw.ReadOnlyError():
            hint = "Check that the folder exists and that this user may read and write it."
            return Unavailable(f"the ranges in {path} cannot be opened: {error}", hint=hint)
    return Unavailable(f"the ranges in {path} cannot be used: {error}", hint="Check the disk and the system log.")
