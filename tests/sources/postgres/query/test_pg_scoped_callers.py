"""Callers with the scope of one PostgreSQL table: no statement reads another table or reveals that it exists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.hidden_tables import FORMS, WITH_FORMS, mentioning
from tests.sources.postgres.pg_source import shared_server
from tests.sources.postgres.setup.test_pg_logins import Site

from headwater.sources.postgres.query.analysis.tree_reads import Reader

pytestmark = pytest.mark.slow

READER, WRITER = f"scoped_reader_{os.getpid()}", f"scoped_writer_{os.getpid()}"
WORD = "the-word-of-others"
SECRETS = "(SELECT string_agg(word, ',') FROM secret)"
SCOPED = ("viewer_of_orders", "editor_of_orders")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with a viewer and an editor of the table orders alone."""
    folder = tmp_path_factory.mktemp("scoped")
    made = Site(shared_server(), f"scoped_{os.getpid()}", folder, reader=READER, writer=WRITER)
    made.db.execute("INSERT INTO secret VALUES (1, %s)", [WORD])
    for name in SCOPED:
        token = made.live.ok("security.token.create", name=name, role=name.split("_")[0], scopes=["main.orders"])
        headers = {"authorization": f"Bearer {token['token']}"}
        made.callers[name] = httpx.Client(base_url=made.live.url, headers=headers, timeout=60)
    yield made
    for name in SCOPED:
        made.callers[name].close()
    made.db.execute(f"DROP OWNED BY {READER}, {WRITER}".encode())
    made.close()
    with shared_server().connect() as admin:
        admin.execute(f"DROP ROLE {READER}, {WRITER}".encode())


def answers(site: Site, sql: str) -> dict[str, dict[str, Any]]:
    """Return the answers to scoped callers for `sql`, by method."""
    found = {method: site.call(SCOPED[0], method, sql=sql) for method in ("query.select", "query.prepare")}
    return {**found, "query.explain": site.call(SCOPED[0], "query.explain", sql=sql)} | {
        "sql.exec": site.call(SCOPED[1], "sql.exec", sql=sql)
    }


# --- subqueries in every place of a statement ---------------------------------------------------------------

PLACES = (
    "SELECT count(*) FROM orders TABLESAMPLE bernoulli (({}::text)::real)",
    "SELECT count(*) FROM orders TABLESAMPLE system (({}::text)::real)",
    "SELECT count(*) FROM orders TABLESAMPLE bernoulli (50) REPEATABLE (({}::text)::float8)",
    "SELECT count(*) FROM (SELECT id FROM orders TABLESAMPLE bernoulli (({}::text)::real)) x",
    "WITH x AS (SELECT id FROM orders TABLESAMPLE bernoulli (({}::text)::real)) SELECT count(*) FROM x",
    "SELECT {}",
    "SELECT id FROM orders WHERE note = {}",
    "SELECT id FROM orders WHERE note IN (SELECT word FROM secret)",
    "SELECT id FROM orders WHERE note = ANY (ARRAY(SELECT word FROM secret))",
    "SELECT id FROM orders WHERE (id, note) = (SELECT id, word FROM secret)",
    "SELECT id FROM orders WHERE CASE WHEN id > 0 THEN {} END = 'x'",
    "SELECT a.id FROM orders a JOIN orders b ON a.note = {}",
    "SELECT count(*) FROM orders GROUP BY {}",
    "SELECT count(*) FROM orders GROUP BY GROUPING SETS ((({})), ())",
    "SELECT count(*) FROM orders GROUP BY ROLLUP (({}))",
    "SELECT count(*) FROM orders HAVING min(note) = {}",
    "SELECT id FROM orders ORDER BY {}",
    "SELECT DISTINCT ON ({}) id FROM orders",
    "SELECT id FROM orders LIMIT length({})",
    "SELECT id FROM orders OFFSET length({})",
    "SELECT id FROM orders FETCH FIRST (length({})) ROWS WITH TIES",
    "SELECT count(*) FILTER (WHERE note = {}) FROM orders",
    "SELECT string_agg(note, {}) FROM orders",
    "SELECT string_agg(note, ',' ORDER BY {}) FROM orders",
    "SELECT percentile_cont(length({})) WITHIN GROUP (ORDER BY id) FROM orders",
    "SELECT sum(id) OVER (PARTITION BY {}) FROM orders",
    "SELECT sum(id) OVER (ORDER BY {}) FROM orders",
    "SELECT sum(id) OVER w FROM orders WINDOW w AS (ORDER BY {})",
    "SELECT sum(id) OVER (ORDER BY id ROWS length({}) PRECEDING) FROM orders",
    "SELECT sum(id) OVER (ORDER BY id RANGE BETWEEN CURRENT ROW AND length({}) FOLLOWING) FROM orders",
    "SELECT * FROM orders, generate_series(1, length({})) n",
    "SELECT * FROM ROWS FROM (generate_series(1, length({})), generate_series(1, 2)) x",
    "SELECT * FROM orders, unnest(string_to_array({}, ',')) WITH ORDINALITY",
    "SELECT * FROM orders, LATERAL (SELECT {}) x",
    "VALUES (1, 'x'), (2, {})",
    "SELECT * FROM (VALUES ({})) x",
    "WITH x AS MATERIALIZED (SELECT {}) SELECT id FROM orders, x",
    "WITH RECURSIVE x (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x WHERE n < length({})) SELECT n FROM x",
    "WITH RECURSIVE x (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x WHERE n < 2) "
    "CYCLE n SET c TO {} DEFAULT 'x' USING p SELECT c FROM x",
    "WITH RECURSIVE x (n, w) AS (SELECT 1, {} UNION ALL SELECT n + 1, w FROM x WHERE n < 2) "
    "SEARCH DEPTH FIRST BY n SET o SELECT w FROM x",
    "SELECT note FROM orders UNION SELECT {}",
    "SELECT note FROM orders INTERSECT (SELECT word FROM secret)",
    "SELECT ARRAY[note, {}] FROM orders",
    "SELECT (ARRAY[1, 2])[length({})] FROM orders",
    "SELECT (ARRAY[1, 2])[1:length({})] FROM orders",
    "SELECT ROW(id, {}) FROM orders",
    "SELECT coalesce(note, {}), nullif(note, {}), greatest(note, {}) FROM orders",
    'SELECT {} IS DISTINCT FROM note, {} IS NULL, ({})::varchar(3), {} COLLATE "C" FROM orders',
    "SELECT extract(year FROM ({}::text)::date) FROM orders",
    "SELECT xmlelement(name a, xmlattributes({} AS b)), xmlforest({} AS c) FROM orders",
    "SELECT xmlserialize(CONTENT xmlparse(CONTENT {}) AS text) FROM orders",
    "SELECT * FROM orders, xmltable('/a' PASSING xmlparse(DOCUMENT {}) COLUMNS b text PATH 'b' DEFAULT {})",
    "SELECT (SELECT (SELECT (SELECT word FROM secret LIMIT 1))) FROM orders",
    "SELECT a.id FROM orders a JOIN (SELECT id, word AS note FROM secret) b USING (id)",
    "SELECT a.id FROM orders a FULL JOIN secret b USING (id)",
    "SELECT a.id FROM orders a NATURAL JOIN secret b",
    "TABLE secret",
    "SELECT id FROM orders FOR UPDATE OF orders",
    "SELECT word FROM secret FOR SHARE",
)
SINCE_17 = (
    "SELECT * FROM orders, json_table({}::jsonb, '$' COLUMNS (a text PATH '$.a' DEFAULT {} ON EMPTY))",
    "SELECT json_value('{{}}'::jsonb, '$.a' DEFAULT {} ON EMPTY) FROM orders",
    "SELECT json_exists('{{}}'::jsonb, '$ ? (@ == $x)' PASSING {} AS x) FROM orders",
    "SELECT json_object('a': {}), json_array({}), json_scalar({}) FROM orders",
    "SELECT json_arrayagg({} ORDER BY {}) FILTER (WHERE {} = 'x') FROM orders",
    "SELECT {} IS JSON FROM orders",
    "SELECT merge_action() FROM orders",
)
WRITES = (
    "INSERT INTO orders VALUES (500, 1, {})",
    "INSERT INTO orders VALUES (1, 1, 'x') ON CONFLICT (id) DO UPDATE SET note = {} WHERE orders.note = {}",
    "INSERT INTO orders VALUES (501, 1, 'x') RETURNING {}",
    "UPDATE orders SET note = {} RETURNING note",
    "UPDATE orders SET note = word FROM secret RETURNING note",
    "DELETE FROM orders USING secret WHERE note = word",
    "MERGE INTO orders USING secret ON orders.id = secret.id WHEN MATCHED AND {} = 'x' THEN UPDATE SET note = word",
    "WITH x AS (INSERT INTO orders VALUES (502, 1, {}) RETURNING note) SELECT note FROM x",
)


@pytest.mark.parametrize("form", [*PLACES, *SINCE_17, *WRITES])
def test_subquery_on_hidden_table_is_refused_at_every_place(site: Site, form: str) -> None:
    for method, answer in answers(site, form.replace("{}", SECRETS).replace("{{}}", "{}")).items():
        assert not answer["ok"], (method, answer)
        assert WORD not in str(answer) and answer["error"]["code"] == "forbidden", (method, answer)


def test_error_of_sample_size_does_not_show_hidden_values(site: Site) -> None:
    """The original finding: the error text contained the values."""
    sql = f"SELECT count(*) FROM orders TABLESAMPLE bernoulli (({SECRETS})::real)"
    own = site.call("viewer", "query.select", sql=sql)
    assert WORD in str(own), "who may read the table is told of the value that does not fit"
    assert all(WORD not in str(answer) for answer in answers(site, sql).values())


def test_sample_of_own_table_is_allowed_to_scoped_caller(site: Site) -> None:
    for sql in ("SELECT id FROM orders TABLESAMPLE bernoulli (100) REPEATABLE (1)", "SELECT id FROM orders ORDER BY 1"):
        found = answers(site, sql)
        assert all(answer["ok"] for answer in found.values()), found


def test_tree_read_in_part_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second barrier: PostgreSQL's own locks show a table that our parser missed."""
    walk = Reader.item

    def passing_over(self: Reader, item: Any, scope: Any) -> None:
        if getattr(item, "tag", "") != "TABLESAMPLECLAUSE":
            walk(self, item, scope)

    monkeypatch.setattr(Reader, "item", passing_over)
    sql = f"SELECT max(id) FROM orders TABLESAMPLE bernoulli (({SECRETS})::real)"
    for answer in answers(site, sql).values():
        assert not answer["ok"] and answer["error"]["code"] == "forbidden" and WORD not in str(answer)


# --- views and partitioned tables without a table -----------------------------------------------------------

BARE = {
    "settings": f"CREATE VIEW settings AS SELECT '{WORD}'::text AS word",
    "pairs": f"CREATE VIEW pairs AS VALUES (1, '{WORD}')",
    "of_settings": "CREATE VIEW of_settings AS SELECT word FROM settings, pairs",
    "parted": "CREATE TABLE parted (id int, word text) PARTITION BY LIST (id)",
    "of_parted": f"CREATE VIEW of_parted AS SELECT '{WORD}' AS word UNION ALL SELECT word FROM parted",
    "of_series": f"CREATE VIEW of_series AS SELECT '{WORD}' AS word FROM generate_series(1, 3)",
    "orders_and_settings": "CREATE VIEW orders_and_settings AS SELECT id, word FROM orders, settings",
}
ALLOWED = (
    "CREATE VIEW labelled AS SELECT id, 'a constant' AS label FROM orders",
    "CREATE VIEW of_labelled AS SELECT label, 'another' AS other FROM labelled",
)


@pytest.fixture(scope="module")
def bare(site: Site) -> Site:
    """With views and a partitioned table that read no table."""
    for statement in (*BARE.values(), *ALLOWED):
        site.db.execute(statement.encode())
    return site


@pytest.mark.parametrize("form", [*FORMS, *WITH_FORMS, "SELECT * FROM {}", "SELECT {} FROM {}"])
def test_view_without_tables_and_missing_name_have_the_same_answer(bare: Site, form: str) -> None:
    missing = answers(bare, mentioning(form, "missing", "orders"))
    for name in BARE:
        found = answers(bare, mentioning(form, name, "orders"))
        for method, answer in found.items():
            assert answer["ok"] == missing[method]["ok"], (name, method, answer)
            assert answer.get("error") == missing[method].get("error") and WORD not in str(answer)


def test_stored_query_on_a_view_without_tables_is_unknown_to_scoped_caller(bare: Site) -> None:
    id = bare.live.ok("query.prepare", sql="SELECT word FROM settings")["query_id"]
    path = "/api/v1/q/{}"
    found, missing = (bare.callers[SCOPED[0]].get(path.format(each)) for each in (id, "q_" + "a" * 24))
    assert (found.status_code, found.text) == (404, missing.text)


def test_views_that_read_tables_in_scope_are_allowed_with_their_constants(bare: Site) -> None:
    for sql in ("SELECT label FROM labelled", "SELECT label, other FROM of_labelled", "SELECT 1 FROM labelled"):
        found = answers(bare, sql)
        assert all(answer["ok"] for answer in found.values()), found


# --- types, functions and filters ---------------------------------------------------------------------------


def test_enum_of_hidden_table_is_refused(site: Site) -> None:
    site.db.execute("CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE TABLE moods (id int PRIMARY KEY, m mood)")
    site.db.execute("CREATE TYPE colour AS ENUM ('red'); ALTER TABLE orders ADD COLUMN colour colour")
    for sql in ("SELECT enum_range(NULL::mood) FROM orders", "SELECT 'sad'::mood FROM orders", "SELECT '{}'::mood[]"):
        assert [answer["ok"] for answer in answers(site, sql).values()] == [False] * 4, sql
    own = answers(site, "SELECT id, colour, 'red'::colour, ARRAY[colour], t FROM orders t ORDER BY id")
    assert all(answer["ok"] for answer in own.values()), own


def test_function_that_changes_a_shared_session_is_refused(site: Site) -> None:
    for sql in ("SELECT setseed(0.5)", "SELECT lastval()", 'SELECT U&"set\\0073eed"(0.1)'):
        assert site.refused("editor", "sql.exec", sql=sql) == "forbidden", sql
    assert len(site.rows("editor", "SELECT random()")) == 1


FILTERS = (
    ("EXISTS (SELECT nope FROM secret)", "EXISTS (SELECT nope FROM missing)"),
    ("EXISTS (SELECT word FROM secret)", "EXISTS (SELECT word FROM missing)"),
    ("id IN (SELECT * FROM secret)", "id IN (SELECT * FROM missing)"),
    ("EXISTS (SELECT 1 FROM secret WHERE nope.x = 1)", "EXISTS (SELECT 1 FROM missing WHERE nope.x = 1)"),
    ("EXISTS (SELECT nosuch(word) FROM secret)", "EXISTS (SELECT nosuch(word) FROM missing)"),
    ("EXISTS (TABLE secret)", "EXISTS (TABLE missing)"),
    ("'secret'::U&\"\\0072egclass\" IS NULL", "'missing'::U&\"\\0072egclass\" IS NULL"),
    ("regclass 'secret' IS NULL", "regclass 'missing' IS NULL"),
    ("'secret'::regtype IS NULL", "'missing'::regtype IS NULL"),
    ("(NULL::secret).nope IS NULL", "(NULL::missing).nope IS NULL"),
    ("CAST(NULL AS secret) IS NULL", "CAST(NULL AS missing) IS NULL"),
    ("secret.word = 'x'", "missing.word = 'x'"),
    ("'postgres=r/postgres'::aclitem IS NOT NULL", "'missing=r/postgres'::aclitem IS NOT NULL"),
    ("'{postgres=r/postgres}'::aclitem[] IS NOT NULL", "'{missing=r/postgres}'::aclitem[] IS NOT NULL"),
    (
        "aclcontains(acldefault('r', 10), 'postgres=r/postgres')",
        "aclcontains(acldefault('r', 10), 'missing=r/postgres')",
    ),
)


@pytest.mark.parametrize("hidden, missing", FILTERS)
def test_filter_does_not_show_whether_a_table_exists(site: Site, hidden: str, missing: str) -> None:
    for method in ("cdc.subscribe_table", "cdc.backtest"):
        found = [site.call(SCOPED[0], method, table="orders", where=where) for where in (hidden, missing)]
        words = [str(answer).replace("secret", "T").replace("missing", "T") for answer in found]
        assert not found[0]["ok"] and words[0] == words[1]


def test_filter_on_a_locked_table_and_on_a_missing_one_has_the_same_answer(site: Site) -> None:
    with site.postgres.connect(site.name) as other:
        other.execute(b"BEGIN; LOCK TABLE secret IN ACCESS EXCLUSIVE MODE")
        for method in ("cdc.subscribe_table", "cdc.backtest"):
            found = [
                site.call(SCOPED[0], method, table="orders", where=f"id IN (SELECT id FROM {table})")
                for table in ("secret", "missing")
            ]
            assert not found[0]["ok"] and found[0] == found[1]


def test_filter_of_scoped_caller_computes_no_function_of_users(site: Site) -> None:
    """An error, or its absence, would reveal values that the function read."""
    site.db.execute(
        "CREATE OR REPLACE FUNCTION peek_at(int) RETURNS text LANGUAGE sql IMMUTABLE SECURITY DEFINER "
        "AS 'SELECT word FROM public.secret WHERE id = $1'"
    )
    site.db.execute("CREATE OR REPLACE FUNCTION stable_one() RETURNS int LANGUAGE sql STABLE AS 'SELECT 1'")
    for where in ("peek_at(1)::int = id", f"1 / (peek_at(1) <> '{WORD}')::int = id", "peek_at(1) = note"):
        for method in ("cdc.subscribe_table", "cdc.backtest"):
            found = site.call(SCOPED[0], method, table="orders", where=where)
            assert found["error"]["code"] == "forbidden" and WORD not in str(found), (where, found)
    for where in ("stable_one() = id", "peek_at(id) = now()::text", "peek_at(id) = current_user", "id::date = note"):
        assert not site.call("viewer", "cdc.subscribe_table", table="orders", where=where)["ok"], where
    assert site.call("viewer", "cdc.subscribe_table", table="orders", where="peek_at(id) = note AND id > 3")["ok"]


LIKE_BUILT_IN = (
    "CREATE SCHEMA apart",
    "CREATE FUNCTION apart.abs(text) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 1'",
    "CREATE FUNCTION apart.lower(int) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT NULL::text'",
    "CREATE TYPE apart.upper AS ENUM ('x')",
    "CREATE OPERATOR apart.|| (LEFTARG = text, RIGHTARG = int, FUNCTION = left)",
    "CREATE TABLE length (id int PRIMARY KEY)",
    "CREATE VIEW md5 AS SELECT 1 AS id",
    "CREATE FUNCTION lower(int) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT NULL::text'",
)
CALLS_OF_BUILT_IN = (
    *("abs('1') = 1", "abs(note) = 1", "lower(id) = 'x'", "lower('x') = 'x'", "lower(note) = 'x'", "upper('x') = 'X'"),
    *("note || id = 'x1'", "length('x') = 1", "length(note) = 1", "length(orders) = 1", "md5('x') = 'x'"),
    *("(note).length = 1", "(orders).md5 IS NULL", "md5 'x' = 'x'", "apart.abs('1') = 1", "'x'::apart.upper = 'x'"),
)


def test_hidden_names_of_built_in_functions_change_no_answer(site: Site) -> None:
    """Tables, views, and objects outside the login's search_path may have the names of built-in functions."""

    def answer(where: str) -> list[Any]:
        query = site.call(SCOPED[0], "query.select", sql=f"SELECT id FROM orders WHERE {where} ORDER BY id")
        filtered = site.call(SCOPED[0], "cdc.backtest", table="orders", where=where)
        return [query.get("error") or query["result"]["data"], filtered.get("error") or filtered["result"]["matches"]]

    before = {where: answer(where) for where in CALLS_OF_BUILT_IN}
    for statement in LIKE_BUILT_IN:
        site.db.execute(statement.encode())
    assert {where: answer(where) for where in CALLS_OF_BUILT_IN} == before


HIDDEN = {
    "secret": "",
    "hidden_view": "CREATE VIEW hidden_view AS SELECT * FROM secret",
    "hidden_enum": "CREATE TYPE hidden_enum AS ENUM ('x', 'y')",
    "hidden_domain": "CREATE DOMAIN hidden_domain AS int CHECK (VALUE > 0)",
    "hidden_row": "CREATE TYPE hidden_row AS (id int, word text)",
    "hidden_range": "CREATE TYPE hidden_range AS RANGE (subtype = int4)",
    "hidden_function": "CREATE FUNCTION hidden_function(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 1'",
    "hidden_rows": "CREATE FUNCTION hidden_rows(int) RETURNS secret LANGUAGE sql IMMUTABLE AS 'SELECT 1, NULL::text'",
    "hidden_any": "CREATE FUNCTION hidden_any(anyelement) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 1'",
    "hidden_texts": "CREATE FUNCTION hidden_texts(text) RETURNS text LANGUAGE sql VOLATILE AS 'SELECT $1'",
}
FILTER_FORMS = """
id::{} IS NULL
note::{} IS NULL
'x'::{} IS NULL
NULL::{} IS NULL
'(1,x)'::{} IS NULL
'[1,2)'::{} IS NULL
5::{} > 0
CAST(id AS {}) IS NULL
CAST(NULL AS {}[]) IS NULL
cast ( null as public.{} ) is null
array[]::{}[] IS NULL
array[]::public.{}[] IS NULL
array[]::"{}"[] IS NULL
array[]:: /* :: */ {} [] IS NULL
array[]::{}[] IS NULL AND nope = 1
array[]::{}[] IS NULL AND {} = 1
array[]::{}[] IS NULL AND note + 1 > 0
array[]::{}[] IS NULL AND id = 'x'
nope = 1 AND id::{} IS NULL
((array[]::{}[])[1]).word IS NULL
((array[]::{}[])[1]).nope IS NULL
((array[]::{}[])[1]).word + 1 > 0
((array[]::{}[])[1]).id + 1 > 0
row(((array[]::{}[])[1]).*) IS DISTINCT FROM row(NULL, NULL)
row(((array[]::{}[])[1]).*) = row(1, 2, 3)
(array[]::{}[])[1] = 'x'
(array[]::{}[])[1] IN ('x', 'z')
id = (array[]::{}[])[1]
coalesce(NULL, (array[]::{}[])[1]) IS NULL
nullif((array[]::{}[])[1], NULL) IS NULL
CASE WHEN true THEN (array[]::{}[])[1] END IS NULL
greatest((array[]::{}[])[1], NULL) IS NULL
jsonb_build_object('a', (array[]::{}[])[1]) IS NULL
jsonb_populate_record(NULL::{}, '{{}}') IS NULL
(1, 2) = ANY (array[]::{}[])
row(1, 'x')::{} IS NULL
row(1)::{} IS NULL
{} 'x' IS NULL
{} '(1,x)' IS NULL
public.{} '(1,x)' IS NULL
"{}" 'x' = 'y'
note LIKE {} 'x'
{}('x') IS NULL
{}('(1,x)') IS NULL
{}(3) '5' IS NULL
{}(id) = 1
{}(id) = 'x'
{}(note) = 'x' AND nope = 1
({}(id)).word = 'x'
public.{}(id) = 1
"{}"(id) IS NULL
U&"{}"(id) = 1
array[]::U&"{}"[] IS NULL
orders.{} = 1
(id).{} = 1
(orders).{} IS NULL
{}(orders) IS NULL
'{}'::regclass IS NULL
'{}'::regtype IS NULL
'{}'::regproc IS NULL
'{}(int)'::regprocedure IS NULL
id = 1 AND '{}'::text::regproc IS NULL
{} = 1
{}.id = 1
JSON_VALUE('1', '$' RETURNING {}) IS NULL
note COLLATE {} = 'x'
id::{} +
""".strip().splitlines()


@pytest.fixture(scope="module")
def hidden(site: Site) -> Site:
    """Add objects that no table of the callers uses."""
    for statement in filter(None, HIDDEN.values()):
        site.db.execute(statement.encode())
    return site


@pytest.mark.parametrize("form", FILTER_FORMS)
def test_filter_on_hidden_and_missing_name_has_the_same_answer(hidden: Site, form: str) -> None:
    def answer(name: str) -> str:
        found = hidden.call(SCOPED[0], "cdc.backtest", table="orders", where=form.format(*[name] * form.count("{}")))
        assert not found["ok"], (name, found)
        return str(found).replace(name, "NAME")

    wanted = answer("nosuch")
    assert {name: answer(name) for name in HIDDEN} == dict.fromkeys(HIDDEN, wanted)
