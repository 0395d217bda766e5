"""The normal form of SQL: equal for texts that differ in white space and comments only, and the same query."""

from __future__ import annotations

import contextlib

import apsw
import pytest
from tests.soundness.differential_checker import make_case

from headwater.queries.sql_normal_form import normal_form
from headwater.sources.sqlite.query.authorizer import ANY_BINDINGS

EQUAL = [
    ("SELECT a,b FROM t WHERE a=1", "SELECT a , b\n  FROM t -- all\n WHERE a = 1 ;"),
    ("SELECT f(a) FROM t", "SELECT f ( a )  FROM\tt"),
    ("SELECT 1", "/* one */ SELECT /* two */ 1"),
    ("SELECT a FROM t WHERE b IN (1,2)", "SELECT a FROM t WHERE b IN( 1, 2 )"),
    ("SELECT a<=b", "SELECT a  <=  b"),
    ("SELECT a FROM t WHERE a=1", "SELECT a FROM t --all\r\nWHERE a = 1"),
]
DIFFERENT = [
    ("SELECT 'a b'", "SELECT 'a  b'"),
    ('SELECT "a b"', 'SELECT "a  b"'),
    ("SELECT `a b`", "SELECT `a  b`"),
    ("SELECT a - -b", "SELECT a --b"),
    ("SELECT a, b", "SELECT a b"),
    ("SELECT A", "SELECT a"),
]
KEPT = [
    "SELECT f(a := 1)",
    "SELECT a @> b, a -> 'x' ->> 'y', a #>> '{x}'",
    "SELECT 1.5e-3, .5, x'ff', 1 - -1",
    "SELECT a::text, :name, ?1, $1, @p",
    "SELECT $name,  1",
    "SELECT 1 /* a /* b */",
    "SELECT 'not closed",
    "SELECT a < = b",
    # PostgreSQL and SQLite read these differently: they stay as they are.
    "SELECT ARRAY['x]', 'a  b']",
    "SELECT [my  name]",
    "SELECT $a1$two   spaces$a1$",
    "SELECT $$--  x$$",
    "SELECT '{\"a  b\":1}'::jsonb?$$a  b$$",
    "SELECT 'a'\n'b'",
    "SELECT a FROM t --all\rWHERE  a = 1",
    "SELECT a FROM t --all\r  --more\rWHERE  a = 1",
    "SELECT E'it\\'s  x'",
    "SELECT ARRAY['x]', 'pa''/* ', ' */''q']",
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_texts_that_differ_in_white_space_and_comments_have_one_normal_form(one: str, other: str) -> None:
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_differ_in_anything_else_have_different_normal_forms(one: str, other: str) -> None:
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize("sql", KEPT)
def test_normal_form_keeps_text_without_extra_white_space(sql: str) -> None:
    assert normal_form(sql) == sql


@pytest.mark.parametrize("sql", [text for pair in (*EQUAL, *DIFFERENT) for text in pair] + KEPT)
def test_normal_form_of_normal_form_is_itself(sql: str) -> None:
    assert normal_form(normal_form(sql)) == normal_form(sql)


@pytest.mark.parametrize("place", range(5))
def test_normal_form_of_random_query_compiles_to_the_same_program(place: int, fresh_number: int) -> None:
    """SQLite's bytecode is the oracle."""
    case = make_case(fresh_number + place)
    db = apsw.Connection(":memory:")
    for statement in case.setup:
        with contextlib.suppress(apsw.ConstraintError):  # rows are random, too
            db.execute(statement)
    for query in case.queries:
        is_plain = "'" not in query.sql and '"' not in query.sql
        spaced = query.sql.replace(" ", "  \n").replace(",", " , ") if is_plain else query.sql
        texts = (query.sql, normal_form(query.sql), normal_form(spaced))
        programs = [compiled(db, text) for text in texts]
        assert programs[0] == programs[1] == programs[2], query.sql
    db.close()


def compiled(db: apsw.Connection, sql: str) -> object:
    """Return SQLite's program, or its error: some random queries do not compile."""
    try:
        return db.execute(f"EXPLAIN {sql}", ANY_BINDINGS).fetchall()
    except apsw.SQLError as error:
        return str(error)


def test_unclosed_quote_before_many_line_breaks_is_read_in_one_pass() -> None:
    text = "'" + "\n" * 1_000_000  # quadratic reading would take hours
    assert normal_form(f"SELECT {text}x").startswith("SELECT '")
    assert normal_form("SELECT 'a'  \n \n  'b'") == "SELECT 'a'  \n \n  'b'"
