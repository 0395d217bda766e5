"""Real SQLite databases in a temporary folder, behind the protocol the rooms use."""

from pathlib import Path
from typing import Any

import apsw
from tests.suite.deadlines import PATIENCE, TRANSACTIONS

from headwater.app import App
from headwater.config import Config, QuotasConfig
from headwater.database import DatabaseStatus
from headwater.errors import NotFound
from headwater.feeds.subscriptions.registry import Registry
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource


class MemoryNotes:
    """Notes in memory that end with the test."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def note(self, name: str) -> str:
        return self._notes.get(name, "")

    def set_notes(self, **notes: str) -> None:
        self._notes |= notes


class Files:
    """Databases, one file each, without capture: their changes are not moved or trimmed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._config = SqliteConfig(**{"wal": True, **TRANSACTIONS} | settings)
        folder.mkdir(exist_ok=True)
        self._open: dict[str, SqliteSource] = {}
        self.create("main")

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.db"

    def get(self, name: str) -> SqliteSource:
        if name not in self._open:
            raise NotFound(f"there is no database {name!r}")
        return self._open[name]

    def names(self) -> list[str]:
        return sorted(self._open)

    def create(self, name: str) -> bool:
        if name in self._open:
            return False
        source = SqliteSource(name, str(self.path(name)), notes=MemoryNotes(), config=self._config)
        assert source.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
        self._open[name] = source
        return True

    def drop(self, name: str) -> bool:
        if name not in self._open:
            return False
        self._open.pop(name).close()
        for path in self.folder.glob(f"{name}.db*"):
            path.unlink()
        return True

    def stop_statements(self) -> None:
        for source in self._open.values():
            source.stop_statements()

    def quota(self, name: str) -> QuotasConfig:
        return QuotasConfig()

    def status(self) -> dict[str, DatabaseStatus]:
        return {
            name: DatabaseStatus(ready=True, generation="g", horizon=1, latest=source.head())
            for name, source in self._open.items()
        }

    def run(self, sql: str, *, db: str = "main") -> None:
        self.get(db).write(lambda session: session.execute(sql)).result(PATIENCE)

    def rows(self, sql: str, *, db: str = "main") -> list[tuple[Any, ...]]:
        return list(self.get(db).read(sql).rows)

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()


class Whole(App):
    """Databases as a server has them: with logs, capture and subscriptions."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        sources = {"sqlite": SqliteConfig(**TRANSACTIONS)}
        super().__init__(Config(**{"data": str(folder), "sources": sources} | settings))
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.db"

    @property
    def registry(self) -> Registry:
        assert self._registry is not None
        return self._registry

    def run(self, sql: str, *, db: str = "main") -> None:
        self.get(db).write(lambda session: session.execute(sql)).result(PATIENCE)

    def rows(self, sql: str, *, db: str = "main") -> list[tuple[Any, ...]]:
        return list(self.get(db).read(sql).rows)

    def __enter__(self) -> "Whole":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dump(path: Path, *, ours: bool = True) -> list[Any]:
    """Return the schema and all rows of a database file; rows of our own tables only if `ours`.

    By apsw, not the standard library: two copies of SQLite in one process drop each other's file locks.
    """
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        objects = list(db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name"))
        names = [name.replace('"', '""') for kind, name, _ in objects if kind == "table"]
        names = [name for name in names if ours or not name.startswith("_headwater_")]
        return [objects, *(list(db.execute(f'SELECT * FROM "{name}"')) for name in names)]
    finally:
        db.close()
