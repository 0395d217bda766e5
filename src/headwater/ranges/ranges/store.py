"""The SQLite file of ranges and of the leases of pulls: both survive a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import msgspec

from headwater.log.sqlite_store import FileFormat, SqliteStore, take_next_id
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range

_TABLES = """
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
-- One row for every epoch of a range since its table was split: the holder of an old one is sent to its heirs.
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
_OWNER = "ALTER TABLE lease ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
FORMAT = FileFormat(
    "ranges",
    application_id=0x48575247,  # "HWRG"
    migrations=(_TABLES, _OWNER),
    aside="Move the file aside and start again: tables are split again, and pipelines register again.",
)
_RANGE = "id, epoch, start, end, rows, bytes"
_LIVE = f"SELECT {_RANGE} FROM range WHERE db = ? AND tab = ? AND live ORDER BY start"


class RangeBasis(msgspec.Struct, frozen=True):
    """The table that ranges were made for: another generation or version has other keys, or another order."""

    generation: str
    version: int
    target: int  # bytes of a range
    at: int  # the offset at which the ranges were last measured


class Pull(msgspec.Struct, frozen=True):
    """A lease: the log after `kept` is retained for `subscriber`."""

    db: str
    subscriber: str
    table: str
    range: int  # 0 for the whole table
    generation: str
    kept: int
    until_ms: int
    owner: str = ""  # the principal that registered it; "" if an earlier Headwater did: any principal may change it

    @property
    def name(self) -> str:
        """Return the name of the lease in the log."""
        return f"pull:{self.subscriber}\0{self.table}\0{self.range}"


class OtherLeases(NamedTuple):
    """The live leases other than a new one: their numbers, and the principals that use its name."""

    total: int
    of_owner: int  # leases of the principal that registers the new one
    holders: frozenset[str]  # owners of leases of the same subscriber on the same table; "" is one of them


class Store:
    """The ranges and leases. Open it with `Store.open`. Thread-safe; a write that returned survives kill -9."""

    def __init__(self, file: SqliteStore) -> None:
        self._file = file

    @classmethod
    def open(cls, path: str | PathLike[str], *, vfs: str | None = None) -> Store:
        """Open or create the file at `path`; LogDamaged if it is another's, of a newer Headwater, or broken."""
        return cls(SqliteStore(FORMAT, Path(path), vfs=vfs))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # --- ranges ----------------------------------------------------------------------------------------------

    def cut(self, db: str, table: str) -> RangeBasis | None:
        """Return the generation, version and target that the ranges of `table` were made for; None if it has none."""
        with self._file.connection() as file:
            sql = "SELECT generation, version, target, at FROM cut WHERE db = ? AND tab = ?"
            row: Any = file.execute(sql, (db, table)).fetchone()
            return None if row is None else RangeBasis(*row)

    def ranges(self, db: str, table: str) -> list[Range]:
        """Return the ranges of `table`, in order."""
        with self._file.connection() as file:
            return _live(file, db, table)

    def begin(self, db: str, table: str, cut: RangeBasis, ranges: Callable[[Callable[[], int]], list[Range]]) -> None:
        """Split a table again, unless another thread just did; `ranges` returns the new ones, given a source of ids."""
        with self._file.transaction() as file:
            held = file.execute("SELECT generation, version FROM cut WHERE db = ? AND tab = ?", (db, table)).fetchone()
            if held == (cut.generation, cut.version):
                return
            file.execute("DELETE FROM range WHERE db = ? AND tab = ?", (db, table))
            _put(file, db, table, ranges(lambda: take_next_id(file)))
            _put_cut(file, db, table, cut)

    def change(
        self,
        db: str,
        table: str,
        cut: RangeBasis,
        old: Sequence[Range],
        new: Callable[[Callable[[], int]], list[Range]],
    ) -> bool:
        """Replace `old` by `new`; return False and change nothing if the ranges are others by now."""
        with self._file.transaction() as file:
            if [(one.id, one.epoch) for one in _live(file, db, table)] != [(one.id, one.epoch) for one in old]:
                return False
            file.execute("UPDATE range SET live = 0 WHERE db = ? AND tab = ? AND live", (db, table))
            _put(file, db, table, new(lambda: take_next_id(file)))
            _put_cut(file, db, table, cut)
            return True

    def heirs(self, db: str, table: str, id: int, epoch: int) -> list[Range] | None:
        """Return the ranges that now hold the keys of range `id`; None if `table` never had one of that id."""
        with self._file.connection() as file:
            known: list[Any] = file.execute(
                "SELECT db, tab, epoch, start, end FROM range WHERE id = ?", (id,)
            ).fetchall()
            ours = [(its_epoch, Span(start, end)) for d, t, its_epoch, start, end in known if (d, t) == (db, table)]
            next_id = file.execute("SELECT value FROM meta WHERE name = 'next_id'").get
            if not ours and (known or not 0 < id < int(str(next_id))):
                return None
            live = _live(file, db, table)
        held = [span for its_epoch, span in ours if its_epoch == epoch] or [span for _, span in ours]
        if not held:  # of an earlier split: its keys may have had another order
            return live
        return [one for one in live if any(one.span.overlaps(span) for span in held)]

    def owner(self, id: int) -> tuple[str, str] | None:
        """Return the database and the table of a range of any epoch; None if it is not known, or no longer."""
        with self._file.connection() as file:
            row: Any = file.execute("SELECT db, tab FROM range WHERE id = ? LIMIT 1", (id,)).fetchone()
            return None if row is None else (row[0], row[1])

    # --- leases ----------------------------------------------------------------------------------------------

    def put_lease(self, pull: Pull, *, now_ms: int) -> None:
        """Store a lease, replacing the one of the same name; delete those that ended."""
        with self._file.transaction() as file:
            file.execute("DELETE FROM lease WHERE until_ms <= ?", (now_ms,))
            file.execute("INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(pull))

    def others(self, pull: Pull, *, now_ms: int) -> OtherLeases:
        """Return the number and the owners of the live leases that the new lease `pull` is checked against."""
        count = (
            "SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM lease"
            " WHERE until_ms > ? AND (db, subscriber, tab, range) <> (?, ?, ?, ?)"
        )
        holders = "SELECT DISTINCT owner FROM lease WHERE until_ms > ? AND (db, subscriber, tab) = (?, ?, ?)"
        name = (pull.db, pull.subscriber, pull.table)
        with self._file.connection() as file:
            row: Any = file.execute(count, (pull.owner, now_ms, *name, pull.range)).fetchone()
            found: list[Any] = file.execute(holders, (now_ms, *name)).fetchall()
        return OtherLeases(row[0], row[1], frozenset(owner for (owner,) in found))

    def leases(self, db: str) -> list[Pull]:
        """Return the leases of one database."""
        with self._file.connection() as file:
            rows: list[Any] = file.execute("SELECT * FROM lease WHERE db = ?", (db,)).fetchall()
            return [Pull(*row) for row in rows]

    def drop_leases(self, db: str, table: str, subscriber: str, owner: str | None = None) -> list[Pull]:
        """Delete and return the leases of a subscriber on a table; with `owner`, not those of other principals."""
        with self._file.transaction() as file:
            sql = (
                "DELETE FROM lease WHERE db = ? AND tab = ? AND subscriber = ?"
                " AND (?4 IS NULL OR owner IN ('', ?4)) RETURNING *"
            )
            rows: list[Any] = file.execute(sql, (db, table, subscriber, owner)).fetchall()
            return [Pull(*row) for row in rows]

    def drop_database(self, db: str) -> None:
        """Delete the ranges and leases of one database; their ids are never used again."""
        with self._file.transaction() as file:
            for name in ("cut", "range", "lease"):
                file.execute(f"DELETE FROM {name} WHERE db = ?", (db,))


def _live(file: apsw.Connection, db: str, table: str) -> list[Range]:
    rows: list[Any] = file.execute(_LIVE, (db, table)).fetchall()
    return [Range(id, epoch, Span(start, end), rows, bytes) for id, epoch, start, end, rows, bytes in rows]


def _put(file: apsw.Connection, db: str, table: str, ranges: Sequence[Range]) -> None:
    file.executemany(
        f"INSERT OR REPLACE INTO range ({_RANGE}, db, tab, live) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)",
        [(one.id, one.epoch, one.span.start, one.span.end, one.rows, one.bytes, db, table) for one in ranges],
    )


def _put_cut(file: apsw.Connection, db: str, table: str, cut: RangeBasis) -> None:
    file.execute("INSERT OR REPLACE INTO cut VALUES (?, ?, ?, ?, ?, ?)", (db, table, *msgspec.structs.astuple(cut)))
