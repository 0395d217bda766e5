"""Schema changes: through the server in one transaction; by others detected and reported, never a silent gap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig, images, ops, schema_changes
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError
from headwater.model.change import Change
from headwater.sources.sqlite.capture.triggers import MAX_COLUMNS

Attach = Callable[..., Rig]
T = "CREATE TABLE t(id INTEGER PRIMARY KEY, a, b)"
SEED = "INSERT INTO t VALUES (1, 'x', 'y'), (2, 'p', 'q')"


def tables_and_resnapshots(changes: list[Change]) -> list[tuple[str, bool]]:
    """Return the table and the resnapshot flag of each schema change."""
    return [(change.table.name, change.resnapshot) for change in schema_changes(changes)]


# --- through the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "columns"),
    [
        ("ALTER TABLE t ADD COLUMN c DEFAULT NULL", ["id", "a", "b", "c"]),
        ("ALTER TABLE t RENAME COLUMN a TO z", ["id", "z", "b"]),
        ("ALTER TABLE t DROP COLUMN a", ["id", "b"]),
    ],
)
def test_alter_between_writes_is_captured_in_the_same_transaction(rig: Attach, ddl: str, columns: list[str]) -> None:
    r = rig(T, SEED)
    last = columns[-1]
    r.write("UPDATE t SET b = 'before'", ddl, f"UPDATE t SET {last} = 'after'")
    (transaction,) = r.transactions()
    r.compare()
    changes = list(transaction.changes)
    assert tables_and_resnapshots(changes) == [("t", False)]
    assert [c.op.word for c in changes] == ["update", "update", "schema_change", "update", "update"]
    assert list(changes[0].table.names) == ["id", "a", "b"] and changes[0].table.version == 1
    assert list(changes[4].table.names) == columns and changes[4].table.version == 2
    assert changes[2].ddl == ddl and changes[2].table == changes[4].table
    r.foreign.run(f"UPDATE t SET {last} = 'foreign'")
    r.check()


@pytest.mark.parametrize("by_server", [True, False])
@pytest.mark.parametrize("column", ["c DEFAULT 7", "c TEXT NOT NULL DEFAULT ''", "c AS (id + 1)", "c AS (a) VIRTUAL"])
def test_added_column_with_values_for_existing_rows_asks_for_a_snapshot(
    rig: Attach, column: str, by_server: bool
) -> None:
    r = rig(T, SEED, "CREATE TABLE empty(id INTEGER PRIMARY KEY, a)")
    alter = r.write if by_server else r.foreign.script
    alter(f"ALTER TABLE t ADD COLUMN {column}", f"ALTER TABLE empty ADD COLUMN {column}")
    assert sorted(tables_and_resnapshots(r.settle())) == [("empty", False), ("t", True)]
    r.write("ALTER TABLE t RENAME COLUMN c TO d", "UPDATE t SET b = 'after'")
    assert tables_and_resnapshots(r.check()) == [("t", False)]


def test_created_and_dropped_tables_are_captured(rig: Attach) -> None:
    r = rig(T, SEED)
    r.write("CREATE TABLE n(x PRIMARY KEY) WITHOUT ROWID", "INSERT INTO n VALUES (1)")
    changes = r.check()
    assert tables_and_resnapshots(changes) == [("n", False)] and ops(changes) == ["insert"]
    r.write("CREATE TABLE copy AS SELECT * FROM t")
    assert tables_and_resnapshots(r.settle()) == [("copy", True)]  # its rows came without changes
    r.write("DROP TABLE n", "CREATE TABLE n(y)", "INSERT INTO n VALUES (2)")
    changes = r.check()
    assert tables_and_resnapshots(changes) == [("n", False), ("n", False)]
    assert changes[-1].table.version > changes[0].table.version
    r.write("DROP TABLE t", "DROP TABLE copy", "DROP TABLE n")
    r.check()
    assert r.fold.tables == {} and r.captured() == {}


def test_renamed_table_ends_and_its_new_name_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED)
    r.write("UPDATE t SET a = 1", "ALTER TABLE t RENAME TO u", "UPDATE u SET a = 2")
    changes = r.settle()
    assert tables_and_resnapshots(changes) == [("t", False), ("u", True)]
    assert [c.table.name for c in changes] == ["t", "t", "t", "u", "u", "u"]
    r.foreign.run("DELETE FROM u")
    r.check()


def test_table_that_can_no_longer_be_captured_is_reported_as_dropped(rig: Attach) -> None:
    columns = ", ".join(f"c{place}" for place in range(MAX_COLUMNS - 1))
    r = rig(T, f"CREATE TABLE wide(id INTEGER PRIMARY KEY, {columns})")
    assert r.write("ALTER TABLE wide ADD COLUMN d") == [""]
    (change,) = schema_changes(r.check())
    assert (change.table.name, change.ddl) == ("wide", 'DROP TABLE "wide"')
    assert set(r.captured()) == {"t"}
    assert r.write("ALTER TABLE wide DROP COLUMN d") == [""]
    (change,) = schema_changes(r.settle())
    assert (change.table.name, change.ddl) == ("wide", "ALTER TABLE wide DROP COLUMN d")
    assert r.write("DROP TABLE wide -- real") == [""]
    (change,) = schema_changes(r.check())
    assert change.ddl == "DROP TABLE wide -- real"


def test_new_indexes_and_triggers_are_followed_by_capture(rig: Attach) -> None:
    r = rig(T, SEED)
    r.write("CREATE UNIQUE INDEX i ON t(a)")
    r.check()
    r.foreign.run("REPLACE INTO t VALUES (9, 'x', 'new')")
    assert sorted(ops(r.check())) == ["delete", "insert"]
    r.write("CREATE TRIGGER g AFTER INSERT ON t BEGIN UPDATE t SET b = 'g' WHERE id = NEW.id; END")
    r.foreign.run("INSERT INTO t VALUES (20, 20, 20)")
    assert images(r.check()) == [(None, (20, 20, 20)), ((20, 20, 20), (20, 20, "g"))]
    r.write("DROP INDEX i", "DROP TRIGGER g", "CREATE INDEX j ON t(b)", "CREATE VIEW v AS SELECT * FROM t")
    r.foreign.run("REPLACE INTO t VALUES (20, 1, 1)")
    r.check()


@pytest.mark.parametrize(
    "ddl",
    [
        "CREATE TABLE t(x)",
        "ALTER TABLE t DROP COLUMN id",
        "ALTER TABLE t DROP COLUMN nothing",
        "ALTER TABLE t ADD COLUMN a",
        "ALTER TABLE nothing RENAME TO other",
        "CREATE UNIQUE INDEX i ON t(c)",
        "DROP TABLE _headwater_capture",
        "DROP TRIGGER _headwater_1_insert",
        "CREATE TABLE _headwater_x(x)",
        "CREATE TRIGGER g AFTER INSERT ON _headwater_capture BEGIN SELECT 1; END",
    ],
)
def test_failed_ddl_leaves_schema_and_capture_unchanged(rig: Attach, ddl: str) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, a, b, c)", "INSERT INTO t VALUES (1, 1, 1, 1), (2, 2, 2, 1)")
    before = r.foreign.run("SELECT name, sql FROM sqlite_schema ORDER BY name")
    with pytest.raises(HeadwaterError):
        r.source.write(lambda session: session.execute(ddl)).result(PATIENCE)
    assert r.foreign.run("SELECT name, sql FROM sqlite_schema ORDER BY name") == before
    assert r.check() == []
    r.foreign.run("UPDATE t SET c = 2")
    assert len(r.check()) == 2


def test_rolled_back_ddl_leaves_capture_unchanged(rig: Attach) -> None:
    r = rig(T, SEED)

    def work(session: object) -> None:
        session.execute("ALTER TABLE t ADD COLUMN c")  # type: ignore[attr-defined]
        session.execute("INSERT INTO t VALUES (1, 1, 1, 1)")  # type: ignore[attr-defined]

    with pytest.raises(HeadwaterError):
        r.source.write(work).result(PATIENCE)
    assert r.check() == []
    r.write("INSERT INTO t VALUES (3, 3, 3)")
    assert images(r.check()) == [(None, (3, 3, 3))]


# --- by other processes ----------------------------------------------------------------------------------


def test_column_added_by_another_program_is_captured(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.run("ALTER TABLE t ADD COLUMN c")
    assert tables_and_resnapshots(r.check()) == [("t", False)]  # nothing was written meanwhile: nothing can be missing
    r.foreign.script("INSERT INTO t VALUES (3, 3, 3, 3)", "UPDATE t SET c = 'e'")
    assert images(r.check())[0] == (None, (3, 3, 3, 3))


def test_foreign_column_written_before_capture_adapts_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.script("ALTER TABLE t ADD COLUMN c", "INSERT INTO t VALUES (3, 3, 3, 'unseen')")
    changes = r.settle()
    assert tables_and_resnapshots(changes) == [("t", True)]
    r.foreign.run("UPDATE t SET c = 1")
    assert len(r.check()) == 3


@pytest.mark.parametrize("gap", [False, True])
def test_column_renamed_by_another_program_is_reported(rig: Attach, gap: bool) -> None:
    r = rig(T, SEED)
    r.foreign.run("ALTER TABLE t RENAME COLUMN a TO z")
    if gap:
        r.foreign.run("UPDATE t SET z = 'gap'")
    changes = r.settle()
    assert [name for name, _ in tables_and_resnapshots(changes)] == ["t"]
    r.foreign.run("UPDATE t SET z = 'later'")
    assert len(r.check()) == 2


@pytest.mark.parametrize("gap", [False, True])
def test_table_renamed_by_another_program_asks_for_a_snapshot(rig: Attach, gap: bool) -> None:
    r = rig(T, SEED)
    r.foreign.run("ALTER TABLE t RENAME TO u")
    if gap:
        r.foreign.run("UPDATE u SET a = 'gap'")
    changes = r.settle()
    assert tables_and_resnapshots(changes) == [("t", False), ("u", True)]
    r.foreign.run("UPDATE u SET a = 'later'")
    assert [c.table.name for c in r.check()] == ["u", "u"]


def test_table_renamed_to_other_capitals_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED, "CREATE TRIGGER g AFTER INSERT ON T BEGIN UPDATE t SET b = 'g' WHERE id = NEW.id; END")
    r.foreign.script("ALTER TABLE t RENAME TO x", "ALTER TABLE x RENAME TO T")
    assert tables_and_resnapshots(r.settle()) == [("t", False), ("T", True)]
    r.foreign.run("INSERT INTO t VALUES (20, 20, 20)")
    assert images(r.check()) == [(None, (20, 20, 20)), ((20, 20, 20), (20, 20, "g"))]


def test_tables_with_swapped_names_ask_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED, "CREATE TABLE u(k TEXT PRIMARY KEY)", "INSERT INTO u VALUES ('k')")
    r.foreign.script("ALTER TABLE t RENAME TO x", "ALTER TABLE u RENAME TO t", "ALTER TABLE x RENAME TO u")
    assert tables_and_resnapshots(r.settle()) == [("t", False), ("u", False), ("t", True), ("u", True)]
    r.foreign.script("INSERT INTO t VALUES ('l')", "DELETE FROM u")
    assert len(r.check()) == 3


def test_tables_created_and_dropped_by_another_program_are_followed(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.script("CREATE TABLE n(x)", "INSERT INTO n VALUES (1)", "CREATE TABLE empty(x)")
    assert tables_and_resnapshots(r.settle()) == [("empty", False), ("n", True)]
    r.foreign.script("DROP TABLE t", "DROP TABLE empty")
    r.check()
    assert set(r.captured()) == {"n"}
    r.foreign.script("DROP TABLE n", "CREATE TABLE n(x)")
    assert tables_and_resnapshots(r.settle()) == [("n", True)]
    r.foreign.run("INSERT INTO n VALUES (1)")
    assert len(r.check()) == 1


def test_table_of_another_program_between_two_of_ours_is_reported_under_its_own_statement(rig: Attach) -> None:
    r = rig(T, SEED)
    r.write("CREATE TABLE one(x)", "CREATE TABLE two(x)")
    r.foreign.run("CREATE TABLE theirs(x)")
    r.write("CREATE TABLE three(x)", "CREATE TABLE four(x)")
    found = [(change.table.name, change.ddl) for change in schema_changes(r.settle())]
    assert found == [(name, f"CREATE TABLE {name}(x)") for name in ("one", "two", "theirs", "three", "four")]
    r.foreign.script(*(f"INSERT INTO {name} VALUES (1)" for name, _ in found))
    assert len(r.check()) == 5


REBUILD = (
    "CREATE TABLE t_new(id INTEGER PRIMARY KEY, a TEXT NOT NULL, b)",
    "INSERT INTO t_new SELECT * FROM t",
    "DROP TABLE t",
    "ALTER TABLE t_new RENAME TO t",
)


@pytest.mark.parametrize("looks", [(), (0,), (1,), (2,), (0, 1, 2), (3,)])
def test_foreign_rebuild_checked_at_any_step_asks_for_a_snapshot(rig: Attach, looks: tuple[int, ...]) -> None:
    r = rig(T, SEED)
    changes = []
    for place, statement in enumerate(REBUILD):
        r.foreign.run(statement)
        if place in looks:
            changes += r.settle()
    changes += r.settle()
    assert ("t", True) in tables_and_resnapshots(changes)
    for statement in ("INSERT INTO t VALUES (9, 9, 9)", "UPDATE t SET a = 'n'", "REPLACE INTO t VALUES (1, 1, 1)"):
        r.foreign.run(statement)
        r.check()
    assert set(r.captured()) == {"t"}


def test_table_rebuilt_through_the_server_is_captured_afterwards(rig: Attach) -> None:
    r = rig(T, SEED)
    assert r.write(*REBUILD) == [""] * 4
    r.settle()
    r.foreign.script("INSERT INTO t VALUES (9, 9, 9)", "DELETE FROM t")
    assert len(r.check()) == 4


def test_foreign_drop_column_fails_with_the_name_of_the_capture_trigger(rig: Attach) -> None:
    r = rig(T, SEED)
    said = r.foreign.attempt("ALTER TABLE t DROP COLUMN a")
    assert "error in trigger _headwater_" in said
    assert r.check() == []
    r.foreign.run("UPDATE t SET a = 1")
    assert len(r.check()) == 2


def test_dropped_capture_triggers_are_restored_and_ask_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.script("DROP TRIGGER _headwater_1_insert", "INSERT INTO t VALUES (9, 9, 9)")
    assert tables_and_resnapshots(r.settle()) == [("t", True)]
    r.foreign.run("INSERT INTO t VALUES (10, 9, 9)")
    assert ops(r.check()) == ["insert"]


def test_foreign_vacuum_asks_for_a_snapshot_of_keyless_tables_only(rig: Attach) -> None:
    r = rig(T, SEED, "CREATE TABLE loose(x)", "INSERT INTO loose(rowid, x) VALUES (5, 'a'), (9, 'b')")
    r.foreign.run("VACUUM")
    assert tables_and_resnapshots(r.settle()) == [("loose", True)]
    r.foreign.script("UPDATE loose SET x = 'c'", "UPDATE t SET a = 0")
    r.check()
    r.foreign.run("VACUUM")
    assert tables_and_resnapshots(r.settle()) == [("loose", True)]


def test_vacuum_between_writes_asks_for_a_snapshot_of_a_keyless_table(rig: Attach) -> None:
    r = rig("CREATE TABLE loose(x)", "INSERT INTO loose(rowid, x) VALUES (5, 'a'), (9, 'b')")
    r.foreign.script("UPDATE loose SET x = 'b1' WHERE x = 'b'", "VACUUM", "INSERT INTO loose VALUES ('c')")
    assert ("loose", True) in tables_and_resnapshots(r.settle())
    r.foreign.run("DELETE FROM loose")
    assert len(r.check()) == 3


def test_replace_on_a_foreign_unique_index_is_captured(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.run("CREATE UNIQUE INDEX i ON t(a)")
    r.pull()
    r.foreign.run("REPLACE INTO t VALUES (9, 'x', 'new')")
    assert sorted(ops(r.check())) == ["delete", "insert"]


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX i ON t(a) WHERE b <> 0 -- only live rows",
        "CREATE UNIQUE INDEX i ON t(a) WHERE b <> 0 /* only live rows",
        "CREATE UNIQUE INDEX i ON t(lower(a) -- any case\n)",
        "CREATE UNIQUE INDEX i ON t(lower(a)/* any case */DESC)",
        "CREATE UNIQUE INDEX i ON t(lower(a)DESC)",
        "CREATE UNIQUE INDEX i ON t(lower(a) || '-- \"/* text') WHERE/**/b <> '--'--",
    ],
)
def test_replace_on_a_foreign_unique_index_with_comments_is_captured(rig: Attach, index: str) -> None:
    r = rig(T, SEED)
    r.foreign.run(index)
    r.pull()
    r.foreign.run("REPLACE INTO t VALUES (9, 'x', 'new')")
    assert sorted(ops(r.check())) == ["delete", "insert"]


def test_unique_index_used_before_capture_adapts_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.script("CREATE UNIQUE INDEX i ON t(a)", "REPLACE INTO t VALUES (9, 'x', 'new')")
    assert ("t", True) in tables_and_resnapshots(r.settle())


def test_ddl_while_headwater_is_stopped_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, SEED)
    r.foreign.run("UPDATE t SET a = 0")
    r.check()
    r.close()
    r.foreign.script(
        "ALTER TABLE t ADD COLUMN c", "UPDATE t SET c = 1", "CREATE TABLE n(x)", "INSERT INTO n VALUES (1)"
    )
    r.open()
    changes = r.settle()
    assert ("t", True) in tables_and_resnapshots(changes) and ("n", True) in tables_and_resnapshots(changes)
    r.foreign.script("UPDATE t SET c = 2", "DELETE FROM n")
    r.check()
