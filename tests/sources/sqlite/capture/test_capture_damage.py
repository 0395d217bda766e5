"""Other programs at our triggers, our tables and our files: noticed, told, survived, never silent."""

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
from headwater.sources.file_lock import SUFFIX, FileLock

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
    """Remove a lock and take it, as often as its holder is quicker."""
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
