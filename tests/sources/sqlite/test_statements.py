"""Statements of callers through the source: what they may name, how much they may answer, what SQLite adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apsw
import pytest
from tests.sources.sqlite_source import Rig, ops
from tests.suite.deadlines import PATIENCE

from headwater.errors import AnswerTooLarge, Busy, InvalidRequest
from headwater.model.work.answer_limits import MEMORY
from headwater.sources.sqlite import connection_pool
from headwater.sources.sqlite.query import authorizer, statement_execution
from headwater.sources.write import Result

Attach = Callable[..., Rig]
T = "CREATE TABLE t(id INTEGER PRIMARY KEY, v)"
SEED = "INSERT INTO t VALUES (1, 'one'), (2, 'two'), (3, 'three')"
SEARCH = (
    "CREATE VIRTUAL TABLE f USING fts5(v, content='t', content_rowid='id')",
    "CREATE TRIGGER searched AFTER INSERT ON t BEGIN INSERT INTO f(rowid, v) VALUES (new.id, new.v); END",
)


def run(r: Rig, sql: str, args: Any = ()) -> Result:
    """Run a statement as sql.exec does: the source decides whether it only reads."""
    if r.source.is_read_only(sql):
        read = r.source.read(sql, args)
        return Result(read.columns, read.rows, truncated=read.truncated)
    return r.source.write(lambda s: s.execute(sql, args)).result(PATIENCE).value


# --- the schema moves between two statements -------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("RENAME COLUMN v TO w", "RENAME COLUMN w TO v"),
        ("ADD COLUMN n1", "DROP COLUMN n1"),
        ("ADD COLUMN n1", "RENAME COLUMN n1 TO n2"),
    ],
)
@pytest.mark.parametrize("by_others", [False, True])
def test_new_column_is_altered_at_once(rig: Attach, first: str, second: str, by_others: bool) -> None:
    r = rig(T, SEED)
    run(r, "SELECT * FROM t")
    if by_others:
        r.foreign.run(f"ALTER TABLE t {first}")
    else:
        run(r, f"ALTER TABLE t {first}")
    run(r, f"ALTER TABLE t {second}")
    run(r, "INSERT INTO t(id) VALUES (4)")
    r.settle()


def test_open_transaction_drops_a_column_added_by_another(rig: Attach) -> None:
    r = rig(T, SEED)
    tx = r.source.begin()
    run(r, "ALTER TABLE t ADD COLUMN n1")
    tx.run(lambda s: s.execute("ALTER TABLE t DROP COLUMN n1")).result(PATIENCE)
    tx.commit().result(PATIENCE)
    r.check()


# --- the size of an answer -------------------------------------------------------------------------------


def count_to(n: int) -> str:
    return f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT {n}) SELECT n FROM c"


def test_answer_is_truncated_at_the_row_limit(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_execution, "MAX_ROWS", 3)
    r = rig(T, SEED)
    assert (run(r, count_to(3)).truncated, len(run(r, count_to(3)).rows)) == (False, 3)
    cut = run(r, count_to(10**15))  # never read to its end
    assert (cut.truncated, cut.rows) == (True, ((1,), (2,), (3,)))


def test_answer_past_the_most_bytes_is_refused(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORY, "max_bytes", 100)
    r = rig(T, SEED)
    assert len(run(r, f"SELECT zeroblob(50) FROM ({count_to(2)})").rows) == 2
    with pytest.raises(AnswerTooLarge):
        run(r, f"SELECT zeroblob(50) FROM ({count_to(10**15)})")


def test_write_with_a_truncated_answer_is_completed(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_execution, "MAX_ROWS", 2)
    r = rig(T, SEED)
    done = run(r, "UPDATE t SET v = 'x' RETURNING id")
    assert (done.truncated, len(done.rows), done.affected) == (True, 2, 3)
    assert ops(r.check()) == ["update"] * 3


def test_value_larger_than_the_limit_of_callers_is_refused(rig: Attach) -> None:
    r = rig(T, SEED)
    for sql in ("SELECT zeroblob(300000000)", "INSERT INTO t(v) VALUES (zeroblob(300000000))"):
        with pytest.raises(InvalidRequest, match="too big|more than"):
            run(r, sql)
    assert r.check() == []


def test_capture_reads_a_value_that_is_larger_than_callers_may_make(
    rig: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorizer, "MAX_LENGTH", 100_000)
    r = rig(T, SEED)
    r.foreign.run("INSERT INTO t(v) VALUES (zeroblob(200000))")
    r.check()
    with pytest.raises(InvalidRequest, match="too big|more than"):
        run(r, "SELECT v FROM t WHERE id = 4")


def test_answer_without_enough_memory_is_refused(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    r = rig(T, SEED)

    def no_memory(*_: object, **__: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(statement_execution, "collect", no_memory)
    with pytest.raises(InvalidRequest, match="memory"):
        run(r, "SELECT 1")


# --- virtual tables --------------------------------------------------------------------------------------


def test_search_index_created_through_the_server_finds_new_rows(rig: Attach) -> None:
    r = rig(T, SEED)
    for sql in SEARCH:
        made = run(r, sql)
        assert (made.affected, made.last_insert_id) == (0, 0)
    run(r, "INSERT INTO f(f) VALUES ('rebuild')")
    run(r, "INSERT INTO t VALUES (4, 'hello world')")
    r.source.write(lambda s: s.insert("t", [{"id": 5, "v": "hello again"}])).result(PATIENCE)
    assert run(r, "SELECT rowid FROM f WHERE f MATCH 'hello' ORDER BY rowid").rows == ((4,), (5,))
    r.foreign.run("INSERT INTO t VALUES (6, 'hello there')")
    assert len(run(r, "SELECT rowid FROM f('hello')").rows) == 3
    assert "insert" in ops(r.settle())


def test_existing_search_index_finds_new_rows(rig: Attach) -> None:
    r = rig(T, *SEARCH, SEED)
    assert run(r, "SELECT rowid FROM f WHERE f MATCH 'two'").rows == ((2,),)
    run(r, "INSERT INTO t VALUES (4, 'four')")
    assert run(r, "SELECT rowid FROM f WHERE f MATCH 'four'").rows == ((4,),)
    r.settle()


@pytest.mark.parametrize(
    ("create", "insert", "select"),
    [
        ("fts5(a, b)", "INSERT INTO x VALUES ('red', 'blue')", "SELECT count(*) FROM x WHERE x MATCH 'blue'"),
        ("fts4(a, b)", "INSERT INTO x VALUES ('red', 'blue')", "SELECT count(*) FROM x WHERE x MATCH 'blue'"),
        ("rtree(id, low, high)", "INSERT INTO x VALUES (1, 2, 3)", "SELECT count(*) FROM x WHERE low < 2.5"),
    ],
)
def test_virtual_table_is_created_written_and_dropped_through_the_server(
    rig: Attach, create: str, insert: str, select: str
) -> None:
    module = create.partition("(")[0]
    if f"ENABLE_{'FTS3' if module == 'fts4' else module.upper()}" not in apsw.compile_options:
        pytest.skip(f"this SQLite has no {module}")
    r = rig(T, SEED)
    assert run(r, f"CREATE VIRTUAL TABLE x USING {create}").affected == 0
    assert run(r, insert).affected == 1
    assert run(r, select).rows == ((1,),)
    run(r, "DROP TABLE x")
    r.settle()


# --- our own names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM _headwater_meta",
        "SELECT * FROM _HEADWATER_META",
        "WITH _headwater_x AS (SELECT * FROM _headwater_meta) SELECT * FROM _headwater_x",
        "WITH _headwater_1_insert AS (SELECT * FROM _headwater_meta) SELECT * FROM _headwater_1_insert",
        "WITH '_headwater_1_insert' AS (SELECT * FROM _headwater_meta) SELECT * FROM \"_headwater_1_insert\"",
        "WITH x AS (SELECT * FROM _headwater_meta) SELECT * FROM x AS _headwater_1_insert",
        "DELETE FROM t WHERE v IN (WITH _headwater_1_insert AS (SELECT value FROM _headwater_meta) "
        "SELECT value FROM _headwater_1_insert)",
        "ALTER TABLE t RENAME TO _headwater_t",
        "ALTER TABLE t RENAME TO _Headwater_t",
        "CREATE TABLE _Headwater_t(x)",
        "CREATE TRIGGER mine AFTER INSERT ON t BEGIN DELETE FROM _headwater_capture; END",
        "CREATE TRIGGER mine AFTER INSERT ON t BEGIN DELETE FROM _HEADWATER_capture; END",
        "CREATE VIEW mine AS SELECT * FROM _headwater_meta",
        "CREATE VIRTUAL TABLE mine USING fts5(value, content='_headwater_meta')",
        "CREATE INDEX mine ON _headwater_capture(t)",
        "PRAGMA data_version = 5",
        "PRAGMA page_size = 512",
        "PRAGMA foreign_keys = 0",
    ],
)
def test_statement_on_headwater_names_is_refused(rig: Attach, sql: str) -> None:
    r = rig(T, SEED)
    before = run(r, "SELECT type, name, sql FROM sqlite_schema").rows
    with pytest.raises(InvalidRequest):
        run(r, sql)
    assert run(r, "SELECT type, name, sql FROM sqlite_schema").rows == before
    run(r, "INSERT INTO t VALUES (4, 'four')")
    assert ops(r.check()) == ["insert"]


def test_refused_schema_change_keeps_the_open_transaction(rig: Attach) -> None:
    r = rig(T, SEED)
    tx = r.source.begin()
    tx.run(lambda s: s.execute("DELETE FROM t WHERE id > 1")).result(PATIENCE)
    with pytest.raises(InvalidRequest, match="_headwater_t"):
        tx.run(lambda s: s.execute("ALTER TABLE t RENAME TO _headwater_t")).result(PATIENCE)
    tx.run(lambda s: s.execute("INSERT INTO t VALUES (9, 'nine')")).result(PATIENCE)
    tx.commit().result(PATIENCE)
    assert run(r, "SELECT id FROM t").rows == ((1,), (9,))
    assert ops(r.check()) == ["delete", "delete", "insert"]


def test_text_with_the_headwater_prefix_is_captured_as_data(rig: Attach) -> None:
    r = rig(T, SEED)
    run(r, "INSERT INTO t VALUES (4, '_headwater_ is a prefix')")
    run(r, "INSERT INTO t VALUES (5, ?)", ["_headwater_1_insert"])
    assert ops(r.check()) == ["insert", "insert"]


def test_foreign_view_that_mentions_the_headwater_prefix_does_not_block_ddl(rig: Attach) -> None:
    r = rig(T, SEED, "CREATE VIEW old AS SELECT '_headwater_' AS x")
    run(r, "ALTER TABLE t RENAME TO u")
    r.settle()


# --- the text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1;",
        "SELECT 1; -- c",
        "SELECT 1; -- c\n",
        "SELECT 1; /* b */",
        "SELECT 1 /* b */ ; ; -- x",
        "SELECT 1;/* b",
    ],
)
def test_comment_after_a_statement_is_accepted(rig: Attach, sql: str) -> None:
    assert run(rig(T), sql).rows == ((1,),)


@pytest.mark.parametrize(
    "sql", ["SELECT 1; SELECT 2", "SELECT 1; /* a */ SELECT 2 /* b */", "SELECT 1; -- c\nSELECT 2", "SELECT 1; x"]
)
def test_two_statements_with_any_separator_are_refused(rig: Attach, sql: str) -> None:
    with pytest.raises(InvalidRequest, match="one statement"):
        run(rig(T), sql)


@pytest.mark.parametrize("sql", ["ANALYZE", "ANALYZE t", "REINDEX", "REINDEX t"])
def test_analyze_and_reindex_are_accepted_and_capture_continues(rig: Attach, sql: str) -> None:
    r = rig(T, "CREATE INDEX by_v ON t(v)", SEED)
    for _ in range(2):
        done = run(r, sql)
        assert (done.affected, done.last_insert_id) == (0, 0)
        run(r, "UPDATE t SET v = v || '.'")
        assert ops(r.check()) == ["update"] * 3


_NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT {}) "


@pytest.mark.parametrize("read_only_transaction", [False, True])
def test_temporary_rows_past_the_memory_limit_are_refused(
    rig: Attach, monkeypatch: pytest.MonkeyPatch, read_only_transaction: bool
) -> None:
    monkeypatch.setattr(connection_pool, "READ_HEAP", apsw.memory_used() + (16 << 20))
    r = rig(T, SEED)
    sql = _NUMBERS.format(100_000) + ", m AS MATERIALIZED (SELECT zeroblob(1000) AS z FROM n) SELECT count(z) FROM m"

    def ask(text: str) -> Any:
        if not read_only_transaction:
            return r.source.read(text).rows
        tx = r.source.begin(read_only=True)
        try:
            return tx.run(lambda s: s.execute(text)).result(PATIENCE).rows
        finally:
            tx.rollback().result(PATIENCE)

    with pytest.raises(Busy, match="MiB of memory"):
        ask(sql)
    assert ask(sql.replace("100000", "1000")) == ((1_000,),)
    assert run(r, "INSERT INTO t(v) VALUES ('still works')").affected == 1


@pytest.mark.slow
def test_sort_of_a_million_rows_succeeds_within_the_memory_limit(rig: Attach) -> None:
    sql = (
        _NUMBERS.format(1_000_000)
        + "SELECT max(r) FROM (SELECT row_number() OVER (ORDER BY x * 7919 % 1000003) r FROM n)"
    )
    assert rig(T).source.read(sql).rows == ((1_000_000,),)


def test_long_statement_text_is_not_remembered() -> None:
    watched = authorizer.Guard(apsw.Connection(":memory:"), 30)
    short, long = "SELECT 1 AS v", f"SELECT 1 AS v /*{'x' * authorizer.MAX_KNOWN_TEXT}*/"
    assert watched.examine(short) == watched.examine(long)
    assert list(watched._known) == [short]
