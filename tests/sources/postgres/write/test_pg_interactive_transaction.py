"""Interactive transactions on PostgreSQL: how they wait and are stopped, and which errors follow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait

import pytest
from tests.sources.postgres.pg_database import Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import Busy, DuplicateKey, InvalidRequest, TxExpired
from headwater.sources.postgres.write import interactive_transaction as room
from headwater.sources.write import Session

Attach = Callable[..., Rig]
T = "CREATE TABLE t(id int PRIMARY KEY, v text)"


def run(sql: str) -> Callable[[Session], object]:
    return lambda session: session.execute(sql)


def test_failed_step_is_undone_alone_and_the_rest_are_committed_together(pg_rig: Attach) -> None:
    r = pg_rig(T)
    tx = r.begin()
    tx.run(run("INSERT INTO t VALUES (1, 'a')")).result(PATIENCE)
    with pytest.raises(DuplicateKey):
        tx.run(lambda s: (s.insert("t", [{"id": 2}]), s.insert("t", [{"id": 1}]))).result(PATIENCE)
    tx.run(run("CREATE TABLE u(id int PRIMARY KEY)")).result(PATIENCE)
    tx.run(lambda s: s.insert("u", [{"id": 1}])).result(PATIENCE)
    assert r.run("SELECT count(*) FROM t").rows == ((0,),)
    written = tx.commit().result(PATIENCE)
    assert written.tables.keys() == {"t", "u"} and written.offset == max(written.tables.values())
    assert (tx.is_over, r.run("SELECT id FROM t").rows) == (True, ((1,),))
    with pytest.raises(TxExpired, match="committed"):
        tx.run(run("SELECT 1")).result(PATIENCE)


def test_rolled_back_transaction_captures_no_change(pg_rig: Attach) -> None:
    r = pg_rig(T)
    tx = r.begin()
    tx.run(run("INSERT INTO t VALUES (1, 'a')")).result(PATIENCE)
    tx.rollback().result(PATIENCE)
    assert r.log.ops() == []
    with pytest.raises(TxExpired, match="rolled back"):
        tx.commit().result(PATIENCE)


def test_long_write_stopped_by_the_expiry_is_reported_as_expired_at_the_commit(pg_rig: Attach) -> None:
    r = pg_rig(T)
    tx = r.begin(seconds=0.2)
    tx.run(run("INSERT INTO t VALUES (1, 'a')")).result(PATIENCE)
    with pytest.raises(TxExpired) as found:
        tx.run(run("SELECT pg_sleep(20)")).result(PATIENCE)
    assert found.value.retryable and tx.is_over
    with pytest.raises(TxExpired):
        tx.commit().result(PATIENCE)
    assert r.log.ops() == []


def test_long_read_stopped_by_the_age_of_its_snapshot_is_reported_as_expired(
    pg_rig: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "READ_SECONDS", 0.2)
    tx = pg_rig(T).begin(read_only=True)
    with pytest.raises(TxExpired):
        tx.run(run("SELECT pg_sleep(20)")).result(PATIENCE)
    with pytest.raises(TxExpired):
        tx.rollback().result(PATIENCE)


def test_idle_transaction_expires_and_releases_its_locks(pg_rig: Attach) -> None:
    r = pg_rig(T, "INSERT INTO t VALUES (1, 'a')")
    tx = r.begin(idle=0.2)
    tx.run(run("UPDATE t SET v = 'b'")).result(PATIENCE)
    assert r.run("UPDATE t SET v = 'c'").affected == 1  # waits for the lock until then
    assert tx.is_over


def test_transaction_with_a_running_step_is_not_idle(pg_rig: Attach) -> None:
    tx = pg_rig(T).begin(idle=0.05)
    queued = threading.Event()

    def slow(session: Session) -> None:
        session.execute("INSERT INTO t VALUES (1, 'x')")
        assert queued.wait(PATIENCE)
        threading.Event().wait(0.5)  # ten times what idling may last

    step, commit = tx.run(slow), tx.commit()
    queued.set()
    step.result(PATIENCE)
    assert commit.result(PATIENCE).tables.keys() == {"t"}


def test_step_blocked_by_a_foreign_lock_raises_busy_and_succeeds_when_the_caller_retries(
    pg_rig: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOCK_SECONDS", 0.2)
    r = pg_rig(T, "INSERT INTO t VALUES (1, 'a')")
    tx = r.begin()
    with r.connect() as other, other.transaction(force_rollback=True):
        other.execute("UPDATE t SET v = 'x'")
        with pytest.raises(Busy):
            tx.run(run("UPDATE t SET v = 'y'")).result(PATIENCE)
    tx.run(run("UPDATE t SET v = 'y'")).result(PATIENCE)
    tx.commit().result(PATIENCE)


def test_write_over_a_row_changed_since_its_read_is_refused_as_busy(pg_rig: Attach) -> None:
    r = pg_rig(T, "INSERT INTO t VALUES (1, 'a')")
    tx = r.begin()
    tx.run(run("SELECT * FROM t")).result(PATIENCE)
    r.stream.run("UPDATE t SET v = 'foreign'")
    with pytest.raises(Busy, match="concurrent") as found:
        tx.run(run("UPDATE t SET v = 'mine'")).result(PATIENCE)
    assert "begin again" in found.value.hint


@pytest.mark.parametrize("timing", ["", "DEFERRABLE INITIALLY DEFERRED"])
def test_conflict_that_a_trigger_raises_keeps_its_mark_of_naming_tables(pg_rig: Attach, timing: str) -> None:
    r = pg_rig(
        T,
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION USING errcode = '40001', message = 'canary'; END $$",
        f"CREATE CONSTRAINT TRIGGER f AFTER INSERT ON t {timing} FOR EACH ROW EXECUTE FUNCTION f()",
    )
    tx = r.begin()
    with pytest.raises(Busy, match="canary") as found:
        tx.run(lambda s: s.insert("t", [{"id": 1}])).result(PATIENCE)
        tx.commit().result(PATIENCE)
    assert found.value.names_tables and "begin again" in found.value.hint


def test_read_only_transaction_keeps_its_snapshot_and_refuses_writes(pg_rig: Attach) -> None:
    r = pg_rig(T, "CREATE FUNCTION f() RETURNS void LANGUAGE sql STABLE AS 'SELECT 1'")
    tx = r.begin(read_only=True)
    assert tx.run(lambda s: s.execute("SELECT count(*) FROM t").rows).result(PATIENCE) == ((0,),)
    r.run("INSERT INTO t VALUES (1)")
    assert tx.run(lambda s: s.execute("SELECT count(*) FROM t").rows).result(PATIENCE) == ((0,),)
    for work in (run("INSERT INTO t VALUES (2)"), lambda s: s.insert("t", [{"id": 2}])):
        with pytest.raises(InvalidRequest, match="read-only"):
            tx.run(work).result(PATIENCE)
    assert tx.commit().result(PATIENCE).tables == {}


def test_blocked_step_ends_at_once_when_its_transaction_expires(pg_rig: Attach) -> None:
    r = pg_rig(T, "INSERT INTO t VALUES (1, 'a')")
    holder, waiter = (r.begin(seconds=2 * PATIENCE, idle=2 * PATIENCE) for _ in range(2))
    holder.run(run("UPDATE t SET v = 'x'")).result(PATIENCE)
    step = waiter.run(run("UPDATE t SET v = 'y'"))
    waiter.expire()
    assert not wait([step], PATIENCE).not_done
    with pytest.raises(TxExpired):
        step.result(0)
    holder.expire()
    with pytest.raises(TxExpired):
        holder.commit().result(PATIENCE)


def test_transaction_with_a_terminated_connection_is_over(pg_rig: Attach) -> None:
    r = pg_rig(T)
    tx = r.begin()
    ((pid,),) = tx.run(lambda s: s.execute("SELECT pg_backend_pid()").rows).result(PATIENCE)
    r.stream.run(f"SELECT pg_terminate_backend({pid}, 120000)")
    with pytest.raises(Exception) as found:
        tx.run(run("INSERT INTO t VALUES (1)")).result(PATIENCE)
    assert getattr(found.value, "retryable", False) and tx.is_over
