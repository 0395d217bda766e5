"""SQL as the caller wrote it, on a real SQLite file."""

from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Files, dump
from tests.suite.deadlines import PATIENCE

from headwater.errors import DuplicateKey, Forbidden, InvalidRequest, NotFound, NotSupported
from headwater.model.literal import UNAVAILABLE
from headwater.model.principal import ANONYMOUS, EDITOR, Principal, Scope
from headwater.queries.missing_names import no_table
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.sql import Outcome, Statement, check_format
from headwater.queries.statements.transactions import Transactions


@pytest.fixture
def files(tmp_path: Path) -> Any:
    with Files(tmp_path) as found:
        found.run("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT UNIQUE)")
        yield found


class Run:
    def __init__(self, files: Files) -> None:
        self.transactions = Transactions(files)
        self.statement = Statement(files, self.transactions)

    def __call__(self, sql: str, args: Any = (), *, who: Principal = ANONYMOUS, **more: Any) -> Outcome:
        found = self.statement.execute(who, sql, args, **more)
        return found.result(PATIENCE) if isinstance(found, PendingAnswer) else found


@pytest.fixture
def run(files: Files) -> Run:
    return Run(files)


def test_write_returns_its_result_and_a_read_returns_the_new_rows(files: Files, run: Run) -> None:
    done = run("INSERT INTO t (v) VALUES (?), (?)", ["a", "b"])
    assert (done.affected, done.last_insert_id) == (2, 2)
    assert done.causality is not None
    assert [(dep.table, dep.v) for dep in done.causality.deps] == [("main.t", files.get("main").head())]
    read = run("SELECT id, v AS w FROM t WHERE v = :v", {"v": "b"})
    assert (read.columns, read.rows, read.causality) == (("id", "w"), ((2, "b"),), None)


DDL = (
    "DROP TABLE t",
    "ALTER TABLE t ADD COLUMN x",
    "CREATE TABLE u (id INTEGER PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS t (id)",
    "CREATE INDEX i ON t (v)",
    "CREATE VIEW w AS SELECT 1",
    "CREATE TRIGGER g AFTER INSERT ON t BEGIN SELECT 1; END",
    "/* DELETE FROM t */ DROP TABLE t",
)


@pytest.mark.parametrize("sql", DDL)
def test_ddl_by_editor_is_forbidden_and_changes_nothing(files: Files, run: Run, sql: str) -> None:
    editor = Principal("ed", EDITOR)
    run("INSERT INTO t (v) VALUES ('x')", who=editor)
    before = dump(files.path("main"))
    with pytest.raises(Forbidden, match="role owner"):
        run(sql, who=editor)
    tx = run.transactions.begin(editor).tx
    with pytest.raises(Forbidden, match="role owner"):
        run(sql, who=editor, tx=tx)
    run.transactions.rollback(editor, tx).result(PATIENCE)
    assert dump(files.path("main")) == before
    run(sql)


def test_insert_returning_gives_the_inserted_row(run: Run) -> None:
    assert run("INSERT INTO t (v) VALUES ('x') RETURNING id, v").rows == ((1, "x"),)


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "   -- nothing",
        "SELEKT 1",
        "SELECT nope FROM t",
        'SELECT "nope" FROM t',
        "SELECT * FROM nope",
        "SELECT 1; SELECT 2",
        "INSERT INTO t (v) VALUES ('a'); DELETE FROM t",
        "BEGIN",
        "COMMIT",
        "SAVEPOINT a",
        "PRAGMA journal_mode = DELETE",
        "ATTACH ':memory:' AS x",
        "VACUUM INTO 'copy.db'",
        "INSERT INTO t (v) VALUES (?)\0",
        "INSERT INTO t (id, v) VALUES ('x', 'y')",
        "CREATE TEMP TABLE x (y)",
        "SELECT load_extension('x')",
        "\ud800",
    ],
)
def test_invalid_forbidden_or_multiple_statements_are_rejected_and_change_nothing(
    files: Files, run: Run, sql: str
) -> None:
    before, head = dump(files.path("main")), files.get("main").head()
    with pytest.raises(InvalidRequest):
        run(sql)
    assert (dump(files.path("main")), files.get("main").head()) == (before, head)


@pytest.mark.parametrize("args", [[], [1, 2], {"nope": 1}, [UNAVAILABLE]])
def test_arguments_must_be_those_of_the_statement(files: Files, run: Run, args: Any) -> None:
    for sql in ("SELECT ?", "INSERT INTO t (v) VALUES (?)"):
        with pytest.raises(InvalidRequest):
            run(sql, args)
    assert files.rows("SELECT * FROM t") == []


@pytest.mark.parametrize(
    ("sql", "args", "said"),
    [
        ("SELECT ?", [1, 2], "the statement takes 1 argument, 2 given"),
        ("SELECT ?2, ?1, ?1", [1], "the statement takes 2 arguments, 1 given"),
        ("SELECT :a", [], "the statement takes 1 argument, 0 given"),
        ("INSERT INTO t (v) VALUES ('x')", [1], "the statement takes 0 arguments, 1 given"),
    ],
)
def test_wrong_number_of_arguments_error_has_the_expected_number(
    run: Run, sql: str, args: list[Any], said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        run(sql, args)
    assert refused.value.message == said and refused.value.hint
    assert run("SELECT ?2, ?1, ?1", [1, 2]).rows == ((2, 1, 1),) and run("SELECT :a", [3]).rows == ((3,),)


@pytest.mark.parametrize("sql", ["SELECT * FROM user", "DELETE FROM main.user", "INSERT INTO user VALUES (1)"])
def test_missing_table_error_suggests_a_similar_name(files: Files, run: Run, sql: str) -> None:
    files.run("CREATE TABLE users (id INTEGER PRIMARY KEY)")
    with pytest.raises(InvalidRequest) as refused:
        run(sql)
    assert "no such table" in refused.value.message and refused.value.hint == "Did you mean 'users'?"


def test_hint_on_a_missing_table_names_only_tables_in_the_scopes_of_the_caller() -> None:
    error, some = InvalidRequest("no such table: payrol"), Principal("p", scopes=(Scope("main", ("staff",)),))
    error.missing_table = "payrol"
    assert no_table(error, ANONYMOUS, "main", ["payroll", "staff"]).hint == "Did you mean 'payroll'?"
    assert "payroll" not in no_table(error, some, "main", ["payroll", "staff"]).hint


def test_insert_of_an_existing_primary_or_unique_key_raises_duplicate_key(run: Run) -> None:
    run("INSERT INTO t VALUES (1, 'a')")
    for sql in ("INSERT INTO t VALUES (1, 'b')", "INSERT INTO t VALUES (2, 'a')"):
        with pytest.raises(DuplicateKey):
            run(sql)


def test_duplicate_column_names_are_returned_as_rows_and_refused_as_objects(files: Files, run: Run) -> None:
    assert run("SELECT 1 AS a, 2 AS a").rows == ((1, 2),)
    head = files.get("main").head()
    for sql in ("SELECT 1 AS a, 2 AS a", "INSERT INTO t (v) VALUES ('x') RETURNING id, v AS id"):
        with pytest.raises(InvalidRequest, match="'(a|id)'"):
            run(sql, named=True)
    assert files.get("main").head() == head


def test_insert_starting_with_a_cte_is_recognized_as_a_write(files: Files, run: Run) -> None:
    done = run("WITH x(v) AS (SELECT 'cte') INSERT INTO t (v) SELECT v FROM x")
    assert (done.affected, done.causality is None) == (1, False)
    assert files.rows("SELECT v FROM t") == [("cte",)]


def test_create_table_statement_advances_the_head_offset(files: Files, run: Run) -> None:
    head = files.get("main").head()
    run("CREATE TABLE u (id INTEGER PRIMARY KEY)")
    assert files.get("main").head() > head
    assert "u" in files.get("main").describe()


def test_statement_on_an_unknown_database_raises_not_found(run: Run) -> None:
    with pytest.raises(NotFound):
        run("SELECT 1", db="nowhere")
    assert run("SELECT 1", db="default").rows == ((1,),)


def test_unsupported_result_format_is_refused() -> None:
    assert [check_format(name) for name in (None, "rows_json", "objects_json")] == [False, False, True]
    with pytest.raises(NotSupported):
        check_format("skeinpack_v1")
    with pytest.raises(InvalidRequest):
        check_format("xml")
