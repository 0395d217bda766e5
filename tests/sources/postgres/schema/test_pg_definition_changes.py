"""Definition changes that change rows, or which rows belong to a table, ask for a snapshot; others do not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from tests.sources.postgres.pg_server import PATIENCE
from tests.sources.postgres.pg_source import PgRig

from headwater.model.change import Change, Op
from headwater.sources.postgres.schema import definition_changes
from headwater.sources.postgres.schema.shape_changes import Shapes

TABLE = "CREATE TABLE t(k int PRIMARY KEY, a int, b int)"
ROWS = "INSERT INTO t VALUES (1, 10, 20)"
pytestmark = pytest.mark.usefixtures("watchful")


def changes(own: PgRig) -> list[Change]:
    """Return all new changes, including those that comparing the catalogue yields."""
    parts = own.pull()
    own.acknowledge()
    parts += own.pull()
    return [change for part in parts for change in part.changes]


# --- what rows hold -------------------------------------------------------------------------------------------

TYPES = (
    "CREATE DOMAIN d7 AS int DEFAULT 7",
    "CREATE DOMAIN d8 AS d7",
    "CREATE TYPE mood AS ENUM ('a', 'z')",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE mood_range AS RANGE (SUBTYPE = mood, MULTIRANGE_TYPE_NAME = mood_ranges)",
    "CREATE TYPE pair AS (x int, y int)",
    TABLE,
    "ALTER TABLE t ADD m mood, ADD ms moods, ADD p pair, ADD v varchar(5), ADD l int",
    "CREATE TABLE by_mood(m mood PRIMARY KEY)",
    "CREATE TABLE by_range(k int PRIMARY KEY, r mood_range)",
    "CREATE TABLE by_ranges(k int PRIMARY KEY, r mood_ranges)",
    "CREATE TABLE beside(k int PRIMARY KEY, l int)",
    ROWS,
)
ANOTHER = {  # each changes what every row says
    "a default that went at once": "ADD c int DEFAULT 5; ALTER TABLE t ALTER c DROP DEFAULT",
    "a default": "ADD c int DEFAULT 5",
    "the default of a type": "ADD c d7",
    "the default of a type below a type": "ADD c d8",
    "names exchanged": "RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
    "a name given to a new column": "RENAME a TO x; ALTER TABLE t ADD a int",
    "a name given to the next column": "DROP a; ALTER TABLE t RENAME b TO a",
    "a column made anew": "DROP a, ADD a int",
    "the last column made anew": "DROP l, ADD l int",
    "values computed anew": "ALTER a TYPE bigint USING a * 100",
    "the name of a column": "RENAME a TO x",
}
LABELS = {
    "ALTER TYPE mood RENAME VALUE 'a' TO 'b'": {"t", "by_mood", "by_range", "by_ranges"},
    "ALTER TYPE pair ADD ATTRIBUTE w int": {"t"},
    "ALTER TYPE pair DROP ATTRIBUTE y": {"t"},
}
SAME = {  # none of them does
    "a column": "ADD c int",
    "a column less": "DROP a",
    "the last column less": "DROP l",
    "some columns less": "DROP b, DROP ms",
    "a promise": "ALTER a SET NOT NULL",
    "a table beside it": "ADD c int; DROP TABLE beside; CREATE TABLE beside(l int, k int PRIMARY KEY)",
}
ALIKE = ["ALTER TYPE mood ADD VALUE 'm' BEFORE 'z'", "ALTER TYPE pair RENAME ATTRIBUTE x TO w", "ANALYZE t"]


def tables_to_resnapshot(found: list[Change]) -> set[str]:
    """Return the tables with a change that asks for a snapshot."""
    return {change.table.name for change in found if change.resnapshot}


@pytest.mark.parametrize("first", ["a row", "a look"])
@pytest.mark.parametrize("case", ANOTHER)
def test_alteration_that_rewrites_every_row_asks_for_a_snapshot(
    rig: Callable[..., PgRig], case: str, first: str
) -> None:
    own = rig(*TYPES)
    own.run("INSERT INTO t VALUES (2, 11, 21)")
    changes(own)
    alter = f"BEGIN; ALTER TABLE t {ANOTHER[case]}; COMMIT"
    found = []
    own.run(alter)
    if first == "a look":
        found += changes(own)
    own.run("INSERT INTO t VALUES (3)")
    found += changes(own)
    assert tables_to_resnapshot(found) == {"t"}
    own.open()
    own.run("INSERT INTO t VALUES (4)")
    assert tables_to_resnapshot(changes(own) + changes(own)) == set()


QUIET = ["names exchanged", "a name given to a new column", "a column made anew", "the last column made anew"]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("case", [*QUIET, "a name given to the next column", "values computed anew"])
def test_rewriting_alteration_without_a_row_asks_for_a_snapshot_once(
    rig: Callable[..., PgRig], case: str, away: bool
) -> None:
    own = rig(*TYPES)
    changes(own)
    if away:
        own.source.close()
    own.run(f"BEGIN; ALTER TABLE t {ANOTHER[case]}; COMMIT")
    if away:
        own.open()
    found = changes(own)
    described = own.source.describe()["t"]
    assert [change.table for change in found if change.resnapshot] == [described]
    own.run("INSERT INTO t VALUES (3)")
    assert [(change.op, change.table) for change in changes(own)] == [(Op.INSERT, described)]


@pytest.mark.parametrize("case", LABELS)
def test_type_with_renamed_labels_asks_for_a_snapshot(rig: Callable[..., PgRig], case: str) -> None:
    own = rig(*TYPES)
    changes(own)
    own.run(case)
    assert tables_to_resnapshot(changes(own)) == LABELS[case]
    assert changes(own) == []


@pytest.mark.parametrize("case", SAME)
def test_alteration_that_changes_no_row_asks_for_no_snapshot(rig: Callable[..., PgRig], case: str) -> None:
    own = rig(*TYPES)
    own.run("INSERT INTO t VALUES (2, 11, 21)")
    changes(own)
    own.run(f"BEGIN; ALTER TABLE t {SAME[case]}; COMMIT")
    found = changes(own)
    own.run("INSERT INTO t VALUES (3, 12)")
    assert tables_to_resnapshot(found + changes(own)) <= {"beside"}


@pytest.mark.parametrize("case", ALIKE)
def test_type_with_added_labels_asks_for_no_snapshot(rig: Callable[..., PgRig], case: str) -> None:
    own = rig(*TYPES)
    changes(own)
    own.run(case, "INSERT INTO t VALUES (3, 12)")
    assert tables_to_resnapshot(changes(own)) == set()


def test_truncated_table_with_an_added_column_asks_for_no_snapshot(rig: Callable[..., PgRig]) -> None:
    own = rig(*TYPES)
    own.run("BEGIN; TRUNCATE t; ALTER TABLE t ADD c int; COMMIT")
    found = changes(own)
    own.run("INSERT INTO t VALUES (3, 12)")
    assert tables_to_resnapshot(found + changes(own)) == set()


# --- whose rows they are --------------------------------------------------------------------------------------

SWAP = "BEGIN; ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; COMMIT"


@pytest.mark.parametrize("how", ["goes on", "begins again", "was killed before its note"])
def test_table_that_lost_its_name_in_a_swap_asks_for_a_snapshot(rig: Callable[..., PgRig], how: str) -> None:
    own = rig(TABLE, ROWS, "CREATE TABLE t_new(k int PRIMARY KEY, a int, b int)")
    own.run("UPDATE t SET a = 11", SWAP, "INSERT INTO t VALUES (8, 8, 8)")
    if how == "was killed before its note":
        own.pull()
    else:
        changes(own)
    if how != "goes on":
        own.open()
    own.run("UPDATE t_old SET a = 2")
    told = [change for change in changes(own) if change.table.name == "t_old"]
    assert [(change.op, change.resnapshot) for change in told] == [(Op.SCHEMA_CHANGE, True), (Op.UPDATE, False)]
    own.run("UPDATE t_old SET a = 3", "CREATE TABLE fresh(k int PRIMARY KEY)", "INSERT INTO fresh VALUES (1)")
    assert not [change for change in changes(own) if change.resnapshot]


def test_table_identity_learnt_after_a_kill_is_kept_across_restarts(rig: Callable[..., PgRig]) -> None:
    """The log does not store it: the identity of a table that is new at a kill is unknown at first."""
    own = rig()
    own.run(TABLE, ROWS)
    own.pull()
    own.notes.set_notes(**{definition_changes.NOTE: ""})
    own.open()
    own.run("UPDATE t SET a = 11")
    changes(own)
    own.notes.set_notes(**{definition_changes.NOTE: ""})
    own.open()
    own.run("DROP TABLE t", TABLE, "INSERT INTO t VALUES (2, 2, 2)")
    assert [(change.op, change.ddl, change.resnapshot) for change in changes(own)[:2]] == [
        (Op.SCHEMA_CHANGE, "DROP TABLE t", False),
        (Op.SCHEMA_CHANGE, 'CREATE TABLE t ("k" integer NOT NULL, "a" integer, "b" integer, PRIMARY KEY ("k"))', True),
    ]


def test_recreated_table_after_a_restart_asks_for_a_snapshot(rig: Callable[..., PgRig]) -> None:
    own = rig()
    own.run(TABLE, ROWS)
    own.pull()  # and looks
    own.open()
    own.run("DROP TABLE t", TABLE, "INSERT INTO t VALUES (2, 2, 2)")
    assert tables_to_resnapshot(changes(own)) == {"t"}


def test_table_renamed_before_a_kill_keeps_its_identity(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, ROWS)
    own.run("ALTER TABLE t RENAME TO u", "UPDATE u SET a = 11")
    own.pull()
    own.open()
    own.run("ALTER TABLE u RENAME TO w", "UPDATE w SET a = 12")
    assert [change.ddl for change in changes(own)][:1] == ["ALTER TABLE u RENAME TO w"]


def test_table_dropped_before_the_stream_delivers_it_is_reported_as_dropped(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    changes(own)
    with reader_behind(own) as announce:
        own.run("CREATE TABLE x(k int PRIMARY KEY)", "INSERT INTO x VALUES (1)", "DROP TABLE x")
        announce()
    told = changes(own)
    assert "x" in {change.table.name for change in told}
    assert [change.ddl.partition(" (")[0] for change in told if change.ddl] == ["CREATE TABLE x", "DROP TABLE x"]
    assert sorted(shapes(own).tables) == ["t"]


def test_view_replaced_before_the_stream_delivers_its_new_table_is_reported(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, publish_all=False)
    changes(own)
    with reader_behind(own) as announce:
        own.run("CREATE TABLE x(k int PRIMARY KEY)", "CREATE VIEW v AS SELECT k FROM x")
        own.source._attachment.join()
        announce()
        own.run("CREATE OR REPLACE VIEW v AS SELECT k + 1 AS k FROM x")
        announce()
    told = [(change.table.name, change.ddl) for change in changes(own) if change.ddl]
    assert told == [
        ("x", 'CREATE TABLE x ("k" integer NOT NULL, PRIMARY KEY ("k"))'),
        ("x", "-- view v was redefined"),
    ]


def shapes(own: PgRig) -> Shapes:
    held = own.source._held
    assert held is not None
    return held.whole.shapes


@contextlib.contextmanager
def reader_behind(own: PgRig) -> Iterator[Callable[[], None]]:
    """Hold the reader of the stream; yield a function that compares the catalogue with what the reader knows."""
    held, attachment = own.source._held, own.source._attachment
    assert held is not None
    held._most_changes = 10  # a reader that is behind by ten changes instead of 32,768
    own.run("INSERT INTO t SELECT n, n, n FROM generate_series(1, 20) n")
    end = time.monotonic() + PATIENCE
    while held.has_room:
        assert time.monotonic() < end
        own.source.wait(0.01)
    yield lambda: attachment.announce(held.whole.shapes)
    held._most_changes = 32_768
    held.acknowledge(0)  # wakes the reader
