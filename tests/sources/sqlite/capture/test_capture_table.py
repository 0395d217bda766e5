"""Following: transactions and their parts, page by page; foreign programs see no effect of capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig, ops
from tests.suite.deadlines import PATIENCE

from headwater.sources.sqlite.capture.capture_table import PAGE

Attach = Callable[..., Rig]
T = "CREATE TABLE t(id INTEGER PRIMARY KEY, x)"
MANY = f"WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {PAGE + 900})"


def test_own_transactions_are_captured_singly_and_foreign_ones_are_merged(rig: Attach) -> None:
    r = rig(T)
    r.write("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    r.write("INSERT INTO t VALUES (3, 'c')")
    r.foreign.script("INSERT INTO t VALUES (4, 'd')", "INSERT INTO t VALUES (5, 'e')")
    r.write("INSERT INTO t VALUES (6, 'f')")
    r.foreign.run("INSERT INTO t VALUES (7, 'g')")
    found = r.transactions()
    r.compare()
    assert [len(part.changes) for part in found] == [2, 1, 2, 1, 1]
    assert all(part.start == 0 and part.last for part in found)
    assert len({part.id for part in found}) == 5 and all(part.commit_ts_ms > 0 for part in found)


def test_write_without_changes_takes_no_offset(rig: Attach) -> None:
    r = rig(T)
    r.write("UPDATE t SET x = 1", "DELETE FROM t", "CREATE VIEW v AS SELECT 1")
    assert r.check() == []
    written = r.source.write(lambda session: session.execute("SELECT 1")).result(PATIENCE)
    assert written.offset == r.source.head() == 0


@pytest.mark.parametrize("writer", ["foreign", "server"])
@pytest.mark.parametrize("unique", ["", "UNIQUE"])
def test_replaced_rows_are_joined_across_pages(rig: Attach, writer: str, unique: str) -> None:
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, x {unique})", f"{MANY} INSERT INTO t SELECT i, -i FROM n")
    statement = "REPLACE INTO t SELECT id, x - 100000 FROM t"
    if writer == "server":
        assert r.write(statement) == [""]
    else:
        r.foreign.run(statement)
    parts = r.transactions()
    r.compare()
    changes = [change for part in parts for change in part.changes]
    assert set(ops(changes)) == ({"delete", "insert"} if unique else {"update"})
    assert len({part.id for part in parts}) == 1 and [part.last for part in parts][-1]
    assert [part.start for part in parts] == [part.first - parts[0].first for part in parts]


def test_cascades_of_replaced_rows_are_captured_across_pages(rig: Attach) -> None:
    r = rig(
        "CREATE TABLE p(id INTEGER PRIMARY KEY, x)",
        "CREATE TABLE c(id INTEGER PRIMARY KEY, p REFERENCES p(id) ON DELETE CASCADE)",
        "INSERT INTO p VALUES (1, 'old'), (2, 'old')",
        f"{MANY} INSERT INTO c SELECT i, 1 + i % 2 FROM n",
    )
    r.foreign.run("REPLACE INTO p VALUES (1, 'new'), (2, 'new')")
    changes = r.check()
    assert ops(changes).count("delete") == PAGE + 900
    assert [(c.before, c.after) for c in changes if c.table.name == "p"] == [
        ((1, "old"), (1, "new")),
        ((2, "old"), (2, "new")),
    ]


def test_ignored_insert_is_not_captured_later(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (1, 'old')")
    r.foreign.script("INSERT OR IGNORE INTO t VALUES (1, 'ignored')", "INSERT INTO t VALUES (2, 'b')")
    r.check()
    r.foreign.run("DELETE FROM t WHERE id = 1")
    r.check()
    r.foreign.run("INSERT INTO t VALUES (1, 'new')")
    assert ops(r.check()) == ["insert"]


def test_foreign_program_keeps_its_own_row_counts_and_rowids(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, x UNIQUE)", "CREATE TABLE u(x)")
    code = "c = con.execute({!r}); c.fetchall(); answer = [c.rowcount, c.lastrowid]"
    assert r.foreign.python(code.format("INSERT INTO t VALUES (7, 'a'), (9, 'b')")) == [2, 9]
    assert r.foreign.python(code.format("REPLACE INTO t VALUES (9, 'a')")) == [1, 9]
    assert r.foreign.python(code.format("UPDATE t SET x = 'z'"))[0] == 1
    assert r.foreign.python(code.format("INSERT INTO u VALUES (1)")) == [1, 1]
    assert r.foreign.run("INSERT INTO t VALUES (20, 'q') RETURNING id, x") == [(20, b"q")]
    r.check()


def test_stash_is_empty_after_every_kind_of_collision(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, x UNIQUE)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    r.foreign.script("REPLACE INTO t VALUES (3, 'a')", "UPDATE OR REPLACE t SET x = 'b' WHERE id = 3")
    assert r.foreign.run("SELECT count(*) FROM _headwater_stash") == [(0,)]
    r.foreign.run("INSERT OR IGNORE INTO t VALUES (3, 'n')")
    r.check()
    r.source._trimmer._seconds = 0.0
    r.source.acknowledge(r.after)
    r.source.write(lambda session: None).result(PATIENCE)  # the move stands before it in the queue
    assert r.foreign.run("SELECT count(*) FROM _headwater_stash") == [(0,)]
    assert r.foreign.run("SELECT count(*) FROM _headwater_capture") == [(1,)]


def test_offsets_continue_after_all_captured_rows_were_moved(rig: Attach) -> None:
    r = rig(T)
    r.source._trimmer._seconds = 0.0
    for turn in range(5):
        r.foreign.run("INSERT INTO t VALUES (?, 'x')", turn)
        r.check()
        r.source.acknowledge(r.after)
        r.source.write(lambda session: None).result(PATIENCE)
        r.source.acknowledge(r.after)
        r.foreign.run("DELETE FROM t WHERE id = ?", turn - 1)
        r.check()
    assert r.after == 9
