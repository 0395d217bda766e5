"""A large PostgreSQL transaction is captured once, whole and in bounded memory, despite kills."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psycopg
import pytest
from tests.guarantees.pg_nemesis_database import RUN, Postgres, programs
from tests.guarantees.server_process import ServerProcess
from tests.guarantees.validators import Atomic, Ordered, placed
from tests.sources.postgres.pg_server import Server

from headwater.log.disk.disk_log import DiskLog

MOST_MEMORY = 512 << 20  # of the server, whatever the size of a transaction


@pytest.mark.soak(seconds=300)
def test_postgresql_transaction_of_a_million_rows_is_captured_once_despite_kills(
    tmp_path: Path,
) -> None:
    big_transaction(tmp_path, rows=1_000_000)


def test_postgresql_transaction_of_60000_rows_is_captured_once_despite_kills(tmp_path: Path) -> None:
    big_transaction(tmp_path, rows=60_000)


def big_transaction(folder: Path, rows: int) -> None:
    """Kill the server while a transaction is streamed and after its commit; half as many rows more are rolled back."""
    postgres = Server(programs(), **RUN)
    url = f"main=postgresql://postgres@/app?host={postgres.folder}"
    settings = Postgres.settings.replace("{retention}", '"none"')
    server = ServerProcess(folder / "data", settings, databases=[url], forked=False)
    try:
        with postgres.connect() as admin:
            admin.execute("CREATE DATABASE app")
        with postgres.connect("app") as db:
            db.execute("CREATE TABLE big(k int PRIMARY KEY, v text); CREATE TABLE other(k int PRIMARY KEY)")
        server.start()
        insert = b"INSERT INTO big SELECT n, 'row ' || n FROM generate_series(%s::int, %s::int) n"
        with postgres.connect("app") as db, db.transaction():
            db.execute(insert, [1, rows // 2])
            server.kill()
            server.start()
            with postgres.connect("app") as other:
                other.execute("INSERT INTO other VALUES (1)")
            with contextlib.suppress(psycopg.Rollback), db.transaction():
                db.execute(insert, [rows + 1, rows + rows // 2])
                raise psycopg.Rollback
            db.execute(insert, [rows // 2 + 1, rows])
        server.kill()
        server.start()
        postgres.crash()
        postgres.start()
        with postgres.connect("app") as db:
            db.execute("INSERT INTO other VALUES (2)")
        peak = _until(server, folder, changes=rows + 2)
        server.stop()
    finally:
        server.close()
        postgres.stop()
    _judge(folder, rows)
    print(f"{rows} rows, at most {peak >> 20} MiB")
    assert peak < MOST_MEMORY, f"the server took {peak >> 20} MiB"


def _until(server: ServerProcess, folder: Path, changes: int) -> int:
    """Wait until the log has `changes` changes; return the peak memory of the server in bytes."""
    end = time.monotonic() + 900
    while True:
        with contextlib.closing(DiskLog.open(folder / "data" / "main.log.db", read_only=True)) as log:
            if log.latest >= changes:
                break
        assert time.monotonic() < end, f"the log ends at {log.latest}: {server.last_words()}"
        time.sleep(0.1)
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _judge(folder: Path, rows: int) -> None:
    ordered, atomic = Ordered(), Atomic()
    with contextlib.closing(DiskLog.open(folder / "data" / "main.log.db", read_only=True)) as log:
        assert log.latest == rows + 2
        sizes: dict[str, int] = {}
        keys: set[object] = set()
        for part in log.scan(after=0):
            sizes[part.id] = sizes.get(part.id, 0) + len(part.changes)
            assert part.start + len(part.changes) == sizes[part.id] and part.last == (sizes[part.id] in (1, rows))
            keys.update(change.after[0] for change in part.changes if change.after and change.table.name == "big")
        assert sorted(sizes.values()) == [1, 1, rows] and keys == set(range(1, rows + 1))
        atomic.check_parts(log.scan(after=0))
        ordered.check(placed(log.scan(after=max(0, log.latest - 5_000))))
    assert atomic.failures + ordered.failures == []
