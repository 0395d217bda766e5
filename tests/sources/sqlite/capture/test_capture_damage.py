"""Damage by other programs to our triggers, tables and files: detected, reported, survived."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sources.sqlite.capture.test_file_history import T, running, wait_for
from tests.sources.sqlite_source import Rig, schema_changes
from tests.sources.sqlite_writer_process import Foreign

from headwater.errors import Busy, HeadwaterError, LogDamaged, SourceMismatch, Unavailable
from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Change
from headwater.sources.file_lock import SUFFIX, FileLock
from headwater.sources.sqlite.capture import trigger_installation
from headwater.sources.sqlite.capture.capture_table import Follower

Attach = Callable[..., Rig]
M = "CREATE TABLE m(id INTEGER PRIMARY KEY, v)"


def saved_triggers(r: Rig) -> list[str]:
    return schema(r, "sql")


def schema(r: Rig, column: str) -> list[str]:
    rows = r.foreign.run(f"SELECT {column} FROM sqlite_schema WHERE type = 'trigger' ORDER BY rowid")
    return [text.decode() for (text,) in rows]


def test_rebuilt_table_with_recreated_capture_triggers_asks_for_a_snapshot(rig: Attach) -> None:
    # SQLite's own recipe: new table, copy, drop, rename, create the saved triggers again
    r = rig(M, "INSERT INTO m VALUES (1, 'a'), (2, 'b')")
    triggers = saved_triggers(r)
    r.foreign.script(
        "BEGIN",
        "CREATE TABLE new_m(id INTEGER PRIMARY KEY, v, extra DEFAULT 7)",
        "INSERT INTO new_m(id, v) SELECT id, upper(v) FROM m WHERE id < 2",
        "DROP TABLE m",
        "ALTER TABLE new_m RENAME TO m",
        *triggers,
        "COMMIT",
    )
    assert any(change.resnapshot for change in schema_changes(r.settle()))
    r.foreign.run("INSERT INTO m VALUES (3, 'c', 8)")
    r.check()


def test_write_while_capture_triggers_are_dropped_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(M, "INSERT INTO m VALUES (1, 'a')")
    names = schema(r, "name")
    triggers = saved_triggers(r)
    r.foreign.script(
        "BEGIN", *(f"DROP TRIGGER {n}" for n in names), "INSERT INTO m VALUES (2, 'x')", *triggers, "COMMIT"
    )
    assert any(change.resnapshot for change in schema_changes(r.settle()))


def test_vacuum_alone_asks_for_no_snapshot(rig: Attach) -> None:
    r = rig(M, "CREATE TABLE gone(a)", "INSERT INTO m VALUES (1, 'a')")
    r.foreign.script("DROP TABLE gone")
    r.check()
    r.foreign.run("VACUUM")
    assert not any(change.resnapshot for change in schema_changes(r.check()))
    r.foreign.run("INSERT INTO m VALUES (2, 'b')")
    r.check()


U = "CREATE TABLE t(id INTEGER PRIMARY KEY, u, v)"
INDEX = ("CREATE UNIQUE INDEX i ON t(u)", "DROP INDEX i")
TRIGGER = (
    "CREATE TRIGGER i AFTER INSERT ON t WHEN NEW.v = 'x' BEGIN DELETE FROM t WHERE id = 2; END",
    "DROP TRIGGER i",
)


def tables_to_resnapshot(changes: list[Change]) -> set[str]:
    """Return the tables with a change that asks for a snapshot."""
    return {change.table.name for change in changes if change.resnapshot}


@pytest.mark.parametrize("others", [(), ("CREATE TABLE o(a)",), ("ALTER TABLE m ADD COLUMN w",)])
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("made, dropped", [INDEX, TRIGGER])
def test_rule_made_and_dropped_unseen_asks_for_snapshots_of_written_tables(
    rig: Attach, made: str, dropped: str, is_stopped: bool, others: tuple[str, ...]
) -> None:
    r = rig(U, M, "INSERT INTO t VALUES (1, 1, 'a'), (2, 2, 'b')")
    r.foreign.run("INSERT INTO m VALUES (1, 'a')")
    r.check()
    if is_stopped:
        r.close()
    r.foreign.script("BEGIN", *others, made, "INSERT OR REPLACE INTO t VALUES (3, 2, 'x')", dropped, "COMMIT")
    if is_stopped:
        r.open()
    assert tables_to_resnapshot(r.settle()) == {"t"}
    r.foreign.run("INSERT INTO t VALUES (4, 4, 'y')")
    r.check()


@pytest.mark.parametrize(
    "statements",
    [
        (*INDEX,),
        ("CREATE INDEX i ON t(u)",),
        ("CREATE TABLE o(a PRIMARY KEY, b UNIQUE)", "CREATE INDEX o_a ON o(b, a)", "INSERT INTO t VALUES (5, 5, 5)"),
        ("DROP TABLE k", "INSERT INTO t VALUES (5, 5, 5)"),
        ("DROP INDEX k_v", "INSERT INTO t VALUES (5, 5, 5)", "CREATE INDEX k_v ON k(v)"),
        ("ALTER TABLE k RENAME TO l", "INSERT INTO t VALUES (5, 5, 5)"),
        (*(f"ALTER TABLE k ADD COLUMN w{n}" for n in range(5)), "INSERT INTO t VALUES (5, 5, 5)"),
        (
            "CREATE TABLE l(id INTEGER PRIMARY KEY, v TEXT)",
            "DROP TABLE k",
            "ALTER TABLE l RENAME TO k",
            "CREATE INDEX k_v ON k(v)",
            "INSERT INTO t VALUES (5, 5, 5)",
        ),
        ("ANALYZE", "INSERT INTO t VALUES (5, 5, 5)"),
        ("CREATE VIEW w AS SELECT * FROM t", "INSERT INTO t VALUES (5, 5, 5)"),
    ],
)
def test_schema_changes_of_one_table_ask_for_no_snapshot_of_another(rig: Attach, statements: tuple[str, ...]) -> None:
    r = rig(U, "CREATE TABLE k(id INTEGER PRIMARY KEY, v)", "CREATE INDEX k_v ON k(v)")
    r.check()
    r.foreign.script("BEGIN", *statements, "COMMIT")
    assert "t" not in tables_to_resnapshot(r.settle())


def test_schema_changes_through_the_server_ask_for_no_snapshot(rig: Attach) -> None:
    r = rig(U)
    r.write(*INDEX, "CREATE TABLE o(a)", "DROP TABLE o", "INSERT INTO t VALUES (1, 1, 1)")
    r.check()
    r.foreign.run("CREATE TABLE o(a INTEGER PRIMARY KEY)")
    r.foreign.run("INSERT INTO t VALUES (2, 2, 2)")
    assert tables_to_resnapshot(r.settle()) == set()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_action_of_a_foreign_key_added_before_a_replace_asks_for_a_snapshot(rig: Attach, is_stopped: bool) -> None:
    r = rig("CREATE TABLE p(id INTEGER PRIMARY KEY, u UNIQUE, v)", "INSERT INTO p VALUES (1, 1, 'a'), (2, 2, 'b')")
    r.foreign.run("PRAGMA foreign_keys = ON")
    if is_stopped:
        r.close()
    r.foreign.script(
        "BEGIN",
        "CREATE TABLE c(id INTEGER PRIMARY KEY, p REFERENCES p(id) ON DELETE CASCADE)",
        "CREATE TRIGGER x AFTER DELETE ON c BEGIN INSERT OR REPLACE INTO p VALUES (8, 8, 'log'); END",
        "INSERT INTO c VALUES (1, 1)",
        "INSERT OR REPLACE INTO p VALUES (1, 2, 'new')",
        "COMMIT",
    )
    if is_stopped:
        r.open()
    assert "p" in tables_to_resnapshot(r.settle())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_pages_captured_under_a_dropped_trigger_are_compared(
    rig: Attach, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower._read, "__defaults__", (7,))  # rows of a page
    monkeypatch.setattr(trigger_installation, "_is_undone", lambda db: False)
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v, n)", "CREATE TABLE o(id INTEGER PRIMARY KEY)")
    r.foreign.run(f"INSERT INTO t VALUES {', '.join(f'({number}, 0, 0)' for number in range(20))}")
    r.check()
    if is_stopped:
        r.close()
    r.foreign.script(
        "BEGIN",
        "CREATE TRIGGER x AFTER UPDATE OF v ON t BEGIN UPDATE t SET n = n + 1 WHERE id = NEW.id; END",
        "INSERT INTO o VALUES (1)",  # changes of one row are in two pages then
        "UPDATE t SET v = 1",
        "DROP TRIGGER x",
        "COMMIT",
    )
    if is_stopped:
        r.open()
    r.fold.unknown.add("t")
    assert tables_to_resnapshot(r.settle()) == {"t"}


def attempt(write: Callable[[], object]) -> bool:
    try:
        write()
    except (Busy, Unavailable):
        return False
    return True


@pytest.mark.parametrize("harm", ["DELETE FROM _headwater_capture", "DROP TABLE _headwater_capture"])
def test_emptied_or_dropped_capture_tables_begin_a_new_generation(tmp_path: Path, foreign: Foreign, harm: str) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        one.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        generation, latest = one.log.generation, one.log.latest
        foreign.run(harm)
        # Until capture has begun anew, writes are refused as such, and the writer lives
        wait_for(one, lambda: attempt(lambda: one.run("INSERT INTO t VALUES (NULL, 'b')")))
        wait_for(one, lambda: one.log.generation != generation and one.capture.error is None)
        offset = one.run("INSERT INTO t VALUES (NULL, 'c')")
        one.caught_up()
        assert offset > latest + 1


def test_write_into_a_replaced_file_is_refused(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    foreign.close()
    shutil.copy(tmp_path / "app.db", tmp_path / "other.db")
    with running(tmp_path) as one:
        one.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        one.capture._stopping.set()  # so that the swap is seen by the writer first
        one.capture._thread.join()
        os.replace(tmp_path / "other.db", tmp_path / "app.db")
        with pytest.raises(HeadwaterError, match="replaced"):
            one.run("INSERT INTO t VALUES (2, 'b')")


def test_write_to_a_removed_log_is_refused(tmp_path: Path) -> None:
    log = DiskLog.open(tmp_path / "a.log.db")
    try:
        log.set_notes(a="1")
        (tmp_path / "a.log.db").unlink()
        with pytest.raises(LogDamaged, match="removed or replaced"):
            log.set_notes(a="2")
    finally:
        log.close()


def snatch(database: Path, lock: Path) -> FileLock:
    """Remove a lock file and take the lock; repeat while its holder is quicker."""
    while True:
        lock.unlink(missing_ok=True)
        try:
            return FileLock(str(database))
        except SourceMismatch:
            continue


def test_removed_lock_is_taken_again_unless_another_headwater_holds_it(tmp_path: Path, foreign: Foreign) -> None:
    foreign.run(T)
    with running(tmp_path) as one:
        one.run("INSERT INTO t VALUES (1, 'a')")
        one.caught_up()
        generation = one.log.generation
        lock = Path(str(tmp_path / "app.db") + SUFFIX)
        # Removed: taken again
        lock.unlink()
        wait_for(one, lock.exists)
        # Taken by another: no fight over the file
        other = snatch(tmp_path / "app.db", lock)
        wait_for(one, lambda: "another Headwater" in (one.capture.error or ""))
        other.release()
        wait_for(one, lambda: one.capture.error is None)
        assert one.log.generation == generation
