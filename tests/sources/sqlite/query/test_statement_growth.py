"""Statements that SQLite would enlarge too much by copying columns of subqueries are refused before it parses them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from tests.sources.sqlite.query import chinook, tpch
from tests.sources.sqlite.query.shop_analysis import opened, run

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.sources.sqlite.query import authorizer as guards
from headwater.sources.sqlite.query.analysis import authorizer_reads
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.query.statement_cost import _TOKEN
from headwater.sources.sqlite.query.statement_growth import TOO_LARGE, check_growth
from headwater.sources.sqlite.schema.table_shapes import mask
from headwater.sources.sqlite.source import SqliteSource

LEVELS = 20


def nested(
    column: Callable[[int], str] = lambda i: f"x{i}||x{i} AS x{i + 1}",
    around: str = "SELECT {column} FROM ({inner})",
    inner: str = "SELECT a AS x0 FROM t",
    levels: int = LEVELS,
) -> str:
    for level in range(levels):
        inner = around.format(column=column(level), inner=inner)
    return inner


def chained(first: str, further: str) -> str:
    rest = "".join(f", c{i + 1}{further.format(before=f'c{i}')}" for i in range(LEVELS))
    return f"WITH c0{first}{rest} SELECT * FROM c{LEVELS}"


BOMBS = {
    "alias": nested(),
    "alias without AS": nested(lambda i: f"x{i}||x{i} x{i + 1}"),
    "alias as text": nested(lambda i: f"x{i}||x{i} AS 'x{i + 1}'"),
    "qualified": nested(lambda i: f"s.x{i}||s.x{i} AS x{i + 1}", "SELECT {column} FROM ({inner}) AS s"),
    "case of names": nested(lambda i: f'X{i}||"x{i}" AS x{i + 1}'),
    "same name": nested(lambda i: "x||x AS x", inner="SELECT a AS x FROM t"),
    "join in brackets": nested(around="SELECT {column} FROM (({inner}) JOIN t)"),
    "second source": nested(around="SELECT {column} FROM t AS t1, ({inner})"),
    "left join": nested(around="SELECT {column} FROM t LEFT JOIN ({inner}) ON 1"),
    "star between": nested(around="SELECT {column} FROM (SELECT * FROM ({inner}))"),
    "star beside": nested(around="SELECT *, {column} FROM ({inner})"),
    "scalar subquery": nested(lambda i: f"(SELECT x{i}||x{i}) AS x{i + 1}"),
    "comments": nested(lambda i: f"x{i}/*)*/||x{i} --(\n AS x{i + 1}"),
    "union": nested(around="SELECT {column} FROM ({inner}) UNION ALL SELECT a FROM t"),
    "second arm": nested(lambda i: "x||x AS y", "SELECT a AS x FROM t UNION ALL SELECT {column} FROM ({inner})", "t"),
    "own text": '"x||x"'.join(
        [
            "SELECT ",
            " FROM (SELECT x||x FROM (" + nested(lambda i: "x||x AS x", inner="SELECT a AS x FROM t", levels=18) + "))",
        ]
    ),
    "outer source of the same name": "SELECT ("
    + nested(
        lambda i: "a.x||a.x AS x", "SELECT {column} FROM ({inner}) AS a NATURAL JOIN (SELECT 1 AS k)", "SELECT 1 AS x"
    )
    + ") FROM (SELECT 1 AS x) AS a",
    "outer column called like a text": "SELECT ("
    + nested(
        lambda i: 'b."a.x||a.x" AS x',
        "SELECT {column} FROM (SELECT a.x||a.x FROM ({inner}) AS a) AS b",
        "SELECT a AS x FROM t",
    )
    + ') FROM (SELECT 1 AS "a.x||a.x") AS b',
    "with": chained(" AS (SELECT a AS x FROM t)", " AS (SELECT x||x AS x FROM {before})"),
    "with names": chained("(x) AS (SELECT a FROM t)", "(x) AS NOT MATERIALIZED (SELECT x||x FROM {before})"),
    "with same name": nested(
        lambda i: "x||x AS x", "WITH a AS ({inner}) SELECT {column} FROM a", "SELECT a AS x FROM t"
    ),
    "joined with": chained(" AS (SELECT a AS x FROM t)", " AS (SELECT d.x FROM {before} JOIN {before} AS d)"),
    "in name": f"WITH c AS ({nested()}) SELECT 1 FROM t WHERE a IN c",
    "in query": f"SELECT 1 FROM t WHERE a IN ({nested()})",
    "window": "SELECT " + ", ".join(["sum(a) OVER w"] * 1500) + f" FROM t WINDOW w AS (ORDER BY {'+'.join('a' * 500)})",
    "between": f"SELECT 1 FROM t WHERE {'(' * 300}a{' BETWEEN 1 AND 2)' * 300}",
    "between without brackets": f"SELECT 1 FROM t WHERE a{' BETWEEN 1 AND 2' * 400}",
    "between of rows": f"SELECT 1 FROM t WHERE {'((' * 200}a{', a) BETWEEN (1, 2) AND (3, 4))' * 200}",
    "case": f"SELECT {'CASE ' * 300}a{' WHEN 1 THEN 2 END' * 300} FROM t",
    "case of end": f"SELECT {'CASE ' * 300}a{' WHEN end THEN 2 END' * 300} FROM t",
    "insert": f"INSERT INTO t(a) {nested()}",
    "update": f"UPDATE t SET a = x{LEVELS} FROM ({nested()})",
    "delete": f"DELETE FROM t WHERE a IN ({nested()})",
    "view": f"CREATE VIEW v AS {nested()}",
    "distinct from": f"SELECT x{LEVELS} IS DISTINCT FROM 1 FROM ({nested()})",
    "where alias": nested(lambda i: f"x{i} AS y{i}, x{i}||x{i} AS x{i + 1}", "SELECT {column} FROM ({inner}) WHERE 1"),
}


WIDE = f"max({','.join(['a'] * 900)})"
BOMBS |= {
    "byte order marks": nested(around="\ufeffSELECT {column} FROM ({inner})", inner="\ufeffSELECT a AS x0 FROM t"),
    "ordinals": f"SELECT {WIDE} AS b FROM t ORDER BY {','.join(['1'] * 1_900)}",
    "ordinals in brackets": f"SELECT {WIDE} FROM t GROUP BY {','.join(['(1)'] * 1_900)}",
    "alias of one SELECT": f"SELECT max({WIDE},{WIDE}) b FROM t WHERE b IN ({','.join(['b'] * 900)})",
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_statement_that_doubles_at_each_level_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=TOO_LARGE):
        check_growth(BOMBS[name], {})


def test_views_that_double_at_each_level_are_refused() -> None:
    views = {f"v{i + 1}": f"CREATE VIEW v{i + 1} AS SELECT x||x AS x FROM v{i}" for i in range(LEVELS)}
    views["v0"] = "CREATE VIEW v0(x) AS SELECT a FROM t"
    for sql in ("SELECT x FROM v20", 'SELECT x FROM main."V20"', "SELECT 1 IN v20"):
        with pytest.raises(InvalidRequest, match=TOO_LARGE):
            check_growth(sql, views)
    check_growth("SELECT x FROM v5", views)


def test_statement_is_checked_again_once_a_view_has_changed() -> None:
    views = {f"v{i + 1}": f"CREATE VIEW v{i + 1} AS SELECT x||x AS x FROM v{i}" for i in range(LEVELS)}
    sql, small = f"SELECT x FROM v{LEVELS}", {**views, f"v{LEVELS}": f"CREATE VIEW v{LEVELS}(x) AS SELECT a FROM t"}
    for _ in range(2):
        check_growth(sql, small)
        with pytest.raises(InvalidRequest, match=TOO_LARGE):
            check_growth(sql, views)


def test_text_that_hides_its_brackets_in_a_parameter_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="parameter"):
        check_growth("SELECT $a('), (SELECT 1) FROM t WHERE a = '", {})


def test_ordinary_queries_are_not_refused() -> None:
    for sql in [*tpch.QUERIES.values(), *(sql for sql, _ in chinook.QUERIES)]:
        check_growth(sql, {})
    check_growth("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 9) SELECT n FROM c", {})
    check_growth(nested(levels=8), {})
    check_growth(nested(lambda i: "upper(s.x) AS x", "SELECT {column} FROM ({inner}) AS s", "SELECT a AS x FROM t"), {})
    check_growth(f"SELECT {', '.join(['CASE a WHEN 1 THEN 2 ELSE (3) END'] * 1_000)} FROM t", {})
    check_growth(f"SELECT 1 FROM t WHERE {' AND '.join(['a BETWEEN 1 AND 2'] * 1_000)}", {})
    check_growth(f"SELECT 1 FROM t WHERE {'(' * 100}a{' = 1)' * 100} OR a BETWEEN 1 AND 2", {})
    check_growth(f"DELETE FROM t WHERE (id, a) IN (VALUES {', '.join(['(1, 2)'] * 50_000)})", {})


def test_long_statement_that_does_not_grow_is_not_refused() -> None:
    numbers = ", ".join(map(str, range(60_000)))
    check_growth(f"SELECT a FROM (SELECT a FROM t WHERE a IN ({numbers})) WHERE a IN (SELECT 1)", {})
    branches = " ".join(f"WHEN a BETWEEN {n} AND {n + 9} THEN {n}" for n in range(1_000))
    check_growth(f"SELECT CASE {branches} ELSE 0 END FROM t", {})
    check_growth(f"INSERT INTO t VALUES (1, '{'select case between ' * 100_000}'), (2, (SELECT 1))", {})
    check_growth(f"INSERT INTO t VALUES {', '.join(['(1, 2)'] * 60_000)} ON CONFLICT DO NOTHING", {"t2": "CREATE VIEW"})


def test_longer_statement_with_subqueries_is_refused() -> None:
    numbers = ", ".join(["1"] * 200_000)
    with pytest.raises(InvalidRequest, match="characters besides its texts"):
        check_growth(f"SELECT a FROM (SELECT a FROM t WHERE a IN ({numbers}))", {})
    with pytest.raises(InvalidRequest, match="characters besides its texts"):
        check_growth(f"""SELECT "'" FROM (SELECT a FROM t WHERE a IN ({numbers}))""", {})


@pytest.mark.parametrize(
    "names", [("Gr\u00f6\u00dfe", "GR\u00d6\u00dfe"), ("\u0130", "i\u0307"), ("\u03c3", "\u03c2"), ("\u212a", "\u212b")]
)
def test_names_that_differ_in_letters_beyond_ascii_are_different_tables(tmp_path: Path, names: tuple[str, str]) -> None:
    made = tuple(f'CREATE TABLE "{name}"(id INTEGER PRIMARY KEY, a TEXT)' for name in names)
    with opened(tmp_path, made) as source:
        for name in names:
            assert source.analyse(f'SELECT a FROM "{name}"').tables == (name,)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SqliteSource]:
    with opened(tmp_path, ("CREATE TABLE t(id INTEGER PRIMARY KEY, a TEXT)",)) as made:
        yield made


def test_queries_and_statements_are_refused_before_they_are_prepared(source: SqliteSource) -> None:
    apsw.memory_high_water(True)
    before = apsw.memory_used()
    with pytest.raises(InvalidRequest, match=TOO_LARGE):
        source.analyse(BOMBS["alias"])
    for name in ("alias", "insert", "update", "view"):
        with pytest.raises(InvalidRequest, match=TOO_LARGE):
            run(source, BOMBS[name])
    assert apsw.memory_high_water() - before < 32 << 20


def test_views_made_one_by_one_are_refused_where_they_are_used(source: SqliteSource) -> None:
    run(source, "CREATE VIEW v0 AS SELECT a AS x FROM t")
    with pytest.raises(HeadwaterError, match=TOO_LARGE):
        for level in range(LEVELS):
            run(source, f"CREATE VIEW v{level + 1} AS SELECT x||x AS x FROM v{level}")


def test_program_past_the_limit_is_not_listed(source: SqliteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer_reads, "MAX_NODES", 20)
    with pytest.raises(InvalidRequest, match=TOO_LARGE):
        source.analyse(f"SELECT a FROM t WHERE {' AND '.join(f'a <> {i}' for i in range(30))}")
    assert source.analyse("SELECT a FROM t").tables == ("t",)


def test_larger_statements_need_at_least_the_memory_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count follows SQLite: one level more doubles both."""
    monkeypatch.setattr(guards, "check_growth", lambda sql, views: None)
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE t(a)")
    watched = Guard(db, 60)
    used = []
    for levels in (12, 13):
        apsw.memory_high_water(True)
        before = apsw.memory_used()
        watched.examine(nested(levels=levels))
        used.append(apsw.memory_high_water() - before)
    assert used[1] > 1.5 * used[0]


@pytest.mark.parametrize("mark", ["@", "[", "$", ":", "#", "$[", "/*", "'[", '"@', "[ "])
def test_text_of_marks_is_checked_in_linear_time(mark: str) -> None:
    text = f"select a from t where b = {mark * 300_000} between case"
    with contextlib.suppress(InvalidRequest):
        check_growth(text, {})
    list(_TOKEN.finditer(text))
    mask(text)


@pytest.mark.parametrize(("clause", "is_flattened"), [("", True), (" ORDER BY 1", True), (" LIMIT 3", False)])
def test_compound_with_a_limit_is_not_flattened_and_counts_once(clause: str, is_flattened: bool) -> None:
    arms = " UNION ALL ".join(f"SELECT a + {n} AS c FROM t" for n in range(12))
    views = {"v": f"CREATE VIEW v AS {arms}{clause}"}
    joined = "SELECT x0.c FROM " + " JOIN ".join(f"v AS x{n}" for n in range(3))
    db = apsw.Connection(":memory:")
    db.execute(f"CREATE TABLE t(a); {views['v']}")
    assert (len(db.execute(f"EXPLAIN {joined}").fetchall()) > 5_000) == is_flattened, "SQLite does otherwise"
    longer = joined + " JOIN v AS x3 JOIN v AS x4"
    if is_flattened:
        with pytest.raises(InvalidRequest, match="parts"):
            check_growth(longer, views)
    else:
        check_growth(longer, views)


def test_compound_with_a_limit_is_flattened_into_a_query_without_a_join() -> None:
    arms, terms = " UNION ALL ".join(["SELECT a AS c FROM t"] * 400), "||".join(["c"] * 600)
    with pytest.raises(InvalidRequest, match="parts"):
        check_growth(f"SELECT {terms} FROM ({arms} LIMIT 3) ORDER BY 1", {})


@pytest.mark.parametrize(
    ("outputs", "is_flattened"),
    [("x0.c", True), ("max(x0.c, 1)", True), ("max(x0.c)", False), ("count(*)", False), ("count(*) OVER ()", True)],
)
def test_aggregate_takes_no_union_arms_and_counts_once(outputs: str, is_flattened: bool) -> None:
    arms = " UNION ALL ".join(f"SELECT a + {n} AS c FROM t" for n in range(12))
    views = {"v": f"CREATE VIEW v AS {arms}"}
    joined = f"SELECT {outputs} FROM " + " JOIN ".join(f"v AS x{n}" for n in range(3))
    db = apsw.Connection(":memory:")
    db.execute(f"CREATE TABLE t(a); {views['v']}")
    assert (len(db.execute(f"EXPLAIN {joined}").fetchall()) > 5_000) == is_flattened, "SQLite does otherwise"
    longer = joined + " JOIN v AS x3 JOIN v AS x4"
    with pytest.raises(InvalidRequest, match="parts") if is_flattened else contextlib.nullcontext():
        check_growth(longer, views)


def doubled(hint: str, *, levels: int) -> str:
    """Return a WITH statement in which each name uses the one before twice."""
    names = [f"w{n + 1} AS {hint} (SELECT x + x AS x FROM w{n})" for n in range(levels)]
    return f"WITH w0 AS (SELECT a AS x FROM t), {', '.join(names)} SELECT x FROM w{levels}"


@pytest.mark.parametrize(("hint", "is_copied"), [("", True), ("NOT MATERIALIZED", True), ("MATERIALIZED", False)])
def test_columns_of_a_materialized_name_are_not_copied(hint: str, is_copied: bool) -> None:
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE t(a)")
    program = db.execute(f"EXPLAIN {doubled(hint, levels=9)}").fetchall()
    assert (len(program) > 500) == is_copied, "SQLite does otherwise"
    with pytest.raises(InvalidRequest, match="parts") if is_copied else contextlib.nullcontext():
        check_growth(doubled(hint, levels=20), {})


SOURCES = ["v AS x", "v x", "v 'x'", 'v "x"', "(SELECT * FROM v) AS x", "(v) AS x", "main.v AS x", "v AS x NOT INDEXED"]


@pytest.mark.parametrize("source", SOURCES)
def test_column_of_a_named_source_has_the_size_of_that_source(source: str) -> None:
    views = {"v": f"CREATE VIEW v AS SELECT {'||'.join(['a'] * 500)} AS c FROM t"}
    used = "||".join(["x.c"] * 500)
    with pytest.raises(InvalidRequest, match="parts"):
        check_growth(f"SELECT {used} FROM {source} JOIN (SELECT 1 AS c) AS y", views)
    check_growth(f"SELECT {used.replace('x.', 'y.')} FROM {source} JOIN (SELECT 1 AS c) AS y", views)


def test_query_of_many_uses_is_not_refused_for_a_column_of_another_source() -> None:
    """A random query with 960 instructions that was counted as 250,204 parts."""
    views = {
        "v0": "CREATE VIEW v0(c0) AS WITH RECURSIVE r0(n, x) AS (SELECT 0, c FROM t1 WHERE t1.a <> 1 UNION SELECT n + 1"
        ", z.b FROM r0 JOIN t1 AS z ON z.c = r0.x WHERE n < 2) SELECT count(x0.c) FILTER (WHERE x0.b IS NOT 1) AS c0"
        " FROM t1 AS x0 GROUP BY x0.a UNION ALL SELECT count(x3.x) AS c0 FROM t1 AS x1 LEFT JOIN (r0 AS x2 FULL JOIN"
        " r0 AS x3 ON x2.x = x3.n) ON x1.c < x2.x"
    }
    check_growth(
        "WITH w0(c0) AS (SELECT (SELECT count(*) FROM v0 AS x1 WHERE x1.c0 = x0.c AND x0.a < 'B') AS c0 FROM t0 AS x0),"
        " w1(c0, c1) AS MATERIALIZED (SELECT (SELECT max(x3.k) FROM t0 AS x3 JOIN w0 AS x4 ON x3.k = x4.c0 WHERE x3.b ="
        " x2.c0) AS c0, x2.c0 AS c1 FROM v0 AS x2 WHERE x2.c0 NOT LIKE '1%' UNION ALL SELECT x5.c0 AS c0, x6.c0 AS c1"
        " FROM w0 AS x5 FULL JOIN w0 AS x6 ON x5.c0 < x6.c0 WHERE x6.c0 = NULL AND x6.c0 NOT GLOB '[aA]')"
        " SELECT max(x7.c1) AS c0, sum(x7.c0) AS c1 FROM (SELECT x9.c0 AS c0, coalesce(x9.c1, 2) AS c1 FROM t0 AS x8"
        " JOIN w1 AS x9 ON x8.b = x9.c1 AND x8.c = (SELECT count(*) FROM w1 AS x12 LEFT JOIN w0 AS x13 ON x12.c0 ="
        " x13.c0 AND x12.c1 > x8.c WHERE x12.c1 = x8.c)) AS x7 WHERE 'ab' > x7.c0",
        views,
    )
