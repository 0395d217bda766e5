"""The JSON form run by SQLite: it equals SQL written by hand, and its constants equal bound values."""

import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.capture.captured_database import running
from tests.model.parsed_query import parse_query
from tests.model.random_forms import CREATE, Forms, shuffled

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.literal import Value, from_lit
from headwater.model.query.json_form import AGGREGATES, QUERY_FUNCTIONS
from headwater.model.query.query import Query
from headwater.sources.sqlite.connection import open_file
from headwater.sources.sqlite.query.determinism.deterministic_functions import DETERMINISTIC
from headwater.sources.sqlite.query.query_sql import constant, query_sql
from headwater.sources.sqlite.types import Stored, to_stored

ROWS = """
INSERT INTO t VALUES (1, 1, 'a'), (2, 2, 'B'), (3, NULL, 'it''s'), (4, 3, NULL), (5, 1, 'A');
INSERT INTO u VALUES (1, 1, 0.5), (2, 'a', 2.5), (3, X'6100', NULL), (7, NULL, 1.0);
"""


@pytest.fixture(scope="module")
def db() -> Iterator[apsw.Connection]:
    made = open_file(":memory:")
    made.execute(CREATE + ROWS)
    yield made
    made.close()


def col(name: str, table: str | None = None) -> dict[str, Any]:
    return {"col": name} if table is None else {"col": name, "table": table}


def op(name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"op": name, "a": a, "b": b}


def lit(value: Any) -> dict[str, Any]:
    return {"lit": value}


def core(items: list[Any], tables: list[Any], **fields: Any) -> dict[str, Any]:
    projection = [item if "expr" in item else {"expr": item} for item in items]
    return {"select": {"projection": projection, "from": tables} | fields}


def select_json(
    items: list[Any], tables: list[Any], *, outer: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return a SELECT of `items` from `tables` as JSON; `outer` are the fields beside its body."""
    return {"body": core(items, tables, **fields)} | (outer or {})


def setop(kind: str, left: Any, right: Any, **fields: Any) -> dict[str, Any]:
    return {"setop": {"kind": kind, "left": left, "right": right} | fields}


def join(kind: str, left: Any, right: Any, **fields: Any) -> dict[str, Any]:
    return {"join": {"type": kind, "left": left, "right": right} | fields}


TT, UU = {"table": "t"}, {"table": "u"}
ID = col("id")
BY_ID = {"order_by": [{"expr": ID}]}
SAME_ID = op("eq", col("id", "t"), col("id", "u"))
IDS = [col("id", "t"), col("id", "u")]
T_IDS, U_IDS = core([ID], [TT]), core([ID], [UU])
BOTH = join("inner", TT, UU, on=SAME_ID)
X_AND_U = op("eq", col("id", "x"), col("id", "u"))
NEXT = core([op("add", col("n"), lit(1))], [{"table": "w"}], where=op("lt", col("n"), lit(4)))
COUNTING = {"body": setop("union", core([{"expr": lit(1), "as": "n"}], []), NEXT, all=True)}
SOME_T = {"body": core([ID], [TT], where=op("gt", col("a"), lit(1)))}


@pytest.mark.parametrize(
    ("body", "sql"),
    [
        ({"body": {"select": {"projection": [{"expr": lit(1)}]}}}, "SELECT 1"),
        (select_json([ID, {"expr": col("b"), "as": "x"}], [TT]), "SELECT id, b AS x FROM t"),
        (select_json([col("*")], [TT, UU]), "SELECT * FROM t, u"),
        (select_json([col("*", "u"), ID], [UU]), "SELECT u.*, id FROM u"),
        (select_json([col("a")], [TT], distinct=True), "SELECT DISTINCT a FROM t"),
        (
            select_json([ID], [{"db": "main", "table": "t", "as": "x"}], where=op("eq", col("a", "x"), lit(1))),
            "SELECT id FROM t WHERE a = 1",
        ),
        (select_json([ID], [TT], where=op("eq", col("b"), lit("a"))), "SELECT id FROM t WHERE b = 'a'"),
        (select_json([ID], [TT], where=op("sub", col("a"), lit(-1))), "SELECT id FROM t WHERE a - -1"),
        (
            select_json([ID], [TT], where={"op": "between", "a": ID, "lo": lit(2), "hi": lit(4)}),
            "SELECT id FROM t WHERE id BETWEEN 2 AND 4",
        ),
        (
            select_json([ID], [TT], where={"op": "in", "a": ID, "list": [lit(1), lit(9)]}),
            "SELECT id FROM t WHERE id IN (1, 9)",
        ),
        (select_json([ID], [TT], where={"op": "in", "a": ID, "list": []}), "SELECT id FROM t WHERE 0"),
        (
            select_json([ID], [TT], where={"op": "not", "a": {"op": "is_null", "a": col("a")}}),
            "SELECT id FROM t WHERE a IS NOT NULL",
        ),
        (select_json([ID], [TT], where=op("like", col("b"), lit("_"))), "SELECT id FROM t WHERE b LIKE '_'"),
        (select_json([ID], [TT], where=op("ilike", col("b"), lit("A"))), "SELECT id FROM t WHERE b LIKE 'A'"),
        (select_json([{"cast": {"expr": col("v"), "to": {"kind": "i64"}}}], [UU]), "SELECT CAST(v AS INTEGER) FROM u"),
        (
            select_json([{"case": {"when": [{"if": op("gt", ID, lit(2)), "then": lit("big")}], "else": ID}}], [TT]),
            "SELECT CASE WHEN id > 2 THEN 'big' ELSE id END FROM t",
        ),
        (
            select_json([{"case": {"when": [{"if": op("gt", ID, lit(2)), "then": lit("big")}]}}], [TT]),
            "SELECT CASE WHEN id > 2 THEN 'big' END FROM t",
        ),
        (select_json([{"fn": "coalesce", "args": [col("a"), lit(0)]}], [TT]), "SELECT coalesce(a, 0) FROM t"),
        # aggregates
        (select_json([{"fn": "count"}], [TT]), "SELECT count(*) FROM t"),
        (select_json([{"fn": "count", "args": [col("*")]}], [TT]), "SELECT count(*) FROM t"),
        (select_json([{"fn": "count", "args": [col("a")]}], [TT]), "SELECT count(a) FROM t"),
        (select_json([{"fn": "count", "args": [col("a")], "distinct": True}], [TT]), "SELECT count(DISTINCT a) FROM t"),
        (
            select_json([{"fn": name, "args": [col("v")]} for name in ("sum", "avg", "min", "max", "total")], [UU]),
            "SELECT sum(v), avg(v), min(v), max(v), total(v) FROM u",
        ),
        (select_json([{"fn": "sum", "args": [col("a")], "distinct": True}], [TT]), "SELECT sum(DISTINCT a) FROM t"),
        (select_json([{"fn": "group_concat", "args": [ID, lit("-")]}], [TT]), "SELECT group_concat(id, '-') FROM t"),
        (select_json([{"fn": "max", "args": [ID, lit(3)]}], [TT]), "SELECT max(id, 3) FROM t"),
        (
            select_json(
                [col("a"), {"fn": "count"}], [TT], group_by=[col("a")], having=op("gt", {"fn": "count"}, lit(1))
            ),
            "SELECT a, count(*) FROM t GROUP BY a HAVING count(*) > 1",
        ),
        # joins
        (select_json(IDS, [join("inner", TT, UU, on=SAME_ID)]), "SELECT t.id, u.id FROM t JOIN u ON t.id = u.id"),
        (select_json(IDS, [join("left", TT, UU, on=SAME_ID)]), "SELECT t.id, u.id FROM t LEFT JOIN u ON t.id = u.id"),
        (select_json(IDS, [join("right", TT, UU, on=SAME_ID)]), "SELECT t.id, u.id FROM t RIGHT JOIN u ON t.id = u.id"),
        (select_json(IDS, [join("full", TT, UU, on=SAME_ID)]), "SELECT t.id, u.id FROM t FULL JOIN u ON t.id = u.id"),
        (select_json(IDS, [join("cross", TT, UU)]), "SELECT t.id, u.id FROM t CROSS JOIN u"),
        (
            select_json([ID, col("a"), col("v")], [join("full", TT, UU, using_columns=["id"])]),
            "SELECT id, a, v FROM t FULL JOIN u USING (id)",
        ),
        (
            select_json([col("id", "x"), *IDS], [{"table": "t", "as": "x"}, join("right", TT, UU, on=SAME_ID)]),
            "SELECT x.id, j.* FROM t AS x CROSS JOIN (SELECT t.id, u.id FROM t RIGHT JOIN u ON t.id = u.id) AS j",
        ),
        (
            select_json([*IDS, col("id", "x")], [join("left", {"table": "t", "as": "x"}, BOTH, on=X_AND_U)]),
            "SELECT j.a, j.b, x.id FROM t AS x LEFT JOIN"
            " (SELECT t.id AS a, u.id AS b FROM t JOIN u ON t.id = u.id) AS j ON x.id = j.b",
        ),
        # subqueries
        (select_json([col("id", "d")], [{"subquery": {"query": SOME_T, "as": "d"}}]), "SELECT id FROM t WHERE a > 1"),
        (
            select_json([{"subquery": {"query": {"body": core([{"fn": "max", "args": [ID]}], [UU])}}}], [TT]),
            "SELECT (SELECT max(id) FROM u) FROM t",
        ),
        (
            select_json([ID], [UU], where={"op": "in", "a": ID, "b": {"subquery": {"query": SOME_T}}}),
            "SELECT id FROM u WHERE id IN (SELECT id FROM t WHERE a > 1)",
        ),
        (
            select_json(
                [ID], [UU], where={"op": "not", "a": {"op": "in", "a": ID, "b": {"subquery": {"query": SOME_T}}}}
            ),
            "SELECT id FROM u WHERE id NOT IN (SELECT id FROM t WHERE a > 1)",
        ),
        (
            select_json([ID], [TT], where={"exists": {"query": {"body": core([lit(1)], [UU], where=SAME_ID)}}}),
            "SELECT id FROM t WHERE EXISTS (SELECT 1 FROM u WHERE t.id = u.id)",
        ),
        (
            select_json(
                [ID], [TT], where={"exists": {"query": {"body": core([lit(1)], [UU], where=SAME_ID)}, "negated": True}}
            ),
            "SELECT id FROM t WHERE NOT EXISTS (SELECT 1 FROM u WHERE t.id = u.id)",
        ),
        # set operations: from the left unless nested right
        ({"body": setop("union", T_IDS, U_IDS)}, "SELECT id FROM t UNION SELECT id FROM u"),
        ({"body": setop("union", T_IDS, U_IDS, all=True)}, "SELECT id FROM t UNION ALL SELECT id FROM u"),
        ({"body": setop("intersect", T_IDS, U_IDS)}, "SELECT id FROM t INTERSECT SELECT id FROM u"),
        ({"body": setop("except", T_IDS, U_IDS)}, "SELECT id FROM t EXCEPT SELECT id FROM u"),
        ({"body": setop("except", setop("except", T_IDS, U_IDS), T_IDS)}, "SELECT id FROM t WHERE 0"),
        ({"body": setop("except", T_IDS, setop("except", U_IDS, T_IDS))}, "SELECT id FROM t"),
        # order, window, names
        (
            select_json([ID], [TT], outer={"order_by": [{"expr": col("b"), "dir": "desc"}, {"expr": ID}]}),
            "SELECT id FROM t ORDER BY b DESC, id",
        ),
        (
            select_json([ID], [TT], outer=BY_ID | {"limit": {"limit": 2, "offset": 1}}),
            "SELECT id FROM t ORDER BY id LIMIT 2 OFFSET 1",
        ),
        (select_json([ID], [TT], outer=BY_ID | {"limit": {"limit": 0}}), "SELECT id FROM t LIMIT 0"),
        (
            select_json([ID], [TT], outer=BY_ID | {"limit": {"offset": 3}}),
            "SELECT id FROM t ORDER BY id LIMIT -1 OFFSET 3",
        ),
        (
            {"body": setop("union", T_IDS, U_IDS)} | {"order_by": [{"expr": ID, "dir": "desc"}], "limit": {"limit": 2}},
            "SELECT 7 UNION ALL SELECT 5",
        ),
        (
            select_json([ID], [{"table": "w"}], outer={"with": [{"name": "w", "query": SOME_T}]}),
            "SELECT id FROM t WHERE a > 1",
        ),
        (
            select_json([col("n")], [{"table": "w"}], outer={"with": [{"name": "w", "query": COUNTING}]}),
            "VALUES (1), (2), (3), (4)",
        ),
    ],
)
def test_query_form_returns_the_rows_of_its_sql(db: apsw.Connection, body: Any, sql: str) -> None:
    found = db.execute(query_sql(parse_query(body))).fetchall()
    expected = db.execute(sql).fetchall()
    if "order_by" not in body:
        found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    assert found == expected
    assert found or "WHERE 0" in sql or "LIMIT 0" in sql, "the case shows nothing"


def test_columns_have_the_names_of_the_form(db: apsw.Connection) -> None:
    body = select_json([ID, col("b", "t"), {"expr": op("add", ID, lit(1)), "as": 'od"d'}], [TT])
    cursor = db.execute(query_sql(parse_query(body)))
    assert [name for name, _ in cursor.get_description()] == ["id", "b", 'od"d']


def test_parameters_are_positional_at_every_place(db: apsw.Connection) -> None:
    where = op("or", op("eq", ID, {"param": 1}), op("eq", col("b"), {"param": 0}))
    query = parse_query(select_json([ID], [TT], where=where, outer=BY_ID | {"limit": {"limit": {"param": 2}}}))
    sql = query_sql(query)
    assert query.parameters == ("1", "2", "3")
    assert db.execute(sql, ("a", 2, 5)).fetchall() == [(1,), (2,), (5,)]
    assert db.execute(sql, ("a", 2, 1)).fetchall() == [(1,)]


@pytest.mark.parametrize("kind", ["intersect", "except"])
def test_set_operation_that_sqlite_lacks_is_refused(kind: str) -> None:
    with pytest.raises(NotSupported, match=f"SQLite has no {kind.upper()} ALL"):
        query_sql(parse_query({"body": setop(kind, T_IDS, U_IDS, all=True)}))


@pytest.mark.parametrize("name", ['x"; DROP TABLE t; --', "a b", "select", "é", "it's", "a\nb", "--", "?1", "[x]"])
def test_hostile_name_is_quoted_as_a_name(name: str) -> None:
    own = open_file(":memory:")
    quoted = '"' + name.replace('"', '""') + '"'
    own.execute(f"CREATE TABLE {quoted} ({quoted} INTEGER); INSERT INTO {quoted} VALUES (7)")
    item = {"expr": col(name, name), "as": name}
    body = select_json(
        [item], [{"table": name}], where=op("eq", col(name), lit(7)), outer={"order_by": [{"expr": col(name)}]}
    )
    cursor = own.execute(query_sql(parse_query(body)))
    assert cursor.get_description()[0][0] == name
    assert cursor.fetchall() == [(7,)]
    own.close()


def test_unknown_column_name_is_refused(db: apsw.Connection) -> None:
    with pytest.raises(apsw.SQLError, match="no such column"):
        db.execute(query_sql(parse_query(select_json([col("nothing")], [TT]))))


@pytest.mark.parametrize("name", sorted({*QUERY_FUNCTIONS, *AGGREGATES}))
def test_every_function_of_the_form_runs_in_sqlite_and_is_deterministic(db: apsw.Connection, name: str) -> None:
    fewest, _ = QUERY_FUNCTIONS.get(name) or AGGREGATES[name]
    args = [lit("{}"), lit("$")][:fewest] if name.startswith("json") else [ID] * fewest
    db.execute(query_sql(parse_query(select_json([{"fn": name, "args": args}], [TT])))).fetchall()
    assert name.lower() in DETERMINISTIC


LITS = [
    {"t": "null"},
    {"t": "bool", "v": True},
    {"t": "bool", "v": False},
    {"t": "i64", "v": -(2**63)},
    {"t": "i64", "v": 2**63 - 1},
    {"t": "i64", "v": -1},
    {"t": "u64", "v": 2**63 - 1},
    {"t": "f64", "v": 0.1},
    {"t": "f64", "v": -0.0},
    {"t": "f64", "v": 5e-324},
    {"t": "f64", "v": -1.7976931348623157e308},
    {"t": "f64", "v": 1e22},
    {"t": "f64", "v": 3},
    {"t": "f64", "v": "NaN"},
    {"t": "f64", "v": "Infinity"},
    {"t": "f64", "v": "-Infinity"},
    {"t": "dec", "v": "12.3400"},
    {"t": "dec", "v": "-1E+3"},
    {"t": "str", "v": ""},
    {"t": "str", "v": "it's ''--;\"é🜁\n"},
    {"t": "str", "v": "\0a\0'\0"},
    {"t": "bytes", "b64": ""},
    {"t": "bytes", "b64": "AAECAyc="},
    {"t": "json", "v": {"b": "'", "a": [1.5, None]}},
    {"t": "embedding", "dims": 3, "v": [0.1, 2, -3], "model": "m'"},
    {"t": "date", "iso": "2026-01-18"},
    {"t": "time", "iso": "12:34:56.789Z"},
    {"t": "datetime", "iso": "2026-01-18T12:34:56.789Z"},
    {"t": "uuid", "v": "550E8400-e29b-41d4-a716-446655440000"},
]


def exact(value: Any) -> Any:
    return (type(value), struct.pack("<d", value) if isinstance(value, float) else value)


@pytest.mark.parametrize("value", LITS, ids=lambda value: f"{value['t']}:{str(value.get('v'))[:12]!r}")
def test_constant_equals_the_stored_value_of_a_write(db: apsw.Connection, value: Any) -> None:
    stored = to_stored(from_lit(value))
    items = [lit(value), {"param": 0}]
    columns = [col("a", "t"), col("b", "t"), col("k", "u"), col("v", "u")]
    for name in ("eq", "lt"):  # compared with columns of every affinity: as a bound value is
        items += [op(name, column, side) for column in columns for side in (lit(value), {"param": 0})]
    sql = query_sql(parse_query(select_json(items, [TT, UU])))
    for row in db.execute(sql, (stored,)):
        pairs = list(zip(row[::2], row[1::2], strict=True))
        assert all(exact(one) == exact(other) for one, other in pairs), (sql, pairs)


def test_value_that_sqlite_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not fit"):
        query_sql(parse_query(select_json([lit({"t": "u64", "v": 2**63})], [])))


def test_every_float_constant_is_read_back_exactly(db: apsw.Connection) -> None:
    rng = random.Random(20261115)
    for _ in range(20):
        drawn = (struct.unpack("<d", rng.randbytes(8))[0] for _ in range(500))
        floats = [value for value in drawn if math.isfinite(value)]
        row = db.execute("SELECT " + ", ".join(map(constant, floats))).fetchone()
        assert list(map(exact, row)) == list(map(exact, floats))


class Binding:
    """Replaces every value of a form by a parameter, and collects the values to bind."""

    def __init__(self) -> None:
        self.values: list[Stored] = []

    def bound(self, body: Any) -> Any:
        if isinstance(body, list):
            return [self.bound(item) for item in body]
        if not isinstance(body, dict):
            return body
        if "lit" in body:
            self.values.append(to_stored(_value(body["lit"])))
            return {"param": len(self.values) - 1}
        return {name: self.bound(value) for name, value in body.items()}


def _value(value: Any) -> Value:
    return from_lit(value) if isinstance(value, dict) else value


def rows(db: apsw.Connection, query: Query, values: list[Stored]) -> list[Any]:
    try:
        found = db.execute(query_sql(query), values).fetchall()
    except apsw.SQLError as error:
        assert "integer overflow" in str(error), (str(error), query_sql(query))
        return ["overflow"]
    return sorted([tuple(map(exact, row)) for row in found], key=repr)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_queries_run_and_constants_are_as_bound_values(db: apsw.Connection, seed: int) -> None:
    print("seed", seed)
    forms = Forms(random.Random(seed))
    for _ in range(10):
        body = forms.query(3)
        query = parse_query(body)
        sql = query_sql(query)
        assert query_sql(parse_query(shuffled(body, forms.rng))) == sql
        binding = Binding()
        found = rows(db, query, [])
        assert found == rows(db, parse_query(binding.bound(body)), binding.values), sql


def test_analysis_keeps_the_parameter_names_of_the_form(tmp_path: Path) -> None:
    where = op("and", op("gt", col("a"), {"param": 2}), op("ne", col("a"), {"param": 0}))
    query = parse_query(select_json([ID], [TT], where=where, outer=BY_ID))
    with running(tmp_path) as captured:
        captured.run(CREATE.split(";")[0])
        captured.run("INSERT INTO t VALUES (1, 5, ''), (2, 6, ''), (3, 7, '')")
        analysis = captured.source.analyse(query_sql(query))
        assert analysis.parameters == query.parameters == ("1", "2", "3")
        found = captured.source.answer(analysis, {"1": 7, "2": None, "3": 5})
        assert found is not None and found.rows == ((2,),)


@pytest.mark.parametrize("value", [{"t": "dec", "v": "1" * 9_999}, {"t": "str", "v": "\0" * 5_000}])
def test_rendering_stops_when_constants_become_too_long(value: Any) -> None:
    query_sql(parse_query(select_json([lit(value)], [])))
    with pytest.raises(InvalidRequest, match="the query exceeds"):
        query_sql(parse_query(select_json([lit(value)] * 12, [])))
