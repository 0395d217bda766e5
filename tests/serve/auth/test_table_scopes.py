"""Principals with table scopes: no statement reads other tables, and no answer names hidden ones."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.hidden_tables import FORMS, WITH_FORMS, mentioning
from tests.serve.server_fixture import serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret
from headwater.feeds import feeds
from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.feeds.watched_instances import WatchedInstances

ADMIN = "admin-token"
# Names that the callers below must not learn.
HIDDEN = ("payroll", "payrolls", "diary", "vault", "pay_seen", "prices", "price_list", "pay_priced")
SECRET = "of-great-price"  # and a value
SCOPES = ["main.pay", "shop"]
ALLOWED = [
    "SELECT k, v FROM pay",
    "SELECT key, value FROM pay, json_each('[1, 2]')",
    "SELECT upper(v), date('now'), random() FROM pay",
    "SELECT * FROM mine",
    "SELECT v FROM labelled",
    "WITH prices(v) AS (SELECT 'mine' FROM pay) SELECT count(*) FROM prices",
    "WITH a AS (SELECT k FROM pay) SELECT count(*) FROM a",
    "SELECT k, row_number() OVER w FROM pay WINDOW w AS (ORDER BY k)",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT max(k) FROM pay))",
]
BEYOND = [
    "SELECT * FROM payroll",
    "SELECT * FROM diary",
    "SELECT count(*) FROM diary",
    "SELECT * FROM diary WHERE diary MATCH 'great'",
    "SELECT c0 FROM diary_content",
    "SELECT pay.k FROM pay JOIN diary USING (v)",
    "SELECT pay.k FROM pay, json_each('[1]') JOIN diary USING (v)",
    "SELECT k FROM pay WHERE EXISTS (SELECT 1 FROM diary)",
    "SELECT * FROM pay_seen",
    "SELECT v FROM prices",
    "SELECT count(*) FROM price_list",
    "SELECT pay.k FROM pay JOIN price_list USING (v)",
    "SELECT * FROM pay_priced",
    "SELECT name, sql FROM sqlite_schema",
    "SELECT name FROM sqlite_master",
    "SELECT * FROM sqlite_sequence",
    "SELECT tbl, idx, stat FROM sqlite_stat1",
    "SELECT name FROM dbstat",
    "SELECT value FROM json_tree",
    "SELECT count(*) FROM JSON_TREE",
    "SELECT count(*) FROM json_tree('great')",
    "SELECT value FROM json_tree WHERE json_tree MATCH 'great'",
    "SELECT name FROM pragma_table_list",
    "SELECT name FROM pragma_table_info('payroll')",
    "SELECT term FROM vocabulary",
    "SELECT rtreecheck('main', 'diary') FROM pay",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT 1 FROM payroll))",
    "SELECT k FROM pay WINDOW w AS (PARTITION BY (SELECT 1 FROM diary))",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT 1 FROM payroll a JOIN payroll b USING (v)))",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (WITH x(a, b) AS (SELECT * FROM payroll) SELECT 1 FROM x))",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT 1 FROM sqlite_schema))",
]
ABSENT = [  # the same words must be said of these
    "SELECT * FROM payrolly",
    "SELECT nothing FROM payroll",
    "SELECT nothing FROM payrolly",
    "SELECT * FROM payrolly)",
    "SELECT * FROM payroll)",
    "SELECT * FROM pay JOIN payrolly USING (k)",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT 1 FROM payrolly))",
    "SELECT k FROM pay WINDOW w AS (ORDER BY (SELECT 1 FROM payroll a JOIN payroll b USING (nothing)))",
]
WRITES = ["DELETE FROM payroll", "DELETE FROM payrolly", "DELETE FROM pay", "INSERT INTO diary VALUES ('x')"]


class World:
    """A server with credentials, and a viewer and an owner with the scope of one table of `main`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.admin = httpx.Client(base_url=url, headers={"x-api-key": ADMIN}, timeout=PATIENCE)
        self.people = {role: self._made(role) for role in ("viewer", "owner")}

    def _made(self, role: str) -> httpx.Client:
        made = self.call(self.admin, "security.token.create", name=f"held {role}", role=role, scopes=SCOPES)["result"]
        return httpx.Client(base_url=self.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE)

    def call(self, client: httpx.Client, method: str, **params: Any) -> Any:
        return client.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params}).json()

    def close(self) -> None:
        for client in (self.admin, *self.people.values()):
            client.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(tmp_path_factory.mktemp("held"))
    with Whole(folder) as files:
        for name in ("shop", "vault"):
            files.create(name)
        for sql in (
            "CREATE TABLE pay(k INTEGER PRIMARY KEY, v TEXT)",
            "CREATE TABLE payroll(k INTEGER PRIMARY KEY AUTOINCREMENT, v TEXT)",
            "CREATE TABLE payrolls(k INTEGER PRIMARY KEY, v TEXT)",
            "CREATE INDEX payroll_v ON payroll(v)",
            "CREATE VIRTUAL TABLE diary USING fts5(v)",
            "CREATE VIRTUAL TABLE vocabulary USING fts5vocab('diary', 'row')",
            "CREATE VIEW mine AS SELECT k FROM pay",
            "CREATE VIEW pay_seen AS SELECT pay.k, payroll.v FROM pay JOIN payroll USING (k)",
            "CREATE VIEW labelled AS SELECT 'a constant' AS v FROM pay",
            f"CREATE VIEW prices AS SELECT '{SECRET}' AS v",
            f"CREATE VIEW price_list(v) AS VALUES ('{SECRET}'), ('2')",
            "CREATE VIEW pay_priced AS SELECT pay.k, prices.v FROM pay, prices",
            "INSERT INTO pay VALUES (1, 'one')",
            f"INSERT INTO payroll VALUES (1, '{SECRET}')",
            f"INSERT INTO diary VALUES ('{SECRET}')",
            "CREATE VIRTUAL TABLE json_tree USING fts5(value)",
            f"INSERT INTO json_tree VALUES ('{SECRET}')",
            "ANALYZE",
        ):
            files.run(sql)
        with serving(files, folder=folder, token=Secret(ADMIN)) as client:
            made = World(str(client.http.base_url))
            yield made
            made.close()


def _said(answer: dict[str, Any]) -> tuple[str, str, str]:
    assert not answer["ok"], answer
    error = answer["error"]
    return error["code"], error["message"], error["details"]["hint"]


def _get(client: httpx.Client, path: str) -> tuple[int, str]:
    """Return the status and the headers and body of an answer; of a status 200, the headers only."""
    with client.stream("GET", path) as response:
        text = json.dumps({name: value for name, value in response.headers.items() if name != "date"})
        return response.status_code, text if response.status_code == 200 else text + response.read().decode()


@pytest.mark.parametrize("sql", ALLOWED)
def test_statement_on_tables_in_scope_is_executed(world: World, sql: str) -> None:
    for client, method in itertools.product(world.people.values(), ("query.select", "query.prepare", "query.explain")):
        assert world.call(client, method, sql=sql)["ok"], method
    assert world.call(world.people["owner"], "sql.exec", sql=sql)["ok"]


@pytest.mark.parametrize("form", [*FORMS, *WITH_FORMS])
def test_hidden_and_missing_table_have_the_same_answer(world: World, form: str) -> None:
    for role, method in itertools.product(world.people, ("query.select", "query.prepare", "query.explain")):
        client = world.people[role]
        missing = world.call(client, method, sql=mentioning(form, "missing", "pay"))
        for table in ("payroll", "prices", "price_list"):
            hidden = world.call(client, method, sql=mentioning(form, table, "pay"))
            assert hidden["ok"] == missing["ok"], (role, method, table)
            if not hidden["ok"]:
                assert _said(hidden) == _said(missing)


def test_scope_on_a_view_without_tables_allows_it(world: World) -> None:
    made = world.call(world.admin, "security.token.create", name="p", role="viewer", scopes=["main.prices"])["result"]
    with httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        assert SECRET in json.dumps(world.call(client, "query.select", sql="SELECT v FROM prices"))
        assert world.call(client, "query.select", sql="SELECT v FROM price_list")["error"]["code"] == "forbidden"


@pytest.mark.parametrize("sql", [*BEYOND, *ABSENT])
def test_sql_reading_a_hidden_or_missing_table_gets_the_same_forbidden_error(world: World, sql: str) -> None:
    expected = _said(world.call(world.people["owner"], "sql.exec", sql="SELECT v FROM payroll"))
    assert expected[0] == "forbidden"
    assert not any(name in " ".join(expected) for name in HIDDEN)
    assert _said(world.call(world.people["owner"], "sql.exec", sql=sql)) == expected
    for method in ("query.select", "query.prepare", "query.explain", "query.patch"):
        params = {"sql": sql} if method != "query.patch" else {"sql": sql, "args": []}
        found = _said(world.call(world.people["owner"], method, **params))
        assert found == expected, method
        assert _said(world.call(world.people["viewer"], method, **params))[0] == "forbidden"


@pytest.mark.parametrize("sql", WRITES)
def test_sql_write_by_a_table_scoped_key_gets_the_same_forbidden_error_as_a_read(world: World, sql: str) -> None:
    expected = _said(world.call(world.people["owner"], "sql.exec", sql="SELECT v FROM payroll"))
    assert _said(world.call(world.people["owner"], "sql.exec", sql=sql)) == expected


@pytest.mark.parametrize("sql", [sql for sql in BEYOND if not sql.startswith("SELECT term")])
def test_prepared_query_of_another_caller_on_tables_outside_the_scope_is_unknown(world: World, sql: str) -> None:
    """The id follows from the text: an answer that differs from that of a free id shows what others prepared."""
    kept = world.call(world.admin, "query.prepare", sql=sql)
    if not kept["ok"]:
        pytest.skip("no query")
    id, free = kept["result"]["query_id"], "q_" + "a" * 24
    for client in world.people.values():
        for path in ("/api/v1/q/{}", "/api/v1/q/{}/events"):
            found, missing = (_get(client, path.format(each)) for each in (id, free))
            assert found[0] == 404 and found[1].replace(id, free) == missing[1]
        for method in (
            "query.execute_prepared",
            "query.explain",
            "query.patch",
            "query.subscribe",
            "cdc.subscribe_query",
        ):
            more = {} if method == "query.explain" else {"args": []}
            answer = world.call(client, method, query_id=id, **more)
            assert answer["error"]["code"] == "not_found", method
            assert answer == world.call(client, method, query_id=free, **more)
            assert not any(name in json.dumps(answer) for name in HIDDEN), answer


def test_caller_without_table_scopes_gets_full_errors(world: World) -> None:
    answer = world.call(world.admin, "query.select", sql="SELECT * FROM payrolly")
    assert answer["error"]["code"] == "invalid_request" and "no such table" in answer["error"]["message"]
    for method in ("query.select", "sql.exec", "query.prepare", "query.explain"):
        answer = world.call(world.admin, method, sql="SELECT * FROM payrol")
        assert answer["error"]["details"]["hint"] == "Did you mean 'payroll'?", method
    assert world.call(world.admin, "query.select", sql="SELECT * FROM diary")["ok"]


def test_scope_on_a_virtual_table_allows_it_but_not_its_shadow_table(world: World) -> None:
    made = world.call(world.admin, "security.token.create", name="d", role="viewer", scopes=["main.diary"])["result"]
    with httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        assert world.call(client, "query.select", sql="SELECT * FROM diary")["ok"]
        answer = world.call(client, "query.select", sql="SELECT * FROM diary_content")
        assert answer["error"]["code"] == "forbidden"


def test_new_key_with_narrower_scopes_lists_only_query_subscriptions_in_its_scopes(world: World) -> None:
    def issue(*scopes: str) -> tuple[str, httpx.Client]:
        made = world.call(world.admin, "security.token.create", name="narrowed", role="viewer", scopes=scopes)["result"]
        return made["id"], httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE)

    subs = {}
    key, wide = issue("main")
    with wide:
        for table, name in (("payroll", "hidden feed"), ("pay", "seen feed")):
            sql = f"SELECT v FROM {table} WHERE k = ?"
            query = world.call(wide, "query.prepare", sql=sql)["result"]["query_id"]
            for arg in (1, 2):
                given = {"query_id": query, "args": [arg], "name": f"{name} {arg}"}
                subs[table, arg] = world.call(wide, "cdc.subscribe_query", **given)["result"]["sub_id"]
        assert len(world.call(wide, "cdc.list")["result"]["subscriptions"]) == 4
    world.call(world.admin, "security.token.revoke", id=key)
    key, narrow = issue("main.pay")
    with narrow:
        listed = world.call(narrow, "cdc.list")["result"]["subscriptions"]
        assert [each["sub_id"] for each in listed] == [subs["pay", 1], subs["pay", 2]]
        page = world.call(narrow, "cdc.list", db="main", limit=1)["result"]
        assert page["next"] == subs["pay", 1]
        requests = [("cdc.ack", {"offset": 0}), ("cdc.seek", {"offset": 0}), ("cdc.list", {})]
        requests += [(f"cdc.{verb}", {}) for verb in ("poll", "pause", "resume", "close")]
        for method, given in requests:
            answer = world.call(narrow, method, sub_id=subs["payroll", 1], **given)
            unknown = world.call(narrow, method, sub_id="sub_00000000000000ff", **given)
            assert _said(answer) == tuple(
                text.replace("sub_00000000000000ff", subs["payroll", 1]) for text in _said(unknown)
            ), method
            assert world.call(narrow, method, sub_id=subs["pay", 1], **given)["ok"], method
        assert _get(narrow, f"/api/v1/cdc/sse/{subs['payroll', 1]}")[0] == 404
        assert subs["payroll", 1] not in json.dumps(world.call(narrow, "cdc.poll", sub_id="hidden feed 1"))
    for left in (("payroll", 1), ("payroll", 2), ("pay", 2)):
        assert world.call(world.admin, "cdc.close", sub_id=subs[left])["ok"], "an owner may close it"
    world.call(world.admin, "security.token.revoke", id=key)


def test_list_of_many_query_subscriptions_lets_the_event_loop_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, turns = WatchedInstances.find, list[int]()

    async def noted(self: WatchedInstances, options: Options) -> QueryInstance:
        asyncio.get_running_loop().call_soon(turns.append, len(turns))
        return await find(self, options)

    made = world.call(world.admin, "security.token.create", name="lister", role="viewer", scopes=["main.pay"])["result"]
    with httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:
        for number in range(20):
            query = world.call(client, "query.prepare", sql=f"SELECT v FROM pay WHERE k = {number}")["result"][
                "query_id"
            ]
            assert world.call(client, "cdc.subscribe_query", query_id=query)["ok"]
        monkeypatch.setattr(feeds, "TURN_SECONDS", 0)
        monkeypatch.setattr(WatchedInstances, "find", noted)
        listed = world.call(client, "cdc.list")["result"]["subscriptions"]
        assert len(listed) == 20 and turns == list(range(20))
        for each in listed:
            world.call(client, "cdc.close", sub_id=each["sub_id"])
    world.call(world.admin, "security.token.revoke", id=made["id"])


@pytest.mark.parametrize("kind", ["text/event-stream", "application/vnd.apache.arrow.stream"])
def test_long_filters_of_open_streams_are_limited_for_each_caller(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "MOST_OPTIONS", 5_000)
    where = f"k IN ({', '.join(map(str, range(10_000, 10_300)))})"
    path = f"/api/v1/changes/main/pay?where={where}"
    made = world.call(world.admin, "security.token.create", name="many", role="viewer", scopes=["main.pay"])["result"]
    with httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE) as client:

        def opened() -> list[int]:
            asked = [(client, path)] * 3 + [(client, "/api/v1/changes/main/pay"), (world.admin, path)]
            with contextlib.ExitStack() as streams:
                return [
                    streams.enter_context(who.stream("GET", url, headers={"accept": kind})).status_code
                    for who, url in asked
                ]

        assert opened() == [200, 200, 429, 200, 200]
        wait_until(lambda: opened() == [200, 200, 429, 200, 200], "closed streams do not count")
    world.call(world.admin, "security.token.revoke", id=made["id"])


# --- names -----------------------------------------------------------------------------------------------

NEAR = ("payrol", "zzz", "diry", "pay_sen")  # near what is hidden, or near nothing
DATABASES = ("main", "shop", "vaul", "nowhere")
ROW = {"k": {"t": "i64", "v": 1}}
ONE = {"op": "eq", "a": {"col": "k"}, "b": {"lit": {"t": "i64", "v": 1}}}
FORM = {"body": {"select": {"projection": [{"expr": {"col": "v"}}], "from": [{"table": "payrol"}]}}}


def _calls() -> Iterator[tuple[str, dict[str, Any]]]:
    for db, table in itertools.product(DATABASES, (*NEAR, "pay")):
        place = {"db": db, "table": table}
        yield "data.get", {"table": place, "pk": [1]}
        yield "data.insert", {"into": place, "rows": [ROW]}
        yield "data.update", {"table": place, "where": ONE, "set": {"v": {"t": "str", "v": "x"}}}
        yield "data.delete", {"table": place, "where": ONE}
        for method in ("schema.describe_table", "schema.drop_table", "cdc.subscribe_table", "cdc.backtest"):
            yield method, place
        yield "cdc.subscribe_table", {"db": db, "tables": ["pay", table]}
        for method in ("pull.describe", "pull.ranges"):
            yield method, place
        yield "pull.register", {**place, "subscriber": "s"}
        yield "pull.release", {**place, "subscriber": "s"}
        for method in ("sql.exec", "query.select", "query.prepare", "query.explain"):
            yield method, {"db": db, "sql": f"SELECT * FROM {table}"}
    for db in DATABASES:
        for method in ("stats.snapshot", "schema.list_tables", "cdc.list", "tx.begin", "cdc.subscribe_table"):
            yield method, {"db": db}
        yield "query.select", {"db": db, "query": FORM}
        yield "sql.exec", {"db": db, "sql": "EXPLAIN QUERY PLAN SELECT * FROM pay, payrol"}
        yield "sql.exec", {"db": db, "sql": "PRAGMA table_list"}
    yield "schema.drop_database", {"db": "vaul"}
    yield "schema.drop_database", {"db": "sho"}
    yield "schema.list_databases", {}
    yield "security.token.list", {}
    yield "security.token.revoke", {"id": "aaaaaaaaaaaa"}
    yield "query.execute_prepared", {"query_id": "q_aaaaaaaaaaaaaaaaaaaaaa", "args": []}
    yield "cdc.poll", {"sub_id": "sub_0000000000000000"}


def _paths() -> Iterator[str]:
    for db in DATABASES:
        yield f"/api/v1/changes/{db}?upto=1&from_offset=0"
        yield f"/api/v1/pull/{db}/log?after=0&upto=0"
        yield f"/api/v1/pull/{db}/log?after=0&upto=0&tables=payrol"
        for table in NEAR:
            yield f"/api/v1/changes/{db}/{table}?upto=1&from_offset=0"
            yield f"/api/v1/snapshot/{db}/{table}"
            yield f"/api/v1/pull/{db}/{table}/snapshot"
            yield f"/api/v1/pull/{db}/{table}/log?after=0&upto=0"
            yield f"/api/v1/t/{db}/{table}/1"


def _posted(client: httpx.Client, method: str, params: dict[str, Any]) -> tuple[int, str]:
    answer = client.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params})
    return answer.status_code, answer.text + json.dumps(dict(answer.headers))


@pytest.mark.slow
def test_answers_do_not_reveal_hidden_names(world: World) -> None:
    asked = [*NEAR, "vaul"]
    wrong = []
    keys = {each["id"] for each in world.call(world.admin, "security.token.list")["result"]["tokens"]}
    mine = {each["id"] for each in world.call(world.people["owner"], "security.token.list")["result"]["tokens"]}
    for role, client in world.people.items():
        answers = [(f"{method} {params}", _posted(client, method, params)) for method, params in _calls()]
        answers += [(path, _get(client, path)) for path in _paths()]
        for what, (status, answer) in answers:
            assert status < 500 or status == 501, (what, answer)
            text = answer
            for word in sorted(asked, key=len, reverse=True):
                text = text.replace(f"'{word}'", "")
            wrong += [(role, what, name, answer) for name in (*HIDDEN, SECRET, *(keys - mine)) if name in text]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("db", ["nowhere", "shop"])
def test_caller_who_sees_a_database_gets_a_hint(world: World, db: str) -> None:
    world.call(
        world.admin,
        "schema.create_table",
        db="shop",
        table="parcels",
        columns=[{"name": "k", "type": {"kind": "i64"}}],
        primary_key=["k"],
        if_not_exists=True,
    )
    answer = world.call(world.people["viewer"], "schema.describe_table", db=db, table="parcel")
    helped = "Did you mean 'parcels'?" in json.dumps(answer)
    assert helped == (db == "shop")
