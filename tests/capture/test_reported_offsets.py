"""Reported offsets that may be lost are never reused, and a log in doubt never counts as caught up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.capture.captured_database import Running, foreign, running
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError, Unavailable
from headwater.sources.sqlite.capture import power_loss

KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.capture.captured_database import foreign, running

folder = Path(sys.argv[1])
path = folder / "app.db"
with running(folder, flush_seconds=3600.0) as one:
    one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    foreign(path, *(f"INSERT INTO t VALUES ({n})" for n in range(5)))
    one.caught_up()
    one.log.flush()
    foreign(path, f"VACUUM INTO '{folder / 'survives.db'}'")
    foreign(path, *(f"INSERT INTO t VALUES ({n})" for n in range(5, 25)))
    one.caught_up()
    print(one.log.latest, one.log.durable, flush=True)
    os.kill(os.getpid(), 9)
"""


def put_back(copy: Path, path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(copy, path)


@pytest.mark.slow
def test_offsets_reported_before_a_power_failure_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes were durable neither in the log nor in the file: another program used synchronous = NORMAL."""
    here = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told, durable = map(int, done.stdout.split())
    assert told >= durable + 20
    foreign(tmp_path / "survives.db", "PRAGMA journal_mode = WAL")
    put_back(tmp_path / "survives.db", tmp_path / "app.db")
    monkeypatch.setattr(power_loss, "boot_id", lambda: "another boot")
    with running(tmp_path) as one:
        assert one.log.generation_first > told + 1, one.log.generation_reason


def test_log_of_a_replaced_file_is_not_caught_up_and_chunks_are_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path, stop_when_lost=True) as one:
        wrong = prepared(one, path)
        analysis = one.source.analyse("SELECT v FROM t")
        assert one.source.answer(analysis, {}).settled
        put_back(wrong, path)
        one.source.wake()
        while one.capture.error is None:
            one.log.wait_beyond(one.log.latest, 0.01)
        assert one.capture.peek_head() is None and not one.capture.catch_up(0.01)
        try:
            assert not one.source.answer(analysis, {}).settled
        except HeadwaterError as error:
            assert isinstance(error, Unavailable)
        with pytest.raises(Unavailable):
            one.source.chunk("t", after=None, span=None, limit=10)


def test_new_connection_to_a_replaced_database_file_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path, stop_when_lost=True, poll_seconds=30.0) as one:
        put_back(prepared(one, path), path)
        with pytest.raises(Unavailable, match="replaced"):
            one.source._file.connect()


def test_transaction_commit_after_the_file_was_replaced_fails_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with running(tmp_path, poll_seconds=30.0) as one:
        wrong = prepared(one, path)
        tx = one.source.begin()
        tx.run(lambda session: session.execute("INSERT INTO t VALUES (700, 'nowhere')")).result(PATIENCE)
        put_back(wrong, path)
        with pytest.raises(HeadwaterError):
            tx.commit().result(PATIENCE)
        one.source.wake()
        while path.stat().st_ino != one.source.inode:
            one.log.wait_beyond(one.log.latest, 0.01)
        one.caught_up()
        assert one.source.read("SELECT count(*) FROM t WHERE id = 700").rows == ((0,),)


def test_stop_makes_staged_changes_durable_even_if_the_source_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, flush_seconds=3600.0) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        one.run("INSERT INTO t VALUES (1)")
        one.caught_up()
        assert one.log.staged_changes

        def fail(**_: int) -> None:
            raise Unavailable("busy")

        monkeypatch.setattr(one.source, "follow", fail)
        one.capture.stop()
        assert not one.log.staged_changes


def prepared(one: Running, path: Path) -> Path:
    """Fill a table and return the path of an older copy of the file in which the row has another value."""
    one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    one.run("INSERT INTO t VALUES (1, 'right')")
    one.caught_up()
    foreign(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    wrong = path.with_name("wrong.db")
    shutil.copy(path, wrong)
    foreign(wrong, "UPDATE t SET v = 'wrong'")
    for number in range(2, 20):
        one.run(f"INSERT INTO t VALUES ({number}, 'more')")
    one.caught_up()
    return wrong
