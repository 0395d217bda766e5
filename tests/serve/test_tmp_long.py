"""Random JSON at every method: always a well-formed answer, a known code, and no change where it says no."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from open_databases import Files, dump
from serving import Client, serving

from headwater import errors
from headwater.serve.methods import METHODS

DDL = (
    "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT NOT NULL UNIQUE, age INTEGER, extra JSON)",
    "CREATE TABLE pairs (a TEXT, b INTEGER, v BLOB, PRIMARY KEY (a, b)) WITHOUT ROWID",
)
CODES = {
    found.code
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, errors.HeadwaterError)
} - {"internal"}
WHERE = {"op": "eq", "a": {"col": "id"}, "b": {"lit": {"t": "i64", "v": 1}}}
USERS = {"db": "main", "table": "users"}
NEARLY: dict[str, dict[str, Any]] = {  # method -> params that would do, to be spoilt
    "system.ping": {},
    "system.version": {},
    "system.capabilities": {},
    "stats.snapshot": {"db": "main"},
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
}
WORDS = st.sampled_from(
    ["", "main", "default", "users", "pairs", "id", "email", "a", "b", "rowid", "'", '"', ";", "\0", "é", "ﬀ"]
    + ["i64", "u64", "str", "json", "null", "unavailable", "t", "v", "b64", "iso", "W/", "_headwater_meta"]
    + ['users"; DROP TABLE users; --', "DROP TABLE users", "SELECT 1", "DELETE FROM pairs", "../../etc/x"]
    + ["INSERT INTO users (email) VALUES ('q'), (NULL)", "PRAGMA writable_schema = 1", "BEGIN"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 0.5]),
    WORDS,
    st.text(max_size=6),
)
LITS = st.builds(
    lambda tag, value: {"t": tag, "v": value, "b64": "AA=="} if tag == "bytes" else {"t": tag, "v": value},
    st.sampled_from(["null", "bool", "i64", "u64", "f64", "dec", "str", "bytes", "json", "uuid", "embedding"]),
    SCALARS,
)
JSON = st.recursive(
    SCALARS | LITS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def places(body: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in `body`."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [trail] + [path for key, value in inner for path in places(value, (*trail, key))]


def spoil(body: Any, trail: tuple[Any, ...], how: str, value: Any) -> Any:
    """`body` with one place replaced, removed or given something more."""
    body = copy.deepcopy(body)
    if not trail:
        return {**body, str(value): value} if how == "add" and isinstance(body, dict) else value
    here = body
    for step in trail[:-1]:
        here = here[step]
    if how == "remove":
        del here[trail[-1]]
    elif how == "add" and isinstance(here[trail[-1]], dict):
        here[trail[-1]][str(value)] = value
    else:
        here[trail[-1]] = value
    return body


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    method = draw(st.sampled_from(sorted(METHODS)))
    body: Any = NEARLY[method]
    if draw(st.integers(0, 4)) == 0:
        return method, draw(JSON)
    for _ in range(draw(st.integers(0, 3))):
        trails = places(body)
        trail = trails[draw(st.integers(0, len(trails) - 1))]
        body = spoil(body, trail, draw(st.sampled_from(["replace", "remove", "add"])), draw(JSON))
    return method, body


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Files]]:
    with Files(Path(tmp_path_factory.mktemp("random"))) as files:
        for sql in DDL:
            files.run(sql)
        with serving(files) as client:
            yield client, files


def state(files: Files) -> Any:
    return files.names(), [dump(files.path(name)) for name in files.names()]


def forget(client: Client, files: Files) -> None:
    """Undo what good requests did, so that the next ones start small."""
    api = client.server._api
    api.transactions.close()
    for name in set(files.names()) - {"main"}:
        files.drop(name)
    for table in set(files.get("main").describe()) - {"users", "pairs"}:
        with contextlib.suppress(errors.HeadwaterError):
            files.get("main").write(lambda session, table=table: session.drop_table(table)).result(10)
    files.run("DELETE FROM users")
    files.run("DELETE FROM pairs")


def test_every_method_has_params_to_spoil() -> None:
    assert set(NEARLY) == set(METHODS)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_params_that_are_not_spoilt_are_understood(world: tuple[Client, Files], method: str) -> None:
    client, files = world
    answer = client.rpc(method, **NEARLY[method])
    if not answer["ok"]:
        assert answer["error"]["code"] in ("not_found", "conflict", "duplicate_key"), answer
        assert method not in ("data.insert", "sql.exec", "schema.create_table")
    forget(client, files)


@settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests())
def test_random_requests_are_answered_and_refused_ones_change_nothing(
    world: tuple[Client, Files], request: tuple[str, Any]
) -> None:
    client, files = world
    method, params = request
    before = state(files)
    response = client.http.post("/api/v1/rpc", json={"id": "r", "method": method, "params": params})
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"] == "r"
    if answer["ok"]:
        forget(client, files)
        return
    assert answer["error"]["code"] in CODES, answer
    assert state(files) == before, answer


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.one_of(st.binary(max_size=40), JSON, st.dictionaries(st.sampled_from(["id", "method"]), JSON)))
@pytest.mark.parametrize("path", ["/api/v1/rpc", "/api/v1/sql/exec"])
def test_random_bodies_never_break_the_server(world: tuple[Client, Files], path: str, body: Any) -> None:
    client, files = world
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 204, 400)
    if response.status_code != 204 and not response.json()["ok"]:
        assert response.json()["error"]["code"] in CODES
