"""A small shop in a SQLite source, and analyses of it as short texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.sources.sqlite_source import MemoryNotes
from tests.suite.deadlines import PATIENCE

from headwater.model.dependencies.dependency import Analysis
from headwater.model.dependencies.description import of_dependency
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

SHOP = (
    "CREATE TABLE c(id INTEGER PRIMARY KEY, name TEXT NOT NULL, region TEXT COLLATE NOCASE, boss INTEGER)",
    "CREATE TABLE o(id INTEGER PRIMARY KEY, cid INTEGER, total REAL, day TEXT, tag)",
    "CREATE TABLE i(oid INTEGER NOT NULL, n INTEGER NOT NULL, sku TEXT, qty INTEGER, PRIMARY KEY (oid, n))",
    "CREATE TABLE bare(a INTEGER, b TEXT)",
    "CREATE TABLE named(k TEXT PRIMARY KEY, v INTEGER)",
    "CREATE TABLE made(id INTEGER PRIMARY KEY, a INTEGER, twice INTEGER GENERATED ALWAYS AS (a * 2))",
    "CREATE TABLE chosen(id INTEGER)",
    "CREATE VIEW big AS SELECT id, cid, total FROM o WHERE total > 100",
    "CREATE VIEW bigger(x, y) AS SELECT cid, total FROM big WHERE total > 200",
)


@contextlib.contextmanager
def opened(folder: Path, schema: Sequence[str] = SHOP) -> Iterator[SqliteSource]:
    """Yield a source with `schema`; only `settle` follows it."""
    config = SqliteConfig(wal=True)
    source = SqliteSource("app", str(folder / "app.db"), notes=MemoryNotes(), config=config)
    try:
        assert source.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
        for sql in schema:
            run(source, sql)
        yield source
    finally:
        source.close()


def run(source: SqliteSource, sql: str) -> None:
    """Run a statement that writes."""
    source.write(lambda session: session.execute(sql)).result(PATIENCE)


def settle(source: SqliteSource) -> None:
    """Follow once, so that capture matches the schema."""
    list(source.follow(after=0))


def dependency_texts(analysis: Analysis) -> list[str]:
    """Return the dependencies of an analysis as sorted texts."""
    return sorted(of_dependency(one).replace("; all rows", "") for one in analysis.dependencies)
