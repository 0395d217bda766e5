"""Reader of a SQLite file in another process than the capturing server: no lock, no triggers, no writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headwater.errors import NotFound, SourceMismatch, Unavailable
from headwater.model.table import Table
from headwater.sources.read import BulkReader
from headwater.sources.sqlite.capture.trigger_installation import is_installed, meta
from headwater.sources.sqlite.catalog import Catalog
from headwater.sources.sqlite.connection import file_name, open_file, sqlite_errors
from headwater.sources.sqlite.connection_pool import Pool
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.query.where import Predicates, SqliteCondition
from headwater.sources.sqlite.read.reads import SqliteReads

READERS = 8
CHUNK_ROWS = 10_000  # rows per chunk: rows are Python objects, and several jobs hold chunks at once
STATEMENT_SECONDS = 60.0  # no caller's statement runs here


class SqliteReader(SqliteReads, BulkReader):
    """The bulk reads of a database: reads the file `inode` at `path` while it holds the history `generation`."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, path: str, *, inode: int, generation: str) -> None:
        self.path, self._name, self._inode, self._generation = path, file_name(path), inode, generation
        super().__init__(Pool(self._connect, READERS), Predicates())

    def _connect(self) -> GuardedConnection:
        self._check_file()
        db = open_file(self.path, read_only=True)
        try:
            self._check_file()  # checks that this is the file that was opened
        except BaseException:
            db.close()
            raise
        guard = Guard(db, STATEMENT_SECONDS)
        return GuardedConnection(db, guard, Catalog(guard))

    def _check_file(self) -> None:
        try:
            found = os.stat(self.path).st_ino
        except OSError as error:
            raise Unavailable(f"{self._name} cannot be read: {error.strerror}", hint="Try again.") from None
        if found != self._inode:
            raise Unavailable(f"{self._name} was replaced by another file", hint="Try again in a moment.")

    @contextmanager
    def _read(self) -> Iterator[GuardedConnection]:
        """Open a read transaction; SourceMismatch if the file no longer holds our history."""
        with self._pool.read() as reader:
            with reader.guard.own() as db, sqlite_errors(self.path):
                found = meta(db, "generation") if is_installed(db) else ""
            if found != self._generation:
                raise SourceMismatch(
                    f"{self._name} began a new history", hint="Readers need a new snapshot of the new generation."
                )
            yield reader

    def shape(self, name: str, version: int | None = None) -> Table:
        with self._read() as reader:
            if version is None:
                return reader.catalog.shape(name).table
            reader.catalog.refresh_unless_held()
            for layout in reader.catalog.layouts.values():
                if (layout.table.name, layout.table.version) == (name, version):
                    return layout.table
        raise NotFound(f"table {name!r} never had a version {version}", hint="Leave `version` out for the current one.")

    def head(self) -> int:
        with self._read() as reader:
            return reader.offset()

    def condition(self, table: Table, where: str) -> SqliteCondition:
        """Return the predicate `where`, with an engine of its own, so that a slow predicate delays no other job."""
        return Predicates().condition(table, where)

    def status(self) -> dict[str, Any]:
        with self._read() as reader:
            reader.catalog.refresh_unless_held()
            layouts = reader.catalog.layouts.values()
            return {"tables": sorted(layout.table.name for layout in layouts if layout.active)}

    def wake(self) -> None:
        """Do nothing: no capture thread waits in this process."""

    def close(self) -> None:
        self._pool.close()
