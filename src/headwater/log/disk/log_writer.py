"""The one writer of a log file: its transactions, and the check that no other process writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
from msgspec.structs import astuple, replace

from headwater.errors import LogDamaged, Unavailable
from headwater.log.disk.block_codec import Block
from headwater.log.disk.shape_store import Shapes
from headwater.log.disk.store import FORMAT, State, load_state, new_generation, set_meta
from headwater.log.sqlite_store import SqliteStore

_INSERT = "INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_MAGIC = b"SQLite format 3\0"
_AGAIN = "Restart the server: a new generation begins, at offsets above all that readers received."


class Writer:
    """Writes to the log at `path`, which is created with `floor` as its first offset if it is missing."""

    def __init__(self, path: Path, *, floor: int, vfs: str | None) -> None:
        self._path, self._shapes = path, Shapes()
        first = new_generation(max(floor, 1), "created")
        self.file = SqliteStore(FORMAT, path, fill=lambda new: set_meta(new, ceiling=0, **first), vfs=vfs)
        try:
            with self.file.connection() as connection:
                self._data_version = connection.pragma("data_version")
                self._inode = path.stat().st_ino
                total = connection.execute("SELECT ifnull(sum(bytes), 0) FROM block").get
                # Replaced whole after each commit: a reader in another thread sees the old or the new one.
                self.state = replace(load_state(path, connection), bytes=total)
        except BaseException:
            self.file.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[LogTransaction]:
        """Write in one transaction, durable at the end of the block; raise if another process writes to the file."""
        with self.file.lock:
            try:
                with self.file.transaction() as connection:
                    self._check_alone(connection)
                    draft = LogTransaction(connection, self.state, self._shapes)
                    yield draft
            except BaseException:
                self._shapes.forget_numbers()
                raise
            self.state = draft.state

    def inode(self) -> int:
        """Return the inode of the file; LogDamaged if it is no longer at its path."""
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                return self._inode
        raise LogDamaged(f"the log {self._path.name} was removed or replaced while the server ran", hint=_AGAIN)

    def _check_alone(self, connection: apsw.Connection) -> None:
        self.inode()
        with self._path.open("rb") as file:  # SQLite keeps the header in its cache, and would go on for long
            if file.read(len(_MAGIC)) not in (_MAGIC, b""):  # empty: a new log is still in its journal
                raise LogDamaged(f"the log {self._path.name} was overwritten while the server ran", hint=_AGAIN)
        version = connection.pragma("data_version")
        if version == self._data_version:
            return
        mine = self.state
        if replace(load_state(self._path, connection), bytes=mine.bytes, merged=mine.merged) != mine:
            hint = "One process owns a log. Stop the other server, then start this one again."
            raise Unavailable(f"another process writes to the log {self._path.name}", hint=hint)
        self._data_version = version


class LogTransaction:
    """One open transaction of a log file, and the state of the log after it."""

    def __init__(self, connection: apsw.Connection, state: State, shapes: Shapes) -> None:
        self.connection, self.state, self._shapes = connection, state, shapes

    def insert(self, block: Block) -> None:
        """Store a block, and the definitions of its tables that are not stored yet."""
        *lookups, tables, raw, codec, crc, data = astuple(block)  # in the order of the columns
        numbers = self._shapes.numbers(self.connection, tables)
        self.connection.execute(_INSERT, (*lookups, numbers, len(data), raw, codec, crc, data))

    def note_evicted(self, first: int) -> None:
        """Store where the changes of each table end in the blocks up to the one that begins at `first`."""
        ends: dict[str, int] = {}
        sql = "SELECT schemas, max(first + count - 1) FROM block WHERE first <= ? GROUP BY schemas"
        for schemas, upto in self.connection.execute(sql, (first,)):
            for name in self._shapes.names(self.connection, schemas):
                ends[name] = max(upto, ends.get(name, 0))
        self.connection.executemany("INSERT OR REPLACE INTO evicted VALUES (?, ?)", ends.items())

    def set_meta(self, **entries: int | str) -> None:
        """Store meta entries, and set the fields of `state` with their names."""
        set_meta(self.connection, **entries)
        self.state = replace(self.state, **entries)

    def set_notes(self, notes: Mapping[str, str]) -> None:
        """Store notes, by name; an old note of that name is replaced."""
        self.connection.executemany("INSERT OR REPLACE INTO note VALUES (?, ?)", notes.items())
