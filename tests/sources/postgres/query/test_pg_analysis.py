"""Dependencies of statements as PostgreSQL itself reports them: what is cacheable, the reasons if not, and when that
ends.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.model.parsed_query import parse_query
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.model.dependencies.description import of_condition
from headwater.model.literal import DateTime, Json
from headwater.sources.postgres.query.analysis import analysis
from headwater.sources.query import ReadResult

SCHEMA = [
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE DOMAIN small AS int CHECK (VALUE < 100)",
    "CREATE TABLE t(id int PRIMARY KEY, a text, n numeric(10,2), d date, ts timestamptz, u uuid, m mood, s small)",
    "CREATE TABLE u(id int PRIMARY KEY, tid int, f double precision)",
    "CREATE VIEW v AS SELECT id, upper(a) AS big FROM t WHERE n > 1",
    "CREATE VIEW w AS SELECT v.id, u.f FROM v JOIN u USING (id)",
    "CREATE TABLE parted(id int, k int) PARTITION BY LIST (k)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (2)",
    "CREATE TABLE parent(id int PRIMARY KEY)",
    "CREATE TABLE child(extra text) INHERITS (parent)",
    "CREATE MATERIALIZED VIEW mv AS SELECT 1 AS one",
    "CREATE UNLOGGED TABLE quick(id int)",
    "CREATE SEQUENCE counter",
    "CREATE TABLE secret(id int PRIMARY KEY)",
    "ALTER TABLE secret ENABLE ROW LEVEL SECURITY",
    "CREATE FUNCTION liar(int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT count(*)::int FROM t'",
    "CREATE FUNCTION plus(int, int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1 + $2'",
    "CREATE OPERATOR <+> (FUNCTION = plus, LEFTARG = int, RIGHTARG = int)",
    "CREATE AGGREGATE total(int) (SFUNC = plus, STYPE = int)",
    'CREATE SCHEMA "odd one"',
    'CREATE TABLE "odd one"."a.b"("x y" int PRIMARY KEY)',
]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def own(pg: Server) -> Iterator[PgRig]:
    made = PgRig(pg, f"asked_{os.getpid()}_{next(_numbers)}", *SCHEMA)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT id FROM t ORDER BY id", "t"),
        ("TABLE t", "t"),
        ("VALUES (1), (2)", ""),
        ("SELECT count(*) FROM t", "t"),
        ("SELECT t FROM t", "t"),
        ("SELECT row_to_json(t) FROM t", "t"),
        ("SELECT big FROM v WHERE id = $1", "t"),
        ("SELECT * FROM w", "t u"),
        ("SELECT id FROM t WHERE id IN (SELECT tid FROM u)", "t u"),
        ("WITH x AS (SELECT * FROM u) SELECT 1 FROM x", "u"),
        ("WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT r.n FROM r, t", "t"),
        ("SELECT id FROM t UNION SELECT id FROM u", "t u"),
        ("SELECT * FROM parted", "parted_1 parted_2"),
        ("SELECT * FROM parent", "child parent"),
        ("SELECT * FROM ONLY parent", "parent"),
        ("SELECT x.id FROM generate_series(1, 3) g(n) JOIN t x ON x.id = g.n", "t"),
        ("SELECT id FROM t, LATERAL (SELECT f FROM u WHERE u.tid = t.id) z", "t u"),
        ('SELECT "x y" FROM "odd one"."a.b"', '"odd one"."a.b"'.replace('"odd one"', "odd one")),
        ("SELECT ts::text, d + 1, ts + interval '1 day', date_trunc('day', ts), to_char(ts, 'YYYY') FROM t", "t"),
        ("SELECT id FROM t WHERE d > '2024-01-01' AND ts < $1", "t"),
        ("SELECT m, s, u, n FROM t WHERE m = 'ok' ORDER BY m", "t"),
        ("SELECT a::int, n::text, id::bigint FROM t", "t"),
        ("SELECT json_agg(t ORDER BY id), jsonb_build_object('a', max(a)) FROM t", "t"),
        ("SELECT greatest(id, 3), coalesce(a, ''), CASE WHEN id > 1 THEN 1 END, ARRAY[id], (id, a) FROM t", "t"),
        ("SELECT a COLLATE \"C\", nullif(id, 1), id IS DISTINCT FROM 2, (id, a) < (1, 'b'), id = ANY ($1) FROM t", "t"),
        ("SELECT rank() OVER (PARTITION BY a ORDER BY n) FROM t", "t"),
        ("SELECT id FROM t WHERE a = 'now' -- now", "t"),
    ],
)  # fmt: skip
def test_cacheable_query_reports_the_tables_it_reads(own: PgRig, sql: str, tables: str) -> None:
    found = own.source.analyse(sql)
    assert found.volatile == () and found.is_cacheable
    expected = [tables] if '"' in tables else tables.split()
    assert list(found.tables) == expected
    assert {each.table for each in found.dependencies} == set(expected)


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT now()", "now() may answer differently"),
        ("SELECT current_date", "the current time or user"),
        ("SELECT current_user", "the current time or user"),
        ("SELECT localtimestamp", "the current time or user"),
        ("SELECT random()", "random() may answer"),
        ("SELECT gen_random_uuid()", "gen_random_uuid() may answer"),
        ("SELECT clock_timestamp()", "clock_timestamp() may answer"),
        ("SELECT age(ts) FROM t", "age() may answer"),
        ("SELECT current_setting('search_path')", "current_setting() may answer"),
        ("SELECT id FROM t WHERE d > 'today'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > 'NOW'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > E'\\x6eow'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > U&'n\\006fw'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > 'n'\n'ow'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > 'n'\r'ow'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts > 'n' -- one\n -- two\n 'ow'", "depend on the clock"),
        ("SELECT id FROM t WHERE ts <@ '[n\"o\"w,)'::tstzrange", "depend on the clock"),
        ("SELECT a::date FROM t", "may mean the current time"),
        ("SELECT CAST(a AS timestamptz) FROM t", "may mean the current time"),
        ("SELECT nextval('counter')", "nextval() may answer"),
        ("SELECT last_value FROM counter", "is a sequence"),
        ("SELECT 't'::regclass", "names things of the catalogue"),
        ("SELECT to_tsvector('english', a) FROM t", "names things of the catalogue"),
        ("SELECT to_tsvector(a) FROM t", "to_tsvector() may answer"),
        ("SELECT relname FROM pg_class", "catalogue"),
        ("SELECT table_name FROM information_schema.tables", "catalogue"),
        ("SELECT ctid FROM t", "system columns of 't'"),
        ("SELECT id FROM t WHERE xmin::text = '5'", "system columns of 't'"),
        ("SELECT tableoid FROM parted", "system columns of 'parted'"),
        ("SELECT id FROM t TABLESAMPLE SYSTEM (50)", "TABLESAMPLE"),
        ("SELECT one FROM mv", "is a materialised view"),
        ("SELECT id FROM quick", "is unlogged"),
        ("SELECT id FROM secret", "has row security"),
        ("SELECT liar(1)", "public.liar() is not PostgreSQL's own"),
        ("SELECT id FROM t WHERE id <+> 1 = 2", "public.plus() is not PostgreSQL's own"),
        ("SELECT total(id) FROM t", "public.total() is not PostgreSQL's own"),
        ("SELECT pg_typeof(id) FROM t", "pg_typeof() may answer"),
        ("SELECT * FROM json_to_recordset('[]') AS x(a timestamptz)", "json_to_recordset() may answer"),
        ("SELECT pg_relation_size('t')", "pg_relation_size() may answer"),
    ],
)  # fmt: skip
def test_uncacheable_query_reports_the_reason(own: PgRig, sql: str, reason: str) -> None:
    found = own.source.analyse(sql)
    assert any(reason in each for each in found.volatile), found.volatile


@pytest.mark.parametrize(
    "sql", ["SELECT liar(1) FROM u", "SELECT total(id) FROM t", "SELECT count(*) > 0 FROM pg_class"]
)
def test_uncacheable_query_is_answered(own: PgRig, sql: str) -> None:
    assert own.source.answer(own.source.analyse(sql), {}) is not None


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t(id) VALUES (1)",
        "WITH x AS (DELETE FROM t RETURNING id) SELECT id FROM x",
        "SELECT id FROM t FOR UPDATE",
        "SELECT id FROM t FOR SHARE",
        "SELECT id INTO z FROM t",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE t",
        "EXPLAIN SELECT 1",
        "SHOW search_path",
        "SELECT FROM t",
        "SELECT nothing FROM t",
        "SELECT id FROM nowhere",
        "SELECT $2::int",
        "SELECT :a::int + $2::int",
        "SELECT 1 FROM t WHERE (",
        "",
    ],
)
def test_statement_that_is_no_query_is_refused(own: PgRig, sql: str) -> None:
    with pytest.raises(InvalidRequest):
        own.source.analyse(sql)


@pytest.mark.parametrize(
    ("sql", "beyond"),
    [
        ("SELECT id, upper(a), now(), random() FROM t", ""),
        ("SELECT count(*) FROM w", ""),
        ("SELECT query_to_xml('select * from u', true, false, '')", "query_to_xml()"),
        ("SELECT table_to_xml('u', true, false, '')", "table_to_xml()"),
        ("SELECT relname FROM pg_class", "pg_catalog.pg_class"),
        ("SELECT table_name FROM information_schema.tables", "pg_catalog.pg_class"),
        ("SELECT 1 FROM pg_stat_activity", "pg_stat_get_activity()"),
        ("SELECT 'u'::regclass::text", "type regclass"),
        ("SELECT pg_relation_size('u')", "pg_relation_size()"),
        ("SELECT id FROM t WHERE has_table_privilege('u', 'select')", "has_table_privilege()"),
        ("SELECT b FROM XMLTABLE('/a' PASSING query_to_xml('select 1', true, false, '') COLUMNS b text)", "understood"),
    ],
)
def test_reads_beyond_tables_are_reported(own: PgRig, sql: str, beyond: str) -> None:
    found = own.source.analyse(sql).beyond
    assert any(beyond in each for each in found) if beyond else not found, found


def test_query_parameters_are_bound_by_position_or_by_name(own: PgRig) -> None:
    found = own.source.analyse("SELECT :b::text || ':no' || $$:no$$ || :a || :b /* :no /* ' */ :no */ -- :no")
    assert (found.parameters, found.columns) == (("b", "a"), ("?column?",))
    read = own.source.answer(found, {"a": "x", "b": "y"})
    assert read is not None and read.rows == (("y:no:noxy",),)
    assert own.source.analyse("SELECT $2::int - $1::int AS less").parameters == ("1", "2")


def test_argument_that_depends_on_the_clock_is_refused(own: PgRig) -> None:
    found = own.source.analyse("SELECT count(*) FROM t WHERE ts < $1")
    for value in ("now", " Yesterday", "tomorrow 10:00", Json('"now"'), Json('"Today"')):
        with pytest.raises(InvalidRequest, match="relative to now"):
            own.source.answer(found, {"1": value})
    assert own.source.answer(found, {"1": DateTime("2024-01-01T00:00:00+00:00")}) is not None
    found = own.source.analyse("SELECT count(*) FROM t WHERE ts <@ $1::tstzrange")
    for value in ('[n"o"w,)', "[n\\ow,)"):
        with pytest.raises(InvalidRequest, match="relative to now"):
            own.source.answer(found, {"1": value})
    assert own.source.answer(found, {"1": "[2024-01-01,)"}) is not None
    found = own.source.analyse("SELECT count(*) FROM t WHERE a = $1")
    assert own.source.answer(found, {"1": "now"}) is not None


def test_analysis_leaves_no_object_in_the_database(own: PgRig) -> None:
    own.source.analyse("SELECT id FROM t WHERE id = $1")
    assert own.db.execute("SELECT count(*) FROM pg_proc WHERE proname ~ 'headwater'").fetchone() == (0,)


# --- what is seen of tables ------------------------------------------------------------------------------------

WHOLE = None


@pytest.mark.parametrize(
    ("sql", "columns", "condition", "is_total"),
    [
        ("SELECT * FROM u", "id tid f", "", True),
        ("SELECT id FROM u ORDER BY f", "id f", "", True),
        ("SELECT u FROM u", WHOLE, "", True),
        ("SELECT count(*) FROM u", "", "", True),
        ("SELECT id FROM u WHERE tid = $1", "id tid", "tid = ?1", True),
        ("SELECT id FROM u WHERE 3 < tid AND tid IN (5, 6, NULL)", "id tid", "tid > 3 and tid in (5, 6, null)", True),
        ("SELECT id FROM u WHERE tid IS NULL OR id = 1", "id tid", "tid is null or id = 1", True),
        ("SELECT id FROM u WHERE tid IS NOT NULL", "id tid", "tid is not null", True),
        ("SELECT id FROM u WHERE tid = 1 AND f > 0", "id tid f", "tid = 1", True),
        ("SELECT id FROM u WHERE tid = 1 AND 10 / tid > 1", "id tid", "", True),  # what may fail, may fail on any row
        ("SELECT id FROM u WHERE tid = 1 AND id IN (SELECT 1)", "id tid", "", True),
        ("SELECT id FROM u WHERE tid + 0 = 1", "id tid", "", True),
        ("SELECT a.id FROM u a JOIN u b ON a.id = b.tid WHERE a.id = 1", "id tid", "", True),
        ("SELECT id FROM u WHERE id = 1 UNION SELECT 2", WHOLE, "", False),
        ("SELECT tid, count(*) FROM u WHERE id > 5 GROUP BY tid", WHOLE, "id > 5", False),
        ("SELECT tid, count(*) FROM u WHERE id > 5 GROUP BY tid ORDER BY tid", "id tid", "id > 5", True),
        ("SELECT sum(f) FROM u", WHOLE, "", False),
        ("SELECT max(tid) FROM u", "tid", "", True),
        ("SELECT f, count(*) FROM u GROUP BY f ORDER BY f", WHOLE, "", False),
        ("SELECT id FROM u ORDER BY tid, id LIMIT 3", "id tid", "", True),
        ("SELECT string_agg(tid::text, ',' ORDER BY tid::text) FROM u", "tid", "", True),
        ("SELECT row_number() OVER (ORDER BY tid, id) FROM u ORDER BY id", "id tid", "", True),
        ("SELECT id FROM (SELECT * FROM u) x WHERE id = 1", WHOLE, "", False),
        ("SELECT id FROM u, generate_series(1, 10 / tid) g WHERE id = 1", WHOLE, "", False),
    ],
)  # fmt: skip
def test_dependency_has_the_columns_and_condition_of_the_query(
    own: PgRig, sql: str, columns: str | None, condition: str, is_total: bool
) -> None:
    found = own.source.analyse(sql)
    assert found.is_cacheable, found.volatile
    (place,) = found.dependencies
    assert place.columns == (None if columns is None else frozenset(columns.split()))
    assert (of_condition(place.condition), found.is_total) == (condition, is_total)


@pytest.mark.parametrize(
    ("sql", "u", "t"),
    [
        ("SELECT t.a FROM t JOIN u ON u.tid = t.id AND u.f > 1 AND u.tid > 3 WHERE t.a = 'x'", "tid > 3", "a = 'x'"),
        ("SELECT t.a FROM t LEFT JOIN u ON u.tid = t.id AND u.tid > 3 WHERE t.a = 'x'", "", "a = 'x'"),
        ("SELECT t.a FROM t LEFT JOIN u ON u.tid = t.id WHERE u.tid IS NULL", "", ""),
        ("SELECT t.a FROM t LEFT JOIN u ON u.tid = t.id WHERE u.tid = 3", "tid = 3", ""),
        ("SELECT t.a FROM t FULL JOIN u ON u.tid = t.id WHERE u.id = 3 OR t.id = 3", "", ""),
        ("SELECT t.a FROM t JOIN u ON 1 / u.tid = t.id WHERE t.a = 'x'", "", ""),
        ("SELECT t.a FROM t, u WHERE t.d <= '2024-01-01' AND t.u <> $1 AND t.a <> 'x' AND t.a < 'y' AND u.f = 1",
         "", "d <= '2024-01-01' and u <> ?1 and a <> 'x'"),
        ("SELECT t.a FROM t, u WHERE t.s = 3 AND t.n = 1 AND u.tid = $1::bigint", "tid = ?1", ""),
        ("SELECT t.a FROM t, u WHERE t.m = 'ok' AND u.tid = 4", "", ""),
    ],
)  # fmt: skip
def test_conditions_of_joins_are_assigned_to_their_tables(own: PgRig, sql: str, u: str, t: str) -> None:
    found = {each.table: of_condition(each.condition) for each in own.source.analyse(sql).dependencies}
    assert found == {"t": t, "u": u}


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT a FROM t ORDER BY d LIMIT 3", "LIMIT without a total order"),
        ("SELECT id FROM t OFFSET 3", "LIMIT without a total order"),
        ("SELECT DISTINCT ON (a) a, d FROM t ORDER BY a", "DISTINCT ON without a total order"),
        ("SELECT array_agg(id) FROM t", "array_agg() takes rows in any order"),
        ("SELECT string_agg(a, ',' ORDER BY d) FROM t", "string_agg() takes rows in any order"),
        ("SELECT json_agg(t) FROM t", "json_agg() takes rows in any order"),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", "row_number() OVER without"),
        ("SELECT lag(a) OVER (ORDER BY d) FROM t", "lag() OVER without"),
        ("SELECT sum(id) OVER (ORDER BY d ROWS 1 PRECEDING) FROM t", "sum() OVER without"),
        ("SELECT ARRAY(SELECT id FROM t)", "ARRAY(SELECT …)"),
        ("SELECT (SELECT a FROM t LIMIT 1)", "LIMIT without a total order"),
        ("SELECT x.a FROM (SELECT a FROM t LIMIT 1) x", "LIMIT without a total order"),
    ],
)  # fmt: skip
def test_query_with_a_result_chosen_by_the_plan_is_not_cacheable(own: PgRig, sql: str, reason: str) -> None:
    assert any(reason in each for each in own.source.analyse(sql).volatile)


@pytest.mark.parametrize("call", ["any_value(d%s)", "json_object_agg_unique(a, d%s)"])
def test_aggregate_of_postgresql_16_that_takes_rows_in_any_order_is_not_cacheable(own: PgRig, call: str) -> None:
    if own.db.info.server_version < 160000:
        pytest.skip("PostgreSQL has these functions since version 16")
    assert "takes rows in any order" in own.source.analyse(f"SELECT {call % ''} FROM t").volatile[0]
    assert own.source.analyse(f"SELECT {call % ' ORDER BY id'} FROM t").is_cacheable


@pytest.mark.every_server
def test_key_compared_by_a_nondeterministic_collation_gives_no_total_order(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id text PRIMARY KEY)")
    if not own.db.execute("SELECT 1 FROM pg_collation WHERE collname = 'en-x-icu'").fetchall():
        pytest.skip("this PostgreSQL was built without ICU")
    own.run(
        "CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        "CREATE TABLE u(id int PRIMARY KEY, a text COLLATE ci)",
    )
    for join in ("JOIN t ON u.a = t.id", "LEFT JOIN t ON t.id = u.a"):
        found = own.source.analyse(f"SELECT t.id FROM u {join} ORDER BY u.id LIMIT 1")
        assert "LIMIT without a total order" in found.volatile[0]


@pytest.mark.parametrize(
    ("sql", "key"),
    [
        ("SELECT f, id FROM u", (1,)),
        ("SELECT u.id, t.id FROM u LEFT JOIN t ON t.id = u.tid LIMIT 5", (0, 1)),
        ("SELECT u.id FROM u LEFT JOIN t ON t.id = u.tid", None),
        ("SELECT id + 1 FROM u", None),
        ("SELECT id, count(*) FROM u GROUP BY id", None),
        ("SELECT id, generate_series(1, 2) FROM u", None),
        ("SELECT u.id, t.id FROM u FULL JOIN t ON t.id = u.tid", None),
        ("SELECT id FROM parent", None),
    ],
)
def test_analysis_finds_the_key_of_the_result(own: PgRig, sql: str, key: tuple[int, ...] | None) -> None:
    assert own.source.analyse(sql).key == key


def test_column_that_rounds_or_truncates_is_compared_by_equality_only(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, ts timestamptz(0), v varchar(4))")
    for condition, expected in {
        "ts < '2024-01-01 00:00:00.4'": "",
        "ts <> '2024-01-01 00:00:00.4'": "",
        "v <> 'abcd '": "",
        "v = 'abcd'": "v = 'abcd'",
    }.items():
        (place,) = own.source.analyse(f"SELECT id FROM t WHERE {condition}").dependencies
        assert of_condition(place.condition) == expected


def test_partial_order_is_extended_by_the_keys_of_its_tables(own: PgRig) -> None:
    found = own.source.analyse("SELECT x.a FROM t x LEFT JOIN u ON u.id = x.id ORDER BY x.d DESC -- done")
    assert found.sql.endswith('-- done\n, "x"."id", "u"."id"') and found.is_total
    assert own.source.answer(found, {}) is not None
    assert own.source.analyse(found.sql).epoch == found.epoch


# --- epochs ------------------------------------------------------------------------------------------------


def answer_of(own: PgRig, sql: str, **args: Any) -> ReadResult:
    """Analyse and run the query; return its answer, which it must have."""
    found = own.source.answer(own.source.analyse(sql), {str(name): value for name, value in args.items()})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("sql", "ddl"),
    [
        ("SELECT * FROM w", "CREATE OR REPLACE VIEW v AS SELECT id, lower(a) AS big FROM t WHERE n > 1"),
        ("SELECT * FROM w", "ALTER VIEW v RENAME COLUMN big TO huge"),
        ("SELECT a FROM t", "ALTER TABLE t ALTER COLUMN ts TYPE timestamp"),
        ("SELECT a FROM t", "ALTER TABLE t ADD COLUMN z int DEFAULT 5"),
        ("SELECT m FROM t", "ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'"),
        ("SELECT * FROM parted", "CREATE TABLE parted_3 PARTITION OF parted FOR VALUES IN (3)"),
        ("SELECT * FROM parted", "ALTER TABLE parted DETACH PARTITION parted_2"),
        ("SELECT * FROM parent", "CREATE TABLE other() INHERITS (parent)"),
        ("SELECT id FROM t", "ALTER TABLE t ENABLE ROW LEVEL SECURITY"),
        ("SELECT id FROM t", "ALTER PUBLICATION {publication} SET (publish = 'insert')"),
        ("SELECT id FROM t", "DROP TABLE t CASCADE; CREATE TABLE t(id int PRIMARY KEY)"),
        ("SELECT id FROM t", "ALTER TABLE t RENAME TO gone; CREATE TABLE t(id int PRIMARY KEY)"),
        ("SELECT id FROM t", "CREATE SCHEMA postgres; CREATE TABLE postgres.t(id int PRIMARY KEY)"),
        ("SELECT f FROM u", "DROP VIEW w; ALTER TABLE u ALTER COLUMN f TYPE text COLLATE \"C\""),
        ("SELECT s FROM t", "ALTER DOMAIN small DROP CONSTRAINT small_check"),
    ],
)  # fmt: skip
def test_schema_change_that_alters_a_query_invalidates_its_analysis(
    rig: Callable[..., PgRig], sql: str, ddl: str
) -> None:
    own = rig(*SCHEMA)
    found, before = own.source.analyse(sql), own.source.read_head().schema
    assert own.source.answer(found, {}) is not None
    for statement in ddl.format(publication=own.slot).split("; "):
        own.run(statement)
    assert own.source.read_head().schema != before
    assert own.source.answer(found, {}) is None
    again = own.source.analyse(sql)
    assert again.epoch != found.epoch and own.source.answer(again, {}) is not None


def test_view_changed_and_changed_back_has_a_new_epoch(rig: Callable[..., PgRig]) -> None:
    own = rig(*SCHEMA)
    view = "CREATE OR REPLACE VIEW v AS SELECT id, {}(a) AS big FROM t WHERE n > 1"
    found = own.source.analyse("SELECT * FROM v")
    own.run(view.format("lower"), view.format("upper"))
    assert own.source.analyse("SELECT * FROM v").epoch != found.epoch


def test_unrelated_schema_changes_keep_the_epoch_of_a_query(rig: Callable[..., PgRig]) -> None:
    own = rig(*SCHEMA)
    found = own.source.analyse("SELECT id FROM t")
    own.run("CREATE TABLE more(id int)", "CREATE INDEX ON u(f)", "ANALYZE t", "VACUUM t", "DROP VIEW w")
    assert own.source.analyse("SELECT id FROM t").epoch == found.epoch
    own.run("DROP TABLE more")
    assert own.source.answer(found, {}) is not None  # it finds out by itself that nothing of its own moved


def test_changed_search_path_invalidates_an_analysis(rig: Callable[..., PgRig]) -> None:
    own = rig(
        *SCHEMA, "INSERT INTO t(id) VALUES (1)", "CREATE SCHEMA other", "CREATE TABLE other.t(id int PRIMARY KEY)"
    )
    found = own.source.analyse("SELECT id FROM t")
    assert answer_of(own, "SELECT id FROM t").rows == ((1,),)
    own.run(f"ALTER DATABASE {own.name} SET search_path = other")
    own.source._pool.renew()  # as sessions come and go
    assert own.source.answer(found, {}) is None
    assert own.source.analyse("SELECT id FROM t").tables == ("other.t",)
    assert answer_of(own, "SELECT id FROM t").rows == ()


def test_table_name_redefined_during_a_query_invalidates_the_answer(
    rig: Callable[..., PgRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot has the old catalogue, PostgreSQL reads the new one: its locks show which table was read."""
    own = rig("CREATE TABLE t(id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    found = own.source.analyse("SELECT id FROM t")
    source, once = own.source, threading.Event()

    real = analysis.state_in

    def between(link: Any) -> Any:
        found = real(link)
        if not once.is_set():
            once.set()
            own.run("CREATE SCHEMA postgres", "CREATE TABLE postgres.t(id int PRIMARY KEY)")
        return found

    monkeypatch.setattr(analysis, "state_in", between)
    assert source.answer(found, {}) is None
    assert once.is_set()
    assert source.analyse("SELECT id FROM t").tables == ("postgres.t",)


# --- roles, publications -------------------------------------------------------------------------------------


def test_role_without_temporary_objects_receives_answers_without_tags(rig: Callable[..., PgRig], pg: Server) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    own.run(
        f"REVOKE TEMPORARY ON DATABASE {own.name} FROM PUBLIC",
        f"CREATE ROLE plain_{own.name} LOGIN REPLICATION",
        f"GRANT SELECT ON t TO plain_{own.name}",
    )
    own.user = f"plain_{own.name}"
    own.open()
    try:
        found = own.source.analyse("SELECT id FROM t")
        assert not found.is_cacheable and "GRANT TEMPORARY" in found.volatile[0]
        assert answer_of(own, "SELECT id FROM t").rows == ((1,),)
    finally:
        own.user = "postgres"
        own.open()
        own.run(f"DROP OWNED BY plain_{own.name}", f"DROP ROLE plain_{own.name}")


def test_query_on_a_partly_or_not_published_table_is_not_cacheable(rig: Callable[..., PgRig], pg: Server) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, a text)", "CREATE TABLE u(id int PRIMARY KEY)", tables=("t",))
    assert own.source.analyse("SELECT id FROM t").is_cacheable
    (reason,) = own.source.analyse("SELECT id FROM u").unseen
    assert "not published" in reason
    if own.db.info.server_version >= 150000:
        own.run(f"ALTER PUBLICATION {own.slot} SET TABLE t WHERE (id > 5)")
        (reason,) = own.source.analyse("SELECT id FROM t").unseen
        assert "row filter" in reason
        own.run(f"ALTER PUBLICATION {own.slot} SET TABLE t (id)")
        (reason,) = own.source.analyse("SELECT id FROM t").unseen
        assert "column list" in reason
        own.run(f"ALTER PUBLICATION {own.slot} SET TABLE t")
    own.run(f"ALTER PUBLICATION {own.slot} SET (publish = 'insert, update')")
    assert any("ALTER PUBLICATION" in each for each in own.source.analyse("SELECT id FROM t").unseen)


# --- positions -----------------------------------------------------------------------------------------------


def test_answer_has_the_offset_of_its_snapshot_in_any_order_of_commits(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY)")
    found = own.source.analyse("SELECT id FROM t ORDER BY id")
    first, second = (pg_session(own) for _ in "12")
    first.execute("INSERT INTO t VALUES (1)")
    second.execute("INSERT INTO t VALUES (2)")
    second.commit()
    own.pull()
    read = own.source.answer(found, {})
    assert read is not None and (read.rows, read.offset) == (((2,),), own.latest)
    first.commit()
    own.pull()
    read = own.source.answer(found, {})
    assert read is not None and (read.rows, read.offset) == (((1,), (2,)), own.latest)
    first.close()
    second.close()


def test_query_that_fails_at_run_time_raises_a_headwater_error(own: PgRig) -> None:
    found = own.source.analyse("SELECT 1 / $1::int")
    with pytest.raises(HeadwaterError):
        own.source.answer(found, {"1": 0})


def test_truncated_answer_is_not_settled(own: PgRig) -> None:
    read = answer_of(own, "SELECT n FROM generate_series(1, 200000) n")
    assert read.truncated and not read.settled


def pg_session(own: PgRig) -> Any:
    made = own.server.connect(own.name)
    made.autocommit = False
    return made


# --- the JSON form -------------------------------------------------------------------------------------------


def col(name: str, table: str | None = None) -> dict[str, Any]:
    return {"col": name} if table is None else {"col": name, "table": table}


def select(projection: list[Any], *tables: Any, **more: Any) -> dict[str, Any]:
    items = [each if "expr" in each else {"expr": each} for each in projection]
    return {"select": {"projection": items, "from": [*tables], **more}}


ID, U, ODD = col("id"), {"table": "u"}, {"table": 'odd one."a.b"'}
JOINED = {"join": {"type": "left", "left": {"table": "t", "as": "x"}, "right": U,
                   "on": {"op": "eq", "a": col("id", "x"), "b": col("tid", "u")}}}  # fmt: skip
COUNT = {"setop": {"kind": "union", "all": True, "left": select([{"expr": {"lit": 1}, "as": "n"}]),
                   "right": select([{"op": "add", "a": col("n"), "b": {"lit": 1}}], {"table": "w"},
                                   where={"op": "lt", "a": col("n"), "b": {"lit": 4}})}}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "sql"),
    [
        ({"body": select([ID], U)}, "SELECT id FROM u"),
        ({"body": select([col("*")], ODD)}, 'SELECT * FROM "odd one"."a.b"'),
        ({"body": select([col("x y", 'odd one."a.b"')], ODD)}, 'SELECT "x y" FROM "odd one"."a.b"'),
        ({"body": select([col("id", "x"), col("f", "u")], JOINED)},
         "SELECT x.id, f FROM t x LEFT JOIN u ON x.id = tid"),
        ({"body": select([{"fn": "count"}, {"fn": "total", "args": [col("f")]}], U)},
         "SELECT count(*), coalesce(sum(f), 0) FROM u"),
        ({"body": select([{"fn": "group_concat", "args": [ID]}], U)}, "SELECT string_agg(id::text, ',') FROM u"),
        ({"with": [{"name": "w", "query": {"body": COUNT}}], "body": select([col("n")], {"table": "w"})},
         "VALUES (1), (2), (3), (4)"),
        ({"with": [{"name": "t", "query": {"body": select([ID], U)}}], "body": select([ID], {"table": "t"})},
         "SELECT id FROM u"),
        ({"body": select([ID], U), "order_by": [{"expr": ID, "dir": "desc"}], "limit": {"limit": 2, "offset": 1}},
         "SELECT id FROM u ORDER BY id DESC LIMIT 2 OFFSET 1"),
        ({"body": select([ID], U, where={"op": "eq", "a": col("tid"), "b": {"param": 0}})},
         "SELECT id FROM u WHERE tid = 7"),
        ({"body": select([{"lit": "it's \\ "}, {"lit": -1}, {"lit": {"t": "dec", "v": "2.50"}}, {"lit": True}])},
         "SELECT 'it''s ' || chr(92) || ' ', -1, 2.50, true"),
        ({"body": select([{"lit": {"t": "date", "iso": "2024-02-01"}}, {"lit": {"t": "bytes", "b64": "YQA="}}])},
         "SELECT date '2024-02-01', '\\x6100'::bytea"),
    ],
)  # fmt: skip
def test_query_in_json_form_returns_the_rows_of_its_sql(own: PgRig, form: dict[str, Any], sql: str) -> None:
    own.run("INSERT INTO u VALUES (1, 7, 1.5), (2, 7, 2), (3, 8, NULL) ON CONFLICT DO NOTHING")
    own.run("INSERT INTO t(id) VALUES (7), (9) ON CONFLICT DO NOTHING")
    own.run('INSERT INTO "odd one"."a.b" VALUES (1), (2) ON CONFLICT DO NOTHING')
    query = parse_query(form)
    text = own.source.text(query)
    assert text == own.source.text(parse_query(form))
    found = own.source.answer(own.source.analyse(text), {str(n + 1): 7 for n in range(len(query.parameters))})
    assert found is not None
    assert sorted(map(repr, found.rows)) == sorted(map(repr, own.source.read(sql).rows))
