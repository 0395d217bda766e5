"""Colliding rows: every conflict clause, on every kind of key, by every kind of writer, folds to the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig, images, ops
from tests.suite.deadlines import PATIENCE

from headwater.errors import DuplicateKey
from headwater.model.change import Change

Attach = Callable[..., Rig]
Run = Callable[..., list[str]]
WRITERS = ("foreign", "foreign, recursive triggers", "server")


@pytest.fixture(params=WRITERS)
def run(request: pytest.FixtureRequest) -> Callable[[Rig], Run]:
    """Return how the statements of one transaction are run; each may fail without ending the others."""

    def bind(rig: Rig) -> Run:
        if request.param == "server":
            return rig.write
        rig.foreign.run(f"PRAGMA recursive_triggers = {int('recursive' in request.param)}")

        def by_foreign(*statements: str) -> list[str]:
            rig.foreign.run("BEGIN IMMEDIATE")
            found = [rig.foreign.attempt(statement) for statement in statements]
            rig.foreign.run("COMMIT")
            return found

        return by_foreign

    return bind


T = "CREATE TABLE t(id INTEGER PRIMARY KEY, x NOT NULL)"


@pytest.mark.parametrize(
    ("clause", "kept"), [("", 0), ("OR ABORT", 0), ("OR FAIL", 2), ("OR IGNORE", 3), ("OR REPLACE", 4)]
)
def test_rows_kept_after_a_failed_third_row_are_captured(
    rig: Attach, run: Callable[[Rig], Run], clause: str, kept: int
) -> None:
    r = rig(T, "INSERT INTO t VALUES (3, 'old')")
    run(r)(f"INSERT {clause} INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd')")
    assert sum(change.after is not None for change in r.check()) == kept
    run(r)("INSERT INTO t VALUES (9, 'z')")
    assert ops(r.check()) == ["insert"]


def test_or_rollback_undoes_the_whole_transaction(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (3, 'old')")
    statements = ("INSERT INTO t VALUES (1, 'a')", "INSERT OR ROLLBACK INTO t VALUES (3, 'c')")
    r.foreign.run("BEGIN")
    assert "UNIQUE" in [r.foreign.attempt(statement) for statement in statements][1]
    assert r.check() == []
    with pytest.raises(DuplicateKey):
        r.source.write(lambda session: [session.execute(statement) for statement in statements]).result(PATIENCE)
    assert r.check() == []


def test_rolled_back_savepoints_are_not_captured(rig: Attach) -> None:
    r = rig(T, "INSERT INTO t VALUES (1, 'old')")
    r.foreign.script(
        "BEGIN",
        "INSERT INTO t VALUES (2, 'kept')",
        "SAVEPOINT a",
        "REPLACE INTO t VALUES (1, 'undone')",
        "INSERT INTO t VALUES (4, 'undone')",
        "SAVEPOINT b",
        "DELETE FROM t",
        "RELEASE b",
        "ROLLBACK TO a",
        "UPDATE t SET x = 'new' WHERE id = 1",
        "RELEASE a",
        "COMMIT",
    )
    assert images(r.check()) == [(None, (2, "kept")), ((1, "old"), (1, "new"))]
    r.foreign.script("BEGIN", "DELETE FROM t", "INSERT INTO t VALUES (5, 'x')", "ROLLBACK")
    assert r.check() == []


KEYS = {
    "integer key": "CREATE TABLE t(k INTEGER PRIMARY KEY, u, v)",
    "text key": "CREATE TABLE t(k TEXT PRIMARY KEY, u, v)",
    "any key": "CREATE TABLE t(k PRIMARY KEY, u, v)",
    "nocase key": "CREATE TABLE t(k TEXT COLLATE NOCASE PRIMARY KEY, u, v)",
    "rtrim key": "CREATE TABLE t(k TEXT COLLATE RTRIM PRIMARY KEY, u, v)",
    "without rowid": "CREATE TABLE t(k TEXT PRIMARY KEY, u, v) WITHOUT ROWID",
    "composite": "CREATE TABLE t(k, u, v, PRIMARY KEY (k, u))",
    "composite without rowid": "CREATE TABLE t(k, u, v, PRIMARY KEY (u, k)) WITHOUT ROWID",
    "unique": "CREATE TABLE t(k INTEGER PRIMARY KEY, u UNIQUE, v)",
    "unique nocase": "CREATE TABLE t(k INTEGER PRIMARY KEY, u TEXT COLLATE NOCASE UNIQUE, v)",
    "two uniques": "CREATE TABLE t(k INTEGER PRIMARY KEY, u UNIQUE, v UNIQUE)",
    "composite unique": "CREATE TABLE t(k INTEGER PRIMARY KEY, u, v, UNIQUE (u, v))",
    "no key": "CREATE TABLE t(k, u, v)",
    "no key but unique": "CREATE TABLE t(k, u UNIQUE, v)",
    "text key and unique": "CREATE TABLE t(k TEXT PRIMARY KEY, u UNIQUE, v) WITHOUT ROWID",
    "blob key": "CREATE TABLE t(k BLOB PRIMARY KEY, u, v)",
    "json key": "CREATE TABLE t(k JSON PRIMARY KEY, u, v)",
    "decimal key": "CREATE TABLE t(k DECIMAL_TEXT PRIMARY KEY, u, v)",
    "uuid key": "CREATE TABLE t(k UUID PRIMARY KEY, u, v)",
    "date key": "CREATE TABLE t(k DATE PRIMARY KEY, u, v)",
    "boolean key": "CREATE TABLE t(k BOOLEAN PRIMARY KEY, u, v)",
    "replace by default": "CREATE TABLE t(k PRIMARY KEY ON CONFLICT REPLACE, u UNIQUE ON CONFLICT REPLACE, v)",
    "ignore by default": "CREATE TABLE t(k PRIMARY KEY ON CONFLICT IGNORE, u UNIQUE ON CONFLICT IGNORE, v)",
}
SEED = "INSERT INTO t(k, u, v) VALUES (1, 'a', 'x'), (2, 'b', 'y'), (3, 'c', 'z')"


@pytest.mark.parametrize("table", KEYS.values(), ids=KEYS)
def test_every_conflict_clause_on_every_key_is_captured(rig: Attach, run: Callable[[Rig], Run], table: str) -> None:
    r = rig(table, SEED)
    go = run(r)
    for clause in ("OR REPLACE", "OR IGNORE", "OR FAIL", "OR ABORT", "OR REPLACE"):
        go(f"INSERT {clause} INTO t(k, u, v) VALUES (1, 'a', 'n1'), (7, 'b', 'n2'), (2, 'Q', 'n3'), (8, 'q', 'z')")
        r.check()
        go(f"INSERT {clause} INTO t(k, u, v) VALUES (1, 'b', 'z')", "UPDATE t SET v = v || '!' WHERE k = 1")
        r.check()
        go(f"UPDATE {clause} t SET k = 3 WHERE k = 1", f"UPDATE {clause} t SET u = 'c' WHERE k = 2")
        r.check()
        go(f"UPDATE {clause} t SET k = 5, u = 'Q', v = 'n3'")
        r.check()
        go("DELETE FROM t WHERE k IN (1, 5)", f"INSERT {clause} INTO t(k, u, v) VALUES (5, 'a', 0), (1, 'A', 1)")
        r.check()
    go("DELETE FROM t")
    r.check()


def test_replace_on_the_key_is_captured_as_an_update(rig: Attach, run: Callable[[Rig], Run]) -> None:
    r = rig(KEYS["integer key"], SEED)
    run(r)("REPLACE INTO t VALUES (1, 'n', 'n')")
    changes = r.check()
    recursive = ops(changes) == ["delete", "insert"]
    assert recursive or images(changes) == [((1, "a", "x"), (1, "n", "n"))]


def test_replace_that_displaces_several_rows_captures_each_delete(rig: Attach, run: Callable[[Rig], Run]) -> None:
    r = rig(KEYS["two uniques"], SEED)
    run(r)("REPLACE INTO t VALUES (1, 'b', 'z')")
    changes = r.check()
    assert sorted(ops(changes)) == ["delete", "delete", "delete", "insert"]
    assert [c.before[0] for c in changes[:3] if c.before] == [1, 2, 3] or len(changes) == 4


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX i ON t(lower(u))",
        "CREATE UNIQUE INDEX i ON t(u) WHERE v IS NOT NULL",
        "CREATE UNIQUE INDEX i ON t(u || '-' || v, k > 5) WHERE k <> 2",
        "CREATE UNIQUE INDEX i ON t(u COLLATE NOCASE)",
        "CREATE UNIQUE INDEX i ON t(u COLLATE NOCASE DESC, v ASC)",
        'CREATE UNIQUE INDEX "odd (name, WHERE" ON t("u", /* , ) */ lower("v")) -- WHERE x\n WHERE v <> \')\'',
        "CREATE UNIQUE INDEX i ON t(abs(k % 3), coalesce(u, ')'))",
    ],
)
def test_replace_on_expression_and_partial_indexes_is_captured(
    rig: Attach, run: Callable[[Rig], Run], index: str
) -> None:
    r = rig(KEYS["integer key"], index, "INSERT INTO t VALUES (1,'a','x'), (2,'b','y'), (3,'c',NULL), (9,'d','q')")
    go = run(r)
    for clause in ("OR REPLACE", "OR IGNORE", "OR FAIL"):
        go(f"INSERT {clause} INTO t VALUES (4,'A','x'), (5,'B','Y'), (6,'c',NULL), (7, 'a', 'x')")
        r.check()
        go(f"UPDATE {clause} t SET u = 'a', v = 'x' WHERE k IN (2, 9)", f"UPDATE {clause} t SET v = 'w' WHERE k = 3")
        r.check()
        go(f"INSERT {clause} INTO t VALUES (3,'c','w'), (1, 'z', 'z'), (12, 'C', 'W')")
        r.check()


COMPUTED = {
    "virtual": ("g AS (a || b) UNIQUE",),
    "stored": ("g AS (a || b) STORED UNIQUE",),
    "replace by default": ("g AS (a || b) UNIQUE ON CONFLICT REPLACE",),
    "of another generated column": ("f AS (a || ''), g AS (f || b) UNIQUE",),
    "in an index": ("g AS (a || b)", "CREATE UNIQUE INDEX i ON t(g)"),
    "in a partial index": ("g AS (a || b), h AS (a)", "CREATE UNIQUE INDEX i ON t(g) WHERE h IS NOT NULL"),
    "in an expression": ("g AS (a || b)", "CREATE UNIQUE INDEX i ON t(lower(g))"),
    "with a collation": ("g TEXT AS (a || b)", "CREATE UNIQUE INDEX i ON t(g COLLATE NOCASE)"),
    "behind 32 columns": (", ".join(f"c{n}" for n in range(30)) + ", d AS (b) STORED, g AS (a || d) UNIQUE",),
    "beside an ordinary column": ("g AS (a || 'x'), UNIQUE (b, g)",),
}


@pytest.mark.parametrize("key", ["id INTEGER PRIMARY KEY", "id"])
@pytest.mark.parametrize("rule", COMPUTED)
def test_row_displaced_by_an_update_of_one_input_of_a_generated_column_is_captured(
    rig: Attach, run: Callable[[Rig], Run], rule: str, key: str
) -> None:
    columns, *index = COMPUTED[rule]
    rows = "INSERT INTO t(id, a, b) VALUES (1, 'a', 'x'), (2, 'b', 'x'), (3, 'a', 'y')"
    r = rig(f"CREATE TABLE t({key}, a TEXT, b TEXT, {columns})", *index, rows)
    go = run(r)
    go("UPDATE OR REPLACE t SET a = 'a' WHERE id = 2")
    assert ops(r.check()) == ["delete", "update"]
    go("UPDATE OR REPLACE t SET b = 'y' WHERE id = 2", "UPDATE OR REPLACE t SET id = 9, b = 'z' WHERE id = 2")
    assert ops(r.check()) == ["delete", "update", "update"]


COMPARING = {
    "integer with text": ("a INTEGER", "a = '1'", 1, 7),
    "text with integer": ("a TEXT", "CASE a WHEN 1 THEN 'one' END", "'1'", "'x'"),
    "fraction with text": ("a NUMERIC", "a IN ('2.5', 'x')", 2.5, 7),
    "text in an integer column": ("a INTEGER", "a <> 'x'", "'x'", 7),
    "bytes in a text column": ("a TEXT", "a BETWEEN x'60' AND x'62'", "x'61'", "'a'"),
    "text of a collation": ("a TEXT COLLATE NOCASE", "a = 'A'", "'a'", "'b'"),
    "beside bytes in a numeric column": ("a INTEGER, c NUMERIC DEFAULT x'61'", "c, a = '1'", 1, 7),
    "generated column": ("b INTEGER, a TEXT AS (b)", "a = 1", None, None),
}


@pytest.mark.parametrize("kind", COMPARING)
def test_row_displaced_by_an_index_on_a_comparison_is_captured(
    rig: Attach, run: Callable[[Rig], Run], kind: str
) -> None:
    column, term, value, other = COMPARING[kind]
    name, value, other = ("a", value, other) if value is not None else ("b", 1, 7)
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, {column})", f"CREATE UNIQUE INDEX i ON t({term}, id > 5)")
    go = run(r)
    go(f"INSERT INTO t(id, {name}) VALUES (1, {value}), (2, {other})")
    assert ops(r.check()) == ["insert"] * 2
    go(f"REPLACE INTO t(id, {name}) VALUES (3, {value})")
    assert ops(r.check()) == ["delete", "insert"]
    go(f"UPDATE OR REPLACE t SET {name} = {value} WHERE id = 2")
    assert ops(r.check()) == ["delete", "update"]


NUMBERED = {
    "expression": ("", "CREATE UNIQUE INDEX i ON t(id % 3)"),
    "generated": (", slot INT AS (id % 3) UNIQUE",),
    "generated, replaced by default": (", slot INT AS (id % 3) UNIQUE ON CONFLICT REPLACE",),
    "generated and stored": (", slot TEXT AS (id % 3 /* ) */) STORED UNIQUE",),
    "generated from generated columns": (', "a (" AS (b + 0), slot INT AS ("a (" % 3) UNIQUE, b AS (id)',),
    "generated in an expression": (", b GENERATED ALWAYS AS (id % 3)", "CREATE UNIQUE INDEX i ON t(abs(b), 1)"),
    "computed from converted values": (", a REAL AS (id % 3) STORED, slot AS (length(a) || a) UNIQUE",),
    "compared": (", u TEXT DEFAULT 1", "CREATE UNIQUE INDEX i ON t(id % 3, u = 1, id + 0 = '-5')"),
    "beside other rules": (", slot AS (id % 3), UNIQUE (w, slot), UNIQUE (id, v)",),
    "partial": (", slot AS (id % 3)", "CREATE UNIQUE INDEX i ON t(slot COLLATE NOCASE) WHERE v > 'A'"),
}


@pytest.mark.parametrize("key", ["id INTEGER PRIMARY KEY", "id INTEGER PRIMARY KEY AUTOINCREMENT"])
@pytest.mark.parametrize("rule", NUMBERED)
def test_row_displaced_by_a_rule_on_the_key_that_sqlite_numbers_is_captured(
    rig: Attach, run: Callable[[Rig], Run], rule: str, key: str
) -> None:
    columns, *index = NUMBERED[rule]
    r = rig(f"CREATE TABLE t({key}, v TEXT, w DEFAULT 1{columns})", *index)
    go = run(r)
    go("INSERT INTO t(v) VALUES ('a'), ('b'), ('c')")
    r.check()
    go("REPLACE INTO t(v) VALUES ('d')")
    assert images_of(r.check()) == [(1, None), (None, 4)]
    go("REPLACE INTO t(v) VALUES ('e'), ('f'), ('g')", "REPLACE INTO t(id, v) VALUES (NULL, 'h')")
    assert sorted(ops(r.check())) == ["delete"] * 4 + ["insert"] * 4
    go("REPLACE INTO t(id, v) VALUES (-1, 'i')", "REPLACE INTO t(id, v) VALUES (-2, 'j'), (-1, 'k')")
    r.check()
    go("DELETE FROM t WHERE id > 5", "REPLACE INTO t(v) SELECT v FROM t", "UPDATE t SET v = v || '!'")
    r.check()
    go("DELETE FROM t", "REPLACE INTO t(id, v) VALUES (-7, 'l')", "REPLACE INTO t(v) VALUES ('m'), ('n'), ('o')")
    r.check()


@pytest.mark.parametrize("columns", [4, 5])
def test_rule_on_the_key_through_many_generated_columns_is_captured_or_refused_with_a_reason(
    rig: Attach, columns: int
) -> None:
    chain = ", ".join(f"g{n} AS ({'id % 3' if n == 1 else f'g{n - 1} + 1'})" for n in range(1, columns + 1))
    r = rig(f"CREATE TABLE t(id INTEGER PRIMARY KEY, v, {chain}, UNIQUE (g{columns}))", "CREATE TABLE ok(x)")
    r.foreign.run("INSERT INTO t(v) VALUES ('a'), ('b'), ('c')")
    r.foreign.run("REPLACE INTO t(v) VALUES ('d')")
    assert ops(r.check()) == (["insert"] * 3 + ["delete", "insert"] if columns == 4 else [])
    assert "generated" in r.source.status()["uncaptured"].get("t", "") or columns == 4


def images_of(changes: list[Change]) -> list[tuple[object, object]]:
    """Return the first value of the old and of the new row of each change."""
    return [(before and before[0], after and after[0]) for before, after in images(changes)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("unique", ["", "UNIQUE"])
def test_ignored_inserts_do_not_affect_later_captures(
    rig: Attach, run: Callable[[Rig], Run], unique: str, together: bool
) -> None:
    r = rig(f"CREATE TABLE t(k INTEGER PRIMARY KEY, u {unique}, v)", "INSERT INTO t VALUES (1, 2, 3)")
    statements = [
        "INSERT OR IGNORE INTO t VALUES (1, 'n', 'n')",
        "DELETE FROM t WHERE k = 1",
        "INSERT INTO t VALUES (1, 'again', 0)",
        "INSERT OR IGNORE INTO t VALUES (1, 'n', 'n')",
        "UPDATE t SET k = 8 WHERE k = 1",
        "INSERT INTO t VALUES (1, 'third', 0)",
        "INSERT OR IGNORE INTO t VALUES (1, 'n', 'n')",
        "UPDATE t SET v = 'v' WHERE k = 1",
        "REPLACE INTO t VALUES (1, 'fourth', 0)",
    ]
    for batch in [statements] if together else [[statement] for statement in statements]:
        assert run(r)(*batch) == [""] * len(batch)
        r.check()


@pytest.mark.parametrize("key", ["integer key", "two uniques", "without rowid", "nocase key", "no key but unique"])
def test_upsert_on_every_key_is_captured(rig: Attach, run: Callable[[Rig], Run], key: str) -> None:
    r = rig(KEYS[key], SEED)
    target = {"no key but unique": "u", "two uniques": "v"}.get(key, "k")
    go = run(r)
    again = f"ON CONFLICT({target}) DO UPDATE SET v = excluded.v || '+', k = k"
    go(f"INSERT INTO t(k, u, v) VALUES (1, 'a', 'x'), (50, 'n', 'n') {again}")
    r.check()
    go("INSERT INTO t(k, u, v) VALUES (2, 'b', 'y'), (60, 'm', 'm') ON CONFLICT DO NOTHING")
    r.check()
    go(f"INSERT INTO t(k, u, v) VALUES (3, 'c', 'z') ON CONFLICT({target}) DO UPDATE SET k = 99, v = 'moved'")
    r.check()


@pytest.mark.parametrize("key", ["integer key", "text key", "without rowid", "two uniques"])
def test_keys_swapped_in_a_transaction_are_captured_as_updates(
    rig: Attach, run: Callable[[Rig], Run], key: str
) -> None:
    r = rig(KEYS[key], SEED)
    run(r)("UPDATE t SET k = -1 WHERE k = 1", "UPDATE t SET k = 1 WHERE k = 2", "UPDATE t SET k = 2 WHERE k = -1")
    assert ops(r.check()) == ["update"] * 3


def test_explicit_rowids_of_a_keyless_table_are_captured(rig: Attach, run: Callable[[Rig], Run]) -> None:
    r = rig("CREATE TABLE t(a, b)", "INSERT INTO t VALUES (1, 1), (1, 1)")
    go = run(r)
    go("REPLACE INTO t(rowid, a, b) VALUES (2, 5, 5)", "INSERT INTO t(rowid, a) VALUES (-1, 0)")
    go("INSERT INTO t VALUES (7, 7)")
    r.check()
    go("UPDATE t SET rowid = 77 WHERE a = 5", "UPDATE OR REPLACE t SET _rowid_ = 77 WHERE a = 7")
    go("UPDATE t SET oid = oid + 1000")
    r.check()
    go("INSERT INTO t VALUES (8, 8)", "DELETE FROM t WHERE rowid < 1050")
    r.check()


def test_repeated_null_keys_are_captured(rig: Attach, run: Callable[[Rig], Run]) -> None:
    r = rig(KEYS["composite"], "INSERT INTO t VALUES (NULL, 1, 'a'), (NULL, 1, 'a'), (NULL, 1, 'b')")
    go = run(r)
    go("INSERT INTO t VALUES (NULL, 1, 'c'), (NULL, NULL, 'c')", "REPLACE INTO t VALUES (NULL, 1, 'a')")
    r.check()
    go("UPDATE t SET v = v || '!' WHERE v <> 'c'", "UPDATE t SET u = u + 1", "DELETE FROM t WHERE v = 'a!'")
    r.check()


@pytest.mark.parametrize("unique", ["", "UNIQUE"])
def test_explicit_rowid_beside_a_key_is_captured_or_asks_for_a_snapshot(
    rig: Attach, run: Callable[[Rig], Run], unique: str
) -> None:
    r = rig(
        f"CREATE TABLE t(k TEXT PRIMARY KEY, u {unique})", "INSERT INTO t(rowid, k, u) VALUES (1, 'a', 1), (2, 'b', 2)"
    )
    go = run(r)
    go("UPDATE OR REPLACE t SET rowid = 2 WHERE k = 'a'")
    assert sorted(ops(r.check())) == ["delete", "update"]
    go("REPLACE INTO t(rowid, k, u) VALUES (2, 'c', 3)")
    changes = r.settle()
    # Where the key is the only rule, nothing is written down for an insert: readers are told to look.
    assert unique or any(change.resnapshot for change in changes)
    go("REPLACE INTO t(rowid, k, u) VALUES (2, 'c', 4)", "INSERT OR IGNORE INTO t(rowid, k, u) VALUES (2, 'c', 5)")
    r.check()


@pytest.mark.parametrize("end", ["", " WITHOUT ROWID"])
def test_key_with_a_collation_unlike_its_column_is_refused_with_a_reason(rig: Attach, end: str) -> None:
    r = rig(f"CREATE TABLE t(k TEXT COLLATE RTRIM, v, PRIMARY KEY (k COLLATE NOCASE)){end}", "CREATE TABLE ok(x)")
    assert set(r.captured()) == {"ok"}
    assert "collation" in r.source.status()["uncaptured"]["t"]


@pytest.mark.parametrize(
    "key",
    ["k TEXT PRIMARY KEY", "k TEXT COLLATE NOCASE PRIMARY KEY", "k INTEGER PRIMARY KEY", "k PRIMARY KEY, u UNIQUE"],
)
@pytest.mark.parametrize("without", ["", " WITHOUT ROWID"])
def test_ignored_key_update_causes_no_later_delete(rig: Attach, key: str, without: str) -> None:
    if without and "INTEGER" not in key:
        key = key.replace("k ", "k NOT NULL ", 1) if key.startswith("k PRIMARY") else key
    r = rig(f"CREATE TABLE b({key}, v){without}", "INSERT INTO b(k, v) VALUES (10, 1), (20, 2)")
    for statement in (
        "UPDATE OR IGNORE b SET k = 20 WHERE k = 10",
        "INSERT OR REPLACE INTO b(k, v) VALUES (20, 3)",
        "UPDATE b SET k = 30 WHERE k = 10",
        "UPDATE OR IGNORE b SET k = 20 WHERE k = 30",
        "UPDATE OR REPLACE b SET k = 20 WHERE k = 30",
    ):
        r.foreign.run(statement)  # each its own commit, each seen before the next
        r.check()
