"""A restored, swapped or shortened database file, and a lost log: a new generation or a stop, never a silent gap."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from tests.capture.captured_database import Running, flat, foreign, logged, running
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import HeadwaterError, SourceMismatch, StorageFull
from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Op

NO_TRIM = {"trim_seconds": 3600.0}


def copied(source: Path, target: Path) -> None:
    """A backup of a closed database file."""
    for suffix in ("", "-wal"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
    shutil.copy(source, target)
    if source.with_name(source.name + "-wal").exists():
        shutil.copy(source.with_name(source.name + "-wal"), target.with_name(target.name + "-wal"))


def restored(backup: Path, target: Path) -> None:
    for suffix in ("-wal", "-shm"):
        target.with_name(target.name + suffix).unlink(missing_ok=True)
    os.replace(backup, target)


def installed(one: Running) -> None:
    """Wait until capture is installed in the new file: the log has its generation a moment earlier."""
    for _ in range(1000):
        with contextlib.suppress(HeadwaterError):
            one.source.head()
            return
        one.log.wait_beyond(one.log.latest, 0.01)
    raise AssertionError("capture was not installed in the new file")


def test_commits_while_capture_is_stopped_are_captured_later(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        generation = one.log.generation
    foreign(tmp_path / "app.db", "INSERT INTO t VALUES (1, 'a')", "UPDATE t SET v = 'b'")
    with running(tmp_path) as one:
        assert [(c.op, c.after) for c in one.changes()][-2:] == [(Op.INSERT, (1, "a")), (Op.UPDATE, (1, "b"))]
        assert one.log.generation == generation


def test_backup_from_before_a_trim_is_detected_at_start(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    copied(path, tmp_path / "backup.db")
    with running(tmp_path, trim_rows=1, trim_seconds=0.001) as one:
        for n in range(5):
            one.run(f"INSERT INTO t VALUES ({n}, 'x')")
        one.caught_up()
        latest, generation = one.log.latest, one.log.generation
    restored(tmp_path / "backup.db", path)
    with running(tmp_path) as one:
        assert one.log.generation != generation
        assert one.log.latest == latest + 1, "the first offset of the new generation is max + 2"
        assert "older copy" in one.log.generation_reason or "commits were lost" in one.log.generation_reason
        assert one.run("INSERT INTO t VALUES (1, 'y')") == latest + 2


def test_restored_file_with_other_commits_at_the_same_offsets_starts_a_new_generation(tmp_path: Path) -> None:
    # Power loss under a writer with synchronous=NORMAL: the log has changes that the file forgot. Then other
    # commits take the same offsets: neither the nonce nor the head can tell, only the bytes.
    path = tmp_path / "app.db"
    with running(tmp_path, **NO_TRIM) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    copied(path, tmp_path / "backup.db")
    foreign(path, "INSERT INTO t VALUES (1, 'lost')")
    with running(tmp_path, **NO_TRIM) as one:
        one.caught_up()
        latest, generation = one.log.latest, one.log.generation
    restored(tmp_path / "backup.db", path)
    foreign(path, "INSERT INTO t VALUES (1, 'other')", "INSERT INTO t VALUES (2, 'more')")
    with running(tmp_path, **NO_TRIM) as one:
        assert one.log.generation != generation, "the log says 'lost', the file says 'other'"
        assert one.log.generation_first > latest


def test_restart_with_untrimmed_changes_across_an_alter_table_keeps_the_generation(tmp_path: Path) -> None:
    with running(tmp_path, **NO_TRIM) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        for n in range(9):
            one.run(f"INSERT INTO t VALUES ({n}, 'x')")
        one.run("ALTER TABLE t ADD COLUMN w DEFAULT 7")
        one.run("UPDATE t SET w = 8")
        generation = one.log.generation
    with running(tmp_path, **NO_TRIM) as one:
        assert one.log.generation == generation, one.log.generation_reason


def test_database_file_replaced_while_capture_runs_starts_a_new_generation(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.run("INSERT INTO t VALUES (1, 'old')")
        one.caught_up()
        latest, generation = one.log.latest, one.log.generation
        foreign(tmp_path / "new.db", "PRAGMA journal_mode=WAL", "CREATE TABLE u(a)", "INSERT INTO u VALUES (1)")
        restored(tmp_path / "new.db", path)
        one.source.wake()
        while one.log.generation == generation:
            one.log.wait_beyond(latest, 0.05)
        assert one.log.generation_first == latest + 2
        installed(one)
        assert set(one.source.describe()) == {"u"}
        assert one.run("INSERT INTO u VALUES (2)") == latest + 2
        (change,) = one.changes()
        assert change.after is not None and 2 in change.after


@pytest.mark.slow
def test_unusable_replacement_file_is_reported_until_a_usable_one_starts_a_new_generation(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path, wal=False) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.caught_up()
        generation = one.log.generation
        foreign(tmp_path / "unfit.db", "CREATE TABLE u(a)")
        restored(tmp_path / "unfit.db", path)
        for _ in range(3):
            wait_for(one, lambda: (one.capture.error or "").startswith("source_unfit"))
            assert one.log.generation == generation
            one.log.wait_beyond(one.log.latest, 0.3)  # it looks again, and again finds it unfit
        foreign(tmp_path / "fit.db", "PRAGMA journal_mode = WAL", "CREATE TABLE u(a)")
        restored(tmp_path / "fit.db", path)
        wait_for(one, lambda: one.log.generation != generation and one.capture.error is None)
        one.run("INSERT INTO u VALUES (1)")
        assert [change.op for change in one.changes()] == [Op.INSERT]


def wait_for(one: Running, holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns True; fail with the error of capture after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"capture: {one.capture.error}"
        one.log.wait_beyond(one.log.latest, 0.01)


def test_capture_with_stop_when_lost_refuses_to_start_on_a_replaced_database(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(a)")
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"app.db{suffix}").unlink(missing_ok=True)
    with pytest.raises(SourceMismatch) as caught, running(tmp_path, stop_when_lost=True):
        raise AssertionError("it must not start")
    assert "new_generation" in caught.value.hint
    with running(tmp_path) as one:
        assert one.log.generation_first > 1


def test_new_log_after_a_lost_one_reuses_no_offset(tmp_path: Path) -> None:
    # SkeinDB: when its change log was lost, offsets went back to 0 while cursors stayed ahead.
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        for n in range(20):
            one.run(f"INSERT INTO t VALUES ({n})")
        one.caught_up()
        latest, generation = one.log.latest, one.log.generation
    for path in tmp_path.glob("app.log.db*"):
        path.unlink()
    with running(tmp_path) as one:
        assert one.log.generation != generation
        assert one.log.generation_first == latest + 2
        assert one.run("INSERT INTO t VALUES (100)") == latest + 2
        assert [c.after for c in one.changes()] == [(100,)]


def test_repeatedly_failed_trims_keep_the_generation(tmp_path: Path) -> None:
    # The file keeps its old nonce while trims are refused, by a full disk or a foreign writer that holds it.
    with running(tmp_path, trim_seconds=0.02) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        generation, trimmer, refused = one.log.generation, one.source._trimmer, 0
        delete = trimmer._delete

        def refuse_three_times(upto: int, nonce: str) -> int:
            nonlocal refused
            refused += 1
            if refused <= 3:
                raise StorageFull("no space")
            return delete(upto, nonce)

        trimmer._delete = refuse_three_times  # type: ignore[method-assign]
        for n in range(1000):
            one.run(f"INSERT INTO t VALUES ({n})")
            one.caught_up()
            if refused > 3 or one.log.generation != generation:
                break
            one.log.wait_beyond(one.log.latest, 0.005)  # nothing comes: only time passes
        assert refused > 3
        wait_until(lambda: one.capture.error is None, "the end of the trim")
        assert one.log.generation == generation, one.log.generation_reason


def test_schema_changes_through_the_server_ask_for_a_snapshot_only_if_rows_change(tmp_path: Path) -> None:
    with running(tmp_path, flush_seconds=0.2) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.run("INSERT INTO t VALUES (1, 'a')")
        one.run("ALTER TABLE t ADD COLUMN w")
        one.run("UPDATE t SET v = 'b'")
        one.run("ALTER TABLE t DROP COLUMN v")
        one.run("UPDATE t SET w = 9")
        one.run("ALTER TABLE t RENAME COLUMN w TO x")
        one.run("ALTER TABLE t ADD COLUMN y DEFAULT 7")
        one.run("DELETE FROM t")
        one.run("DROP TABLE t")
        asked = [c.ddl for c in one.changes() if c.resnapshot]
    assert asked == ["ALTER TABLE t ADD COLUMN y DEFAULT 7"]


def test_second_writer_on_the_same_log_is_rejected(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(a)")
        with pytest.raises(SourceMismatch, match="served by another Headwater"), running(tmp_path):
            raise AssertionError("it must not start")
        one.run("INSERT INTO t VALUES (1)")
        assert one.changes()[-1].op is Op.INSERT


def test_reader_in_another_process_sees_the_same_changes(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        for n in range(50):
            one.run(f"INSERT INTO t VALUES ({n})")
        found = one.changes()
        one.log.flush()
        assert flat(logged(tmp_path)) == found


def test_vacuum_of_the_database_keeps_the_generation_and_the_log(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        one.run("INSERT INTO t VALUES (1)")
        generation = one.log.generation
    db = apsw.Connection(str(tmp_path / "app.db"))
    db.execute("VACUUM")
    db.close()
    with running(tmp_path) as one:
        assert one.log.generation == generation
        one.run("INSERT INTO t VALUES (2)")
        assert [c.after for c in one.changes() if c.op is Op.INSERT] == [(1,), (2,)]
    log = DiskLog.open(tmp_path / "app.log.db", read_only=True)
    assert log.generation == generation
    log.close()


@pytest.mark.parametrize(
    "last",
    [
        "REPLACE INTO t(id, v) VALUES (1, 'b')",
        "INSERT INTO t(id, v) VALUES (1, 'b') ON CONFLICT (id) DO UPDATE SET v = excluded.v",
        "UPDATE OR REPLACE t SET id = 2 WHERE id = 1",
        "DELETE FROM t",
        "ALTER TABLE t ADD COLUMN w DEFAULT 7",
        "DROP TABLE t",
    ],
)
@pytest.mark.parametrize("trimmed", [True, False])
def test_restart_keeps_the_generation_whatever_the_last_change_was(tmp_path: Path, last: str, trimmed: bool) -> None:
    settings = {"trim_rows": 1, "trim_seconds": 0.001} if trimmed else NO_TRIM
    with running(tmp_path, **settings) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        offset = one.run(last)
        one.caught_up()
        generation = one.log.generation
        while trimmed and one.source._trimmer.trimmed < offset:
            one.log.wait_beyond(one.log.latest, 0.005)  # nothing comes: only time passes
    with running(tmp_path, **NO_TRIM) as one:
        assert one.log.generation == generation, one.log.generation_reason


HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
db.execute("BEGIN IMMEDIATE")
for sql in sys.argv[2:]:
    db.execute(sql)
print("held", flush=True)
sys.stdin.readline()
db.execute("COMMIT")
db.close()
"""


def our_ddl_right_after_foreign(one: Running, path: Path, ours: str, *foreign_statements: str) -> None:
    """Run `ours` right after the commit of another process's statements, before that commit can be detected."""
    command = [sys.executable, "-c", HOLDER, str(path), *foreign_statements]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "held\n"
        waiting = one.source.write(lambda session: session.execute(ours))
        holder.stdin.write("\n")
        holder.stdin.close()
        waiting.result(PATIENCE)


def test_ddl_of_another_process_is_not_attributed_to_our_statement(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.run("CREATE TABLE gone(id INTEGER PRIMARY KEY)")
        one.caught_up()
        seen = one.log.latest
        foreign_ddl = ("ALTER TABLE t ADD COLUMN w DEFAULT 7", "DROP TABLE gone")
        our_ddl_right_after_foreign(one, tmp_path / "app.db", "CREATE TABLE ours(a)", *foreign_ddl)
        one.caught_up()
        told = {c.table.name: c.ddl or "" for c in flat(one.log.scan(after=seen))}
    assert "ours" in told["ours"]
    assert "ours" not in told["t"] and "DROP TABLE" in told["gone"]


def test_foreign_column_written_before_our_own_ddl_asks_for_a_snapshot(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.caught_up()
        unseen = ("ALTER TABLE t ADD COLUMN w DEFAULT 7", "INSERT INTO t VALUES (1, 'a', 'captured without w')")
        our_ddl_right_after_foreign(one, tmp_path / "app.db", "CREATE TABLE ours(a)", *unseen)
        told = [c for c in one.changes() if c.table.name == "t" and c.op is Op.SCHEMA_CHANGE]
    assert told[-1].resnapshot, "a column was written that no change tells of"
