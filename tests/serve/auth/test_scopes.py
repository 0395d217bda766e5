"""Scopes over the wire: every method and every route against principals held to databases and tables."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import KEY_LIFETIME, PATIENCE

from headwater.config import Secret
from headwater.serve.http.routes import ROUTES
from headwater.serve.rpc.methods import METHODS

ADMIN = "admin-token"
PEOPLE = {  # name -> role and scopes
    "all": ("owner", None),
    "main": ("owner", ["main"]),
    "shop": ("owner", ["shop"]),
    "table": ("owner", ["shop.a"]),
    "viewer": ("viewer", ["shop"]),
    "nowhere": ("owner", ["elsewhere"]),
}
ANYBODY = frozenset(PEOPLE)
WHOLE = frozenset({"all", "shop"})  # may do anything to the database shop
READS = WHOLE | {"viewer"}
READS_A = READS | {"table"}
WRITES_A = WHOLE | {"table"}
OWNERS = ANYBODY - {"viewer"}
COLUMNS = [{"name": "k", "type": {"kind": "i64"}}]
ONE, SEVEN = ({"op": "eq", "a": {"col": "k"}, "b": {"lit": {"t": "i64", "v": number}}} for number in (1, 7))
FORM = {"body": {"select": {"projection": [{"expr": {"col": "v"}}], "from": [{"table": "b"}]}}}
A, B = {"db": "shop", "table": "a"}, {"db": "shop", "table": "b"}
CALLS: list[tuple[str, dict[str, Any], frozenset[str]]] = [  # method, params, principals that are not refused
    ("system.ping", {}, ANYBODY),
    ("system.version", {}, ANYBODY),
    ("system.capabilities", {}, ANYBODY),
    ("stats.snapshot", {"db": "shop"}, READS_A),
    ("data.get", {"table": A, "pk": [1]}, READS_A),
    ("data.get", {"table": B, "pk": [1]}, READS),
    ("data.insert", {"into": A, "rows": [{"k": {"t": "i64", "v": 1}}]}, WRITES_A),
    ("data.insert", {"into": B, "rows": [{"k": {"t": "i64", "v": 1}}]}, WHOLE),
    ("data.update", {"table": A, "where": ONE, "set": {"v": {"t": "str", "v": "x"}}}, WRITES_A),
    ("data.update", {"table": B, "where": ONE, "set": {"v": {"t": "str", "v": "x"}}}, WHOLE),
    ("data.delete", {"table": A, "where": SEVEN}, WRITES_A),
    ("data.delete", {"table": B, "where": SEVEN}, WHOLE),
    ("sql.exec", {"db": "shop", "sql": "SELECT * FROM a"}, WRITES_A),
    ("sql.exec", {"db": "shop", "sql": "SELECT * FROM a, b"}, WHOLE),
    ("sql.exec", {"db": "shop", "sql": "SELECT * FROM seen"}, WHOLE),
    ("sql.exec", {"db": "shop", "sql": "DELETE FROM a WHERE k = 7"}, WHOLE),
    ("tx.begin", {"db": "shop", "read_only": True}, READS_A),
    ("tx.commit", {"tx_id": "tx_0"}, ANYBODY),
    ("tx.rollback", {"tx_id": "tx_0"}, ANYBODY),
    ("schema.create_database", {"db": "shop"}, WHOLE),
    ("schema.drop_database", {"db": "absent"}, frozenset({"all"})),
    ("schema.list_databases", {}, ANYBODY),
    ("schema.list_tables", {"db": "shop"}, READS_A),
    ("schema.describe_table", A, READS_A),
    ("schema.describe_table", B, READS),
    ("schema.create_table", {**A, "columns": COLUMNS, "primary_key": ["k"]}, WHOLE),
    ("schema.drop_table", {"db": "shop", "table": "absent"}, WHOLE),
    ("cdc.subscribe_table", A, READS_A),
    ("cdc.subscribe_table", {"db": "shop", "tables": ["a", "b"]}, READS),
    ("cdc.subscribe_table", {"db": "shop"}, READS),
    ("cdc.subscribe_query", {"query_id": "Q:SELECT k FROM a"}, READS_A),
    ("cdc.subscribe_query", {"query_id": "Q:SELECT k FROM b"}, READS),
    ("query.subscribe", {"query_id": "Q:SELECT k FROM b"}, READS),
    ("cdc.poll", {"sub_id": "sub_0000000000000000"}, ANYBODY),
    ("cdc.ack", {"sub_id": "sub_0000000000000000", "offset": 1}, ANYBODY),
    ("cdc.pause", {"sub_id": "sub_0000000000000000"}, ANYBODY),
    ("cdc.resume", {"sub_id": "sub_0000000000000000"}, ANYBODY),
    ("cdc.close", {"sub_id": "sub_0000000000000000"}, ANYBODY),
    ("cdc.list", {"db": "shop"}, READS_A),
    ("cdc.seek", {"sub_id": "sub_0000000000000000", "offset": 1}, ANYBODY),
    ("cdc.backtest", A, READS_A),
    ("cdc.backtest", {"db": "shop"}, READS),
    ("query.prepare", {"db": "shop", "sql": "SELECT v FROM a"}, READS_A),
    ("query.prepare", {"db": "shop", "sql": "SELECT v FROM b"}, READS),
    ("query.prepare", {"db": "shop", "sql": "SELECT * FROM seen"}, READS),
    ("query.execute_prepared", {"query_id": "Q:SELECT k FROM a", "args": []}, READS_A),
    ("query.execute_prepared", {"query_id": "Q:SELECT k FROM b", "args": []}, READS),
    ("query.select", {"db": "shop", "sql": "SELECT v FROM a"}, READS_A),
    ("query.select", {"db": "shop", "sql": "SELECT v FROM a UNION SELECT v FROM b"}, READS),
    ("query.select", {"db": "shop", "query": FORM}, READS),
    ("query.patch", {"db": "shop", "query": FORM, "args": []}, READS),
    ("query.explain", {"db": "shop", "sql": "SELECT v FROM b"}, READS),
    ("query.explain", {"query_id": "Q:SELECT k FROM b"}, READS),
    ("query.patch", {"query_id": "Q:SELECT k FROM b", "args": []}, READS),
    ("pull.describe", A, READS_A),
    ("pull.describe", B, READS),
    ("pull.changed_tables", {"db": "shop", "after": {"a": 0}}, READS_A),
    ("pull.changed_tables", {"db": "shop", "after": {"a": 0, "b": 0}}, READS),
    ("pull.ranges", B, READS),
    ("pull.register", {**B, "subscriber": "s"}, READS),
    ("pull.release", {**B, "subscriber": "s"}, READS),
    ("pull.split", {**B, "range": 1, "epoch": 1}, WHOLE),
    ("pull.merge", {**B, "ranges": [{"id": 1, "epoch": 1}, {"id": 2, "epoch": 1}]}, WHOLE),
    ("security.ticket.create", {}, ANYBODY),
    ("security.token.create", {"name": "x", "scopes": ["shop"]}, WHOLE),
    ("security.token.create", {"name": "x", "scopes": ["shop.a"]}, WRITES_A),
    ("security.token.list", {}, OWNERS),
    ("security.token.revoke", {"id": "absent"}, OWNERS),
]
ROUTED: dict[str, tuple[str, frozenset[str]]] = {  # route -> a path of it, and principals that are not refused
    "GET /": ("/", ANYBODY),
    "GET /healthz": ("/healthz", ANYBODY),
    "GET /readyz": ("/readyz", ANYBODY),
    "GET /metrics": ("/metrics", frozenset({"all"})),
    "GET /openapi.json": ("/openapi.json", ANYBODY),
    "GET /docs": ("/docs", ANYBODY),
    "GET /api/v1/cdc/sse/{sub_id}": ("/api/v1/cdc/sse/SUB", frozenset({"all", "shop"})),
    "GET /api/v1/changes/{db}/{table}": ("/api/v1/changes/shop/b?upto=1&from_offset=0", READS),
    "GET /api/v1/changes/{db}": ("/api/v1/changes/shop?upto=1&from_offset=0", READS),
    "GET /api/v1/snapshot/{db}/{table}": ("/api/v1/snapshot/shop/b", READS),
    "GET /api/v1/pull/{db}/{table}/snapshot": ("/api/v1/pull/shop/b/snapshot", READS),
    "GET /api/v1/pull/{db}/{table}/log": ("/api/v1/pull/shop/b/log?after=0&upto=0", READS),
    "GET /api/v1/pull/{db}/log": ("/api/v1/pull/shop/log?after=0&upto=0", READS),
    "GET /api/v1/q/{query_id}": ("/api/v1/q/QUERY", READS),
    "GET /api/v1/t/{db}/{table}/{key}": ("/api/v1/t/shop/b/1", READS),
    "PUT /api/v1/t/{db}/{table}/{key}": ("/api/v1/t/shop/b/9", WHOLE),
    "PATCH /api/v1/t/{db}/{table}/{key}": ("/api/v1/t/shop/b/9", WHOLE),
    "DELETE /api/v1/t/{db}/{table}/{key}": ("/api/v1/t/shop/b/9", WHOLE),
}
ELSEWHERE = {  # shown by CALLS, or by the streams below
    "POST /api/v1/rpc",
    "POST /api/v1/sql/exec",
    "GET /api/v1/cdc/ws/{sub_id}",
    "GET /api/v1/ws",
    "GET /api/v1/q/{query_id}/events",
}


class World:
    """A server with credentials, the databases main and shop, and a client for each principal."""

    def __init__(self, client: Client, files: Whole) -> None:
        self.files, self.server, self.url = files, client, str(client.http.base_url)
        self.admin = httpx.Client(base_url=self.url, headers={"x-api-key": ADMIN}, timeout=PATIENCE)
        self.keys = {
            name: self.call(self.admin, "security.token.create", name=name, role=role, scopes=scopes)["result"]
            for name, (role, scopes) in PEOPLE.items()
        }
        self.people = {
            name: httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key['token']}"}, timeout=PATIENCE)
            for name, key in self.keys.items()
        }

    def call(self, client: httpx.Client, method: str, **params: Any) -> Any:
        params = {name: value for name, value in params.items() if value is not None}
        return client.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params}).json()

    def prepared(self, sql: str) -> str:
        return self.call(self.admin, "query.prepare", db="shop", sql=sql)["result"]["query_id"]

    def close(self) -> None:
        for client in (self.admin, *self.people.values()):
            client.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(tmp_path_factory.mktemp("scopes"))
    with Whole(folder) as files:
        files.create("shop")
        for sql in (
            "CREATE TABLE a(k INTEGER PRIMARY KEY, v TEXT)",
            "CREATE TABLE b(k INTEGER PRIMARY KEY, v TEXT)",
            "CREATE VIEW seen AS SELECT a.k, b.v FROM a JOIN b USING (k)",
            "INSERT INTO b VALUES (1, 'one')",
        ):
            files.run(sql, db="shop")
        with serving(files, folder=folder, token=Secret(ADMIN)) as client:
            made = World(client, files)
            yield made
            made.close()


def test_calls_of_the_test_include_every_method() -> None:
    assert {method for method, _, _ in CALLS} == set(METHODS)


def test_calls_of_the_test_include_every_route() -> None:
    assert {f"{route.method} {route.path}" for route in ROUTES} == set(ROUTED) | ELSEWHERE


@pytest.mark.parametrize(("method", "params", "may"), CALLS, ids=lambda each: each if isinstance(each, str) else "")
def test_rpc_method_rejects_exactly_the_callers_without_the_needed_scope(
    world: World, method: str, params: dict[str, Any], may: frozenset[str]
) -> None:
    query = params.get("query_id", "")
    given = {**params, "query_id": world.prepared(query[2:])} if query.startswith("Q:") else params
    for name, client in world.people.items():
        answer = world.call(client, method, **given)
        codes = ("forbidden", "not_found") if query else ("forbidden",)  # ids of other databases are unknown
        refused = not answer["ok"] and answer["error"]["code"] in codes
        assert refused == (name not in may), (name, answer)


@pytest.mark.parametrize("route", sorted(ROUTED))
def test_http_route_rejects_exactly_the_callers_without_the_needed_scope(world: World, route: str) -> None:
    path, may = ROUTED[route]
    if "SUB" in path:
        made = world.call(world.people["shop"], "cdc.subscribe_table", db="shop", table="b")["result"]
        path = path.replace("SUB", made["sub_id"])
    path = path.replace("QUERY", world.prepared("SELECT k FROM b"))
    verb = route.split()[0]
    for name, client in world.people.items():
        body = {"json": {"v": "x"}} if verb in ("PUT", "PATCH") else {}
        with client.stream(verb, path, **body) as response:
            refused = response.status_code in ((403, 404) if "sse" in path or "/q/" in path else (403,))
            assert refused == (name not in may), (name, response.status_code)


def test_lists_show_only_names_in_the_scopes(world: World) -> None:
    def of(name: str, method: str, **params: Any) -> Any:
        return world.call(world.people[name], method, **params)["result"]

    assert of("all", "schema.list_databases")["databases"] == ["main", "shop"]
    assert of("table", "schema.list_databases")["databases"] == ["shop"]
    assert of("nowhere", "schema.list_databases")["databases"] == []
    assert of("table", "schema.list_tables", db="shop")["tables"] == ["a"]
    assert set(of("shop", "stats.snapshot", db="shop")["databases"]) == {"shop"}
    world.call(world.people["all"], "cdc.subscribe_table", db="shop", table="b", name="b of all")
    names = {
        name: {each["name"] for each in of(name, "cdc.list")["subscriptions"]} for name in ("all", "shop", "table")
    }
    assert "b of all" in names["all"] & names["shop"] and "b of all" not in names["table"]
    ids = {
        name: {key["name"] for key in of(name, "security.token.list")["tokens"]} for name in ("all", "shop", "table")
    }
    assert "main" in ids["all"] and "main" not in ids["shop"] and "table" in ids["shop"] and "shop" not in ids["table"]


def test_database_outside_the_scope_gets_the_same_error_as_a_missing_one(world: World) -> None:
    def refusal_of(db: str, table: str) -> str:
        answer = world.call(world.people["table"], "data.get", table={"db": db, "table": table}, pk=[1])
        return answer["error"]["message"].replace(repr(db), "DB").replace(repr(table), "TABLE")

    assert refusal_of("shop", "b") == refusal_of("shop", "absent")
    assert refusal_of("main", "b") == refusal_of("absent", "b")


def test_created_key_cannot_exceed_its_creator(world: World) -> None:
    for params in ({"scopes": ["main"]}, {"scopes": ["shop.b"]}, {"scopes": ["shop"]}):
        answer = world.call(world.people["table"], "security.token.create", name="more", role="owner", **params)
        assert answer["error"]["code"] == "forbidden"
    made = world.call(world.people["table"], "security.token.create", name="same")["result"]
    assert made["scopes"] == ["shop.a"]
    for id in (world.keys["shop"]["id"], "abcdefghijkl"):  # one that is not theirs is none
        beyond = world.call(world.people["table"], "security.token.revoke", id=id)["error"]
        assert (beyond["code"], beyond["message"]) == ("not_found", f"there is no key {id!r}")
    assert world.people["shop"].get("/").status_code == 200


def test_created_token_reports_its_scopes_that_do_not_exist(world: World) -> None:
    def unknown(who: httpx.Client, *scopes: str) -> Any:
        made = world.call(who, "security.token.create", name="typo", scopes=list(scopes))["result"]
        assert made["scopes"] == sorted(scopes) and made["token"]
        world.call(world.admin, "security.token.revoke", id=made["id"])
        return made.get("unknown_scopes")

    assert unknown(world.admin, "main", "shop.a", "shop.b") is None
    assert unknown(world.admin, "absent", "gone.a", "gone.b", "shop.a", "shop.nope") == [
        "absent",
        "gone.a",
        "gone.b",
        "shop.nope",
    ]
    assert unknown(world.people["shop"], "shop.nope") == ["shop.nope"]
    assert unknown(world.people["nowhere"], "elsewhere") == ["elsewhere"]


def test_calls_in_a_transaction_to_a_table_outside_the_scope_are_forbidden(world: World) -> None:
    client = world.people["table"]
    tx = world.call(client, "tx.begin", db="shop")["result"]["tx_id"]
    try:
        assert world.call(client, "data.get", table={"table": "b"}, pk=[1], tx=tx)["error"]["code"] == "forbidden"
        assert world.call(client, "sql.exec", sql="SELECT * FROM b", tx=tx)["error"]["code"] == "forbidden"
        assert world.call(client, "data.insert", into={"table": "a"}, rows=[{"k": {"t": "i64", "v": 50}}], tx=tx)["ok"]
    finally:
        world.call(client, "tx.rollback", tx_id=tx)


def _key(world: World, **more: Any) -> tuple[dict[str, Any], httpx.Client]:
    made = world.call(world.admin, "security.token.create", name="stream", scopes=["shop"], **more)["result"]
    return made, httpx.Client(base_url=world.url, headers={"x-api-key": made["token"]}, timeout=PATIENCE)


def _lines(client: httpx.Client, path: str, opened: threading.Event, lines: list[str]) -> None:
    with client.stream("GET", path) as response:
        for line in response.iter_lines():
            lines.append(line)
            opened.set()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/api/v1/changes/shop/b", "/api/v1/q/QUERY/events"])
@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_event_stream_whose_key_is_revoked_or_expires_ends_with_unauthorized(world: World, path: str, end: str) -> None:
    made, client = _key(world, **({"expires_in_seconds": KEY_LIFETIME} if end == "expired" else {}))
    opened, lines = threading.Event(), list[str]()
    path = path.replace("QUERY", world.prepared("SELECT k FROM b"))
    reading = threading.Thread(target=_lines, args=(client, path, opened, lines))
    reading.start()
    assert opened.wait(PATIENCE)
    if end == "revoked":
        done = world.call(world.admin, "security.token.revoke", id=made["id"])["result"]
        assert done["streams_ended"] == 1
    reading.join(PATIENCE)
    assert not reading.is_alive()
    last = next(json.loads(line[6:]) for line in reversed(lines) if line.startswith("data: "))
    assert last["code"] == "unauthorized"
    client.close()
    again = httpx.get(f"{world.url}/openapi.json", headers=client.headers)  # the connection ended with the stream
    assert again.status_code == 401


def test_ticket_of_a_revoked_key_gets_401(world: World) -> None:
    made, client = _key(world)
    ticket = world.call(client, "security.ticket.create")["result"]["ticket"]
    path = f"/api/v1/snapshot/shop/b?ticket={ticket}"
    plain = httpx.Client(base_url=world.url, timeout=PATIENCE)
    assert plain.get(path).status_code == 307
    assert plain.get(path.replace("/shop/", "/main/")).status_code == 403
    world.call(world.admin, "security.token.revoke", id=made["id"])
    assert plain.get(path).status_code == 401
    client.close()
    plain.close()


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_cached_304_ends_with_its_key(world: World, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, client = _key(world, **({"expires_in_seconds": 600} if end == "expired" else {}))
    path = f"/api/v1/q/{world.prepared('SELECT k, v FROM b')}"
    deadline = time.monotonic() + PATIENCE
    while "etag" not in (first := client.get(path)).headers:
        assert time.monotonic() < deadline
    headers = {"if-none-match": first.headers["etag"]}
    assert [client.get(path, headers=headers).status_code for _ in range(3)] == [304] * 3
    if end == "revoked":
        world.call(world.admin, "security.token.revoke", id=made["id"])
    else:
        monkeypatch.setattr("headwater.serve.auth.gate.time.time_ns", lambda: made["expires_at_ms"] * 1_000_000)
    assert client.get(path, headers=headers).status_code == 401
    client.close()


def test_secrets_do_not_appear_in_answers_or_logs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    token = world.keys["shop"]["token"]
    secret = token.split("_", 2)[2]
    shown = [world.admin.get("/metrics").text, world.admin.get("/").text]
    shown.append(json.dumps(world.call(world.admin, "security.token.list")))
    shown.append(httpx.get(world.url + "/openapi.json", headers={"x-api-key": token[:-1]}).text)
    shown.append(caplog.text)
    assert all(secret not in text and ADMIN not in text for text in shown)
