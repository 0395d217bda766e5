"""The cost of a statement's program, and the time limit of statements."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator

import apsw
import pytest
from tests.sources.sqlite.query.shop_analysis import run
from tests.sources.sqlite_source import MemoryNotes
from tests.suite.deadlines import PATIENCE

from headwater.errors import InvalidRequest
from headwater.model.predicate import Call, Col, Literal
from headwater.model.table import Column, Table
from headwater.sources.sqlite.query import authorizer
from headwater.sources.sqlite.query.authorizer import ANY_BINDINGS
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.slow_functions import SLOW, tiers_of
from headwater.sources.sqlite.query.statement_cost import Cost, cost_of, is_plain
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

LONG_ARRAY = "[" + "1," * 4_500_000 + "1]"
FAR = "'$[4500000]'"
APPENDS = ", ".join(["'$[#]', 1"] * 400)


def cost(sql: str) -> Cost:
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE t(x, y)")
    return cost_of(sql, db.execute(f"EXPLAIN {sql}", ANY_BINDINGS), SLOW)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT json_set(x, '$.a', 1, '$.b', (1), '$.c', max(1, 2)) FROM t",
        "SELECT JSON_SET /* ( */ (x, '$.(', 1, '$.b,c', 2, '$.c', 3) FROM t",
        "SELECT \"json_set\"(x, '$', 1, '$', 2, '$', 3), json_set(x, '$', 1) FROM t",
        "SELECT [json_set](x, '$', 1, '$', 2, '$', 3 -- )\n) FROM t",
    ],
)
def test_arguments_of_a_json_function_are_counted(sql: str) -> None:
    assert cost(sql).arguments == 7


def test_expressions_that_sqlite_copies_are_counted_at_each_place() -> None:
    columns = ", ".join(["c || 'a'"] * 50)
    copied = cost(f"SELECT {columns} FROM (SELECT upper(x) AS c FROM t)")
    assert copied.weight >= 50 * cost("SELECT upper(x) FROM t").weight


def test_calls_of_triggers_are_not_counted() -> None:
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE t(x); CREATE TRIGGER a AFTER INSERT ON t BEGIN SELECT upper(new.x); END")
    assert cost_of("", db.execute("EXPLAIN INSERT INTO t VALUES (1)"), SLOW).weight == 0


def test_only_short_statements_without_subqueries_are_plain() -> None:
    assert is_plain("SELECT id, x FROM t WHERE x > ?")
    assert not is_plain("SELECT CASE WHEN c < c THEN c ELSE c END FROM (SELECT x || ? AS c FROM t)")
    assert not is_plain("SELECT " + " OR ".join(["x > ?1"] * 100) + " FROM t")


def test_blob_literal_of_invalid_utf8_costs_as_much_as_a_number() -> None:
    assert cost("SELECT upper(x), x'ff', lower(x) FROM t") == cost("SELECT upper(x), 1, lower(x) FROM t")


def test_limits_of_slow_functions_are_lower_with_many_calls() -> None:
    few = tiers_of(frozenset({"like"}), Cost(slow_calls=8))
    many = tiers_of(frozenset({"like"}), Cost(slow_calls=80))
    assert few == tiers_of(frozenset({"like"}))
    assert all((less.length or 0) <= (more.length or 0) for less, more in zip(many, few, strict=True))
    assert (many[1].length or 0) * 10 <= (few[1].length or 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    path = tmp_path_factory.mktemp("cost") / "app.db"
    opened = SqliteSource(
        "app", str(path), notes=MemoryNotes(), config=SqliteConfig(wal=True, statement_seconds=PATIENCE)
    )
    try:
        assert opened.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
        run(opened, "CREATE TABLE t(id INTEGER PRIMARY KEY, x TEXT)")
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 5000)"
        run(opened, f"{numbers} INSERT INTO t SELECT i, 'k' FROM n")
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT json_extract(?1, {', '.join([FAR] * 100)})",
        f"SELECT length(json_insert(?1, {APPENDS}))",
        f"SELECT {', '.join([f'?1 ->> {FAR}'] * 100)}",
        f"SELECT {' + '.join(f'length(upper(?1 || {n}))' for n in range(300))}",
        f"SELECT length(max({', '.join(['?1'] * 900)}))",
        f"SELECT {' + '.join(['(c > 1)'] * 300)} FROM (SELECT upper(?1 || id) AS c FROM t)",
    ],
)
def test_statement_with_too_many_calls_for_a_long_value_is_refused(source: SqliteSource, sql: str) -> None:
    with pytest.raises(InvalidRequest, match="function calls, arguments and operators"):
        source.read(sql, [LONG_ARRAY])
    source.read(sql, ["[1]"])


def test_statement_that_writes_too_many_calls_of_a_long_value_is_refused(source: SqliteSource) -> None:
    sql = f"UPDATE t SET x = length(json_insert(?1, {APPENDS}))"
    with pytest.raises(InvalidRequest, match="function calls, arguments and operators"):
        source.write(lambda session: session.execute(sql, [LONG_ARRAY])).result(PATIENCE)
    assert source.read("SELECT count(*) FROM t WHERE x = 'k'").rows == ((5000,),)


def test_few_json_calls_of_a_long_document_are_answered(source: SqliteSource) -> None:
    sql = f"SELECT json_extract(?1, {FAR}, '$[0]'), ?1 ->> {FAR}, json_array_length(json_insert(?1, '$[#]', 2))"
    assert source.read(sql, [LONG_ARRAY]).rows == (("[1,1]", 1, 4_500_002),)


def test_json_calls_of_documents_of_any_length_are_answered(source: SqliteSource) -> None:
    for length in (10, 50_000, 500_000):
        document = "[" + "1," * length + "7]"
        assert source.read(f"SELECT json_extract(?, '$[{length}]')", [document]).rows == ((7,),)


def test_long_pattern_for_a_text_of_several_mebibytes_is_refused(source: SqliteSource) -> None:
    text = "a" * (9 << 20)
    with pytest.raises(InvalidRequest, match="too complex"):
        source.read("SELECT ? LIKE ?", [text, "%" + "a" * 60 + "b"])
    assert source.read("SELECT ? LIKE ?", [text + "xyz", "%xyz"]).rows == ((1,),)


def test_many_patterns_in_one_row_are_refused_for_a_long_text(source: SqliteSource) -> None:
    sql = "SELECT " + ", ".join(f"?1 || '{n}' LIKE ?2" for n in range(200))
    with pytest.raises(InvalidRequest, match="too complex"):
        source.read(sql, ["a" * 31_000, "%a" * 90 + "b"])


def test_statement_with_a_blob_that_is_not_text_is_answered(source: SqliteSource) -> None:
    assert source.read("SELECT x'ff', hex(x'fe')").rows == ((b"\xff", "FE"),)


def test_filter_with_too_many_paths_for_a_long_value_is_refused() -> None:
    engine = Engine(Table("t", (Column("id", "i64"), Column("x", "str")), ("id",)))
    where = f"json_extract(x, {', '.join([FAR] * 500)}) = '1'"
    columns = engine.examine(where)
    assert engine.holds(where, columns, [(1, "[1]")]) == [False]
    with pytest.raises(InvalidRequest, match="too large"):
        engine.holds(where, columns, [(1, LONG_ARRAY)])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every check of the clock find that the time limit has passed."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr(authorizer, "time", types.SimpleNamespace(monotonic=lambda: float(next(hours))))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("call", ["median(value)", "percentile(value, 5)", "percentile_disc(value, 0.5)"])
def test_percentile_checks_the_clock_before_it_sorts(source: SqliteSource, call: str) -> None:
    with pytest.raises(InvalidRequest, match="ran longer"):
        source.read(f"SELECT {call} FROM json_each('[3, 1, 2]')")


@pytest.mark.usefixtures("late")
def test_row_operation_without_functions_is_stopped_when_its_time_is_up(source: SqliteSource) -> None:
    where = Call("gt", (Col("x"), Literal("z")))
    with pytest.raises(InvalidRequest, match="ran longer"):
        source.write(lambda session: session.update("t", where, {"x": "l"}, None)).result(PATIENCE)
    with pytest.raises(InvalidRequest, match="ran longer"):
        source.write(lambda session: session.delete("t", where, None)).result(PATIENCE)
    with pytest.raises(InvalidRequest, match="ran longer"):
        source.write(lambda session: session.insert("t", [{"x": "l"}])).result(PATIENCE)
