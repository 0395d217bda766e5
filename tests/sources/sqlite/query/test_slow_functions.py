"""Functions whose cost is the product of two lengths: exact replacements, and an end within the time limit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sources.sqlite.query.shop_analysis import run
from tests.sources.sqlite_source import MemoryNotes
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.predicate import Call, Col, Function, Literal
from headwater.model.table import Column, Table
from headwater.sources.sqlite.query.predicate_engine import Engine
from headwater.sources.sqlite.query.slow_functions import CAP, PIECE, LinearFunctions
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

pytestmark = pytest.mark.slow

SECONDS = 1.0  # for statements that would run for minutes
LONG = 200_000
HAY, NEEDLE = "a" * LONG, "a" * (LONG // 2) + "b"

_texts = st.text(st.sampled_from("ab\0é€😀 "), max_size=8)
_blobs = st.builds(str.encode, _texts) | st.binary(max_size=0)
_numbers = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.sampled_from([0, 1, -1, 1.0, 1e300])
VALUES = st.none() | _texts | _blobs | _numbers


@pytest.fixture(scope="module")
def both() -> tuple[apsw.Connection, apsw.Connection]:
    builtin, linear = apsw.Connection(":memory:"), apsw.Connection(":memory:")
    LinearFunctions(linear, lambda: None)
    return builtin, linear


def _compare(both: tuple[apsw.Connection, apsw.Connection], sql: str, *values: Any) -> None:
    found = [db.execute(f"SELECT v, typeof(v) FROM (SELECT {sql} AS v)", values).fetchall() for db in both]
    assert found[0] == found[1]


@given(VALUES, VALUES)
@example("€a", b"a")
@example(b"\xe2\x82\xaca", b"\x82")
@example("\u20ac", b"\x82")
@example("aé", "")
@example(12.5, 2)
def test_linear_instr_equals_the_built_in(both: tuple[apsw.Connection, apsw.Connection], x: Any, y: Any) -> None:
    _compare(both, "instr(?, ?)", x, y)


@given(st.text("ab", max_size=40), st.text("ab", max_size=4))
def test_linear_instr_of_matching_texts_equals_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], x: str, y: str
) -> None:
    _compare(both, "instr(?, ?)", x, y)
    _compare(both, "replace(?, ?, 'é')", x, y)


@given(VALUES, VALUES, VALUES)
@example("abc", "", None)
@example("abc", "\0b", "x")
@example(1.5, 1, 2)
def test_linear_replace_equals_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], x: Any, y: Any, z: Any
) -> None:
    _compare(both, "replace(?, ?, ?)", x, y, z)


@given(st.sampled_from(["trim", "ltrim", "rtrim"]), VALUES, VALUES, st.booleans())
@example("trim", "aab", "ab", True)
@example("rtrim", "b\0a", "a\0b", False)
def test_linear_trim_equals_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], name: str, x: Any, y: Any, many: bool
) -> None:
    chars = y if not many or not isinstance(y, str) else "".join(map(chr, range(300, 330))) + y
    _compare(both, f"{name}(?, ?)", x, chars)


@pytest.mark.parametrize("place", [PIECE - 1, PIECE, 2 * PIECE])
def test_linear_functions_of_texts_of_several_pieces_equal_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], place: int
) -> None:
    text = "a" * place + "éb" + "a" * (2 * PIECE - place)
    many = "".join(map(chr, range(300, 330))) + "a"
    for other in ("éb", "b", "ab", "ba", "c", "a", "aé"):
        _compare(both, "instr(?, ?)", text, other)
        _compare(both, "instr(CAST(? AS BLOB), CAST(? AS BLOB))", text, other)
        _compare(both, "replace(?, ?, 'x')", text, other)
    for chars, name in itertools.product(("a", many), ("trim", "ltrim", "rtrim")):
        _compare(both, f"{name}(?, ?)", text, chars)
        _compare(both, f"{name}(?, ?)", "a" * (2 * PIECE), chars)


@given(st.text("aé", max_size=30), st.text("aé", min_size=1, max_size=4), st.text("ab", max_size=3))
def test_replace_in_pieces_equals_the_built_in(
    both: tuple[apsw.Connection, apsw.Connection], text: str, old: str, new: str
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("headwater.sources.sqlite.query.slow_functions.PIECE", 3)
        _compare(both, "replace(?, ?, ?)", text, old, new)


@given(st.none() | st.text("0aF- x", max_size=8) | VALUES, st.none() | st.text("-x ", max_size=3) | VALUES)
def test_linear_unhex_equals_the_built_in(both: tuple[apsw.Connection, apsw.Connection], x: Any, y: Any) -> None:
    _compare(both, "unhex(?, ?)", x, y)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    """Yield a source with a time limit that suffices on a busy machine."""
    yield from opened_source(tmp_path_factory, PATIENCE)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    """Yield a source with a short time limit."""
    yield from opened_source(tmp_path_factory, SECONDS)


def opened_source(folders: pytest.TempPathFactory, seconds: float) -> Iterator[SqliteSource]:
    path = folders.mktemp("slow") / "app.db"
    config = SqliteConfig(wal=True, statement_seconds=PATIENCE)  # for the statements of this function
    opened = SqliteSource("app", str(path), notes=MemoryNotes(), config=config)
    try:
        assert opened.prove(generation="g", latest=0, read=lambda after: iter(())) == ""
        run(opened, "CREATE TABLE t(id INTEGER PRIMARY KEY, x TEXT, y TEXT)")
        run(opened, "CREATE INDEX t_x ON t(x)")
        run(opened, "CREATE VIEW v AS SELECT id, instr(x, y) AS place FROM t")
        opened.write(lambda session: session.insert("t", [{"id": 1, "x": HAY, "y": NEEDLE}])).result(PATIENCE)
        run(opened, "INSERT INTO t SELECT value + 1, 'k' || value, 'y' FROM json_each('[1, 2, 3, 4, 5, 6, 7, 8]')")
        run(opened, "ANALYZE")
        object.__setattr__(config, "statement_seconds", seconds)  # for the connections that are opened from now on
        yield opened
    finally:
        opened.close()


MADE = "printf('%.*c', 20000000, 'a')"


@pytest.mark.parametrize(
    ("sql", "answer"),
    [
        (f"SELECT instr({MADE}, substr({MADE}, 1, 1000000) || 'b')", 0),
        (f"SELECT length(replace({MADE}, substr({MADE}, 1, 1000000) || 'b', 'x'))", 20_000_000),
        ("SELECT length(trim(x, replace(y, 'a', 'z') || 'a')) FROM t WHERE id = 1", 0),
        ("SELECT length(rtrim(x, replace(y, 'a', 'z') || 'a')) FROM t WHERE id = 1", 0),
        ("SELECT place FROM v WHERE id = 1", 0),
        ("SELECT count(*) FROM t WHERE instr(x, y) OR x LIKE '%k%'", 8),
        (f"SELECT count(*) FROM t WHERE x > trim('{HAY}', '{'z' * LONG}a')", 9),
        (f"SELECT count(*) FROM t WHERE x = instr('{HAY}', '{NEEDLE}')", 0),
    ],
)
def test_calls_with_long_values_are_answered_quickly(source: SqliteSource, sql: str, answer: int) -> None:
    assert source.read(sql).rows == ((answer,),)
    source.analyse(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT instr(printf('%.*c', 60000000, 'a'), printf('%.*c', 30000000, 'a') || 'b')",
        f"SELECT replace({MADE}, substr({MADE}, 1, 10000000) || 'b', 'x')",
        f"SELECT trim({MADE}, substr({MADE}, 1, 10000000))",
        "SELECT unhex(replace(x, 'a', '-'), replace(y, 'a', 'z') || '-') FROM t WHERE id = 1",
        f"SELECT printf('%.*c', 8000000, 'a') LIKE '%{'a' * 400}b'",
        f"SELECT x LIKE '%{'a' * 600}b' FROM t",
        "SELECT json_patch(json_object('a', x, 'b', x), '{}') FROM t WHERE id = 1",
        "WITH RECURSIVE r(n, x, y) AS (SELECT 1, printf('%.*c', 30000, 'a'), printf('%.*c', 15000, 'a') || 'b'"
        " UNION ALL SELECT n + 1, x, y FROM r) SELECT count(*) FROM r WHERE instr(x, y)",
        "WITH r(x, y) AS MATERIALIZED (SELECT printf('%.*c', 2000, 'a'), printf('%.*c', 1999, 'z') || 'a')"
        f" SELECT {' + '.join(['length(trim(x, y))'] * 900)} FROM r, t a, t b, t c",
        "WITH r(x) AS MATERIALIZED (SELECT printf('%.*c', 7000000, 'a'))"
        " SELECT count(*) FROM r, t a, t b, t c, t d WHERE upper(x || a.id || b.id || c.id || d.id) = 'b'",
        "WITH r(x) AS MATERIALIZED (SELECT printf('%.*c', 30000000, 'a'))"
        " SELECT count(*) FROM r, t a, t b, t c, t d WHERE upper(x || a.id || b.id || c.id || d.id) = 'b'",
    ],
)
def test_calls_without_a_linear_form_end_in_time(hasty: SqliteSource, sql: str) -> None:
    with pytest.raises(HeadwaterError):
        hasty.read(sql)


def test_writing_statement_retried_for_long_values_takes_effect_once(source: SqliteSource) -> None:
    written = source.write(
        lambda session: session.execute("UPDATE t SET y = replace(y, 'a', 'b') || 'y' WHERE id IN (1, 2) RETURNING id")
    ).result(PATIENCE)
    assert sorted(written.value.rows) == [(1,), (2,)] and written.value.affected == 2
    assert source.read("SELECT length(y) FROM t WHERE id IN (1, 2) ORDER BY id").rows == ((LONG // 2 + 2,), (2,))
    run(source, f"UPDATE t SET y = '{NEEDLE}' WHERE id = 1")


def test_row_condition_with_long_operands_does_not_block_the_writer(source: SqliteSource) -> None:
    found = Call("gt", (Function("instr", (Literal(HAY * 50), Literal(HAY * 5 + "b"))), Literal(0)))
    assert source.write(lambda session: session.delete("t", found, None)).result(PATIENCE).value.affected == 0
    longer = Call("gt", (Function("instr", (Literal(HAY * 50), Literal(HAY * 25 + "b"))), Literal(0)))
    with pytest.raises(InvalidRequest, match=r"instr\(\)"):
        source.write(lambda session: session.delete("t", longer, None)).result(PATIENCE)
    trimmed = Function("trim", (Col("x"), Literal("z" * LONG + "a")))
    where = Call("eq", (trimmed, Literal("")))
    assert source.write(lambda session: len(session.select("t", where))).result(PATIENCE).value == 1


def test_pattern_longer_than_the_first_limit_is_matched(source: SqliteSource) -> None:
    for length in (150, 300, 490):
        sql = f"SELECT '{'a' * 600}' LIKE '{'a' * length}%', '{'a' * 600}' GLOB '*{'a' * length}'"
        assert source.read(sql).rows == ((1, 1),)


def test_connection_with_linear_functions_is_not_used_again(source: SqliteSource) -> None:
    before = len(source._file._connections or ())
    for _ in range(3):
        source.read("SELECT instr(x, y) FROM t")
    assert len(source._file._connections or ()) <= before
    with source._pool.read() as reader:
        assert not reader.guard.is_linear


def test_value_longer_than_the_cap_is_read_without_the_capped_function(source: SqliteSource) -> None:
    run(source, f"INSERT INTO t VALUES (100, printf('%.*c', {CAP + 1}, 'q'), 'y')")
    with pytest.raises(InvalidRequest, match="json_patch"):
        source.read("SELECT x, json_patch('{}', '{}') FROM t WHERE id = 100")
    assert len(source.read("SELECT x FROM t WHERE id = 100").rows[0][0]) == CAP + 1
    run(source, "DELETE FROM t WHERE id = 100")


@pytest.fixture
def engine() -> Engine:
    return Engine(Table("t", (Column("id", "i64"), Column("x", "str"), Column("y", "str")), ("id",)))


@pytest.mark.parametrize(
    "where",
    [
        " OR ".join(["instr(x || x, substr(x, 1, 100000) || 'b')"] * 12),
        " OR ".join(["instr(printf('%.*c', 260000, 'a'), printf('%.*c', 130000, 'a') || 'b')"] * 12),
        " OR ".join(["length(trim(x, y)) > 5"] * 12),
        " OR ".join(["x LIKE '%" + "a" * 90 + "b'"] * 12),
        " OR ".join(["json_patch(x, y) = 1"] * 12),
    ],
)
def test_filter_with_slow_functions_ends_in_time(engine: Engine, where: str) -> None:
    rows = [(n, HAY, "z" * LONG + "a") for n in range(20)]
    with contextlib.suppress(InvalidRequest):
        assert engine.holds(where, engine.examine(where), rows) == [False] * 20


def test_filter_of_long_values_is_exact(engine: Engine) -> None:
    where = "instr(x, y) = 100001 AND trim(y, 'cz') = 'b'"
    columns = engine.examine(where)
    assert engine.holds(where, columns, [(1, "a" * 100_000 + "bc", "bc"), (2, "bc", "bc")]) == [True, False]


@pytest.mark.parametrize("where", ["fts3_tokenizer('simple') IS NULL", "load_extension(x)", "sqlite_log(1, x)"])
def test_filter_with_a_function_that_reaches_outside_the_database_is_refused(engine: Engine, where: str) -> None:
    with pytest.raises(HeadwaterError):
        engine.examine(where)


@pytest.mark.parametrize(
    ("call", "most"), [("snippet({}, 0, '', '', '', 9)", CAP), ("highlight({}, 0, '', '')", 8 * CAP)]
)
def test_search_hits_in_a_value_longer_than_the_cap_are_refused(source: SqliteSource, call: str, most: int) -> None:
    table = f"hits_{most}"
    run(source, f"CREATE VIRTUAL TABLE {table} USING fts5(body)")
    texts = [
        "some word here",
        "plain " * 1_000 + "word",
        "plain " * (most // 6 - 10) + "word",
        "word " * (most // 5 + 1),
    ]
    for text in texts:
        run(source, f"INSERT INTO {table} VALUES ('{text}')")
    asked = f"SELECT {call.format(table)} FROM {table} WHERE {table} MATCH 'word' AND rowid = ?"
    for place in (1, 2, 3):
        assert "word" in str(source.read(asked, [place]).rows)
    with pytest.raises(InvalidRequest, match=f"at most {most} bytes"):
        source.read(asked, [4])
    assert len(str(source.read(f"SELECT body FROM {table} WHERE rowid = 4").rows)) > most
