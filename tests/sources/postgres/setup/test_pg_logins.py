"""PostgreSQL logins for callers' SQL: which login runs what, what is refused, and service without such logins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.conformance.live_server import Live
from tests.serve.hidden_tables import FORMS, mentioning
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.cli.main import main
from headwater.errors import ConfigError, SourceUnfit
from headwater.model.principal import EDITOR, Principal
from headwater.serve.gateway.kv import Entry, Kv
from headwater.serve.thread_bridge import Bridge
from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.logins import Logins, read_password, setup_sql

READER, WRITER = f"reader_{os.getpid()}", f"writer_{os.getpid()}"
TOKEN = "the owner's token of these tests"
_numbers = count(1)


class Site:
    """A server over a PostgreSQL database, with a caller for each role."""

    def __init__(self, postgres: Server, name: str, folder: Path, **settings: Any) -> None:
        self.postgres, self.name = postgres, name
        with postgres.connect() as admin:
            admin.execute(f"CREATE DATABASE {name}".encode())
        self.db = postgres.connect(name)
        self.db.execute("CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL, note text)")
        self.db.execute("CREATE TABLE secret (id int PRIMARY KEY, word text)")
        self.db.execute("INSERT INTO orders SELECT n, n * 10, 'x' FROM generate_series(1, 20) n")
        self.url, self.own = f"postgresql://postgres@/{name}?host={postgres.folder}", f"headwater_{name}"
        if "reader" in settings:
            with Address(name, self.url).connect() as admin:
                for line in setup_sql(admin, settings["reader"], settings["writer"]):
                    admin.execute(line.encode())
        settings = {"slot": self.own, "publication": self.own, **settings}
        self.live = Live(folder, url=self.url, postgres=settings, serve={"token": TOKEN})
        self.callers = {"owner": self.live.http}
        for role in ("viewer", "editor"):
            made = self.live.ok("security.token.create", name=role, role=role)
            headers = {"authorization": f"Bearer {made['token']}"}
            self.callers[role] = httpx.Client(base_url=self.live.url, headers=headers, timeout=PATIENCE)

    def call(self, role: str, method: str, **params: Any) -> dict[str, Any]:
        body = {"id": 1, "method": method, "params": params}
        found: dict[str, Any] = self.callers[role].post("/api/v1/rpc", json=body).json()
        return found

    def refused(self, role: str, method: str, **params: Any) -> str:
        """Return the error code of a call; fail if it succeeds."""
        answer = self.call(role, method, **params)
        assert not answer["ok"], (role, params, answer)
        return str(answer["error"]["code"])

    def rows(self, role: str, sql: str, **more: Any) -> list[list[Any]]:
        """Return the rows of a query by a viewer, or of a statement by another role."""
        method = "query.select" if role == "viewer" else "sql.exec"
        answer = self.call(role, method, sql=sql, **more)
        assert answer["ok"], answer
        data = answer["result"]["data"] if role == "viewer" else answer["result"]["result"]["data"]
        return [[cell.get("v") for cell in row] for row in data["rows"]]

    def close(self) -> None:
        for role in ("viewer", "editor"):
            self.callers[role].close()
        self.live.stop()
        self.db.close()
        with Address(self.name, self.url).connect() as admin:
            drop(admin, self.own, self.own)
            admin.execute(f"DROP OWNED BY {READER}, {WRITER}".encode()) if _has_role(admin) else None
        with self.postgres.connect() as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)".encode())


def _has_role(admin: Any) -> bool:
    return admin.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [READER]).fetchone() is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with logins for callers; the source itself is a superuser, as in the quick start."""
    made = Site(shared_server(), f"split_{os.getpid()}", tmp_path_factory.mktemp("split"), reader=READER, writer=WRITER)
    yield made
    made.close()
    with shared_server().connect() as admin:
        admin.execute(f"DROP ROLE {READER}, {WRITER}".encode())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server without such logins: everything runs as the source's own role."""
    made = Site(shared_server(), f"alone_{os.getpid()}", tmp_path_factory.mktemp("alone"))
    yield made
    made.close()


# --- who runs what ---------------------------------------------------------------------------------------


def test_sql_of_each_role_runs_as_its_login(site: Site) -> None:
    assert site.rows("viewer", "SELECT session_user") == [[READER]]
    assert site.rows("editor", "SELECT session_user") == [[WRITER]]
    assert site.rows("owner", "SELECT session_user") == [["postgres"]]


def test_query_of_owner_runs_as_reader(site: Site) -> None:
    """Analysis and execution use one login, whoever prepared it."""
    asked = site.live.ok("query.select", sql="SELECT session_user")
    assert asked["data"]["rows"][0][0]["v"] == READER


def test_editor_writes_by_statement_row_and_transaction(site: Site) -> None:
    site.rows("editor", "INSERT INTO orders VALUES (100, 1, 'statement')")
    row = {"id": {"t": "i64", "v": 101}, "total": {"t": "i64", "v": 2}}
    assert site.call("editor", "data.insert", into={"table": "orders"}, rows=[row])["ok"]
    tx = site.call("editor", "tx.begin")["result"]["tx"]
    site.rows("editor", "UPDATE orders SET note = session_user WHERE id = 100", tx=tx)
    assert site.call("editor", "tx.commit", tx=tx)["ok"]
    found = site.rows("viewer", "SELECT id, note FROM orders WHERE id >= 100 ORDER BY id")
    assert found == [[100, WRITER], [101, None]]
    site.rows("editor", "DELETE FROM orders WHERE id >= 100")


def test_named_arguments_of_a_statement_are_bound(site: Site) -> None:
    args = {"low": {"t": "i64", "v": 19}}
    assert site.rows("editor", "SELECT id FROM orders WHERE id >= :low ORDER BY id", args=args) == [[19], [20]]


def test_table_made_by_schema_create_table_is_granted_to_both_logins(site: Site) -> None:
    column = {"name": "id", "type": {"kind": "i64"}, "nullable": False}
    assert site.call("owner", "schema.create_table", table="made", columns=[column], primary_key=["id"])["ok"]
    site.rows("editor", "INSERT INTO made VALUES (1)")
    assert site.rows("viewer", "SELECT id FROM made") == [[1]]


def test_first_key_of_editor_creates_key_value_table(site: Site) -> None:
    bridge, editor = Bridge(threads=1), Principal("ed", EDITOR)
    kv = Kv(site.live.api, bridge, lambda: 1_000)

    async def use() -> None:
        assert await kv.put(editor, "main", [Entry(b"a", b"b", 9)]) == 1
        assert await kv.get(editor, "main", b"a") == b"b"

    asyncio.run(use())
    bridge.close()


def test_filter_of_viewer_runs_as_reader(site: Site) -> None:
    assert site.call("viewer", "cdc.subscribe_table", table="orders", where="total > 100 AND note ~ 'x'")["ok"]
    code = site.refused("viewer", "cdc.subscribe_table", table="orders", where="pg_read_file('/etc/passwd') <> ''")
    assert code == "not_supported"


# --- what is refused -------------------------------------------------------------------------------------

CANARY = "/tmp/headwater_canary_{}"
NOT_ROWS = (
    "DO $$BEGIN EXECUTE 'CREATE ROLE evil SUPERUSER'; END$$",
    "DO $$BEGIN COPY orders TO PROGRAM 'touch {canary}'; END$$",
    "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE TABLE mine (id int PRIMARY KEY)",
    "ALTER TABLE orders ADD COLUMN x int",
    "DROP TABLE secret",
    "TRUNCATE orders",
    "CREATE EXTENSION adminpack",
    "COPY orders TO PROGRAM 'touch {canary}'",
    "SET ROLE postgres",
    "SET SESSION AUTHORIZATION postgres",
    "RESET ROLE",
    "GRANT ALL ON secret TO PUBLIC",
    "EXPLAIN ANALYZE DELETE FROM orders",
    "CALL pg_catalog.pg_sleep(0)",
    "VACUUM orders",
    "REASSIGN OWNED BY postgres TO CURRENT_USER",
)
CALLS = (
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT pg_ls_dir('/')",
    "SELECT lo_import('/etc/passwd')",
    "SELECT lo_create(0)",
    "SELECT lo_from_bytea(0, 'x')",
    "SELECT pg_reload_conf()",
    "SELECT pg_switch_wal()",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'walsender'",
    'SELECT "pg_catalog"."pg_terminate_backend"(pid) FROM pg_stat_activity',
    'SELECT U&"pg_terminate\\005fbackend"(pid) FROM pg_stat_activity',
    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity",
    "SELECT query_to_xml('SELECT pg_terminate_backend(pid) FROM pg_stat_activity', true, true, '')",
    "SELECT * FROM ts_stat('SELECT pg_terminate_backend(pid)::text::tsvector FROM pg_stat_activity')",
    "SELECT set_config('statement_timeout', '0', true)",
    "SELECT set_config('role', 'postgres', false)",
    "SELECT pg_advisory_lock(1)",
    "SELECT pg_logical_emit_message(false, 'headwater', 'x')",
    "SELECT pg_create_logical_replication_slot('x', 'pgoutput')",
    "SELECT 1 WHERE EXISTS (SELECT pg_read_file('/etc/passwd'))",
    "SELECT * FROM orders ORDER BY pg_terminate_backend(id)",
    "WITH x AS (SELECT pg_terminate_backend(1)) SELECT * FROM x",
)


@pytest.mark.parametrize("sql", NOT_ROWS)
def test_statement_by_editor_that_is_not_dml_is_refused(site: Site, tmp_path: Path, sql: str) -> None:
    canary = tmp_path / "canary"
    code = site.refused("editor", "sql.exec", sql=sql.format(canary=canary))
    assert code in ("forbidden", "invalid_request") and not canary.exists()
    assert site.db.execute("SELECT count(*) FROM pg_roles WHERE rolname = 'evil'").fetchone() == (0,)


@pytest.mark.parametrize("sql", CALLS)
@pytest.mark.parametrize("role", ["viewer", "editor"])
def test_dangerous_function_is_refused(site: Site, role: str, sql: str) -> None:
    walsender = "SELECT pid FROM pg_stat_replication WHERE application_name = 'headwater'"
    before = site.db.execute(walsender).fetchall()
    method = "query.select" if role == "viewer" else "sql.exec"
    assert site.refused(role, method, sql=sql) in ("forbidden", "invalid_request")
    if role == "viewer":
        assert site.refused(role, "query.prepare", sql=sql) in ("forbidden", "invalid_request")
    assert site.db.execute(walsender).fetchall() == before


@pytest.mark.parametrize("sql", ["SELECT random()", "SELECT nextval('s')", "SELECT gen_random_uuid()"])
def test_harmless_volatile_function_is_refused_to_viewer_and_allowed_to_editor(site: Site, sql: str) -> None:
    site.db.execute("CREATE SEQUENCE IF NOT EXISTS s")
    site.db.execute(f"GRANT USAGE ON SEQUENCE s TO {WRITER}".encode())
    assert site.refused("viewer", "query.select", sql=sql) == "forbidden"
    assert len(site.rows("editor", sql)) == 1


def test_volatile_function_inside_view_is_allowed(site: Site) -> None:
    site.db.execute("CREATE OR REPLACE VIEW dice AS SELECT id, random() AS r FROM orders")
    site.db.execute(f"GRANT SELECT ON dice TO {READER}".encode())
    assert len(site.rows("viewer", "SELECT * FROM dice LIMIT 3")) == 3


def test_volatile_query_prepared_by_owner_is_callable_by_viewer(site: Site) -> None:
    made = site.live.ok("query.prepare", sql="SELECT id + (random() * 0)::int AS id FROM orders WHERE id < $1::int")
    address = f"/api/v1/q/{made['query_id']}?args={quote('[3]')}"
    assert len(site.callers["viewer"].get(address).json()["data"]["rows"]) == 2


def test_table_without_grant_is_forbidden(site: Site) -> None:
    site.db.execute(f"REVOKE ALL ON secret FROM {READER}, {WRITER}".encode())
    assert site.refused("viewer", "query.select", sql="SELECT word FROM secret") == "forbidden"
    assert site.refused("viewer", "query.select", sql="SELECT rolpassword FROM pg_authid") == "forbidden"
    assert site.refused("editor", "sql.exec", sql="SELECT word FROM secret") == "forbidden"
    assert site.refused("viewer", "sql.exec", sql="SELECT 1") == "forbidden"


def test_signal_function_is_refused_to_owner(site: Site) -> None:
    for sql in ("SELECT pg_terminate_backend(1)", "SELECT pg_cancel_backend(1)"):
        assert site.refused("owner", "sql.exec", sql=sql) == "forbidden"
        assert site.refused("owner", "query.select", sql=sql) == "forbidden"


def test_parameter_names_of_another_caller_do_not_reach_a_prepared_query(site: Site) -> None:
    sql = "SELECT id FROM orders WHERE id >= :{}::int AND id < :{}::int ORDER BY id"
    query = site.live.ok("query.prepare", sql=sql.format("low", "high"))["query_id"]
    asked = {"query_id": query, "args": {"low": {"t": "i64", "v": 2}, "high": {"t": "i64", "v": 4}}}
    before = site.call("viewer", "query.execute_prepared", **asked)["result"]["data"]
    assert len(before["rows"]) == 2
    swapped = {"high": {"t": "i64", "v": 2}, "low": {"t": "i64", "v": 4}}
    assert site.call("viewer", "query.select", sql=sql.format("high", "low"), args=swapped)["ok"]
    assert site.call("viewer", "query.explain", sql=sql.format("zz", "yy"))["ok"]
    assert site.call("viewer", "query.execute_prepared", **asked)["result"]["data"] == before


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE pg_settings SET setting = 'off' WHERE name = 'standard_conforming_strings'",
        "UPDATE pg_catalog.pg_settings SET setting = '0' WHERE name = 'statement_timeout'",
        "WITH x AS (UPDATE pg_settings SET setting = '0' WHERE name = 'lock_timeout' RETURNING 1) SELECT * FROM x",
        "DELETE FROM pg_statistic",
    ],
)
def test_write_to_system_catalogue_is_refused(site: Site, sql: str) -> None:
    assert site.refused("editor", "sql.exec", sql=sql) in ("forbidden", "not_supported")
    tx = site.call("editor", "tx.begin")["result"]["tx"]
    assert site.refused("editor", "sql.exec", sql=sql, tx=tx) in ("forbidden", "not_supported")
    site.call("editor", "tx.rollback", tx=tx)


VOLATILE = ("pg_sleep(3)", "random()", "\"pg_notify\"('x','y')", '"pg_advisory_xact_lock"(5)', "audit_write/**/()")


def test_viewer_in_a_transaction_calls_no_volatile_function(site: Site) -> None:
    site.db.execute(
        "CREATE OR REPLACE FUNCTION audit_write() RETURNS int LANGUAGE sql VOLATILE SECURITY DEFINER "
        "AS 'INSERT INTO orders VALUES (9001, 1, NULL) RETURNING 1'"
    )
    tx = site.call("viewer", "tx.begin")["result"]["tx"]
    for call in VOLATILE:
        assert site.refused("viewer", "query.select", sql=f"SELECT {call}", tx=tx) == "forbidden", call
    assert site.call("viewer", "query.select", sql="SELECT count(*) FROM orders", tx=tx)["ok"]
    site.call("viewer", "tx.commit", tx=tx)
    assert site.db.execute("SELECT count(*) FROM orders WHERE id = 9001").fetchone() == (0,)


@pytest.fixture(scope="module")
def scoped(site: Site) -> Iterator[httpx.Client]:
    """Yield a client of an editor of the table orders alone."""
    made = site.live.ok("security.token.create", name="scoped", role="editor", scopes=["main.orders"])
    with httpx.Client(base_url=site.live.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize(
    "form", [*FORMS, "SELECT id FROM {OWN} WHERE (NULL::{}) IS NULL", "SELECT NULL::{}[] FROM {OWN}"]
)
def test_hidden_and_missing_table_have_the_same_answer(site: Site, scoped: httpx.Client, form: str) -> None:
    site.callers["scoped"] = scoped
    for method in ("query.select", "query.prepare", "query.explain", "sql.exec"):
        answers = [
            site.call("scoped", method, sql=mentioning(form, table, "orders")) for table in ("secret", "missing")
        ]
        assert answers[0] == answers[1], method


def test_statement_in_transaction_does_not_show_tables_to_scoped_caller(site: Site, scoped: httpx.Client) -> None:
    site.callers["scoped"] = scoped
    tx = site.call("scoped", "tx.begin")["result"]["tx"]
    for method in ("query.select", "sql.exec"):
        answers = [
            site.call("scoped", method, sql=sql, tx=tx)
            for sql in ("SELECT word FROM secret", "SELECT word FROM missing", "SELECT wurd FROM secret")
        ]
        assert not answers[0]["ok"] and answers[0] == answers[1] == answers[2]
    site.call("scoped", "tx.rollback", tx=tx)
    foreign = site.call("editor", "tx.begin")["result"]["tx"]
    answers = [site.call("scoped", "sql.exec", sql=f"SELECT 1 FROM {t}", tx=foreign) for t in ("secret", "missing")]
    assert not answers[0]["ok"] and answers[0] == answers[1]
    site.call("editor", "tx.rollback", tx=foreign)


FILTERS = (
    "EXISTS (SELECT 1 FROM {})",
    "id IN (SELECT 1 FROM {})",
    "'{}'::regclass IS NOT NULL",
    "NULL::{} IS NULL",
    "NULL::{}[] IS NULL",
    "(NULL::{}).word IS NULL",
)


@pytest.mark.parametrize("where", FILTERS)
def test_filter_on_hidden_and_missing_table_has_the_same_answer(site: Site, scoped: httpx.Client, where: str) -> None:
    site.callers["scoped"] = scoped
    for method in ("cdc.subscribe_table", "cdc.backtest"):
        answers = [site.call("scoped", method, table="orders", where=where.format(t)) for t in ("secret", "missing")]
        assert not answers[0]["ok"] and answers[0] == answers[1]


def test_filter_of_scoped_caller_calls_no_function_of_users(site: Site, scoped: httpx.Client) -> None:
    site.db.execute(
        "CREATE OR REPLACE FUNCTION peek(int) RETURNS text LANGUAGE sql IMMUTABLE SECURITY DEFINER "
        "AS 'SELECT word FROM public.secret WHERE id = $1'"
    )
    site.callers["scoped"] = scoped
    for method in ("cdc.subscribe_table", "cdc.backtest"):
        assert site.refused("scoped", method, table="orders", where="peek(id) = 'x'") == "forbidden"
        assert site.call("viewer", method, table="orders", where="peek(id) = 'x'")["ok"]
        assert site.call("scoped", method, table="orders", where="lower(note) = 'x'")["ok"]
    query = site.call("scoped", "query.prepare", sql="SELECT id FROM orders ORDER BY id")["result"]["query_id"]
    filtered = {"query_id": query, "where": "peek(id) = 'x'"}
    assert site.refused("scoped", "cdc.subscribe_query", **filtered) == "forbidden"
    assert site.call("viewer", "cdc.subscribe_query", **filtered)["ok"]
    version = site.live.ok("pull.describe", table="orders")["version"]
    path = f"/api/v1/pull/main/orders/snapshot?version={version}&where="
    assert scoped.get(path + quote("peek(id) = 'x'")).status_code == 403
    assert scoped.get(path + quote("lower(note) = 'x'")).status_code == 200


def test_pull_of_dropped_table_by_scoped_caller_calls_no_function_of_users(site: Site) -> None:
    """The worker still reads the changes of a dropped or altered table by an old shape."""
    site.db.execute(
        "CREATE OR REPLACE FUNCTION peek(int) RETURNS text LANGUAGE sql IMMUTABLE SECURITY DEFINER "
        "AS 'SELECT word FROM public.secret WHERE id = $1'"
    )
    # Of the current shape `left` is PostgreSQL's own, of the first one it is not.
    site.db.execute("CREATE OR REPLACE FUNCTION public.left(int, int) RETURNS text LANGUAGE sql AS 'SELECT peek($1)'")
    site.db.execute("ALTER FUNCTION public.left(int, int) IMMUTABLE SECURITY DEFINER SET search_path = public")
    site.db.execute("CREATE TABLE fading (id int PRIMARY KEY, a int)")
    wait_until(lambda: "fading" in site.live.ok("schema.list_tables")["tables"])
    site.db.execute("INSERT INTO fading VALUES (1, 1)")

    def inserts() -> Any:
        return site.call("owner", "cdc.backtest", table="fading", ops=["insert"]).get("result", {}).get("matches")

    wait_until(lambda: inserts() == 1)
    described = site.live.ok("pull.describe", table="fading")
    upto, shape = int(described["version"].rpartition(".")[2]), described["table"]["version"]  # the insert is at `upto`
    made = site.live.ok("security.token.create", name="fading", role="viewer", scopes=["main.fading"])
    headers = {"authorization": f"Bearer {made['token']}"}
    path = f"/api/v1/pull/main/fading/log?after={upto - 1}&upto={upto}&shape={shape}&where="
    with httpx.Client(base_url=site.live.url, headers=headers, timeout=PATIENCE) as scoped:
        present = scoped.get(path + quote("peek(a) = 'x'"))
        assert present.status_code == 403
        site.db.execute("ALTER TABLE fading ALTER a TYPE text")
        wait_until(lambda: site.live.ok("pull.describe", table="fading")["table"]["version"] != shape)
        assert scoped.get(path + quote("left(a, 1) = 'x'")).json() == present.json()
        site.db.execute("DROP TABLE fading")
        wait_until(lambda: "fading" not in site.live.ok("schema.list_tables")["tables"])
        for where in ("peek(a) = 'x'", "nosuch(a) = 'x'", "left(a, 1) = 'x'"):
            found = scoped.get(path + quote(where))
            assert (found.status_code, found.json()) == (403, present.json()), where
        assert scoped.get(path + quote("a > 0")).status_code == 200
    assert site.callers["viewer"].get(path + quote("peek(a) = 'x'")).status_code == 200


def test_constraint_error_does_not_name_hidden_table(site: Site, scoped: httpx.Client) -> None:
    site.db.execute("CREATE TABLE IF NOT EXISTS hidden_lines (id int PRIMARY KEY, number int REFERENCES orders)")
    site.db.execute("INSERT INTO hidden_lines VALUES (1, 1) ON CONFLICT DO NOTHING")
    site.callers["scoped"] = scoped
    where = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": 1}}}
    answer = site.call("scoped", "data.delete", table={"table": "orders"}, where=where)
    assert not answer["ok"] and "constraint" in answer["error"]["message"] and "hidden" not in str(answer)
    page = scoped.delete("/api/v1/t/main/orders/1")
    assert page.status_code in (400, 409) and "constraint" in page.text and "hidden" not in page.text, page.text


FAILURES = {
    "cast": "PERFORM x::int",
    "data": "RAISE EXCEPTION USING errcode = '22P02', message = x, detail = x, hint = x",
    "cancel": "RAISE EXCEPTION USING errcode = '57014', message = x",
    "disk": "RAISE EXCEPTION USING errcode = '53100', message = x",
    "depth": "RAISE EXCEPTION USING errcode = '54001', message = x",
    "json": "PERFORM ('{' || x)::json",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_error_in_a_trigger_does_not_show_values_of_a_hidden_table(site: Site, scoped: httpx.Client, kind: str) -> None:
    site.db.execute("CREATE TABLE IF NOT EXISTS hidden_words (word text)")
    site.db.execute("INSERT INTO hidden_words VALUES ('canary')")
    site.db.execute(
        "CREATE OR REPLACE FUNCTION peeking() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ DECLARE x text;"
        f"BEGIN SELECT word INTO x FROM public.hidden_words LIMIT 1; {FAILURES[kind]}; RETURN NEW; END $$"
    )
    site.db.execute("CREATE OR REPLACE TRIGGER peeking BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION peeking()")
    site.callers["scoped"] = scoped
    try:
        page = scoped.put("/api/v1/t/main/orders/77", json={"total": 1})
        inserted = site.call("scoped", "data.insert", into={"table": "orders"}, rows=[{"id": 77, "total": 1}])
        answers = [page.text, str(inserted)]
    finally:
        site.db.execute("DROP TRIGGER peeking ON orders")
    assert page.status_code >= 400 and all("canary" not in each for each in answers), answers
    assert all(REASON in each for each in answers), answers


REASON = "a constraint, trigger, rule or value stops the statement"


@pytest.fixture(scope="module")
def ruled(site: Site) -> Iterator[Site]:
    """Yield the site with a caller of two tables: one has rules, one a policy, and both read a hidden table."""
    for sql in (
        "CREATE TABLE hidden_codes (code text)",
        "INSERT INTO hidden_codes VALUES ('canary')",
        "CREATE TABLE short_log (x int, c varchar(3))",
        "CREATE TABLE ruled (id int PRIMARY KEY, a varchar(6))",
        "CREATE RULE r1 AS ON INSERT TO ruled WHERE new.a = 'int' DO ALSO INSERT INTO short_log (x)"
        " SELECT code::int FROM hidden_codes",
        "CREATE RULE r2 AS ON INSERT TO ruled WHERE new.a = 'date' DO ALSO INSERT INTO short_log (x)"
        " SELECT extract(year FROM code::date) FROM hidden_codes",
        "CREATE TABLE secured (id int PRIMARY KEY, a varchar(6))",
        "INSERT INTO secured VALUES (1, 'x')",
        "ALTER TABLE secured ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON secured USING (a <> 'x' OR EXISTS (SELECT FROM hidden_codes WHERE code::int = secured.id))"
        " WITH CHECK (a <> 'y' OR EXISTS (SELECT FROM hidden_codes WHERE code::int = secured.id))",
        f"GRANT SELECT ON hidden_codes, ruled, secured TO {READER}, {WRITER}",
        f"GRANT INSERT, UPDATE, DELETE ON short_log, ruled, secured TO {WRITER}",
    ):
        site.db.execute(sql)
    wait_until(lambda: {"ruled", "secured"} <= set(site.live.ok("schema.list_tables")["tables"]))
    scopes = ["main.ruled", "main.secured", "main.orders"]
    made = site.live.ok("security.token.create", name="ruled", role="editor", scopes=scopes)
    with httpx.Client(base_url=site.live.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        site.callers["ruled"] = client
        yield site


WHERE = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": 1}}}
RULED_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("data.insert", {"into": {"table": "ruled"}, "rows": [{"id": 1, "a": "int"}]}),
    ("data.insert", {"into": {"table": "ruled"}, "rows": [{"id": 1, "a": "date"}]}),
    ("data.insert", {"into": {"table": "secured"}, "rows": [{"id": 2, "a": "y"}]}),
    ("data.update", {"table": {"table": "secured"}, "where": WHERE, "set": {"a": "q"}}),
    ("data.delete", {"table": {"table": "secured"}, "where": WHERE}),
    *((method, {"sql": "SELECT a FROM secured"}) for method in ("query.select", "sql.exec")),
    ("query.select", {"sql": "SELECT count(*) FROM orders, secured"}),
)


@pytest.mark.parametrize(("method", "params"), RULED_CALLS)
def test_error_in_a_rule_or_a_policy_does_not_show_values_of_a_hidden_table(
    ruled: Site, method: str, params: dict[str, Any]
) -> None:
    assert "canary" in str(ruled.call("editor", method, **params)["error"])  # without scopes, the reason is shown
    answer = ruled.call("ruled", method, **params)
    assert not answer["ok"] and answer["error"]["message"] == REASON, answer


def test_prepared_query_on_a_secured_table_does_not_show_values_of_a_hidden_table(ruled: Site) -> None:
    id = ruled.call("ruled", "query.prepare", sql="SELECT id FROM secured")["result"]["query_id"]
    page = ruled.callers["ruled"].get(f"/api/v1/q/{id}")
    assert page.status_code == 400 and REASON in page.text, page.text
    row = ruled.callers["ruled"].put("/api/v1/t/main/ruled/9", json={"a": "int"})
    assert row.status_code == 400 and REASON in row.text, row.text


OWN_ERRORS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("query.select", {"sql": "SELECT 1 / (id - 1) FROM orders"}, "division by zero"),
    ("query.select", {"sql": "SELECT (note || 'y')::int FROM orders"}, "invalid input syntax"),
    ("data.insert", {"into": {"table": "orders"}, "rows": [{"id": 1 << 40, "total": 1}]}, "out of range"),
    ("data.insert", {"into": {"table": "ruled"}, "rows": [{"id": 1 << 40, "a": "x"}]}, "out of range"),
)


@pytest.mark.parametrize(("method", "params", "text"), OWN_ERRORS)
def test_error_in_own_values_is_shown_to_scoped_caller(
    ruled: Site, method: str, params: dict[str, Any], text: str
) -> None:
    assert text in ruled.call("ruled", method, **params)["error"]["message"]


# Read with its names replaced, this text asks a CTE; as it stands, it asks the table "비밀".
SHIFTED = (
    "WITH U&\"$1:bc00\" UESCAPE ':' AS (SELECT 'x'::text AS word) SELECT (ARRAY[1,2])[:be44], s.word, name'a\\' , '\"' "
    "FROM (SELECT id::int AS be44 FROM orders WHERE id = 1) p, U&\":be44:bc00\" UESCAPE ':' AS s"
)


def test_statement_of_scoped_caller_runs_as_it_was_analysed(site: Site, scoped: httpx.Client) -> None:
    site.db.execute('CREATE TABLE IF NOT EXISTS "비밀" (word text PRIMARY KEY)')
    site.db.execute("""INSERT INTO "비밀" VALUES ('canary') ON CONFLICT DO NOTHING""")
    site.callers["scoped"] = scoped
    for args in ([], {}, {"be44": {"t": "i64", "v": 1}}):
        assert "canary" not in str(site.call("scoped", "sql.exec", sql=SHIFTED, args=args))


def test_statement_of_scoped_owner_reads_the_tables_that_were_checked(site: Site) -> None:
    site.db.execute("CREATE SCHEMA IF NOT EXISTS postgres")  # first on the path of the source's own role
    site.db.execute("CREATE TABLE IF NOT EXISTS postgres.orders AS SELECT 1 AS id, 'canary' AS note")
    made = site.live.ok("security.token.create", name="scoped owner", role="owner", scopes=["main.orders"])
    try:
        with httpx.Client(base_url=site.live.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
            site.callers["scoped owner"] = client
            assert "canary" not in str(site.call("scoped owner", "sql.exec", sql="SELECT id, note FROM orders"))
    finally:
        site.db.execute("DROP SCHEMA postgres CASCADE")


def test_function_that_names_relations_is_refused_to_scoped_caller(site: Site, scoped: httpx.Client) -> None:
    site.callers["scoped"] = scoped
    (oid,) = site.db.execute("SELECT 'secret'::regclass::oid::int").fetchone()
    for method in ("query.select", "sql.exec"):
        sql = f"SELECT satisfies_hash_partition({oid}::oid, 2, 0, id) FROM orders"
        assert site.refused("scoped", method, sql=sql) == "forbidden"
    for method in ("cdc.subscribe_table", "cdc.backtest"):
        answer = site.call("scoped", method, table="orders", where=f"satisfies_hash_partition({oid}::oid, 2, 0, 1)")
        assert not answer["ok"] and "secret" not in str(answer)


@pytest.mark.parametrize("label", ["happy", "sad"])
def test_filter_on_type_of_other_tables_is_refused(site: Site, scoped: httpx.Client, label: str) -> None:
    site.db.execute("CREATE SCHEMA IF NOT EXISTS unseen")
    site.db.execute(
        "DO $$ BEGIN CREATE TYPE unseen.mood AS ENUM ('happy'); EXCEPTION WHEN duplicate_object THEN END $$"
    )
    site.callers["scoped"] = scoped
    answers = [
        site.call("scoped", "cdc.backtest", table="orders", where=f"'{label}'::unseen.{name} IS NULL")
        for name in ("mood", "missing")
    ]
    assert not answers[0]["ok"] and answers[0] == answers[1]


def test_catalogue_is_not_written_by_way_of_a_view(site: Site) -> None:
    site.db.execute("CREATE OR REPLACE VIEW roles_view AS SELECT rolname, rolsuper FROM pg_authid")
    site.db.execute("CREATE OR REPLACE VIEW roles_again AS SELECT * FROM roles_view")
    site.db.execute("CREATE OR REPLACE VIEW orders_view AS SELECT id, note FROM orders")
    site.db.execute(f"GRANT SELECT, UPDATE ON roles_view, roles_again, orders_view TO {WRITER}".encode())
    for view in ("roles_view", "roles_again"):
        sql = f"UPDATE {view} SET rolsuper = true WHERE rolname = '{WRITER}'"
        assert site.refused("editor", "sql.exec", sql=sql) == "forbidden"
    assert site.db.execute("SELECT rolsuper FROM pg_roles WHERE rolname = %s", [WRITER]).fetchone() == (False,)
    site.rows("editor", "UPDATE orders_view SET note = 'by view' WHERE id = 1")
    site.db.execute("DROP VIEW roles_view, roles_again, orders_view CASCADE")


def test_query_stream_ends_when_its_query_reads_a_table_out_of_scope(site: Site) -> None:
    """With row security, the tables that policies read are unknown, so any change may be relevant to the query."""
    site.db.execute("DROP TABLE IF EXISTS watched")
    site.db.execute("CREATE TABLE watched (id int PRIMARY KEY)")
    site.db.execute("CREATE TABLE IF NOT EXISTS payroll (id int PRIMARY KEY, word text)")
    site.db.execute(f"GRANT SELECT ON watched TO {READER}, {WRITER}".encode())
    wait_until(lambda: {"watched", "payroll"} <= set(site.live.ok("schema.list_tables")["tables"]))
    made = site.live.ok("security.token.create", name="watcher", role="viewer", scopes=["main.watched"])
    with httpx.Client(base_url=site.live.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        site.callers["watcher"] = client
        query = site.call("watcher", "query.prepare", sql="SELECT id FROM watched ORDER BY id")["result"]["query_id"]
        wanted = {"query_id": query, "include": {"before": True, "after": True}, "format": "plain_json"}
        held = site.call("watcher", "cdc.subscribe_query", **wanted)
        other = site.call("viewer", "cdc.subscribe_query", **wanted)  # who sees all tables, and stays
        with (
            site.callers["viewer"].stream("GET", other["result"]["sse_url"]) as unscoped,
            client.stream("GET", held["result"]["sse_url"]) as response,
        ):
            assert next(unscoped.iter_text())
            frames = response.iter_text()
            assert response.status_code == 200 and next(frames)
            site.db.execute("ALTER TABLE watched ENABLE ROW LEVEL SECURITY")
            site.db.execute("INSERT INTO payroll VALUES (1, 'canary') ON CONFLICT (id) DO UPDATE SET word = 'canary'")
            received = ""
            for frame in frames:
                received += frame
                if "canary" in received:
                    break
        assert "canary" not in received and "forbidden" in received, received


# --- without logins --------------------------------------------------------------------------------------


def test_sql_without_logins_is_refused_unless_from_owner(alone: Site) -> None:
    asked = {"sql": "SELECT id FROM orders"}
    for role in ("viewer", "editor"):
        for method in ("query.select", "query.prepare", "query.explain"):
            assert alone.refused(role, method, **asked) == "forbidden"
        assert alone.refused(role, "cdc.subscribe_table", table="orders", where="total > 1") == "forbidden"
        assert alone.refused(role, "cdc.backtest", table="orders", where="total > 1") == "forbidden"
        answer = alone.callers[role].get("/api/v1/changes/main/orders?where=total%3E1")
        assert answer.status_code == 403
    assert alone.refused("editor", "sql.exec", **asked) == "forbidden"
    assert len(alone.rows("owner", asked["sql"])) >= 20


def test_pull_with_where_without_logins_is_refused_unless_from_owner(alone: Site) -> None:
    version = alone.live.ok("pull.describe", table="orders")["version"]
    path = f"/api/v1/pull/main/orders/snapshot?version={version}"
    for role, status in (("viewer", 403), ("editor", 403), ("owner", 200)):
        assert alone.callers[role].get(f"{path}&where=total%3E100").status_code == status
        assert alone.callers[role].get(path).status_code == 200


def test_query_prepared_by_owner_without_logins_is_callable_by_viewer(alone: Site) -> None:
    made = alone.live.ok("query.prepare", sql="SELECT id, total FROM orders WHERE id <= $1::int ORDER BY id")
    address = f"/api/v1/q/{made['query_id']}?args={quote('[2]')}"
    first = alone.callers["viewer"].get(address)
    assert first.status_code == 200 and len(first.json()["data"]["rows"]) == 2
    again = alone.callers["viewer"].get(address, headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    answer = alone.call("viewer", "query.execute_prepared", query_id=made["query_id"], args=[{"t": "i64", "v": 3}])
    assert len(answer["result"]["data"]["rows"]) == 3
    assert alone.call("viewer", "cdc.subscribe_query", query_id=made["query_id"], args=[{"t": "i64", "v": 3}])["ok"]


def test_rows_and_feeds_are_served_to_all_roles_without_logins(alone: Site) -> None:
    row = {"id": {"t": "i64", "v": 200}, "total": {"t": "i64", "v": 2}}
    sub = alone.call("viewer", "cdc.subscribe_table", table="orders", pk=[{"t": "i64", "v": 200}])["result"]
    assert alone.call("editor", "data.insert", into={"table": "orders"}, rows=[row])["ok"]
    events = alone.call("viewer", "cdc.poll", sub_id=sub["sub_id"], wait_ms=20_000)["result"]["events"]
    assert [event["op"] for event in events] == ["insert"]
    assert alone.call("viewer", "data.get", table={"table": "orders"}, pk=[{"t": "i64", "v": 200}])["ok"]
    assert alone.callers["viewer"].get("/api/v1/pull/main/orders/snapshot").status_code in (200, 302, 303, 307)


def test_query_prepared_by_viewer_is_refused_once_logins_are_removed(alone: Site) -> None:
    """Its text was meant for the reader's rights: without a reader login it would run with the source's own."""
    prepared = alone.live.api.asking()._prepared
    for role in ("viewer", "editor", ""):  # the last: by a version that did not write it down
        made = prepared.add("main", f"SELECT note FROM orders WHERE id = {next(_numbers)}", role=role)
        assert alone.callers["viewer"].get(f"/api/v1/q/{made.id}").status_code == 403


# --- the logins themselves -------------------------------------------------------------------------------


def powers(postgres: Server, *statements: str) -> str:
    """Return what is reported of a reader for which these statements were run; {r} is its name."""
    name = f"strong_{os.getpid()}_{next(_numbers)}"
    reader, writer = f"r_{name}", f"w_{name}"
    with postgres.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    url = f"postgresql://postgres@/{name}?host={postgres.folder}"
    try:
        with Address(name, url).connect() as admin:
            admin.execute("CREATE TABLE t (id int PRIMARY KEY)")
            for line in [*setup_sql(admin, reader, writer), *(each.format(r=reader) for each in statements)]:
                admin.execute(line.encode())
            config = PostgresConfig(reader=reader, writer=writer)
            fatal = [each for each in Logins(Address(name, url), config).findings(admin) if each.fatal]
            return "; ".join(each.problem for each in fatal)
    finally:
        with postgres.connect(name) as admin:
            admin.execute(f"ALTER ROLE {reader} NOSUPERUSER".encode())
            admin.execute(f"REASSIGN OWNED BY {reader} TO postgres; DROP OWNED BY {reader}, {writer}".encode())
        with postgres.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            admin.execute(f"DROP ROLE {reader}, {writer}".encode())


@pytest.mark.parametrize(
    "statement, word",
    [
        ("SELECT 1", ""),
        ("ALTER ROLE {r} SUPERUSER", "superuser"),
        ("ALTER ROLE {r} CREATEROLE", "can create roles"),
        ("ALTER ROLE {r} CREATEDB", "can create databases"),
        ("ALTER ROLE {r} REPLICATION", "REPLICATION"),
        ("GRANT pg_read_server_files TO {r}", "member"),
        ("GRANT CREATE ON SCHEMA public TO {r}", "can create objects"),
        ("ALTER TABLE t OWNER TO {r}", "owns"),
        ("GRANT INSERT ON t TO {r}", "INSERT"),
        ("GRANT TRIGGER ON t TO {r}", "TRIGGER"),
        ("GRANT UPDATE (id) ON t TO {r}", "UPDATE"),
        ("GRANT EXECUTE ON FUNCTION pg_read_file(text) TO {r}", "system functions"),
        ("GRANT SELECT ON pg_authid TO {r}", "password hashes"),
        ("ALTER ROLE {r} NOLOGIN", "may not log in"),
    ],
)
def test_too_powerful_login_is_reported(statement: str, word: str) -> None:
    said = powers(shared_server(), statement)
    assert word in said and bool(said) == bool(word)


def test_start_with_too_powerful_login_is_refused(tmp_path: Path) -> None:
    postgres, name = shared_server(), f"unfit_{os.getpid()}"
    with postgres.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    url = f"postgresql://postgres@/{name}?host={postgres.folder}"
    with pytest.raises(SourceUnfit, match="too powerful"):
        Live(tmp_path, url=url, postgres={"reader": "postgres", "writer": "postgres"})
    with postgres.connect() as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_reader_login_without_writer_login_is_refused() -> None:
    with pytest.raises(ConfigError, match="only one of"):
        Logins(Address("x", "postgresql:///x"), PostgresConfig(reader="r"))


def test_password_file_readable_by_the_group_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret word\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users may read"):
        read_password(file)
    file.chmod(0o600)
    assert read_password(file) == "s3cret word"
    config = PostgresConfig(reader="r", writer="w", reader_password_file=str(file), writer_password_file=str(file))
    logins = Logins(Address("x", "postgresql://boss:own@db.example/x"), config)
    assert "s3cret" in logins.server("viewer").address and "own" not in logins.server("viewer").address
    assert "user=r" in logins.server("viewer").address and "user=w" in logins.server("editor").address
    with pytest.raises(ConfigError, match="cannot read"):
        read_password(tmp_path / "absent")


def test_setup_prints_runnable_sql_and_settings(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "setup", f"shop={site.url}", "--reader", "r1", "--writer", "w1"]) == 0
    printed = capsys.readouterr().out
    assert 'CREATE ROLE "r1" LOGIN' in printed and 'reader = "r1"' in printed and "PASSWORD '" not in printed
    with Address("x", site.url).connect() as admin, admin.transaction(force_rollback=True):
        admin.execute(printed.encode())
        login = PostgresConfig(reader="r1", writer="w1")
        assert [each for each in Logins(Address("x", site.url), login).findings(admin) if each.fatal] == []


def test_setup_of_sqlite_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["source", "setup", "app.db"]) != 0
    assert "only PostgreSQL" in capsys.readouterr().err


def test_unreadable_table_is_reported(site: Site) -> None:
    site.db.execute("CREATE TABLE IF NOT EXISTS hidden (id int PRIMARY KEY)")
    site.db.execute(f"REVOKE ALL ON hidden FROM {READER}".encode())
    with Address("x", site.url).connect() as admin:
        found = Logins(Address("x", site.url), PostgresConfig(reader=READER, writer=WRITER)).findings(admin)
    assert any("public.hidden" in each.problem and "GRANT SELECT" in each.remedy for each in found)
