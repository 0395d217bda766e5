"""Rows of a table exclude those of tables that inherit from it; and a read finds its rows whatever happens to the
table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.sources.postgres.pg_database import Rig
from tests.sources.postgres.pg_server import PATIENCE

from headwater.errors import Busy, Forbidden, NotFound
from headwater.model.keys.key import Span
from headwater.model.predicate import eq
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.read.sample import read_sample
from headwater.sources.postgres.schema.table_shapes import Shapes, hold

Attach = Callable[..., Rig]
FAMILY = (
    "CREATE TABLE t(k int PRIMARY KEY, a int)",
    "CREATE TABLE ch(k int PRIMARY KEY, x int) INHERITS (t)",
    "INSERT INTO t VALUES (1, 1), (3, 3)",
    "INSERT INTO ch VALUES (1, 100, 100), (2, 200, 200)",
)


# --- inheritance -----------------------------------------------------------------------------------------


def test_chunk_of_a_parent_omits_the_rows_of_its_children(pg_rig: Attach) -> None:
    r = pg_rig(*FAMILY)
    assert r.reading.chunk("t", after=None, span=None, limit=9).rows == ((1, 1), (3, 3))
    assert r.reading.chunk("t", after=None, span=Span(), limit=9).rows == ((1, 1), (3, 3))
    first = r.reading.chunk("t", after=None, span=None, limit=1)
    rest = r.reading.chunk("t", after=first.next_key, span=None, limit=1)
    assert (*first.rows, *rest.rows) == ((1, 1), (3, 3))
    assert r.reading.chunk("ch", after=None, span=None, limit=9).rows == ((1, 100, 100), (2, 200, 200))


def test_chunk_of_a_partitioned_table_has_the_rows_of_its_partitions(pg_rig: Attach) -> None:
    r = pg_rig(
        "CREATE TABLE p(k int PRIMARY KEY, a int) PARTITION BY RANGE (k)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
        "INSERT INTO p VALUES (1, 1), (11, 11)",
    )
    assert r.reading.chunk("p", after=None, span=None, limit=9).rows == ((1, 1), (11, 11))
    assert r.reading.chunk("p2", after=None, span=None, limit=9).rows == ((11, 11),)
    assert r.do(lambda s: s.update("p", eq("k", 11), {"a": 12}, 5)).affected == 1
    assert r.reading.get("p", (11,))[1] == (11, 12)
    assert read_sample(r.pool, r.shapes, "p", 10).rows == 2


def test_row_and_sample_of_a_parent_omit_its_children(pg_rig: Attach) -> None:
    r = pg_rig(*FAMILY)
    assert r.reading.get("t", (2,))[1] is None
    assert r.reading.get("t", (1,))[1] == (1, 1)
    assert r.do(lambda s: s.select("t", None)) == [(1, 1), (3, 3)]
    assert read_sample(r.pool, r.shapes, "t", 10).rows == 2
    r.run("INSERT INTO ch SELECT n, n, n FROM generate_series(10, 5000) n")
    r.run("INSERT INTO t SELECT n, n FROM generate_series(10, 400) n")
    assert 300 < read_sample(r.pool, r.shapes, "t", 50).rows < 500


@pytest.mark.parametrize("limit", [None, 5])
def test_write_by_key_to_a_parent_leaves_its_children_unchanged(pg_rig: Attach, limit: int | None) -> None:
    r = pg_rig(*FAMILY)
    r.log.ops()
    assert r.do(lambda s: s.update("t", eq("k", 1), {"a": 7}, limit)).affected == 1
    assert r.do(lambda s: s.update("t", eq("k", 2), {"a": 7}, limit)).affected == 0
    assert r.do(lambda s: s.delete("t", eq("k", 3), limit)).affected == 1
    assert r.do(lambda s: s.delete("t", None, limit)).affected == 1
    assert r.log.ops() == ["update", "delete", "delete"]
    assert r.run("SELECT k, a FROM ch ORDER BY k").rows == ((1, 100), (2, 200))


def test_delete_without_a_key_leaves_the_equal_row_of_a_child(pg_rig: Attach) -> None:
    r = pg_rig(
        "CREATE TABLE t(a int)",
        "CREATE TABLE ch() INHERITS (t)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "ALTER TABLE ch REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO ch VALUES (1)",
    )
    assert r.do(lambda s: s.delete("t", eq("a", 1), 5)).affected == 1
    assert r.run("SELECT a FROM ch").rows == ((1,),)


# --- emptied and rewritten meanwhile ---------------------------------------------------------------------

HURT = [
    ("TRUNCATE t", 0),
    ("ALTER TABLE t ALTER a TYPE bigint USING a + 0", 2),
    ("DROP TABLE t; CREATE TABLE t(k int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)", 3),
]


class Hooked(Shapes):
    """Shapes that run a statement against the table once its shape was read, or once it waits for our lock."""

    def __init__(self, r: Rig, hurt: str) -> None:
        super().__init__()
        self._r, self._hurt = r, hurt
        self.other = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._r.connect() as db:
            db.execute(self._hurt.encode())

    def find(self, link: Link, name: str) -> Any:
        found = super().find(link, name)
        if self.other.ident is None:
            self.other.start()
            wait_until(lambda: not self.other.is_alive() or waits(self._r))
        return found


def waits(r: Rig) -> bool:
    ask = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass"
    return bool(r.stream.db.execute(ask).fetchone() != (0,))


def wait_until(ask: Callable[[], bool]) -> None:
    end = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if ask():
            return
        end.wait(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize(("hurt", "left"), HURT, ids=["truncated", "rewritten", "made anew"])
@pytest.mark.parametrize("read", ["chunk", "get", "sample"])
def test_read_keeps_its_rows_when_the_table_changes_after_its_snapshot(
    pg_rig: Attach, read: str, hurt: str, left: int
) -> None:
    r = pg_rig("CREATE TABLE t(k int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1), (2, 2)")
    shapes = Hooked(r, hurt)
    r.reading._shapes = shapes
    if read == "chunk":
        assert len(r.reading.chunk("t", after=None, span=None, limit=9).rows) == 2
    elif read == "get":
        assert r.reading.get("t", (1,))[1] == (1, 1)
    else:
        assert read_sample(r.pool, shapes, "t", 9).rows == 2
    shapes.other.join(PATIENCE)
    assert len(r.reading.chunk("t", after=None, span=None, limit=9).rows) == left


def test_chunk_of_a_table_under_alteration_is_refused_as_busy_after_a_wait(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(k int PRIMARY KEY, a int)", "INSERT INTO t VALUES (1, 1)")
    r.reading._seconds = 0.1
    with r.connect() as db, db.transaction():
        db.execute("ALTER TABLE t ADD COLUMN b int")
        with pytest.raises(Busy, match="'t' is being altered"):
            r.reading.chunk("t", after=None, span=None, limit=9)
        with pytest.raises(Busy, match="'t' is being altered"):
            r.reading.get("t", (1,))
    assert r.reading.chunk("t", after=None, span=None, limit=9).rows == ((1, 1, None),)


def test_lock_needs_only_select_and_is_refused_for_names_that_are_no_table(pg_rig: Attach) -> None:
    r = pg_rig(
        "CREATE TABLE t(k int PRIMARY KEY)",
        "CREATE VIEW v AS SELECT * FROM t",
        "CREATE INDEX ix ON t(k)",
        "CREATE SCHEMA s",
    )
    for name in ("gone", "s.gone", "gone.gone", "v", "ix", "t_pkey", "_headwater_x", "a.b.c", "x\0"):
        with pytest.raises(NotFound):
            r.reading.chunk(name, after=None, span=None, limit=9)
        with pytest.raises(NotFound):
            r.reading.get(name, (1,))
    role = f"reader_{r.stream.name}"
    db = r.stream.db
    db.execute(f"CREATE ROLE {role}".encode())
    try:
        as_role = lambda link: (link.script(f"SET LOCAL ROLE {role}"), hold(link, "t"))  # noqa: E731
        with pytest.raises(Forbidden):
            r.pool.read(as_role)
        db.execute(f"GRANT SELECT ON t TO {role}".encode())
        r.pool.read(as_role)
    finally:
        db.execute(f"DROP OWNED BY {role}".encode())
        db.execute(f"DROP ROLE {role}".encode())


def test_table_lock_takes_no_snapshot(pg_rig: Attach) -> None:
    r = pg_rig("CREATE TABLE t(k int PRIMARY KEY)")

    def read(link: Link) -> Any:
        hold(link, "t")
        with r.connect() as db:
            db.execute("INSERT INTO t VALUES (1)")
        return link.run("SELECT count(*) FROM t").values()

    assert r.pool.read(read) == [(1,)]
