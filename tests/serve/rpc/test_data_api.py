"""The data API as clients of the wire see it: exact shapes, exact codes."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Files, dump
from tests.serve.server_fixture import Client, envelope, serving

USERS = {"db": "app", "table": "users"}
BY_ID = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}


def i64(value: int) -> dict[str, Any]:
    return {"t": "i64", "v": value}


def text(value: str) -> dict[str, Any]:
    return {"t": "str", "v": value}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with Files(tmp_path) as found:
        yield found


@pytest.fixture
def client(files: Files) -> Iterator[Client]:
    with serving(files) as found:
        found.ok(
            "schema.create_table",
            **USERS,
            columns=[
                {"name": "id", "type": {"kind": "i64"}, "nullable": False, "auto_increment": True},
                {"name": "email", "type": {"kind": "str"}, "nullable": False},
                {"name": "score", "type": {"kind": "f64"}, "nullable": True},
            ],
            primary_key=["id"],
        )
        yield found


def test_creating_a_table_created_its_database(client: Client) -> None:
    assert client.ok("schema.list_databases") == {"databases": ["app", "main"]}
    assert client.ok("schema.list_tables", db="app") == {"tables": ["users"]}
    found = client.ok("schema.describe_table", **USERS)
    assert found["primary_key"] == ["id"]
    assert [(c["name"], c["type"]["kind"], c["nullable"]) for c in found["columns"][1:]] == [
        ("email", "str", False),
        ("score", "f64", True),
    ]


def test_row_changed_and_changed_back_has_its_first_etag(client: Client) -> None:
    client.ok("data.insert", into=USERS, rows=[{"id": i64(1), "email": text("a")}])
    before = client.ok("data.get", table=USERS, pk=[i64(1)])["etag"]
    for email in ("b", "a"):
        client.ok("sql.exec", sql="UPDATE users SET email = ?", args=[email], db="app")
    assert client.ok("data.get", table=USERS, pk=[i64(1)])["etag"] == before
    written = {"table": USERS, "where": BY_ID, "args": [i64(1)], "set": {"email": text("c")}}
    assert client.ok("data.update", **written, if_match=before)["affected"] == 1


def test_data_calls_return_the_documented_fields(client: Client, files: Files) -> None:
    done = client.ok("data.insert", into=USERS, rows=[{"email": text("a")}], returning=["id"])
    head = files.get("app").head()
    assert done == {
        "affected": 1,
        "last_insert_id": 1,
        "returning": [{"id": i64(1)}],
        "causality": {"format": "vector_clock_v2", "deps": [{"table": "app.users", "v": head}]},
    }
    found = client.ok("data.get", table=USERS, pk=[i64(1)])
    assert found["row"] == {"id": i64(1), "email": text("a"), "score": {"t": "null"}}
    assert re.fullmatch(r'"row:[A-Za-z0-9_-]+"', found["etag"])
    plain = client.ok("data.get", table=USERS, pk=[1], format="plain_json")
    assert plain == {"row": {"id": 1, "email": "a", "score": None}, "etag": found["etag"]}
    done = client.ok(
        "data.update",
        table=USERS,
        where=BY_ID,
        args=[i64(1)],
        set={"score": {"t": "f64", "v": 0.5}},
        if_match="W/" + found["etag"],
    )
    assert (done["affected"], done["last_insert_id"]) == (1, 0)
    assert done["etag"] == client.ok("data.get", table=USERS, pk=[1])["etag"] != found["etag"]
    error = client.error("data.delete", table=USERS, where=BY_ID, args=[1], expected_etag=found["etag"])
    assert error["code"] == "conflict"
    assert client.ok("data.delete", table=USERS, where=BY_ID, args=[1])["affected"] == 1
    assert client.error("data.get", table=USERS, pk=[1])["code"] == "not_found"


def test_insert_with_a_failing_third_row_inserts_no_row(client: Client, files: Files) -> None:
    client.ok("data.insert", into=USERS, rows=[{"id": i64(7), "email": text("x")}])
    before, head = dump(files.path("app")), files.get("app").head()
    rows = [{"id": i64(n), "email": text("y")} for n in (5, 6, 7)]
    assert client.error("data.insert", into=USERS, rows=rows)["code"] == "duplicate_key"
    rows[2] = {"email": {"t": "null"}}
    assert client.error("data.insert", into=USERS, rows=rows)["code"] == "invalid_request"
    assert (dump(files.path("app")), files.get("app").head()) == (before, head)


@pytest.mark.parametrize(
    ("method", "params", "code", "named"),
    [
        ("data.get", {"table": USERS, "pk": [i64(1), i64(2)]}, "invalid_request", "1 values"),
        ("data.get", {"table": USERS, "pk": [text("1")]}, "invalid_request", "kind i64"),
        ("data.get", {"table": USERS, "pk": [{"t": "i64"}]}, "invalid_request", "pk[0]"),
        ("data.get", {"table": USERS, "pk": [1], "format": "xml"}, "invalid_request", "xml"),
        ("data.get", {"table": {"table": "users"}, "pk": [1]}, "not_found", "users"),
        ("data.insert", {"into": USERS, "rows": []}, "invalid_request", "rows"),
        ("data.insert", {"into": USERS, "rows": [{"emial": 1}]}, "invalid_request", "emial"),
        ("data.insert", {"into": USERS, "rows": [{"email": {"t": "x"}}]}, "invalid_request", "rows[0].email"),
        ("data.insert", {"into": USERS, "rows": [{}], "hints": {"fast": 1}}, "not_supported", "hints"),
        ("data.insert", {"into": USERS, "rows": [{}], "upsert": True}, "invalid_request", "upsert"),
        ("data.update", {"table": USERS, "set": {"score": 1}}, "invalid_request", "where"),
        ("data.update", {"table": USERS, "where": BY_ID, "set": {"score": 1}}, "invalid_request", "param 0"),
        (
            "data.update",
            {"table": USERS, "where": BY_ID, "args": [1], "set": {"score": 1}, "limit": -1},
            "invalid_request",
            "limit",
        ),
        (
            "data.update",
            {"table": USERS, "where": BY_ID, "args": [1], "set": {"x": 1}, "if_match": "a", "expected_etag": "b"},
            "invalid_request",
            "expected_etag",
        ),
        ("data.delete", {"table": USERS, "where": None}, "invalid_request", "where"),
        ("data.delete", {"table": USERS, "where": {"subquery": {}}}, "not_supported", "where"),
        ("sql.exec", {"sql": "SELECT 1", "explain": True}, "not_supported", "explain"),
        ("sql.exec", {"sql": "SELECT 1", "as_of_ms": 0}, "not_supported", "as_of_ms"),
        ("sql.exec", {"sql": "SELECT 1", "db": "app", "default_db": "main"}, "invalid_request", "default_db"),
        ("sql.exec", {"sql": "SELECT 1", "result_format": "wasm_batch_v1"}, "not_supported", "wasm_batch_v1"),
        ("sql.exec", {"sql": "SELECT 1", "result_format": "x"}, "invalid_request", "result_format"),
        ("sql.exec", {"sql": "SELECT 1", "tx": "tx_1"}, "not_found", "tx_1"),
        ("tx.commit", {}, "invalid_request", "tx_id"),
        ("schema.create_table", {"table": "t", "columns": []}, "invalid_request", "columns"),
        ("schema.drop_database", {"db": "default"}, "invalid_request", "main"),
    ],
)
def test_invalid_rpc_params_get_the_matching_error_code_and_name_the_bad_param(
    client: Client, method: str, params: dict[str, Any], code: str, named: str
) -> None:
    error = client.error(method, **params)
    assert (error["code"], named in error["message"]) == (code, True), error


def test_null_and_empty_optional_fields_are_accepted(client: Client) -> None:
    client.ok("sql.exec", sql="SELECT 1", explain=False, as_of_ms=None, tx=None, default_db="default")
    client.ok("data.insert", into=USERS, rows=[{"email": "a"}], hints={}, returning=None)


def test_transaction_over_rpc_shows_its_writes_and_ends_once(client: Client) -> None:
    begun = client.ok("tx.begin", db="app")
    assert begun["tx"] == begun["tx_id"]
    tx = begun["tx"]
    done = client.ok("data.insert", into={"table": "users"}, rows=[{"email": "in"}], tx=tx)
    assert done == {"affected": 1, "last_insert_id": 1}
    assert client.ok("data.get", table={"table": "users"}, pk=[1], tx=tx)["row"]["email"] == text("in")
    counted = client.ok("sql.exec", sql="SELECT count(*) AS n FROM users", tx=tx, result_format="objects_json")
    assert counted["result"]["data"] == {"columns": [{"name": "n"}], "rows": [{"n": i64(1)}]}
    assert client.rows("SELECT count(*) FROM users", db="app") == [[0]]
    over = client.ok("tx.commit", tx_id=tx)
    assert (over["status"], over["tx_id"], len(over["causality"]["deps"])) == ("committed", tx, 1)
    for finish in ("tx.commit", "tx.rollback"):
        assert client.error(finish, tx_id=tx)["code"] == "not_found"
    again = client.ok("tx.begin", db="app", read_only=True)["tx_id"]
    assert client.ok("tx.rollback", tx=again)["status"] == "rolled_back"
    assert client.rows("SELECT email FROM users", db="app") == [["in"]]


def test_sql_exec_route_takes_a_body_without_envelope_and_returns_an_envelope(client: Client) -> None:
    def post(**body: Any) -> dict[str, Any]:
        response = client.http.post("/api/v1/sql/exec", json=body)
        assert response.status_code == 200
        return envelope(response.json(), "sql.exec.http")

    done = post(sql="INSERT INTO users (email) VALUES (?), (?)", args=["a", "b"], db="app")
    inner = done["result"]["result"]
    assert (inner["affected"], inner["last_insert_id"], inner["data"]["rows"]) == (2, 2, [])
    assert inner["causality"]["deps"][0]["table"] == "app.users"
    read = post(sql="SELECT id, email FROM users ORDER BY id", default_db="app")["result"]["result"]["data"]
    assert read["columns"] == [{"name": "id"}, {"name": "email"}]
    assert read["rows"] == [[i64(1), text("a")], [i64(2), text("b")]]
    assert post(sql="SELEC")["error"]["code"] == "invalid_request"
    assert "ecode" in post(sql="SELECT 1", ecode=1)["error"]["message"]


def test_concurrent_inserts_each_return_their_own_row(client: Client) -> None:
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for place in range(10):
                name = f"{worker}-{place}"
                done = client.ok("data.insert", into=USERS, rows=[{"email": name}], returning=["email"])
                assert done["returning"] == [{"email": text(name)}]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert client.rows("SELECT count(*), count(DISTINCT email) FROM users", db="app") == [[80, 80]]


def test_stats_snapshot_includes_every_database_and_the_latest_offset(client: Client) -> None:
    found = client.ok("stats.snapshot", db="app")
    assert set(found["databases"]) == {"app", "main"}
    assert found["cdc"]["latest_offset"] >= 1
