"""A server that starts on a full disk serves reads, says that it is full, and takes writes once there is space."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.guarantees.server_process import Asking, Refused, ServerProcess
from tests.guarantees.small_disk import SmallDisk
from tests.suite.deadlines import wait_until

pytestmark = pytest.mark.slow
STATS = {"id": 1, "method": "stats.snapshot", "params": {"db": "other"}}
CREATE = "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small", "96m")
    if not disk.is_real:
        pytest.skip("NOT TESTED: a full file system needs the right to mount one (run as root)")
    yield disk
    disk.close()


@contextlib.contextmanager
def serving(data: Path, said: Path, *databases: str) -> Iterator[tuple[ServerProcess, Asking]]:
    server = ServerProcess(data, databases=databases, said=said)
    try:
        server.start()
        ask = Asking(server)
        try:
            yield server, ask
        finally:
            ask.close()
    finally:
        server.close()


def readyz(server: ServerProcess) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/readyz")
    return answer.status_code, answer.json()


def rows(ask: Asking) -> int:
    return int(ask("sql.exec", sql="SELECT count(*) FROM t")["result"]["data"]["rows"][0][0]["v"])


def inserts(ask: Asking, sub: str) -> int:
    events = ask("cdc.poll", sub_id=sub, from_offset=0, limit=1000)["events"]
    return sum(event["op"] == "insert" for event in events)


def write_until_refused(ask: Asking) -> str:
    """Insert rows of 100 kB until one is refused; return the error code. SQLite may have free space inside the file."""
    for _ in range(1000):
        try:
            ask("data.insert", into={"table": "t"}, rows=[{"v": "x" * 100_000}])
        except Refused as error:
            return error.code
    raise AssertionError("no write was refused")


@pytest.mark.parametrize("end", [ServerProcess.stop, ServerProcess.kill], ids=["stopped", "killed"])
def test_start_on_full_disk_serves_reads_and_recovers(
    disk: SmallDisk, tmp_path: Path, end: Callable[[ServerProcess], None]
) -> None:
    with serving(disk.folder, tmp_path / "said") as (server, ask):
        ask("sql.exec", sql=CREATE)
        ask("sql.exec", sql="INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        sub = ask("cdc.subscribe_table", table="t", start="earliest")["sub_id"]
        server.wait_caught_up()
        end(server)
    disk.fill()
    for _ in range(2):  # the reserve lasts for more than one start
        with serving(disk.folder, tmp_path / "said") as (server, ask):
            assert rows(ask) == 2
            assert inserts(ask, sub) == 2
            assert readyz(server)[1]["storage_full"] is True
            assert 'headwater_storage_full{db="main"} 1.0' in httpx.get(f"{server.url}/metrics").text
            assert "the disk of the data folder is full" in server.last_words()
            end(server)
    with serving(disk.folder, tmp_path / "said") as (server, ask):
        assert write_until_refused(ask) == "storage_full"
        disk.free()
        wait_until(lambda: readyz(server) == (200, {"ready": True}), "the server notices that there is space")
        before = rows(ask)
        ask("sql.exec", sql="INSERT INTO t(v) VALUES ('after')")
        server.wait_caught_up()
        assert inserts(ask, sub) == before + 1
        reserve = disk.folder / "reserve"
        wait_until(lambda: reserve.exists() and 512 * reserve.stat().st_blocks >= 4 << 20, "the reserve is whole")
        server.stop()


def test_changes_written_before_a_start_on_a_full_disk_are_captured_after_space_is_freed(
    disk: SmallDisk, tmp_path: Path
) -> None:
    with serving(disk.folder, tmp_path / "said") as (server, ask):
        ask("sql.exec", sql=CREATE)
        server.stop()
    with contextlib.closing(sqlite3.connect(disk.folder / "main.db")) as db, db:
        db.executemany("INSERT INTO t(v) VALUES (?)", [(f"{n:0100000}",) for n in range(90)])  # more than the reserve
    disk.fill()
    with serving(disk.folder, tmp_path / "said") as (server, ask):
        assert rows(ask) == 90
        wait_until(lambda: readyz(server)[1].get("reasons") == ["storage_full"], "capture says why it stands still")
        assert readyz(server)[0] == 503
        disk.free()
        assert server.wait_caught_up()["latest"] >= 90
        wait_until(lambda: readyz(server) == (200, {"ready": True}), "the server is ready")
        server.stop()


def test_database_on_a_full_disk_is_opened_after_space_is_freed(disk: SmallDisk, tmp_path: Path) -> None:
    for path in (disk.folder / "app.db", tmp_path / "other.db"):
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(CREATE)
    databases = [f"main={disk.folder}/app.db", f"other={tmp_path}/other.db"]
    with serving(tmp_path / "data", tmp_path / "said", *databases) as (server, _):
        server.stop()
    disk.fill()
    with serving(tmp_path / "data", tmp_path / "said", *databases) as (server, ask):
        with pytest.raises(Refused, match="storage_full: the database 'main' is not open yet: storage_full"):
            rows(ask)
        assert ask("sql.exec", db="other", sql="INSERT INTO t(v) VALUES ('a')")["result"]["affected"] == 1
        told = httpx.get(f"{server.url}/readyz?db=main").json()
        assert told == {"ready": False, "reasons": ["storage_full"], "storage_full": True}
        assert str(disk.folder) not in httpx.post(f"{server.url}/api/v1/rpc", json=STATS).text, "paths are not told"
        disk.free()
        wait_until(lambda: readyz(server) == (200, {"ready": True}), "the server is ready")
        wait_until(lambda: httpx.get(f"{server.url}/readyz?db=main").status_code == 200, "the database is opened")
        ask("sql.exec", sql="INSERT INTO t(v) VALUES ('after')")
        assert rows(ask) == 1
        server.wait_caught_up()
        server.stop()
