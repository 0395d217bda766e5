"""Interactive transactions among other writers: they wait for their turn and are not refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.capture.captured_database import foreign, running
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Op
from headwater.sources.write import Session


def test_transaction_that_starts_with_a_write_waits_for_earlier_writers(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        entered, go = threading.Event(), threading.Event()

        def hold(session: Session) -> None:
            entered.set()
            assert go.wait(PATIENCE)
            session.execute("INSERT INTO t VALUES (1, 'first')")

        held = one.source.write(hold)
        assert entered.wait(PATIENCE)
        tx = one.source.begin()
        step = tx.run(lambda session: session.execute("INSERT INTO t VALUES (2, 'second')"))
        queued = one.source.write(lambda session: session.execute("INSERT INTO t VALUES (3, 'third')"))
        go.set()
        held.result(PATIENCE)
        step.result(PATIENCE)
        tx.commit().result(PATIENCE)
        queued.result(PATIENCE)
        found = [change.after for change in one.changes() if change.op is Op.INSERT]
        assert sorted(row for row in found if row) == [(1, "first"), (2, "second"), (3, "third")]


def test_transaction_that_starts_with_a_write_commits_after_a_foreign_commit(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        tx = one.source.begin()
        foreign(tmp_path / "app.db", "INSERT INTO t VALUES (1, 'foreign')")
        tx.run(lambda session: session.execute("INSERT INTO t VALUES (2, 'ours')")).result(PATIENCE)
        tx.commit().result(PATIENCE)
        assert [change.after for change in one.changes() if change.op is Op.INSERT] == [(1, "foreign"), (2, "ours")]


def test_many_concurrent_short_transactions_all_commit(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
        start = threading.Barrier(40)

        def insert(n: int) -> None:
            tx = one.source.begin()
            start.wait(PATIENCE)
            tx.run(lambda session: session.execute("INSERT INTO t VALUES (?, 'x')", (n,))).result(PATIENCE)
            tx.commit().result(PATIENCE)

        with ThreadPoolExecutor(40) as pool:
            list(pool.map(insert, range(40)))
        found = [change.after for change in one.changes() if change.op is Op.INSERT]
        assert sorted(row[0] for row in found if row) == list(range(40))
