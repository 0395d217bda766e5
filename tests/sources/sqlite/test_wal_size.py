"""The limit on the size of the `-wal` file: which reads are ended, and when."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import Busy, HeadwaterError, TxExpired
from headwater.sources.sqlite import database_file, wal_size
from headwater.sources.write import Tx

TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, v)"
FILL = "INSERT OR REPLACE INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
FILL += "SELECT i, randomblob(4000) FROM n"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
MOST = 1 << 20


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal_size, "MAX_WAL", MOST)
    monkeypatch.setattr(wal_size, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(wal_size, "GRACE_SECONDS", 0.2)


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Return the mode and the result of each checkpoint."""
    found: list[tuple[int, int | None]] = []
    run = wal_size._checkpoint

    def recorded(db: wal_size.apsw.Connection, mode: int) -> int | None:
        result = run(db, mode)
        found.append((mode, result))
        return result

    monkeypatch.setattr(wal_size, "_checkpoint", recorded)
    return found


def size(one: Rig) -> int:
    return os.stat(f"{one.path}-wal").st_size


def fill(one: Rig, rows: int = 500) -> None:
    assert one.write(FILL.format(rows)) == [""]


def reader(one: Rig) -> Tx:
    """Return a read-only transaction that has a snapshot."""
    tx = one.source.begin(read_only=True)
    read(tx)
    return tx


def read(tx: Tx) -> None:
    tx.run(lambda session: session.execute("SELECT count(*) FROM t")).result(PATIENCE)


@pytest.mark.usefixtures("small_limit")
def test_wal_kept_by_overlapping_read_transactions_is_emptied(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE)
    held = older = reader(one)
    fill(one)

    def is_emptied() -> bool:  # there is never a moment without a transaction that reads
        nonlocal older
        with contextlib.suppress(TxExpired):
            newer = reader(one)
            if older is not held:
                older.rollback().result(PATIENCE)
            older = newer
        return size(one) <= MOST

    wait_until(is_emptied)
    with pytest.raises(TxExpired):
        read(held)


@pytest.mark.usefixtures("small_limit")
def test_statement_that_keeps_the_wal_is_stopped_as_busy(rig: Callable[..., Rig]) -> None:
    one, ended = rig(TABLE), []

    def select() -> None:
        try:
            one.source.read(ENDLESS)
        except HeadwaterError as error:
            ended.append(error)

    thread = threading.Thread(target=select)
    thread.start()
    while thread.is_alive():
        fill(one)
    assert isinstance(ended[0], Busy)
    assert "-wal" in ended[0].message
    wait_until(lambda: size(one) <= MOST)
    assert one.source.read("SELECT count(*) FROM t").rows == ((500,),)  # the connection reads again


@pytest.mark.usefixtures("small_limit")
def test_read_of_another_program_that_keeps_the_wal_is_reported_and_reads_go_on(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = rig(TABLE)
    one.foreign.script("BEGIN", "SELECT count(*) FROM t")
    fill(one)
    wait_until(lambda: "another program keeps a read transaction" in caplog.text)
    tx = reader(one)
    fill(one)
    read(tx)
    tx.rollback().result(PATIENCE)
    assert caplog.text.count("above the limit of 1 MiB") == 1
    assert size(one) > MOST
    one.foreign.script("COMMIT")


@pytest.mark.usefixtures("small_limit")
def test_transaction_in_progress_above_the_limit_ends_no_reads(
    rig: Callable[..., Rig], checkpoints: list[tuple[int, int | None]]
) -> None:
    one = rig(TABLE, tx_seconds=PATIENCE, tx_idle_seconds=PATIENCE)
    reads, writes = reader(one), one.source.begin()
    writes.run(lambda session: session.execute(FILL.format(3000))).result(PATIENCE)
    assert size(one) > MOST
    wait_until(lambda: len(checkpoints) > 3)
    assert {mode for mode, _ in checkpoints} == {wal_size.apsw.SQLITE_CHECKPOINT_PASSIVE}
    read(reads)
    reads.rollback().result(PATIENCE)
    writes.rollback().result(PATIENCE)


@pytest.mark.usefixtures("small_limit")
def test_short_reads_do_not_fail_while_the_wal_is_emptied(
    rig: Callable[..., Rig], checkpoints: list[tuple[int, int | None]]
) -> None:
    one = rig(TABLE)
    emptied = (wal_size.apsw.SQLITE_CHECKPOINT_TRUNCATE, 0)
    while checkpoints.count(emptied) < 3:
        fill(one)
        assert one.source.read("SELECT count(*) FROM t").rows == ((500,),)


def test_wal_shrinks_when_sqlite_begins_it_again(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_file, "KEPT_WAL", MOST)
    one = rig(TABLE)
    tx = reader(one)
    fill(one)
    assert size(one) > MOST
    tx.rollback().result(PATIENCE)
    fill(one, 1)  # copies the pages of the file to the database
    fill(one, 1)  # begins the file again
    assert size(one) <= MOST
