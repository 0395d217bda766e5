"""A full disk and a failing fsync, under the database and under the log; and one bad member in a group of writers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.capture.captured_database import Running, logged, running
from tests.guarantees.server_process import Asking, Refused, ServerProcess
from tests.guarantees.small_disk import SmallDisk
from tests.guarantees.sqlite_nemesis_databases import Tables
from tests.guarantees.validators import CompleteInTheLog, placed
from tests.log.faults import FaultyVFS
from tests.suite.deadlines import PATIENCE

from headwater.errors import DuplicateKey, HeadwaterError, InvalidRequest, StorageFull, Unavailable
from headwater.model.change import Op
from headwater.sources.write import Session

FAULTS = [("full", StorageFull), ("fail_sync", Unavailable)]


@pytest.fixture
def disk() -> Iterator[FaultyVFS]:
    made = FaultyVFS()
    yield made
    made.unregister()


def count(one: Running) -> int:
    return int(str(one.source.read("SELECT count(*) FROM t").rows[0][0]))


def inserted(one: Running) -> list[Any]:
    return [change.after[0] for change in one.changes() if change.op is Op.INSERT and change.after]


def judge(folder: Path, name: str = "app") -> None:
    """Check that the log of a stopped server folds to its tables."""
    complete = CompleteInTheLog()
    with Tables(folder / f"{name}.db") as tables:
        complete.check(placed(logged(folder, name)), tables.names(), tables.rows)
    assert not complete.failures and not complete.unknown, (complete.failures, complete.unknown)


@pytest.mark.parametrize(("fault", "error"), FAULTS)
def test_disk_fault_under_the_database_refuses_writes_and_serves_reads(
    tmp_path: Path, disk: FaultyVFS, fault: str, error: type[HeadwaterError]
) -> None:
    with running(tmp_path, vfs=disk.name, trim_rows=2, trim_seconds=0.01) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.run("INSERT INTO t VALUES (1, 'before')")
        generation = one.log.generation
        setattr(disk, fault, True)
        for n in range(2, 8):
            with pytest.raises(error) as caught:
                one.run(f"INSERT INTO t VALUES ({n}, 'refused'), ({n + 100}, 'refused')")
            assert caught.value.hint and caught.value.retryable
            assert count(one) == 1, "reads go on, and see nothing half"
        setattr(disk, fault, False)
        one.run("INSERT INTO t VALUES (9, 'after')")
        assert inserted(one) == [1, 9]
        assert one.log.generation == generation
    judge(tmp_path)


@pytest.mark.parametrize(("fault", "error"), FAULTS)
def test_disk_fault_under_the_database_rolls_back_an_interactive_transaction(
    tmp_path: Path, disk: FaultyVFS, fault: str, error: type[HeadwaterError]
) -> None:
    with running(tmp_path, vfs=disk.name) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        tx = one.source.begin()
        tx.run(lambda session: session.execute("INSERT INTO t VALUES (1, 'x')")).result(PATIENCE)
        setattr(disk, fault, True)
        with pytest.raises(error):
            tx.commit().result(PATIENCE)
        setattr(disk, fault, False)
        assert count(one) == 0
        one.run("INSERT INTO t VALUES (2, 'after')")
        assert inserted(one) == [2]
    judge(tmp_path)


@pytest.mark.parametrize("fault", ["full", "fail_sync"])
def test_disk_fault_under_the_log_loses_no_change_and_recovers_without_a_restart(
    tmp_path: Path, disk: FaultyVFS, fault: str
) -> None:
    with running(tmp_path, log_vfs=disk.name, trim_rows=2, trim_seconds=0.01) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.caught_up()
        one.log.flush()
        durable, generation = one.log.durable, one.log.generation
        setattr(disk, fault, True)
        for n in range(1, 30):
            one.run(f"INSERT INTO t VALUES ({n}, 'x')")  # durable in the file: capture brings it later
        while (error := one.capture.error) is None:
            one.log.wait_beyond(one.log.latest, 0.01)  # nothing comes: only time passes
        assert error.startswith("storage_full" if fault == "full" else "unavailable")
        assert (one.log.durable, count(one)) == (durable, 29)
        setattr(disk, fault, False)
        assert inserted(one) == list(range(1, 30))
        while one.capture.error is not None:
            one.log.wait_beyond(one.log.latest, 0.01)
        assert one.log.generation == generation
    judge(tmp_path)


def test_server_that_ends_with_an_unwritable_log_captures_every_change_at_the_next_start(
    tmp_path: Path, disk: FaultyVFS
) -> None:
    # The checkpoint of the last close fails as well; SQLite does not mind, but APSW tells of the injected error.
    with contextlib.suppress(StorageFull), running(tmp_path, log_vfs=disk.name) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        one.caught_up()
        one.log.flush()
        disk.full = True
        for n in range(1, 30):
            one.run(f"INSERT INTO t VALUES ({n}, 'x')")
    disk.full = False
    with running(tmp_path) as one:
        assert inserted(one) == list(range(1, 30))
    judge(tmp_path)


# One bad member of a group


def or_rollback(session: Session) -> None:
    session.execute("INSERT OR ROLLBACK INTO t VALUES (0, 'taken')")


def orphan(session: Session) -> None:
    session.execute("INSERT INTO child VALUES (1, 4711)")


def too_big(session: Session) -> None:
    session.execute("INSERT INTO t VALUES (-2, zeroblob(2000000000))")


def nonsense(session: Session) -> None:
    raise InvalidRequest("on purpose")


@pytest.mark.parametrize(
    ("bad", "error"),
    [(or_rollback, DuplicateKey), (orphan, InvalidRequest), (too_big, InvalidRequest), (nonsense, InvalidRequest)],
)
@pytest.mark.parametrize("place", [0, 7, 15])
def test_failing_writer_in_a_group_of_sixteen_fails_alone(
    tmp_path: Path, bad: Callable[[Session], None], error: type[HeadwaterError], place: int
) -> None:
    with running(tmp_path) as one:
        prepare(one)
        futures = as_one_group(one, bad, place)
        with pytest.raises(error):
            futures[place].result(PATIENCE)
        good = [n for n in range(1, 17) if n != place + 1]
        assert [futures[n - 1].result(PATIENCE).offset > 0 for n in good] == [True] * 15
        assert sorted(inserted(one)) == [0, *good]
    judge(tmp_path)


@pytest.mark.parametrize("place", [0, 7, 15])
def test_full_disk_for_a_writer_in_a_group_of_sixteen_fails_only_that_writer(
    tmp_path: Path, disk: FaultyVFS, place: int
) -> None:
    def big(session: Session) -> None:
        disk.full = True
        try:
            # More than the page cache holds: SQLite must write before the commit.
            session.execute("INSERT INTO t VALUES (-1, randomblob(30000000))")
        finally:
            disk.full = False

    with running(tmp_path, vfs=disk.name) as one:
        prepare(one)
        futures = as_one_group(one, big, place)
        with pytest.raises(StorageFull):
            futures[place].result(PATIENCE)
        good = [n for n in range(1, 17) if n != place + 1]
        assert [futures[n - 1].result(PATIENCE).offset > 0 for n in good] == [True] * 15
        assert sorted(inserted(one)) == [0, *good]
    judge(tmp_path)


def prepare(one: Running) -> None:
    one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    one.run("CREATE TABLE child(id INTEGER PRIMARY KEY, p REFERENCES t(id) DEFERRABLE INITIALLY DEFERRED)")
    one.run("INSERT INTO t VALUES (0, 'first')")


def as_one_group(one: Running, bad: Callable[[Session], None], place: int) -> list[Future[Any]]:
    """Queue sixteen writes behind a blocked one; return their futures."""
    entered, go = threading.Event(), threading.Event()

    def hold(session: Session) -> None:
        entered.set()
        assert go.wait(PATIENCE)

    def write(n: int) -> Callable[[Session], Any]:
        return lambda session: session.execute(f"INSERT INTO t VALUES ({n}, 'good')")

    held = one.source.write(hold)
    assert entered.wait(PATIENCE)
    futures = [one.source.write(bad if n == place else write(n + 1)) for n in range(16)]
    go.set()
    held.result(PATIENCE)
    return futures


# A file system that is really full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = SmallDisk(tmp_path / "small", "12m")
    if not disk.is_real:
        pytest.skip("NOT TESTED: a really full file system needs the right to mount one (run as root)")
    yield disk.folder
    disk.close()


@pytest.mark.slow
def test_full_file_system_refuses_writes_serves_reads_and_recovers(small_disk: Path) -> None:
    server = ServerProcess(small_disk)
    try:
        server.start()
        ask = Asking(server)
        ask("sql.exec", sql="CREATE TABLE t(id INTEGER PRIMARY KEY, v, mark TEXT)")
        fill(small_disk / "ballast")
        kept = write_until_refused(ask)
        assert ask("sql.exec", sql="SELECT count(*) FROM t")["result"]["data"]["rows"][0][0]["v"] == kept
        (small_disk / "ballast").unlink()
        ask("sql.exec", sql="INSERT INTO t(v) VALUES ('after')")
        server.wait_caught_up()
        ask.close()
        server.stop()
        judge(small_disk, "main")
    finally:
        server.close()


def fill(path: Path) -> None:
    """Fill the disk up to half a megabyte."""
    found = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(bytes(found.f_bavail * found.f_frsize - (1 << 19)))


def write_until_refused(ask: Asking) -> int:
    for n in range(500):
        try:
            ask("data.insert", into={"table": "t"}, rows=[{"v": "x" * 20_000}, {"v": "y" * 20_000}])
        except Refused as error:
            assert error.code in ("storage_full", "unavailable"), error
            return 2 * n
    raise AssertionError("the disk was never full")
