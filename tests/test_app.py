"""One whole server without HTTP: databases are created, dropped, opened again, and never shared."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.app import App, Database
from headwater.config import Config, DatabaseConfig, LogConfig
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    LogDamaged,
    NotFound,
    NotSupported,
    SourceMismatch,
    StorageFull,
    Unavailable,
)
from headwater.log.disk.disk_log import DiskLog
from headwater.log.disk.space_reserve import RESERVE_BYTES
from headwater.model.change import Op
from headwater.sources.sqlite.settings import SqliteConfig

TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, v)"


@contextmanager
def app(folder: Path, *databases: tuple[str, str], **sqlite: Any) -> Iterator[App]:
    config = Config(
        data=str(folder / "data"),
        databases=tuple(DatabaseConfig(*each) for each in databases),
        log=LogConfig(flush_ms=5),
        sources={"sqlite": SqliteConfig(**sqlite)},
    )
    opened = App(config)
    opened.start()
    try:
        yield opened
    finally:
        opened.close()


def run(database: Database, sql: str) -> int:
    return database.source.write(lambda session: session.execute(sql)).result(PATIENCE).offset


def rows(database: Database) -> list[Any]:
    """Wait for capture; return the second value of each inserted row in the log."""
    assert database.capture.catch_up(20), database.capture.error
    log = database.log
    changes = [change for part in log.scan(after=log.horizon - 1) for change in part.changes]
    return [change.after[1] for change in changes if change.op is Op.INSERT and change.after]


def other_process(path: Path, *statements: str) -> None:
    """Run statements by the standard library's SQLite in another process: two copies of SQLite in one drop each other's
    locks.
    """
    text = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1])\n[db.execute(sql) for sql in sys.argv[2:]]\n"
    subprocess.run([sys.executable, "-c", text + "db.commit()\ndb.close()", str(path), *statements], check=True)


def test_app_without_settings_serves_only_the_database_main(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        assert one.names() == ["main"]
        assert (tmp_path / "data" / "main.db").is_file() and (tmp_path / "data" / "main.log.db").is_file()
        run(one.database("main"), TABLE)
        run(one.database("main"), "INSERT INTO t VALUES (1, 'a')")
        assert rows(one.database("main")) == ["a"]


def test_each_database_has_its_own_log_and_offsets(tmp_path: Path) -> None:
    other_process(tmp_path / "shop.db", "PRAGMA journal_mode = WAL", TABLE, "INSERT INTO t VALUES (1, 'old')")
    with app(tmp_path, ("main", str(tmp_path / "m.db")), ("shop", f"sqlite:///{tmp_path / 'shop.db'}")) as one:
        assert one.names() == ["main", "shop"]
        run(one.database("main"), TABLE)
        for name, value in (("main", "m"), ("shop", "s"), ("main", "n")):
            run(one.database(name), f"INSERT INTO t(v) VALUES ('{value}')")
        assert (rows(one.database("main")), rows(one.database("shop"))) == (["m", "n"], ["s"])
        assert one.database("shop").log.latest == 1, "what was there before capture is no change"
        assert one.database("main").log.generation != one.database("shop").log.generation


def test_created_database_exists_after_a_restart_and_a_dropped_database_does_not(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        assert one.create("shop") and one.create("gone")
        assert not one.create("shop")
        run(one.database("shop"), TABLE)
        run(one.database("shop"), "INSERT INTO t VALUES (1, 'kept')")
        assert one.drop("gone") and not one.drop("gone")
        with pytest.raises(NotFound, match="'gone'"):
            one.get("gone")
        assert not list((tmp_path / "data").glob("gone*"))
    with app(tmp_path) as one:
        assert one.names() == ["main", "shop"]
        assert rows(one.database("shop")) == ["kept"]


def test_recreated_database_is_empty_and_has_a_new_generation(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        one.create("shop")
        before = one.database("shop").log.generation
        one.drop("shop")
        one.create("shop")
        assert one.database("shop").log.generation != before
        assert one.database("shop").source.describe() == {}


def test_dropping_main_or_an_attached_file_is_refused(tmp_path: Path) -> None:
    with app(tmp_path, ("main", str(tmp_path / "m.db")), ("mine", str(tmp_path / "mine.db"))) as one:
        for name in ("main", "mine"):
            with pytest.raises(NotSupported):
                one.drop(name)
        assert one.names() == ["main", "mine"]


def test_concurrent_creates_and_drops_of_a_database_each_succeed_once(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        made, failed = together(8, lambda: one.create("shop"))
        assert (sorted(made), failed) == ([False] * 7 + [True], [])
        run(one.database("shop"), TABLE)
        dropped, failed = together(8, lambda: one.drop("shop"))
        assert (sorted(dropped), failed) == ([False] * 7 + [True], [])


def together(count: int, work: Callable[[], bool]) -> tuple[list[bool], list[BaseException]]:
    """Run `work` in `count` threads that start together; return their answers and errors."""
    answers: list[bool] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def one() -> None:
        barrier.wait()
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, errors


def _try_to_start(folder: Path, answer: Any) -> None:
    try:
        with app(folder):
            answer.send("started")
    except HeadwaterError as error:
        answer.send((error.code, error.message, error.hint))


def start_elsewhere(folder: Path) -> Any:
    """Start a second server in another process; return the error it reports."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_try_to_start, args=(folder, theirs))
    process.start()
    found = mine.recv()
    process.join(PATIENCE)
    mine.close()
    theirs.close()
    process.close()
    return found


@pytest.mark.slow
def test_second_server_on_the_same_database_is_refused(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        run(one.database("main"), TABLE)
        code, message, hint = start_elsewhere(tmp_path)
        assert code == "source_mismatch" and str(os.getpid()) in message and hint
        run(one.database("main"), "INSERT INTO t VALUES (1, 'still mine')")
        assert rows(one.database("main")) == ["still mine"]
    assert start_elsewhere(tmp_path) == "started"


def test_same_file_under_two_database_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "m.db")
    for second in ("m.db", "link.db"):
        with pytest.raises(SourceMismatch), app(tmp_path, ("a", str(tmp_path / "m.db")), ("b", str(tmp_path / second))):
            raise AssertionError("it must not start")


def test_failed_start_leaves_no_database_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), app(tmp_path, ("a", str(tmp_path / "a.db")), ("b", "mysql://localhost/x")):
        raise AssertionError("it must not start")
    with app(tmp_path, ("a", str(tmp_path / "a.db"))) as one:
        assert one.names() == ["a"]


def test_database_refused_by_a_full_disk_is_opened_after_further_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[HeadwaterError] = [StorageFull("no space"), Unavailable("away"), StorageFull("no space")]
    build = App._build

    def built(self: App, config: DatabaseConfig) -> Database:
        if config.name == "other" and failures:
            raise failures[0]
        return build(self, config)

    monkeypatch.setattr(App, "_build", built)
    monkeypatch.setattr("headwater.app.RECOVER_SECONDS", 0.01)
    with app(tmp_path, ("main", ""), ("other", str(tmp_path / "other.db"))) as opened:
        assert opened.names() == ["main"]
        for code in ("storage_full", "unavailable", "storage_full"):
            wait_until(lambda: (opened.status()["other"].error or "").startswith(failures[0].code + ":"))
            with pytest.raises(HeadwaterError, match="not open yet") as found:
                opened.database("other")
            assert found.value.code == code
            failures.pop(0)
        wait_until(lambda: opened.names() == ["main", "other"])
        assert opened.status()["other"].ready


def test_refused_start_keeps_the_reserve_file(tmp_path: Path) -> None:
    with app(tmp_path):
        pass
    with pytest.raises(ConfigError), app(tmp_path, ("other", "mysql://host/db")):
        pass
    assert (tmp_path / "data" / "reserve").stat().st_size == RESERVE_BYTES


def test_file_of_an_older_version_is_served_and_remains_readable_by_that_version(tmp_path: Path) -> None:
    """Its table of transactions had no microseconds."""
    with app(tmp_path) as first:
        run(first.database("main"), TABLE)
    path = str(tmp_path / "data" / "main.db")
    with contextlib.closing(apsw.Connection(path)) as db:
        db.execute("ALTER TABLE _headwater_txn DROP COLUMN us")
    with app(tmp_path) as again:
        run(again.database("main"), "INSERT INTO t VALUES (1, 'x')")
        assert len(rows(again.database("main"))) == 1
        with contextlib.closing(apsw.Connection(path)) as db:
            (found,) = db.execute("SELECT upto, first, ms FROM _headwater_txn ORDER BY upto DESC LIMIT 1")
        assert all(isinstance(each, int) for each in found)


def test_damaged_log_is_refused_and_its_removal_starts_a_new_generation(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        run(one.database("main"), TABLE)
        for n in range(50):
            run(one.database("main"), f"INSERT INTO t VALUES ({n}, 'row {n}')")
        rows(one.database("main"))
        latest, generation = one.database("main").log.latest, one.database("main").log.generation
    log = tmp_path / "data" / "main.log.db"
    content = log.read_bytes()
    log.write_bytes(b"not a database at all" + content[21:])
    with pytest.raises(LogDamaged) as caught, app(tmp_path):
        raise AssertionError("it must not start")
    assert str(log) in caught.value.message and "aside" in caught.value.hint
    assert log.read_bytes()[:21] == b"not a database at all", "it was left untouched"
    log.rename(log.with_name("aside.db"))
    with app(tmp_path) as one:
        again = one.database("main").log
        assert again.generation != generation and again.generation_first == latest + 2
        assert run(one.database("main"), "INSERT INTO t VALUES (100, 'on')") == latest + 2
        assert rows(one.database("main")) == ["on"]


def test_log_with_a_damaged_newest_block_is_refused(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        run(one.database("main"), TABLE)
        run(one.database("main"), "INSERT INTO t VALUES (1, 'the only one')")
        rows(one.database("main"))
    path = tmp_path / "data" / "main.log.db"
    path.write_bytes(path.read_bytes().replace(b"the only one", b"THE ONLY ONE"))
    with pytest.raises(LogDamaged, match="damaged"), app(tmp_path):
        raise AssertionError("it must not start")


def test_deleted_log_starts_a_new_generation_above_every_old_offset(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        run(one.database("main"), TABLE)
        latest, generation = (
            run(one.database("main"), "INSERT INTO t VALUES (1, 'a')"),
            one.database("main").log.generation,
        )
    for path in (tmp_path / "data").glob("main.log.db*"):
        path.unlink()
    with app(tmp_path) as one:
        log = one.database("main").log
        assert log.generation != generation and log.generation_first > latest
        assert "log was lost" in log.generation_reason


def test_bulk_read_of_a_removed_log_is_refused_as_damaged(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        place = one.place("main")
        assert place.log_inode == os.stat(place.log).st_ino
        os.unlink(place.log)
        with pytest.raises(LogDamaged, match="removed or replaced"):
            one.place("main")


def test_close_finishes_queued_writes_and_logs_every_change(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        database = one.database("main")
        run(database, TABLE)
        futures = [
            database.source.write(lambda s, n=n: s.execute(f"INSERT INTO t VALUES ({n}, 'x')")) for n in range(200)
        ]
        tx = database.source.begin()
    assert all(future.result(0).offset for future in futures), "queued writes are finished"
    with pytest.raises(HeadwaterError):
        tx.run(lambda session: session.execute("INSERT INTO t VALUES (1000, 'late')")).result(PATIENCE)
    log = DiskLog.open(tmp_path / "data" / "main.log.db", read_only=True)
    try:
        found = [change.op for part in log.scan(after=0) for change in part.changes]
    finally:
        log.close()
    assert found == [Op.SCHEMA_CHANGE] + [Op.INSERT] * 200


def test_status_reports_readiness_latest_offset_and_lag_of_each_database(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        one.create("shop")
        run(one.database("shop"), TABLE)
        rows(one.database("shop"))
        status = one.status()
        assert list(status) == ["main", "shop"]
        assert (status["shop"].ready, status["shop"].latest, status["shop"].lag_changes) == (True, 1, 0)
        assert status["shop"].error is None and status["shop"].generation == one.database("shop").log.generation


def test_closed_app_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    def threads_and_files() -> tuple[set[str], list[str]]:
        files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_there(fd)]
        return {thread.name for thread in threading.enumerate()}, sorted(f for f in files if str(tmp_path) in f)

    before = threads_and_files()
    for _ in range(3):
        with app(tmp_path) as one:
            run(one.database("main"), "CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v)")
            for _ in range(20):
                tx = one.get("main").begin()
                tx.run(lambda session: session.select("t", None)).result(PATIENCE)
                tx.rollback().result(PATIENCE)
    wait_until(lambda: threads_and_files() == before, "the end of the last threads")


def _is_there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_finished_transactions_release_their_files(tmp_path: Path) -> None:
    with app(tmp_path) as one:
        run(one.database("main"), TABLE)
        counts = []
        for _ in range(2):
            for _ in range(40):
                tx = one.get("main").begin()
                tx.run(lambda session: session.select("t", None)).result(PATIENCE)
                tx.commit().result(PATIENCE)
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[1] <= counts[0] + 4, "every interactive transaction left a file open"


def test_creation_of_a_missing_database_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`headwater serve typo.db` would else look as if everything were gone."""
    path = str(tmp_path / "typo.db")
    for said in (1, 0):
        caplog.clear()
        with app(tmp_path, ("typo", path), ("made", "")):
            assert caplog.text.count("a new, empty database was created") == caplog.text.count(path) == said


def test_embedded_database_with_the_name_of_an_internal_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'queries'"), app(tmp_path, ("queries", "")):
        pass


def test_internal_file_beside_the_log_of_an_attached_file_is_not_served_as_a_database(tmp_path: Path) -> None:
    other_process(tmp_path / "own.db", TABLE)
    with app(tmp_path, ("queries", str(tmp_path / "own.db")), wal=True) as one:
        assert list(one.names()) == ["queries"]
    with app(tmp_path) as one:
        assert list(one.names()) == ["main"]
