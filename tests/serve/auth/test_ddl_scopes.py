"""DDL text in all that a viewer restricted to one table receives: it names nothing outside of that table."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.conformance.live_server import Live
from tests.conformance.readers import SseReader, WsReader
from tests.serve.changefeeds import Feed
from tests.serve.grpc_calls import Caller
from tests.sources.postgres.pg_server import drop_slot
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE

from headwater.model.change import Change, Op
from headwater.model.formats import CLOUDEVENTS, COCKROACH, DEBEZIUM, OBJECTS, PLAIN
from headwater.model.table import Column, Table
from headwater.model.table_ddl import CHANGED, table_ddl

ADMIN = "the owner's token of these tests"
HIDDEN = (b"vault", b"pincode", b"hunter22", b"report", b"payroll")  # names and a constant of no table of the viewer
FORMATS = (OBJECTS, PLAIN, DEBEZIUM, CLOUDEVENTS, COCKROACH)
NDJSON, ARROW = "application/x-ndjson", "application/vnd.apache.arrow.stream"
TABLES = (
    "CREATE TABLE vault (id int PRIMARY KEY, pincode text UNIQUE)",
    "CREATE TABLE payroll (id int PRIMARY KEY, a text)",
    "CREATE TABLE orders (id int PRIMARY KEY, n text, v text REFERENCES vault (pincode), CHECK (n <> 'hunter22'))",
)
VIEW = "CREATE VIEW report AS SELECT o.id, s.pincode FROM orders o JOIN vault s ON s.id = o.id AND s.pincode <> '{}'"
_numbers = count(1)


def check(received: bytes) -> None:
    """Fail if anything that a viewer of orders received names what is hidden."""
    assert [word for word in HIDDEN if word in received.lower()] == [], received
    assert b"orders" in received


class Site:
    """A server with the table orders, hidden tables and changed views, and a viewer of orders alone."""

    def __init__(self, live: Live, change: Callable[[str], Any]) -> None:
        self.live, self.change = live, change
        made = live.ok("security.token.create", name="scoped", role="viewer", scopes=["main.orders"])
        self.headers = {"authorization": f"Bearer {made['token']}"}
        self.viewer = httpx.Client(base_url=live.url, headers=self.headers, timeout=PATIENCE)
        for statement in (*TABLES, VIEW.format("hunter22")):
            change(statement)
        query = f"/api/v1/q/{live.ok('query.prepare', sql='SELECT * FROM report')['query_id']}"
        live.http.get(query)
        change("DROP VIEW report")
        change(VIEW.format("hunter22 again"))
        live.http.get(query)  # PostgreSQL's views are compared when a query of one is answered
        change("ALTER TABLE orders ADD COLUMN note text DEFAULT 'hunter22'")
        change("INSERT INTO orders (id, note) VALUES (1, 'x')")
        owner = live.subscribe("orders", start="earliest")
        events = live.whole(owner)["events"]
        self.latest = int(events[-1]["offset"])
        # A change feed cannot begin before rows that may have changed without row changes.
        self.base = max((int(event["offset"]) for event in events if event.get("resnapshot")), default=0)
        self.ddl_texts = [event["ddl"] for event in events if event["op"] == "schema_change"]

    def rpc(self, method: str, **params: Any) -> Any:
        answer = self.viewer.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params}).json()
        assert answer["ok"], answer
        return answer["result"]

    def subscribe(self, format: str) -> dict[str, Any]:
        found: dict[str, Any] = self.rpc("cdc.subscribe_table", table="orders", start="earliest", format=format)
        return found

    def close(self) -> None:
        self.viewer.close()
        self.live.stop()


def _sqlite(folder: Path) -> Iterator[Site]:
    live = Live(folder, serve={"token": ADMIN})
    site = Site(live, live.sql)
    yield site
    site.close()


def _postgres(folder: Path) -> Iterator[Site]:
    server, name = shared_server(), f"ddl_scopes_{os.getpid()}_{next(_numbers)}"
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    url = f"postgresql://postgres@/{name}?host={server.folder}"
    live = Live(folder, url=url, postgres={"slot": name, "publication": name}, serve={"token": ADMIN})
    with server.connect(name) as db:
        site = Site(live, lambda statement: db.execute(statement.encode()))
        yield site
    site.close()
    with server.connect() as admin:
        drop_slot(admin, name)
        admin.execute(f"DROP DATABASE {name}".encode())


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    opened = _sqlite if request.param == "sqlite" else _postgres
    yield from opened(tmp_path_factory.mktemp("ddl"))


def test_owner_sees_the_text_of_views(site: Site) -> None:
    """The other tests of this file prove something only if the log holds hidden names."""
    assert any("report" in text for text in site.ddl_texts), site.ddl_texts


@pytest.mark.parametrize("format", FORMATS)
def test_poll_names_nothing_hidden(site: Site, format: str) -> None:
    sub = site.subscribe(format)
    answer = site.rpc("cdc.poll", sub_id=sub["sub_id"], limit=1000)
    assert len(answer["events"]) > len(site.ddl_texts)
    check(json.dumps(answer).encode())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("accept", [NDJSON, "text/event-stream"])
def test_loose_stream_names_nothing_hidden(site: Site, format: str, accept: str) -> None:
    path = f"/api/v1/changes/main/orders?from_offset=0&upto={site.latest}&format={format}"
    check(site.viewer.get(path, headers={"accept": accept}).content)


@pytest.mark.parametrize("transport", ["sse", "ws"])
@pytest.mark.parametrize("format", [PLAIN, DEBEZIUM])
def test_live_frames_are_not_shared_with_unrestricted_readers(site: Site, format: str, transport: str) -> None:
    mine = site.subscribe(format)
    theirs = site.live.subscribe("orders", start="earliest", format=format)
    opened = SseReader if transport == "sse" else WsReader
    restricted = opened(site.live.url, mine[f"{transport}_url"], site.headers)
    full = site.live.stream(transport, theirs)
    try:
        readers = (full, restricted)
        old = [[frame.data for frame in reader.changes(len(site.ddl_texts) + 1)] for reader in readers]
        column = f"c{next(_numbers)}"
        site.change(f"ALTER TABLE orders ADD COLUMN {column} text /* hunter22 */")
        site.change(f"INSERT INTO orders (id, note, {column}) VALUES ({100 + next(_numbers)}, 'x', 'y')")
        new = [[frame.data for frame in reader.changes(2)] for reader in readers]
        check(json.dumps([old[1], new[1]]).encode())
        assert new[0][0]["ddl"] != CHANGED == new[1][0]["ddl"]
        assert "report" in json.dumps(old[0])
    finally:
        restricted.close()
        site.live.leave()


def test_backtest_arrow_and_pulls_name_nothing_hidden(site: Site) -> None:
    check(json.dumps(site.rpc("cdc.backtest", table="orders")).encode())
    check(json.dumps(site.rpc("pull.describe", table="orders")).encode())
    upto = site.rpc("pull.describe", table="orders")["latest"]
    for path in ("pull/main/log?tables=orders&after=0", "changes/main/orders?from_offset=0"):
        answer = site.viewer.get(f"/api/v1/{path}&upto={min(upto, site.latest)}", headers={"accept": ARROW})
        assert answer.status_code == 200, answer.text
        assert [word for word in HIDDEN if word in answer.content] == []


def test_grpc_and_gateway_name_nothing_hidden(site: Site) -> None:
    metadata = (("authorization", site.headers["authorization"]),)
    caller = Caller(site.live._server.grpc_address, metadata)
    with caller.channel:
        total = len(site.ddl_texts) + 1
        reading = caller.subscribe(tables=["orders"], start_sequence=1)
        check(b"".join(each.SerializeToString() for each in reading.take(total)))
        reading.call.cancel()
        watched: dict[str, Any] = {
            "spans": [{"table": "orders"}],
            "base_offset": site.base,
            "checkpoint_interval_ms": 100,
        }
        with Feed(caller.channel, metadata=metadata, only_resolved=True, **watched) as feed:
            check(b"".join(each.SerializeToString() for each in feed.until(site.latest)))
    gateway = GatewayClient(site.live.url, headers=site.headers)
    gateway.ok("subscribe", {"tables": ["orders"], "start_sequence": 1})
    check(json.dumps(gateway.events(total)).encode())
    gateway.socket.close()


def test_query_events_are_not_shared_with_unrestricted_readers(tmp_path: Path) -> None:
    with contextlib.contextmanager(_sqlite)(tmp_path) as site, contextlib.ExitStack() as opened:
        asked = {"query_id": site.rpc("query.prepare", sql="SELECT n FROM orders")["query_id"], "format": PLAIN}
        restricted = SseReader(site.live.url, site.rpc("cdc.subscribe_query", **asked)["sse_url"], site.headers)
        opened.callback(restricted.close)
        full = site.live.sse(site.live.ok("cdc.subscribe_query", **asked))
        site.change("DROP VIEW report")
        found = restricted.next("invalidate").data
        check(json.dumps(found).encode())
        assert (found["ddl"], full.next("invalidate").data["ddl"]) == (CHANGED, "DROP VIEW report")


def test_events_of_a_query_that_became_uncacheable_name_nothing_hidden(tmp_path: Path) -> None:
    with contextlib.contextmanager(_sqlite)(tmp_path) as site, contextlib.ExitStack() as opened:
        site.change("DROP TABLE orders")
        site.change("CREATE TABLE orders (id INTEGER PRIMARY KEY, n text)")
        query = site.rpc("query.prepare", sql="SELECT rowid, n FROM orders")["query_id"]
        sub = site.rpc("cdc.subscribe_query", query_id=query, format=PLAIN)
        site.change("DROP TABLE orders")
        site.change("CREATE TABLE orders (n text PRIMARY KEY)")  # rowids of such a table are not captured
        site.change("DROP TABLE vault")
        site.change("INSERT INTO orders VALUES ('one')")
        polled = site.rpc("cdc.poll", sub_id=sub["sub_id"], limit=1000)["events"]
        live = SseReader(site.live.url, sub["sse_url"], site.headers)
        opened.callback(live.close)
        replayed = [live.next("invalidate").data for _ in polled]
        site.change("CREATE TABLE vault (pincode int PRIMARY KEY)")
        site.change("INSERT INTO orders VALUES ('two')")
        last = live.next("invalidate").data
        check(json.dumps([polled, replayed, last]).encode())
        assert [event.get("pk") for event in (*polled, last)] == [None, None, ["one"], ["two"]]
        assert replayed == polled


TABLE = Table("orders", (Column("id", "i64", "INT", nullable=False), Column("Name", "str", "TEXT")), ("id",))
CREATED = 'CREATE TABLE orders ("id" INT NOT NULL, "Name" TEXT, PRIMARY KEY ("id"))'


@pytest.mark.parametrize(
    ("ddl", "shown"),
    [
        ("create table if not exists main.[Orders] (id int references vault)", CREATED),
        ("/* vault */ CREATE TABLE orders AS SELECT * FROM vault", CREATED),
        ("DROP TABLE orders", "DROP TABLE orders"),
        ('drop table "orders" -- vault', "DROP TABLE orders"),
        ("ALTER TABLE orders RENAME TO vault", "DROP TABLE orders"),
        ("ALTER TABLE vault RENAME TO orders", CHANGED),
        ("ALTER TABLE orders ADD x DEFAULT 'hunter22'", CHANGED),
        ("ALTER TABLE orders_vault RENAME TO x", CHANGED),
        ("DROP TABLE vault", CHANGED),
        ("DROP VIEW report", CHANGED),
        ("-- view report was redefined", CHANGED),
        ("", CHANGED),
        (None, CHANGED),
        ("; DROP TABLE orders", "DROP TABLE orders"),
        ("ALTER TABLE orders RENAME/* */TO vault", "DROP TABLE orders"),
    ],
)
def test_text_for_restricted_readers_is_made_from_the_table(ddl: str | None, shown: str) -> None:
    assert table_ddl(Change(Op.SCHEMA_CHANGE, TABLE, ddl=ddl)) == shown
