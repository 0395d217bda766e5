"""Writes made by the database itself: user triggers of every age, foreign-key actions, generated columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig, images, ops, schema_changes

Attach = Callable[..., Rig]

T = "CREATE TABLE t(id INTEGER PRIMARY KEY, x, n DEFAULT 0)"
STAMP_UPDATE = "CREATE TRIGGER u AFTER UPDATE OF x ON t BEGIN UPDATE t SET n = n + 1 WHERE id = NEW.id; END"
STAMP_INSERT = "CREATE TRIGGER i AFTER INSERT ON t BEGIN UPDATE t SET n = 100 WHERE id = NEW.id; END"
WRITES = (
    "INSERT INTO t(id, x) VALUES (1, 'a'), (2, 'b')",
    "UPDATE t SET x = x || '!'",
    "REPLACE INTO t(id, x) VALUES (1, 'again')",
    "UPDATE t SET id = 7, x = 'moved' WHERE id = 2",
    "DELETE FROM t",
)


@pytest.mark.parametrize("recursive", [0, 1])
def test_writes_of_older_triggers_are_captured_in_order(rig: Attach, recursive: int) -> None:
    r = rig(T, STAMP_UPDATE, STAMP_INSERT)
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    for statement in WRITES:
        r.foreign.run(statement)
        r.check()
    assert r.write(*WRITES) == [""] * len(WRITES)
    assert images(r.check())[:2] == [(None, (1, "a", 0)), ((1, "a", 0), (1, "a", 100))]


def test_trigger_created_through_the_server_fires_before_the_capture_triggers(rig: Attach) -> None:
    r = rig(T)
    assert r.write(STAMP_UPDATE, STAMP_INSERT) == ["", ""]
    r.foreign.script(*WRITES)
    changes = r.check()
    assert images(changes)[:2] == [(None, (1, "a", 0)), ((1, "a", 0), (1, "a", 100))]


def test_foreign_trigger_is_handled_before_the_next_write(rig: Attach) -> None:
    r = rig(T)
    r.foreign.script(STAMP_UPDATE, STAMP_INSERT)
    assert r.check() == []
    r.foreign.script(*WRITES)
    assert images(r.check())[:2] == [(None, (1, "a", 0)), ((1, "a", 0), (1, "a", 100))]


@pytest.mark.parametrize("by_server", [True, False])
def test_trigger_with_other_capitals_in_its_table_name_fires_before_the_capture_triggers(
    rig: Attach, by_server: bool
) -> None:
    r = rig(T)
    trigger = "CREATE TRIGGER bad AFTER INSERT ON T WHEN NEW.x = 'bad' BEGIN DELETE FROM t WHERE id = NEW.id; END"
    if by_server:
        assert r.write(trigger) == [""]
    else:
        r.foreign.run(trigger)
    assert ops(r.check()) == []
    r.foreign.run("INSERT INTO t(id, x) VALUES (1, 'bad'), (2, 'good')")
    assert ops(r.check()) == ["insert", "delete", "insert"]


def test_images_are_chained_and_ask_for_a_snapshot_after_a_new_foreign_trigger(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (5, 'old', 0)")
    r.foreign.script(STAMP_UPDATE, STAMP_INSERT)
    r.foreign.script("INSERT INTO t(id, x) VALUES (1, 'a'), (2, 'b')", "UPDATE t SET x = x || '!' WHERE id = 1")
    changes = r.settle()
    assert images(changes) == [
        (None, (1, "a", 0)),
        ((1, "a", 0), (1, "a", 100)),
        (None, (2, "b", 0)),
        ((2, "b", 0), (2, "b", 100)),
        ((1, "a", 100), (1, "a!", 100)),
        ((1, "a!", 100), (1, "a!", 101)),
    ]
    # The order was recovered, but nothing proves it: readers are told to look.
    assert [change.resnapshot for change in schema_changes(changes)] == [True]


def test_foreign_trigger_that_undoes_an_update_asks_for_a_snapshot(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (1, 'a', 0)")
    r.foreign.script(
        "CREATE TRIGGER back AFTER UPDATE OF x ON t BEGIN UPDATE t SET x = OLD.x WHERE id = NEW.id; END",
        "UPDATE t SET x = 'b'",
    )
    r.fold.unknown.add("t")  # a → b → a: the images chain in both orders, only the table knows which
    assert [change.resnapshot for change in schema_changes(r.settle())] == [True]
    r.foreign.run("UPDATE t SET x = 'c'")
    assert images(r.check()) == [((1, "a", 0), (1, "c", 0)), ((1, "c", 0), (1, "a", 0))]


def test_images_without_a_provable_order_ask_for_a_snapshot(rig: Attach) -> None:
    before = "CREATE TRIGGER b BEFORE UPDATE OF x ON t BEGIN UPDATE t SET n = n + 1 WHERE id = OLD.id; END"
    r = rig(T, before, "INSERT INTO t VALUES (1, 'a', 0)")
    r.foreign.run("UPDATE t SET x = 'b'")
    r.fold.unknown.add("t")
    changes = r.settle()
    assert any(change.resnapshot and change.table.name == "t" for change in schema_changes(changes))


@pytest.mark.parametrize("recursive", [0, 1])
@pytest.mark.parametrize("unique", ["", "UNIQUE"])
def test_nested_inserts_into_the_same_table_are_captured(rig: Attach, recursive: int, unique: str) -> None:
    r = rig(
        f"CREATE TABLE t(id INTEGER PRIMARY KEY, x {unique})",
        "CREATE TRIGGER twin AFTER INSERT ON t WHEN NEW.id < 100 "
        "BEGIN REPLACE INTO t VALUES (NEW.id + 100, NEW.x || '+'); END",
        "CREATE TRIGGER shadow AFTER DELETE ON t WHEN OLD.id < 100 BEGIN DELETE FROM t WHERE id = OLD.id + 100; END",
    )
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    for statement in (
        "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
        "REPLACE INTO t VALUES (1, 'c')",
        "REPLACE INTO t VALUES (3, 'b')",
        "INSERT OR IGNORE INTO t VALUES (3, 'b'), (4, 'z')",
        "DELETE FROM t WHERE id IN (1, 3)",
    ):
        r.foreign.run(statement)
        r.check()


@pytest.mark.parametrize("recursive", [0, 1])
def test_before_trigger_that_writes_to_the_same_table_is_captured(rig: Attach, recursive: int) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, x UNIQUE, y)",
        "CREATE TRIGGER b BEFORE INSERT ON t WHEN NEW.id < 100 "
        "BEGIN REPLACE INTO t VALUES (NEW.id + 100, NEW.x || '+', 0); END",
        "INSERT INTO t VALUES (1, 'a', 0), (2, 'b', 0), (3, 'c', 0)",
    )
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    for statement in (
        "REPLACE INTO t VALUES (5, 'a', 1)",
        "REPLACE INTO t VALUES (2, 'c', 1)",
        "INSERT OR IGNORE INTO t VALUES (6, 'c', 1)",
        "REPLACE INTO t VALUES (105, 'c+', 1)",
        "UPDATE OR REPLACE t SET x = 'a' WHERE id = 2",
    ):
        r.foreign.run(statement)
        r.check()


@pytest.mark.parametrize(
    "head",
    [
        "after_fix INSERT ON t WHEN NEW.y = 1 BEGIN",
        "after INSERT ON t WHEN NEW.y = 1 BEGIN",
        "'AFTER' /* AFTER */ INSERT ON t WHEN NEW.y = 1 BEGIN",
        "[a.b AFTER] before INSERT ON t WHEN NEW.y = 1 BEGIN",
        "IF NOT EXISTS main.fix INSERT ON t WHEN NEW.y = 1\nBEGIN SELECT 1 AS after_id;",
    ],
)
def test_before_trigger_is_recognised_by_its_keyword(rig: Attach, head: str) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, x UNIQUE, y)",
        f"CREATE TRIGGER {head} REPLACE INTO t VALUES (100, 'z', 0); END",
        "INSERT INTO t VALUES (4, 'a', 0), (100, 'z', 0)",
    )
    r.foreign.run("REPLACE INTO t VALUES (5, 'a', 1)")
    r.check()


TABLES = {
    "rowid": "CREATE TABLE t(id INTEGER PRIMARY KEY, x, n DEFAULT 0)",
    "unique": "CREATE TABLE t(id INTEGER PRIMARY KEY, x UNIQUE, n DEFAULT 0)",
    "without rowid": "CREATE TABLE t(id TEXT PRIMARY KEY, x, n DEFAULT 0) WITHOUT ROWID",
}
BODIES = {
    "updates the row": "UPDATE t SET n = n + 1 WHERE id = {row}.id",
    "replaces the row": "REPLACE INTO t VALUES ({row}.id, {row}.x, 50)",
    "deletes the row": "DELETE FROM t WHERE id = {row}.id",
    "replaces another row": "REPLACE INTO t VALUES ({row}.id + 100, {row}.x || '+', 7)",
}
ROW_WRITES = (
    "INSERT INTO t(id, x) VALUES (1, 'a'), (2, 'b')",
    "REPLACE INTO t(id, x) VALUES (1, 'c')",
    "UPDATE t SET x = x || '!' WHERE id = 2",
    "DELETE FROM t WHERE id = 2",
    "REPLACE INTO t(id, x) VALUES (2, 'c')",
)


@pytest.mark.parametrize("recursive", [0, 1])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("op", ["INSERT", "UPDATE", "DELETE"])
@pytest.mark.parametrize("table", TABLES)
def test_writes_of_an_after_trigger_to_the_same_row_are_chained(
    rig: Attach, table: str, op: str, body: str, recursive: int
) -> None:
    row = "OLD" if op == "DELETE" else "NEW"
    guard = f"WHEN {row}.id + 0 < 100 AND {row}.n < 3"
    r = rig(TABLES[table], f"CREATE TRIGGER g AFTER {op} ON t {guard} BEGIN {BODIES[body].format(row=row)}; END")
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    for statement in ROW_WRITES:
        r.foreign.attempt(statement)  # some bodies break the table's own rules
        r.check()


@pytest.fixture(params=[True, False], ids=["server", "foreign"])
def by_server(request: pytest.FixtureRequest) -> bool:
    """Return whether our server runs the statement, or another program."""
    return bool(request.param)


PARENT = "CREATE TABLE p(id INTEGER PRIMARY KEY, code TEXT UNIQUE)"


@pytest.mark.parametrize("recursive", [0, 1])
@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "SET DEFAULT"])
def test_foreign_key_actions_are_captured(rig: Attach, action: str, recursive: int) -> None:
    r = rig(
        PARENT,
        f"CREATE TABLE c(id INTEGER PRIMARY KEY, p REFERENCES p(id) ON DELETE {action} ON UPDATE {action})",
        f"CREATE TABLE d(code TEXT REFERENCES p(code) ON DELETE {action} ON UPDATE {action}, n PRIMARY KEY) "
        "WITHOUT ROWID",
        "INSERT INTO p VALUES (1, 'a'), (2, 'b'), (3, 'c')",
        "INSERT INTO c VALUES (1, 1), (2, 1), (3, 2)",
        "INSERT INTO d VALUES ('a', 1), ('b', 2), ('b', 3)",
    )
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    for statement in (
        "UPDATE p SET id = id + 10, code = code || '!'",
        "REPLACE INTO p VALUES (11, 'b!')",
        "UPDATE OR REPLACE p SET code = 'c!' WHERE id = 11",
        "INSERT INTO c VALUES (9, 11)",
        "DELETE FROM p",
    ):
        r.foreign.run(statement)
        r.check()
    assert r.write("INSERT INTO p VALUES (1, 'a')", "INSERT INTO c VALUES (50, 1)", "DELETE FROM p") == ["", "", ""]
    r.check()


def test_cascades_of_a_self_referencing_table_are_captured(rig: Attach) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, parent REFERENCES t(id) ON DELETE CASCADE ON UPDATE CASCADE, x UNIQUE)",
        "INSERT INTO t VALUES (1, NULL, 'a'), (2, 1, 'b'), (3, 2, 'c'), (4, 1, 'd'), (5, NULL, 'e')",
    )
    for statement in (
        "UPDATE t SET id = 11 WHERE id = 1",
        "REPLACE INTO t VALUES (2, 5, 'b')",
        "REPLACE INTO t VALUES (50, 5, 'd')",
        "REPLACE INTO t VALUES (51, NULL, 'a')",
        "INSERT INTO t VALUES (60, 51, 'x'), (61, 60, 'y')",
        "DELETE FROM t WHERE id = 51",
    ):
        r.foreign.run(statement)
        r.check()


@pytest.mark.parametrize("end", ["", " WITHOUT ROWID"])
@pytest.mark.parametrize("rule", ["", " UNIQUE"])
def test_delete_by_replace_is_captured_if_its_cascade_removes_the_updated_row(
    rig: Attach, rule: str, end: str, by_server: bool
) -> None:
    r = rig(
        f"CREATE TABLE t(id INTEGER PRIMARY KEY, x{rule}, parent REFERENCES t(id) ON DELETE CASCADE){end}",
        "INSERT INTO t VALUES (3, 'c', NULL), (4, 'd', 3), (5, 'e', NULL), (6, 'f', 5)",
    )
    write = r.write if by_server else r.foreign.script
    write("UPDATE OR REPLACE t SET id = 3 WHERE id = 4")
    assert images(r.check()) == [((3, "c", None), None), ((4, "d", 3), None)]
    write("UPDATE OR REPLACE t SET id = 5, x = 'c' WHERE id = 6", "INSERT INTO t VALUES (5, 'e', NULL)")
    assert ops(r.check()) == ["delete", "delete", "insert"]


CHILD = "CREATE TABLE c(id INTEGER PRIMARY KEY, p REFERENCES t(id) ON DELETE CASCADE ON UPDATE CASCADE)"
NESTED = {
    "replaces another row": "REPLACE INTO t VALUES (100, 100, 'n')",
    "is ignored": "INSERT OR IGNORE INTO t VALUES (100, 7, 'n')",
    "moves another key": "UPDATE OR REPLACE t SET id = 102 WHERE id = 101",
    "inserts a row": "INSERT INTO t VALUES ((SELECT max(id) + 1 FROM t), NULL, 'n')",
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("rule", ["", " UNIQUE"])
def test_delete_by_replace_is_captured_if_a_trigger_of_a_child_writes_the_parent(
    rig: Attach, rule: str, nested: str, by_server: bool
) -> None:
    r = rig(
        f"CREATE TABLE t(id INTEGER PRIMARY KEY, u{rule}, v)",
        CHILD,
        f"CREATE TRIGGER d AFTER DELETE ON c BEGIN {NESTED[nested]}; END",
        f"CREATE TRIGGER u AFTER UPDATE ON c BEGIN {NESTED['inserts a row']}; END",
        "INSERT INTO t VALUES (1, 5, 'a'), (2, 6, 'b'), (3, 7, 'c'), (100, 100, 'x'), (101, 101, 'y'), (102, 102, 'z')",
        "INSERT INTO c VALUES (1, 1), (2, 1), (3, 2)",
    )
    write = r.write if by_server else r.foreign.script
    write("REPLACE INTO t VALUES (3, 5, 'outer')")
    r.check()
    write("UPDATE OR REPLACE t SET id = 3, u = 8 WHERE id = 2")
    r.check()


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_delete_by_replace_is_captured_if_a_temporary_trigger_writes_the_table(
    rig: Attach, when: str, nested: str
) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, u UNIQUE, v)",
        "INSERT INTO t VALUES (1, 5, 'a'), (3, 7, 'c'), (100, 100, 'x'), (101, 101, 'y'), (102, 102, 'z')",
    )
    r.foreign.script(
        f"CREATE TEMP TRIGGER i {when} INSERT ON main.t WHEN NEW.v = 'outer' BEGIN {NESTED[nested]}; END",
        "REPLACE INTO t VALUES (2, 5, 'outer')",
    )
    r.check()


def test_triggers_and_tables_of_an_older_version_are_renewed_without_a_snapshot(rig: Attach) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, parent REFERENCES t(id) ON DELETE CASCADE)",
        "INSERT INTO t VALUES (3, NULL), (4, 3)",
    )
    r.close()
    r.foreign.script(
        "PRAGMA writable_schema = 1",
        "UPDATE sqlite_schema SET sql = 'CREATE TRIGGER ' || name || ' AFTER DELETE ON t BEGIN SELECT 1; END' "
        "WHERE type = 'trigger'",
        "PRAGMA writable_schema = RESET",
        "ALTER TABLE _headwater_stash DROP COLUMN updated",
    )
    r.open()
    assert r.check() == []
    r.foreign.run("UPDATE OR REPLACE t SET id = 3 WHERE id = 4")
    assert ops(r.check()) == ["delete", "delete"]


def test_triggers_that_do_not_load_the_inputs_of_generated_columns_are_renewed(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, a, b, g AS (a || b) UNIQUE)")
    r.foreign.run("INSERT INTO t VALUES (1, 'a', 'x'), (2, 'b', 'x'), (3, 'c', 'x')")
    r.check()
    r.close()
    named = "substr(sql, 1, instr(sql, ' SELECT NEW.') - 1) || ' END'"
    r.foreign.script(
        "PRAGMA writable_schema = 1",
        f"UPDATE sqlite_schema SET sql = {named} WHERE name LIKE '%before_update'",
        "PRAGMA writable_schema = RESET",
    )
    r.open()
    assert r.check() == []
    r.foreign.run("UPDATE OR REPLACE t SET a = 'a' WHERE id = 2")
    assert ops(r.check()) == ["delete", "update"]


def test_layouts_that_do_not_know_the_numbered_key_are_renewed_without_a_snapshot(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)", "CREATE UNIQUE INDEX i ON t(id % 3)")
    r.foreign.run("INSERT INTO t(v) VALUES ('a'), ('b'), ('c')")
    r.check()
    r.close()
    r.foreign.run("UPDATE _headwater_layout SET shape = json_remove(shape, '$.numbered')")
    r.open()
    assert ops(r.check()) == []
    r.foreign.run("REPLACE INTO t(v) VALUES ('d')")
    assert ops(r.check()) == ["delete", "insert"]


@pytest.mark.parametrize("recursive", [0, 1])
def test_generated_columns_are_captured_with_their_values(rig: Attach, recursive: int) -> None:
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, a, v AS (a * 2) VIRTUAL, s AS (a || '!') STORED UNIQUE, "
        "w AS (v + 1) VIRTUAL)",
        "CREATE TABLE k(a, b AS (a + 1) STORED UNIQUE)",
        "INSERT INTO t(id, a) VALUES (1, 10), (2, 20)",
    )
    r.foreign.run(f"PRAGMA recursive_triggers = {recursive}")
    r.foreign.run("UPDATE t SET a = a + 1")
    assert images(r.check()) == [
        ((1, 10, 20, "10!", 21), (1, 11, 22, "11!", 23)),
        ((2, 20, 40, "20!", 41), (2, 21, 42, "21!", 43)),
    ]
    for statement in (
        "REPLACE INTO t(id, a) VALUES (3, 21)",
        "UPDATE OR REPLACE t SET a = 21 WHERE id = 1",
        "INSERT INTO k VALUES (1), (2)",
        "REPLACE INTO k VALUES (1)",
        "UPDATE OR REPLACE k SET a = 2",
        "DELETE FROM t",
    ):
        r.foreign.run(statement)
        r.check()


def test_delete_of_all_rows_is_captured_as_a_delete_per_row(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)")
    r.foreign.run("DELETE FROM t")
    assert ops(r.check()) == ["delete"] * 3


@pytest.mark.parametrize("name", ["t", "old", "new"])
def test_rows_displaced_by_a_qualified_partial_index_are_captured(rig: Attach, name: str) -> None:
    r = rig(
        f"CREATE TABLE {name}(id INTEGER PRIMARY KEY, u, v, p REFERENCES {name}(id) ON DELETE CASCADE)",
        f"CREATE UNIQUE INDEX i ON {name}(u) WHERE {name}.v > .5 AND main.[{name}] . \"v\" <> 't.v'",
    )
    r.foreign.run(f"INSERT INTO {name}(id, u, v) VALUES (1, 1, 1), (2, 2, 1)")
    r.foreign.run(f"REPLACE INTO {name}(id, u, v) VALUES (3, 1, 1)")
    r.foreign.run(f"UPDATE OR REPLACE {name} SET u = 1 WHERE id = 2")
    assert ops(r.check()) == ["insert", "insert", "delete", "insert", "delete", "update"]


@pytest.mark.parametrize("name", ["old", "new"])
def test_rows_displaced_in_a_table_called_as_a_row_of_a_trigger_are_captured(rig: Attach, name: str) -> None:
    r = rig(f"CREATE TABLE {name}(k TEXT PRIMARY KEY, u UNIQUE) WITHOUT ROWID")
    r.foreign.run(f"INSERT INTO {name} VALUES ('a', 1), ('b', 2)")
    r.foreign.run(f"UPDATE OR REPLACE {name} SET u = 5")
    assert ops(r.check()) == ["insert", "insert", "update", "delete", "update"]
