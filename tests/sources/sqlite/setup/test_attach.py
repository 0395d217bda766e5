"""Attaching to files as they are, refusing those that cannot be captured, and detaching without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sources.sqlite_source import MemoryNotes, Rig
from tests.sources.sqlite_writer_process import Foreign
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, SourceMismatch, SourceUnfit
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.setup.detach import detach
from headwater.sources.sqlite.source import SqliteSource

Attach = Callable[..., Rig]
SHOP = (
    "CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT)",
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer REFERENCES customers(id), total REAL)",
    "CREATE TABLE notes(body)",
    "CREATE VIEW rich AS SELECT * FROM orders WHERE total > 100",
    "CREATE TRIGGER rich_insert INSTEAD OF INSERT ON rich BEGIN INSERT INTO orders VALUES (NEW.id, 1, NEW.total); END",
    "CREATE VIRTUAL TABLE words USING fts5(body)",
    "CREATE INDEX by_customer ON orders(customer)",
    "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bob')",
    "INSERT INTO orders VALUES (1, 1, 10.5), (2, 2, 200)",
    "INSERT INTO words VALUES ('some text')",
)


def schema(foreign: Foreign) -> list[Any]:
    return foreign.run("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name")


def test_existing_database_is_captured_from_the_attach_on(rig: Attach) -> None:
    r = rig(*SHOP)
    assert set(r.captured()) == {"customers", "orders", "notes"}
    assert r.check() == []
    r.foreign.script(
        "INSERT INTO rich VALUES (3, 1, 300)", "INSERT INTO words VALUES ('more')", "DELETE FROM customers WHERE id = 9"
    )
    assert [change.table.name for change in r.check()] == ["orders"]


def test_only_named_tables_are_captured(rig: Attach) -> None:
    r = rig(*SHOP, tables=("orders", "later"))
    assert set(r.captured()) == {"orders"}
    r.foreign.script("INSERT INTO notes VALUES ('x')", "INSERT INTO orders VALUES (5, 1, 1)")
    assert len(r.check()) == 1
    r.foreign.run("CREATE TABLE later(x)")
    r.check()
    assert set(r.captured()) == {"orders", "later"}


def test_detach_removes_every_trace_from_the_file(rig: Attach, database: Path) -> None:
    r = rig(*SHOP)
    before = [row for row in schema(r.foreign) if b"_headwater_" not in row[1]]
    assert len(schema(r.foreign)) > len(before)
    r.foreign.run("REPLACE INTO orders VALUES (1, 2, 3)")
    r.write("CREATE TABLE made_by_us(x)", "DROP TABLE made_by_us")
    r.check()
    r.close()
    detach(str(database), config=SqliteConfig())
    assert schema(r.foreign) == before
    assert r.foreign.run("PRAGMA integrity_check") == [(b"ok",)]
    assert r.foreign.run("PRAGMA journal_mode") == [(b"wal",)]
    r.foreign.close()
    assert sorted(path.name for path in database.parent.iterdir()) == ["app.db"]
    detach(str(database), config=SqliteConfig())  # a second time changes nothing
    r.foreign.open(database)
    assert schema(r.foreign) == before


def test_file_without_wal_mode_is_refused_unless_allowed(foreign: Foreign, database: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    with pytest.raises(SourceUnfit) as refused:
        SqliteSource("main", str(database), notes=MemoryNotes(), config=SqliteConfig())
    assert "wal" in refused.value.hint.lower()
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]
    before = schema(foreign)
    r = Rig(database, foreign, wal=True).attach()
    assert foreign.run("PRAGMA journal_mode") == [(b"wal",)]
    foreign.run("DELETE FROM orders WHERE id = 1")
    assert len(r.check()) == 1
    r.close()
    foreign.close()
    detach(str(database), config=SqliteConfig())
    foreign.open(database)
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]
    assert schema(foreign) == before
    foreign.close()
    assert sorted(path.name for path in database.parent.iterdir()) == ["app.db"]


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_utf16_file_is_refused(foreign_process: Foreign, database: Path, encoding: str) -> None:
    foreign_process.open(database)
    foreign_process.script(f"PRAGMA encoding = '{encoding}'", "PRAGMA journal_mode = WAL", "CREATE TABLE t(x)")
    foreign_process.close()
    with pytest.raises(SourceUnfit, match="UTF-16"):
        SqliteSource("main", str(database), notes=MemoryNotes(), config=SqliteConfig())


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_file_that_is_no_database_is_refused(database: Path, content: bytes) -> None:
    database.write_bytes(content)
    with pytest.raises(SourceUnfit):
        SqliteSource("main", str(database), notes=MemoryNotes(), config=SqliteConfig(wal=True))
    assert database.read_bytes() == content


def test_second_server_on_the_same_file_is_refused(rig: Attach, database: Path) -> None:
    r = rig(*SHOP)
    with pytest.raises(SourceMismatch, match="another Headwater"):
        SqliteSource("main", str(database), notes=MemoryNotes(), config=SqliteConfig())
    with pytest.raises(SourceMismatch, match="another Headwater"):
        detach(str(database), config=SqliteConfig())
    link = database.parent / "link.db"
    link.symlink_to(database)
    with pytest.raises(SourceMismatch, match="another Headwater"):
        SqliteSource("main", str(link), notes=MemoryNotes(), config=SqliteConfig())
    r.foreign.run("INSERT INTO notes VALUES ('x')")
    assert len(r.check()) == 1


def test_missing_file_is_created_as_a_database(database: Path, foreign_process: Foreign) -> None:
    foreign_process.open(database)
    r = Rig(database, foreign_process, wal=False).attach()
    r.write("CREATE TABLE t(id INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    assert len(r.check()) == 2
    r.close()
    foreign_process.close()


def test_capture_tables_of_another_format_are_refused(rig: Attach, database: Path) -> None:
    r = rig(*SHOP)
    r.close()
    r.foreign.run("UPDATE _headwater_meta SET value = '99' WHERE name = 'format'")
    again = SqliteSource("main", str(database), notes=r.notes, config=SqliteConfig())
    with pytest.raises(SourceUnfit, match="99"):
        again.prove(generation="g", latest=0, read=lambda after: iter(()))
    again.close()


def test_restart_captures_changes_made_while_stopped(rig: Attach) -> None:
    r = rig(*SHOP)
    r.foreign.run("REPLACE INTO orders VALUES (1, 2, 3)")
    r.check()
    r.close()
    r.foreign.script("INSERT INTO orders VALUES (7, 1, 7)", "REPLACE INTO orders VALUES (7, 1, 8)")
    r.open()
    assert len(r.check()) == 2


def test_refused_start_leaves_the_file_unchanged(foreign: Foreign, database: Path, tmp_path: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    foreign.close()
    before = database.read_bytes()
    elsewhere = tmp_path / "other.db"
    elsewhere.touch()
    log_of_another = MemoryNotes()
    log_of_another.set_notes(path=str(elsewhere))
    source = SqliteSource("main", str(database), notes=log_of_another, config=SqliteConfig(wal=True))
    with pytest.raises(SourceMismatch, match="the log of"):
        source.prove(generation="g", latest=5, read=lambda after: iter(()))
    source.close()
    assert database.read_bytes() == before
    assert not Path(f"{database}-wal").exists()


def test_start_that_needs_a_new_generation_changes_nothing_before_it(foreign: Foreign, database: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    before = database.read_bytes()
    source = SqliteSource("main", str(database), notes=MemoryNotes(), config=SqliteConfig(wal=True))
    assert source.prove(generation="g", latest=5, read=lambda after: iter(()))  # another file: the caller decides
    assert database.read_bytes() == before
    source.restart(generation="next", first=6)
    foreign.run("SELECT count(*) FROM orders")
    assert foreign.run("PRAGMA journal_mode") == [(b"wal",)]
    source.close()
    foreign.close()
    detach(str(database), config=SqliteConfig(wal=True))
    foreign.open(database)
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]


def test_detach_while_another_program_has_the_file_open_changes_nothing(foreign: Foreign, database: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    r = Rig(database, foreign, wal=True).attach()
    r.close()
    foreign.run("SELECT count(*) FROM orders")
    attached = schema(foreign)
    with pytest.raises(Busy, match="open in another program"):
        detach(str(database), config=SqliteConfig(wal=True))
    assert schema(foreign) == attached
    assert foreign.run("PRAGMA journal_mode") == [(b"wal",)]
    foreign.close()
    detach(str(database), config=SqliteConfig(wal=True))
    foreign.open(database)
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]
    assert [row for row in schema(foreign) if b"_headwater_" in row[1]] == []


def test_detach_killed_after_the_journal_mode_changed_is_finished_by_the_next(foreign: Foreign, database: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    r = Rig(database, foreign, wal=True).attach()
    r.close()
    assert foreign.run("PRAGMA journal_mode = DELETE") == [(b"delete",)]
    foreign.close()
    detach(str(database), config=SqliteConfig(wal=True))
    foreign.open(database)
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]
    assert [row for row in schema(foreign) if b"_headwater_" in row[1]] == []


def test_hard_link_of_a_served_file_is_refused(rig: Attach, database: Path, tmp_path: Path) -> None:
    r = rig(*SHOP)
    link = tmp_path / "linked.db"
    os.link(database, link)
    with pytest.raises(SourceMismatch, match="hard link"):
        SqliteSource("other", str(link), notes=MemoryNotes(), config=SqliteConfig(wal=True))
    with pytest.raises(SourceMismatch, match="hard link"):
        detach(str(link), config=SqliteConfig(wal=True))
    command = [sys.executable, "-m", "headwater", "serve", str(link), "--wal", "--data", str(tmp_path / "data")]
    other = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert other.returncode != 0 and "hard link" in other.stderr
    r.foreign.run("INSERT INTO notes VALUES ('x')")
    assert len(r.check()) == 1
    r.close()
    again = SqliteSource("other", str(link), notes=MemoryNotes(), config=SqliteConfig(wal=True))
    again.close()


def test_mode_of_a_file_survives_a_start_killed_before_capture_was_installed(foreign: Foreign, database: Path) -> None:
    foreign.script("PRAGMA journal_mode = DELETE", *SHOP)
    foreign.close()
    notes = MemoryNotes()
    killed = SqliteSource("main", str(database), notes=notes, config=SqliteConfig(wal=True))
    killed._enter_wal()
    killed.close()
    again = SqliteSource("main", str(database), notes=notes, config=SqliteConfig(wal=True))
    assert again.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
    again.close()
    detach(str(database), config=SqliteConfig(wal=True))
    foreign.open(database)
    assert foreign.run("PRAGMA journal_mode") == [(b"delete",)]
