"""Random JSON at every method: always a well-formed answer, a known code, and no change where it says no."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.queries.open_databases import Whole, dump
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE
from tests.suite.examples import examples

from headwater import errors
from headwater.serve.rpc.methods import METHODS

DDL = (
    "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT NOT NULL UNIQUE, age INTEGER, extra JSON)",
    "CREATE TABLE pairs (a TEXT, b INTEGER, v BLOB, PRIMARY KEY (a, b)) WITHOUT ROWID",
)
ROWS = (
    "INSERT INTO users VALUES (1, 'a@x', 30, '{}'), (2, 'b@x', NULL, NULL)",
    "INSERT INTO pairs VALUES ('x', 1, x'00'), ('x', 2, NULL)",
)
CODES = {
    found.code
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, errors.HeadwaterError)
} - {"internal"}
WHERE = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": 1}}}
USERS = {"db": "main", "table": "users"}
SUBSCRIBE: dict[str, Any] = {
    "db": "main",
    "table": "users",
    "pk_range": {"lower_bound": {"t": "i64", "v": 1}},
    "spans": [{"prefix": [{"t": "i64", "v": 1}]}],
    "ops": ["insert", "update"],
    "columns": ["email"],
    "include": {"before": True, "after": True},
    "format": "plain_json",
    "where": "age > 1 AND email LIKE 'x%'",
    "shard": {"index": 0, "of": 2},
    "start": "earliest",
    "name": "mine",
    "txn": "atomic",
}
NEARLY: dict[str, dict[str, Any]] = {  # method -> params that would do, to be spoilt
    "system.ping": {},
    "system.version": {},
    "system.capabilities": {},
    "stats.snapshot": {"db": "main"},
    "query.prepare": {"sql": "SELECT id, email FROM users WHERE age > ?", "db": "main", "name": "old"},
    "query.explain": {"sql": "SELECT email FROM users WHERE id = :id", "db": "main"},
    "query.execute_prepared": {"query_id": "q_none", "args": [{"t": "i64", "v": 1}], "if_none_match": '"x.1"'},
    "query.patch": {
        "sql": "SELECT id, email FROM users ORDER BY id",
        "args": [],
        "base_etag": '"x.1"',
        "client_state": {"mode": "membership_only", "rows": [{"pk": [{"t": "i64", "v": 1}]}]},
    },
    "query.select": {
        "query": {"body": {"select": {"projection": [{"expr": {"col": "id"}}], "from": [{"table": "users"}]}}},
        "args": [],
        "result_format": "plain_json",
        "cache": {"want_etag": True, "if_none_match": 'W/"x.1"', "min_causality": None},
    },
    "data.get": {"table": USERS, "pk": [{"t": "i64", "v": 1}], "format": "plain_json", "tx": None},
    "data.insert": {
        "into": USERS,
        "rows": [{"email": {"t": "str", "v": "x"}, "age": {"t": "i64", "v": 1}}, {"email": "y"}],
        "returning": ["id"],
    },
    "data.update": {
        "table": USERS,
        "where": WHERE,
        "set": {"age": {"t": "i64", "v": 2}, "extra": {"t": "json", "v": {"a": [1]}}},
        "limit": 1,
        "if_match": "row:x",
        "args": [1],
    },
    "data.delete": {
        "table": {"table": "pairs"},
        "where": {"op": "in", "a": {"col": "b"}, "list": [{"param": 0}]},
        "args": [{"t": "i64", "v": 1}],
        "expected_etag": None,
    },
    "sql.exec": {"sql": "INSERT INTO users (email) VALUES (?)", "args": ["z"], "result_format": "rows_json"},
    "tx.begin": {"db": "main", "read_only": True},
    "tx.commit": {"tx_id": "tx_0"},
    "tx.rollback": {"tx": "tx_0"},
    "schema.create_database": {"db": "made"},
    "schema.drop_database": {"db": "nope"},
    "schema.list_databases": {},
    "schema.list_tables": {"db": "main"},
    "schema.describe_table": {"db": "main", "table": "users"},
    "schema.create_table": {
        "db": "main",
        "table": "made",
        "columns": [
            {"name": "id", "type": {"kind": "u64"}, "nullable": False, "auto_increment": True},
            {"name": "v", "type": {"kind": "str"}},
        ],
        "primary_key": ["id"],
        "if_not_exists": True,
    },
    "schema.drop_table": {"db": "main", "table": "made", "if_exists": True},
    "cdc.subscribe_table": SUBSCRIBE,
    "cdc.subscribe_query": {
        **{name: value for name, value in SUBSCRIBE.items() if name not in ("db", "table", "tables", "txn")},
        "query_id": "q_none",
        "args": [{"t": "i64", "v": 1}],
        "confirm": True,
    },
    "query.subscribe": {"query_id": "q_none", "args": [{"t": "i64", "v": 1}]},
    "cdc.backtest": {**SUBSCRIBE, "start": {"offset": 0}},
    "cdc.poll": {"sub_id": "sub_0", "from_offset": 0, "limit": 3, "wait_ms": 0, "cursor": None},
    "cdc.ack": {"sub_id": "sub_0", "offset": 1},
    "cdc.pause": {"sub_id": "sub_0"},
    "cdc.resume": {"sub_id": "sub_0"},
    "cdc.close": {"sub_id": "sub_0"},
    "cdc.list": {"db": "main"},
    "cdc.seek": {"sub_id": "sub_0", "ts": "1763172000000.0"},
    "pull.changed_tables": {"db": "main", "after": {"users": 0}, "wait_ms": 0},
    "pull.describe": {"db": "main", "table": "users", "after": 0, "wait_ms": 0, "shape": 7, "step_rows": 9},
    "pull.ranges": {"db": "main", "table": "users", "target_bytes": 16},
    "pull.register": {"db": "main", "table": "pairs", "subscriber": "lake", "keep": 1},
    "pull.release": {"db": "main", "table": "pairs", "subscriber": "lake"},
    "pull.split": {"db": "main", "table": "users", "range": 1, "epoch": 1, "at": "13043400"},
    "pull.merge": {"db": "main", "table": "users", "ranges": [{"id": 1, "epoch": 1}, {"id": 2, "epoch": 1}]},
    "security.ticket.create": {},
    "security.token.create": {"name": "ann", "role": "viewer", "scopes": ["main.users"], "expires_in_seconds": 60},
    "security.token.list": {},
    "security.token.revoke": {"id": "abcdefghijkl"},
}
WORDS = (
    ["", "main", "default", "users", "pairs", "id", "email", "a", "b", "rowid", "'", '"', ";", "\0", "é", "ﬀ"]
    + ["i64", "u64", "str", "json", "null", "unavailable", "t", "v", "b64", "iso", "W/", "_headwater_meta"]
    + ['users"; DROP TABLE users; --', "DROP TABLE users", "SELECT 1", "DELETE FROM pairs", "../../etc/x"]
    + ["INSERT INTO users (email) VALUES ('q'), (NULL)", "PRAGMA writable_schema = 1", "BEGIN", "x" * 300]
)
NUMBERS = [0, 1, 2, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 0.5]
TAGS = ["null", "bool", "i64", "u64", "f64", "dec", "str", "bytes", "json", "uuid", "date", "embedding", "?"]


def anything(random: Random, depth: int = 3) -> Any:
    """Return random JSON, small and often with names from the API."""
    kind = random.randrange(8 if depth else 5)
    if kind == 0:
        return random.choice([None, True, False])
    if kind == 1:
        return random.choice(NUMBERS)
    if kind < 4:
        return random.choice(WORDS)
    if kind == 4:
        return {"t": random.choice(TAGS), random.choice(["v", "b64", "iso"]): random.choice(WORDS + NUMBERS)}
    size = range(random.randrange(4))
    if kind == 5:
        return {random.choice(WORDS): anything(random, depth - 1) for _ in size}
    return [anything(random, depth - 1) for _ in size]


def another(random: Random, value: Any) -> Any:
    """Return another value, usually of the same type."""
    if random.random() < 0.4:
        return anything(random)
    if isinstance(value, str):
        return random.choice(WORDS)
    if isinstance(value, bool) or value is None:
        return random.choice([None, True, False])
    if isinstance(value, (int, float)):
        return random.choice(NUMBERS)
    if isinstance(value, list):
        return random.choice([[], value + value, [*value, anything(random)]])
    return random.choice([{}, {**value, random.choice(WORDS): anything(random)}])


def places(body: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path in `body`."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [trail] + [path for key, value in inner for path in places(value, (*trail, key))]


def spoil(random: Random, body: Any) -> Any:
    """Return `body` with one element removed or replaced."""
    body = copy.deepcopy(body)
    trail = random.choice(places(body))
    if not trail:
        return another(random, body)
    here = body
    for step in trail[:-1]:
        here = here[step]
    if random.random() < 0.2:
        del here[trail[-1]]
    else:
        here[trail[-1]] = another(random, here[trail[-1]])
    return body


def spoilt(random: Random, method: str) -> Any:
    """Return params for `method`: valid, or changed once or more often."""
    body: Any = NEARLY[method]
    for _ in range(random.choice([0, 1, 1, 1, 1, 2, 3])):
        body = spoil(random, body)
    return body


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Whole]]:
    folder = Path(tmp_path_factory.mktemp("random"))
    with Whole(folder) as files:
        for sql in (*DDL, *ROWS):
            files.run(sql)
        with serving(files, folder=folder) as client:
            yield client, files


def state(files: Whole) -> Any:
    names = files.names()
    held = [(one.id, one.acked, one.paused, one.options) for one in files.registry.for_db("main")]
    return names, held, [(files.get(name).head(), dump(files.path(name), ours=False)) for name in names]


def forget(client: Client, files: Whole) -> None:
    """Undo what accepted requests did, so that the next ones start from the same state."""
    api = client.server._api
    api.transactions.close()
    files.registry.close_db("main")
    for name in set(files.names()) - {"main"}:
        files.drop(name)
    for table in set(files.get("main").describe()) - {"users", "pairs"}:
        with contextlib.suppress(errors.HeadwaterError):
            files.get("main").write(lambda session, table=table: session.drop_table(table)).result(PATIENCE)
    for sql in ("DELETE FROM users", "DELETE FROM pairs", *ROWS):
        files.run(sql)


def test_valid_params_to_mutate_include_every_method() -> None:
    assert set(NEARLY) == set(METHODS)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_unchanged_valid_params_are_accepted_by_every_method(world: tuple[Client, Whole], method: str) -> None:
    client, files = world
    answer = client.rpc(method, **NEARLY[method])
    if not answer["ok"]:
        assert answer["error"]["code"] in ("not_found", "conflict", "duplicate_key", "stale_epoch"), answer
        assert method not in ("data.insert", "sql.exec", "schema.create_table")
    forget(client, files)


@pytest.mark.parametrize("method", sorted(METHODS))
@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=True))
def test_random_requests_are_answered_and_refused_ones_change_nothing(
    world: tuple[Client, Whole], method: str, random: Random
) -> None:
    client, files = world
    params = spoilt(random, method)
    before = state(files)
    response = client.http.post("/api/v1/rpc", json={"id": "r", "method": method, "params": params})
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"] == "r"
    changed = state(files) != before
    if changed or method == "tx.begin":
        forget(client, files)
    assert answer["ok"] or answer["error"]["code"] in CODES, answer
    assert answer["ok"] or not changed, answer


@pytest.mark.parametrize("path", ["/api/v1/rpc", "/api/v1/sql/exec"])
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=40), random=st.randoms(use_true_random=True))
def test_random_bodies_never_break_the_server(
    world: tuple[Client, Whole], path: str, raw: bytes, random: Random
) -> None:
    client, files = world
    named = {random.choice(["id", "method", "params", "sql"]): anything(random) for _ in range(3)}
    body = random.choice([raw, json.dumps(anything(random)).encode(), json.dumps(named).encode()])
    response = client.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 204, 400)
    if response.status_code == 204:
        return
    if response.json()["ok"]:
        forget(client, files)
    else:
        assert response.json()["error"]["code"] in CODES
