"""A SQLite source on a file, the strict fold of what it follows, and a foreign process on the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.guarantees.fold import Fold
from tests.sources.sqlite_writer_process import Foreign
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Table
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource
from headwater.sources.write import Session


class MemoryNotes:
    """Notes in memory that end with the test."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def note(self, name: str) -> str:
        return self.kept.get(name, "")

    def set_notes(self, **notes: str) -> None:
        self.kept |= notes


class Rig:
    """A source, a fold and a foreign process on one file; `pull` follows once, `check` compares fold and file."""

    def __init__(self, path: Path, foreign: Foreign, **settings: Any) -> None:
        self.path, self.foreign = path, foreign
        self.config = SqliteConfig(**{"wal": True, **settings})
        self.notes = MemoryNotes()
        self.after = 0
        self.fold = Fold()
        self.source: SqliteSource
        self._open = False

    def attach(self) -> Rig:
        """Open the source and begin the fold with the current rows."""
        self.open()
        for name, table in self.captured().items():
            self.fold.load_raw(table, self.foreign.rows(name, table.names))
        return self

    def open(self) -> None:
        """Open the source; the fold continues at its offset."""
        self.source = SqliteSource("main", str(self.path), notes=self.notes, config=self.config)
        self._open = True
        reason = self.source.prove(generation="g", latest=self.after, read=lambda after: iter(()))
        assert reason == "", reason

    def captured(self) -> dict[str, Table]:
        """Return the current tables that have capture triggers."""
        shapes = self.source.describe()
        return {name: shapes[name] for name in self.source.status()["tables"]}

    def transactions(self) -> list[Transaction]:
        """Return the transactions committed since the last call, after applying them to the fold."""
        found = list(self.source.follow(after=self.after))
        for part in found:
            assert part.first == self.after + 1, f"{part.first} follows {self.after}"
            assert part.changes
            self.after = part.upto
            self.fold.apply_all(part.changes)
        return found

    def pull(self) -> list[Change]:
        """Return all new changes; repeats until none are left, because following may itself ask for a snapshot."""
        found: list[Change] = []
        while new := self.transactions():
            found += [change for part in new for change in part.changes]
        return found

    def check(self) -> list[Change]:
        """Follow, fail if a snapshot is asked for, and compare every captured table; return the changes."""
        changes = self.pull()
        assert self.fold.unknown == set(), f"a snapshot was asked for {self.fold.unknown}"
        self.compare()
        return changes

    def settle(self) -> list[Change]:
        """Follow, load the snapshots that are asked for, and compare; return the changes."""
        changes = self.pull()
        for name in sorted(self.fold.unknown):
            table = self.fold.tables[name]
            self.fold.load_raw(table, self.foreign.rows(name, table.names))
        self.compare()
        return changes

    def compare(self) -> None:
        """Check that fold and file have equal rows."""
        captured = self.captured()
        assert set(self.fold.tables) == set(captured)
        for name, table in captured.items():
            assert self.fold.tables[name].names == table.names
            self.fold.check(name, self.foreign.rows(name, table.names))

    def write(self, *statements: str, args: Sequence[Any] = ()) -> list[str]:
        """Run statements in one transaction through the source; return the error of each, or ""."""

        def work(session: Session) -> list[str]:
            return [_attempt(session, statement, args) for statement in statements]

        return self.source.write(work).result(PATIENCE).value

    def close(self) -> None:
        """Close the source, if it is open."""
        if self._open:
            self.source.close()
        self._open = False


def _attempt(session: Session, statement: str, args: Sequence[Any]) -> str:
    try:
        session.execute(statement, args)
    except HeadwaterError as error:
        return error.message
    return ""


def ops(changes: Sequence[Change]) -> list[str]:
    """Return the op of each row change, as a word."""
    return [change.op.word for change in changes if change.op is not Op.SCHEMA_CHANGE]


def schema_changes(changes: Sequence[Change]) -> list[Change]:
    """Return the schema changes among `changes`."""
    return [change for change in changes if change.op is Op.SCHEMA_CHANGE]


def images(changes: Sequence[Change]) -> list[tuple[Any, Any]]:
    """Return the old and the new row of each row change."""
    return [(change.before, change.after) for change in changes if change.op is not Op.SCHEMA_CHANGE]
