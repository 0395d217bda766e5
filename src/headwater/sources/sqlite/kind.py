"""SQLite for the registry: open, bulk reads, and the commands `source` and `doctor`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import NotFound
from headwater.model.quantity import counted
from headwater.sources.capture_stream import LogNotes
from headwater.sources.read import BulkAddress, PastShapes, ServerPositions
from headwater.sources.registry import KINDS, CapturedTable, CommandReport, Inspection, SourceKind
from headwater.sources.sqlite.settings import SqliteConfig

if TYPE_CHECKING:
    from headwater.sources.sqlite.read.bulk_reader import SqliteReader
    from headwater.sources.sqlite.source import SqliteSource

logger = logging.getLogger(__name__)


class SqliteKind(SourceKind):
    """The kind of source for SQLite files."""

    settings = SqliteConfig

    def address(self, url: str) -> str:
        for scheme in KINDS["sqlite"].schemes:
            if url.startswith(scheme):
                return url.removeprefix(scheme)
        return url

    def library_version(self) -> str:
        from apsw import sqlite_lib_version

        return sqlite_lib_version()

    def open(
        self, name: str, url: str, *, notes: LogNotes, settings: SqliteConfig, folder: Path, is_embedded: bool
    ) -> SqliteSource:
        """Open the file, or create it, with a warning unless it is our own embedded database."""
        from headwater.sources.sqlite.source import SqliteSource

        path = self.address(url)
        is_new = not is_embedded and not os.path.exists(path)
        made = SqliteSource(name, path, notes=notes, config=settings)
        if is_new:  # perhaps a misspelt path
            logger.warning("%s did not exist: a new, empty database was created", path)
        return made

    def open_bulk_reader(
        self, name: str, address: BulkAddress, *, generation: str, log: PastShapes, server: ServerPositions
    ) -> SqliteReader:
        """Return a reader of the file, which is opened at the first read."""
        from headwater.sources.sqlite.read.bulk_reader import SqliteReader

        return SqliteReader(address.address, inode=address.inode, generation=generation)

    # --- commands ----------------------------------------------------------------------------------------------------

    def list_tables(self, name: str, url: str, settings: SqliteConfig) -> list[CapturedTable]:
        from headwater.sources.sqlite.setup.inspection import list_tables

        path = self.address(url)
        if not os.path.exists(path):
            raise NotFound(f"there is no file {path}", hint="`headwater serve` creates an embedded database.")
        return list_tables(name, path)

    def inspect(self, name: str, url: str, settings: SqliteConfig) -> Inspection:
        from headwater.sources.sqlite.setup.inspection import inspect

        return inspect(name, self.address(url), settings)

    def check_attach(self, url: str) -> None:
        """Raise NotFound if there is no such file."""
        _existing(self.address(url))

    def attached(self, name: str, url: str, status: dict[str, Any], tables: tuple[str, ...]) -> CommandReport:
        """Return the report on the tables that are captured, and those that are not."""
        path, found, uncaptured = os.path.abspath(self.address(url)), status["tables"], status["uncaptured"]
        names = f": {', '.join(found)}" if found else ""
        lines = [f"capturing {counted(len(found), 'table')} of {path} as {name!r}{names}"]
        lines += [f"not captured: {table}: {reason}" for table, reason in uncaptured.items()]
        if missing := sorted(set(tables) - set(found)):
            lines.append(f"not there yet, captured once created: {', '.join(missing)}")
        return CommandReport({"database": name, "file": path, "tables": found, "uncaptured": uncaptured}, lines)

    def detach(
        self, name: str, url: str, settings: SqliteConfig, find_log: Callable[[str | None], str | None]
    ) -> CommandReport:
        """Remove triggers and tables of Headwater from the file, and restore its journal mode."""
        from headwater.sources.sqlite.setup.detach import detach
        from headwater.sources.sqlite.setup.inspection import generation_of

        path = _existing(self.address(url))
        generation = generation_of(path)
        changed, kept = generation is not None, find_log(generation) if generation else None
        if changed:
            detach(path, config=SqliteConfig(wal=True))
        lines = [f"removed every trace from {path}" if changed else f"{path} was not attached"]
        lines += [f"its log is kept: {kept}"] if kept else []
        return CommandReport({"file": path, "changed": changed, "log": kept}, lines)


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise NotFound(f"there is no file {path}", hint="Name an existing SQLite file.")
    return path


KIND = SqliteKind()
