"""Statements that PostgreSQL would expand exponentially before running them are refused first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from tests.sources.postgres.pg_source import shared_server
from tests.sources.postgres.setup.test_pg_logins import Site

from headwater.errors import InvalidRequest
from headwater.sources.postgres.query.analysis.statement_growth import MAX_WORDS, check_text, check_tree

READER, WRITER = f"growth_reader_{os.getpid()}", f"growth_writer_{os.getpid()}"

Wrap = Callable[[str], str]


def nested(wrap: Wrap, depth: int) -> str:
    found = "b"
    for _ in range(depth):
        found = wrap(found)
    return found


COPIES: dict[str, Wrap] = {
    "between": lambda inner: f"({inner} BETWEEN true AND b)",
    "not between": lambda inner: f"({inner} NOT /* ' */ between true AND b)",
    "symmetric": lambda inner: f"(b BETWEEN SYMMETRIC {inner} AND b)",
    "symmetric end": lambda inner: f"(b BETWEEN SYMMETRIC b AND {inner})",
    "in": lambda inner: f"({inner} IN (b, NOT b))",
    "in rows": lambda inner: f"(({inner}, b) IN ((b, b), (b, NOT b)))",
    "case": lambda inner: f"CASE WHEN b THEN {inner} END BETWEEN b AND b",
    "array": lambda inner: f"(ARRAY[{inner}])[1] BETWEEN b AND b",
    "behind a number": lambda inner: f"(1 + ({inner})::int BETWEEN b::int AND 1.)",
    "rows of numbers": lambda inner: f"((({inner})::int, 1) IN ((1, 1), (2, 2)))",
    "arrays": lambda inner: f"(ARRAY[({inner})::int] IN ('{{1}}', '{{2}}'))",
    "a column called values": lambda inner: f"({inner} NOT IN (values, NOT b))",
    "a wide space in a name": lambda inner: f"(({inner})::int + \u00a0and BETWEEN 1 AND 2)",
    "a number before the word": lambda inner: f"(({inner})::int + 1in(i, j))",
    "fields": lambda inner: f"ROW((ROW({inner}, b)).*)",
    "fields with spaces": lambda inner: f"ROW((ROW({inner}, b)) -- )\n . /* ( */ * )",
    "fields of an array": lambda inner: f"ROW((ARRAY[ROW({inner}, b)])[1].*)",
    "fields of a field": lambda inner: f"ROW((ROW(ROW({inner}, b))).f1.*)",
    "fields of a query": lambda inner: f"ROW((SELECT ROW({inner}, b)).*)",
    "json_object": lambda inner: f"JSON_OBJECT('a': ({inner})::text FORMAT JSON)",
    "json_array": lambda inner: f"JSON_ARRAY(({inner})::text FORMAT JSON RETURNING jsonb)",
    "json": lambda inner: f"json (({inner})::text)",
    "json_serialize": lambda inner: f"JSON_SERIALIZE(({inner})::text FORMAT JSON)",
    "json_value": lambda inner: f"JSON_VALUE(({inner})::text, '$')",
    "json_query": lambda inner: f"JSON_QUERY(({inner})::text, '$' RETURNING text)",
    "json_exists": lambda inner: f"JSON_EXISTS(({inner})::text, '$')",
    "is json": lambda inner: f"(({inner})::text::bytea IS JSON)",
    "is not json": lambda inner: f"(({inner})::text::bytea IS NOT JSON OBJECT)",
    "a field called and": lambda inner: f"((CASE WHEN {inner} THEN r END).and BETWEEN b AND b)",
}
HIDDEN = {
    "escapes that go on": "SELECT E'' -- '\n  -- '\n '\\'', {}, '",
    "escapes that go on in the next line": "SELECT E'a'\r'\\'', {}, '",
    "escapes": r"SELECT E'\'', {} AS x, '",
    "a tag": "SELECT $a$ ' $a$, $$ \" $$, {} FROM t",
    "comments": "SELECT /* /* ' */ ' */ {} -- '\n FROM t",
    "a name": 'SELECT 1 AS """", {} FROM t',
}
ALLOWED = {
    "conditions side by side": " AND ".join(f"c{n} BETWEEN 1 AND 2" for n in range(2_000)),
    "a long list": f"c IN ({', '.join(f'd{n}' for n in range(10_000))})",
    "a long list of numbers": f"f(a, b) IN ({', '.join(str(n) for n in range(10_000))})",
    "lists side by side": " OR ".join(f"f(a{n}) IN (b, c, d)" for n in range(2_000)),
    "long subqueries": f"{nested(lambda x: f'({x} IN (SELECT a, b, c FROM t))', 20)}",
    "subqueries of values": f"{nested(lambda x: f'({x} IN (VALUES (a), (b)))', 20)}",
    "subqueries": "a IN (SELECT b FROM t WHERE c BETWEEN 1 AND 2 AND d IN (SELECT e, f, g FROM t))",
    "fields": "ROW(a, b) = ROW((jsonb_populate_record(NULL::t, $1)).*)",
    "columns": f"EXISTS (SELECT {', '.join(f't{n}.*' for n in range(100))}, count(*), a * b * c FROM t)",
    "a list of texts": f"lower(a) IN ({', '.join(['$$a$$'] * 10_000)})",
    "json": "JSON_OBJECT('a': JSON_ARRAY(JSON_OBJECT('b': a), JSON_OBJECT('c': b))) IS JSON",
    "a string of brackets": f"c = '{'(' * 50_000}'",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with logins for callers."""
    folder = tmp_path_factory.mktemp("growth")
    made = Site(shared_server(), f"growth_{os.getpid()}", folder, reader=READER, writer=WRITER)
    made.live.ok("sql.exec", sql="CREATE TABLE flags(id int PRIMARY KEY, b bool, x text)")
    made.live.ok("sql.exec", sql="INSERT INTO flags VALUES (1, true, 'a')")
    made.live.ok("sql.exec", sql=f"GRANT SELECT ON flags TO {READER}")
    made.live.ok("sql.exec", sql=f"GRANT ALL ON flags TO {WRITER}")
    yield made
    made.db.execute(f"DROP OWNED BY {READER}, {WRITER}".encode())
    made.close()
    with shared_server().connect() as admin:
        admin.execute(f"DROP ROLE {READER}, {WRITER}".encode())


# --- operands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", COPIES.values(), ids=COPIES)
def test_nested_copies_of_operands_are_refused(wrap: Wrap) -> None:
    check_text(f"SELECT {nested(wrap, 1)} FROM t")
    with pytest.raises(InvalidRequest, match="copies the operands"):
        check_text(f"SELECT {nested(wrap, 40)} FROM t")


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_copies_after_quotes_and_comments_are_counted(text: str) -> None:
    check_text(text.format(nested(COPIES["between"], 3)))
    with pytest.raises(InvalidRequest):
        check_text(text.format(nested(COPIES["between"], 40)))


@pytest.mark.parametrize("where", ALLOWED.values(), ids=ALLOWED)
def test_long_statements_without_nested_copies_are_allowed(where: str) -> None:
    check_text(f"SELECT a FROM t WHERE {where}")


@pytest.mark.parametrize("sign", ["(", ")", "[", "CASE ", "END ", "'", '"', "$$", "/*", "*/", "IN ", "IN ("])
def test_unbalanced_text_is_left_to_postgresql(sign: str) -> None:
    check_text(sign * 1_000)


def test_fields_of_a_composite_value_may_be_expanded_once_but_not_nested() -> None:
    check_text(f"SELECT {nested(COPIES['fields'], 1)} FROM t")
    with pytest.raises(InvalidRequest):
        check_text(f"SELECT {nested(COPIES['fields'], 2)} FROM t")


def test_tree_that_is_too_deep_is_refused_as_nested_too_deeply() -> None:
    tree: list[object] = []
    for _ in range(5_000):
        tree = [tree]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        check_tree(tree)


@pytest.mark.parametrize("star", ["*", "t.*", '"t" . *', "$1.*"])
def test_many_lists_of_all_columns_are_refused(star: str) -> None:
    check_text(f"SELECT {', '.join([star] * 50)} FROM t")
    with pytest.raises(InvalidRequest):
        check_text(f"SELECT {', '.join([star] * 600)} FROM t")


@pytest.mark.parametrize("columns", ["PARTITION BY", "ORDER BY"])
def test_windows_with_many_columns_that_are_often_referred_to_are_refused(columns: str) -> None:
    def windows(size: int, references: int) -> str:
        named = [f"w AS ({columns} {', '.join(f'x + {n}' for n in range(size))})"]
        named += [f'w{n} AS ("w")' if n % 2 else f"w{n} AS (w ROWS 1 PRECEDING)" for n in range(references)]
        return f"SELECT count(*) OVER (w) FROM t WINDOW {', '.join(named)}"

    check_text(windows(1_000, 10))
    check_text(windows(10, 1_000))
    with pytest.raises(InvalidRequest):
        check_text(windows(1_000, 500))


def test_words_are_counted_with_the_copies_that_postgresql_makes() -> None:
    depth = MAX_WORDS.bit_length()
    check_text(f"SELECT {nested(COPIES['between'], depth // 2)}")
    with pytest.raises(InvalidRequest):
        check_text(f"SELECT {nested(COPIES['between'], depth)}")


def test_statements_and_filters_of_callers_that_grow_too_large_are_refused(site: Site) -> None:
    grown = nested(COPIES["between"], 40)
    assert site.refused("viewer", "query.select", sql=f"SELECT {grown} FROM flags") == "invalid_request"
    assert site.refused("editor", "sql.exec", sql=f"UPDATE flags SET b = {grown}") == "invalid_request"
    assert site.refused("viewer", "cdc.subscribe_table", table="flags", where=grown) == "invalid_request"
    fields = f"{nested(COPIES['fields'], 3)} IS NULL"
    assert site.refused("viewer", "query.select", sql=f"SELECT {fields} FROM flags") == "invalid_request"
    assert site.refused("viewer", "cdc.subscribe_table", table="flags", where=fields) == "invalid_request"
    once = "SELECT (jsonb_populate_record(NULL::flags, '{\"id\": 2}')).* FROM flags"
    assert site.rows("viewer", once) == [[2, None, None]]
    few = nested(COPIES["between"], 3)
    assert site.rows("viewer", f"SELECT {few} FROM flags") == [[True]]


# --- subqueries ---------------------------------------------------------------------------------------------


def subqueries(depth: int, more: str = "") -> str:
    found = "SELECT x FROM flags"
    for n in range(depth):
        found = f"SELECT x || x AS x FROM ({found}) s{n}{more}"
    return found


def expressions(depth: int, kind: str = "") -> str:
    found = [f"w0 AS {kind} (SELECT x FROM flags)"]
    found += [f"w{n + 1} AS {kind} (SELECT x || x AS x FROM w{n})" for n in range(depth)]
    return f"WITH {', '.join(found)} SELECT length(x) FROM w{depth}"


def references(depth: int, kind: str = "") -> str:
    found = [f"w0 AS {kind} (SELECT x FROM flags)"]
    found += [f"w{n + 1} AS {kind} (SELECT a.x FROM w{n} a, w{n} c)" for n in range(depth)]
    return f"WITH {', '.join(found)} SELECT count(*) FROM w{depth}"


GROWN = {
    "subqueries": subqueries(40),
    "sorted subqueries": f"SELECT 1 FROM ({subqueries(40, ' ORDER BY 1')}) t WHERE x || x = ''",
    "expressions of WITH": expressions(40),
    "references to WITH": references(40, "NOT MATERIALIZED"),
    "joins": f"SELECT x FROM ({subqueries(40)}) q FULL JOIN flags j USING (x)",
}
KEPT = {
    "few": f"SELECT length(x) FROM ({subqueries(6)}) t",
    "materialized": expressions(20, "MATERIALIZED"),
    "used several times": references(8),
    "limits": f"SELECT length(x) FROM ({subqueries(16, ' LIMIT 1')}) t",
}


@pytest.mark.parametrize("sql", GROWN.values(), ids=GROWN)
def test_nested_copies_of_subqueries_are_refused(site: Site, sql: str) -> None:
    answer = site.call("viewer", "query.select", sql=sql)
    assert answer["error"]["code"] == "invalid_request", answer
    assert "subqueries" in answer["error"]["message"]
    written = site.call("editor", "sql.exec", sql=f"INSERT INTO flags(id) SELECT 9 FROM ({sql}) t")
    assert "subqueries" in written["error"]["message"], written


@pytest.mark.parametrize("sql", KEPT.values(), ids=KEPT)
def test_subqueries_that_stay_small_are_executed(site: Site, sql: str) -> None:
    assert len(site.rows("viewer", sql)) == 1


def test_very_long_chain_of_with_is_refused(site: Site) -> None:
    found = site.call("viewer", "query.select", sql=expressions(1_000))
    assert found["error"]["code"] == "invalid_request", found
