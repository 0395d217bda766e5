"""Interactive transactions of the SQLite source: how they wait and are stopped, and which errors follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait

import pytest
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, TxExpired
from headwater.sources.sqlite.write import interactive_transaction as room
from headwater.sources.write import Session

TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, v)"
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c WHERE x < 0"


def run(sql: str) -> Callable[[Session], object]:
    return lambda session: session.execute(sql)


def test_long_write_stopped_by_the_expiry_is_reported_as_expired_at_the_commit(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE, tx_seconds=0.1)
    tx = one.source.begin()
    with pytest.raises(TxExpired) as found:
        tx.run(run(f"INSERT INTO t(v) {ENDLESS}")).result(PATIENCE)
    assert found.value.retryable
    assert tx.is_over
    with pytest.raises(TxExpired):
        tx.commit().result(PATIENCE)


def test_long_read_stopped_by_the_age_of_its_snapshot_is_reported_as_expired(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "READ_SECONDS", 0.1)
    one = rig(TABLE)
    tx = one.source.begin(read_only=True)
    with pytest.raises(TxExpired):
        tx.run(run(ENDLESS)).result(PATIENCE)
    assert tx.is_over
    with pytest.raises(TxExpired):
        tx.rollback().result(PATIENCE)
    assert one.source.status()["open_transactions"] == 0


def test_transaction_with_a_running_step_is_not_idle(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE, tx_seconds=PATIENCE, tx_idle_seconds=0.02)
    tx = one.source.begin()
    queued, never = threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        session.execute("INSERT INTO t VALUES (1, 'x')")
        assert queued.wait(PATIENCE)
        never.wait(0.2)  # ten times what idling may last

    step, commit = tx.run(slow), tx.commit()
    queued.set()
    step.result(PATIENCE)
    assert commit.result(PATIENCE).tables.keys() == {"t"}


def test_write_blocked_by_another_writer_raises_busy_and_succeeds_when_the_caller_retries(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig(TABLE, tx_seconds=PATIENCE)
    entered, go = threading.Event(), threading.Event()

    def hold(_: Session) -> None:
        entered.set()
        assert go.wait(PATIENCE)

    held = one.source.write(hold)
    assert entered.wait(PATIENCE)
    tx = one.source.begin()
    with monkeypatch.context() as hasty:
        hasty.setattr(room, "TURNS", 0.3 / PATIENCE)
        with pytest.raises(Busy, match="other transactions hold"):
            tx.run(run("INSERT INTO t VALUES (1, 'x')")).result(PATIENCE)
    go.set()
    held.result(PATIENCE)
    tx.run(run("INSERT INTO t VALUES (1, 'x')")).result(PATIENCE)
    tx.commit().result(PATIENCE)
    one.check()


def test_blocked_step_ends_at_once_when_its_transaction_expires(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE, tx_seconds=2 * PATIENCE, tx_idle_seconds=2 * PATIENCE)
    holder, waiter = one.source.begin(), one.source.begin()
    holder.run(run("INSERT INTO t VALUES (1, 'x')")).result(PATIENCE)
    step = waiter.run(run("INSERT INTO t VALUES (2, 'x')"))
    one.close()
    assert not wait([step], PATIENCE).not_done
    with pytest.raises(TxExpired):
        step.result(0)
    for tx in (holder, waiter):
        with pytest.raises(TxExpired):
            tx.commit().result(PATIENCE)


def test_transaction_after_a_read_waits_for_a_foreign_lock(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE)
    tx = one.source.begin()
    tx.run(run("SELECT count(*) FROM t")).result(PATIENCE)
    one.foreign.run("BEGIN IMMEDIATE")
    step = tx.run(run("INSERT INTO t VALUES (1, 'ours')"))
    assert not wait([step], 0.1).done
    one.foreign.run("ROLLBACK")
    step.result(PATIENCE)
    tx.commit().result(PATIENCE)
    one.check()


@pytest.mark.parametrize("first", ["SELECT count(*) FROM t", None])
def test_foreign_lock_held_too_long_is_reported_as_busy(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    monkeypatch.setattr("headwater.sources.sqlite.database_file.BUSY_SECONDS", 0.1)
    monkeypatch.setattr(room, "BUSY_SECONDS", 0.1)
    one = rig(TABLE)
    tx = one.source.begin()
    if first:
        tx.run(run(first)).result(PATIENCE)
    one.foreign.run("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match="another process has held"):
        tx.run(run("INSERT INTO t VALUES (1, 'ours')")).result(PATIENCE)
    one.foreign.run("ROLLBACK")
    written = tx.run(run("INSERT INTO t VALUES (1, 'ours')"))
    written.result(PATIENCE)
    assert tx.commit().result(PATIENCE).offset == one.source.head()
    one.check()


def test_write_after_a_read_changed_by_another_program_is_refused_as_busy(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE)
    tx = one.source.begin()
    tx.run(run("SELECT count(*) FROM t")).result(PATIENCE)
    one.foreign.run("INSERT INTO t VALUES (1, 'foreign')")
    with pytest.raises(Busy, match="changed since"):
        tx.run(run("INSERT INTO t VALUES (2, 'ours')")).result(PATIENCE)
    tx.rollback().result(PATIENCE)
    one.check()


def test_step_after_the_commit_is_refused_as_committed(rig: Callable[..., Rig]) -> None:
    one = rig(TABLE)
    tx = one.source.begin()
    tx.run(run("INSERT INTO t VALUES (1, 'x')"))
    commit = tx.commit()
    late = tx.run(run("INSERT INTO t VALUES (2, 'x')"))
    commit.result(PATIENCE)
    with pytest.raises(TxExpired, match="committed") as found:
        late.result(PATIENCE)
    assert "Nothing" not in found.value.hint
    one.check()
