"""Requests in the shape of SkeinDB: names of tokens, and JSON queries whose tables name the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import serving

from headwater.config import Secret

ADMIN = "the token of the administrator"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = Path(tmp_path_factory.mktemp("seed"))
    with Whole(folder) as files:
        files.create("shop")
        files.run("CREATE TABLE orders (id INTEGER PRIMARY KEY)", db="shop")
        files.run("INSERT INTO orders VALUES (1), (2)", db="shop")
        with serving(files, folder=folder, token=Secret(ADMIN)) as found:
            found.http.headers["authorization"] = f"Bearer {ADMIN}"
            yield found


def test_token_request_without_name_creates_an_admin_token(client: Any) -> None:
    made = client.ok("security.token.create")
    assert made["role"] == "admin" and made["expires_at_ms"] is None
    assert (made["token_id"], made["secret"], made["created_at_ms"]) == (made["id"], made["token"], made["created_ms"])
    (kept,) = [key for key in client.ok("security.token.list")["tokens"] if key["token_id"] == made["token_id"]]
    assert kept["role"] == "owner"
    headers = {"authorization": f"Bearer {made['secret']}"}
    body = {"id": 1, "method": "schema.create_database", "params": {"db": "made"}}
    assert client.http.post("/api/v1/rpc", json=body, headers=headers).json()["ok"]
    assert client.ok("security.token.revoke", token_id=made["token_id"])["revoked"] is True
    assert client.http.post("/api/v1/rpc", json=body, headers=headers).status_code == 401


def test_token_request_with_label_and_ttl_ms_sets_name_and_expiry(client: Any) -> None:
    made = client.ok("security.token.create", label="reports", ttl_ms=60_000, role="viewer")
    assert (made["name"], made["label"], made["role"]) == ("reports", "reports", "viewer")
    assert made["expires_at_ms"] == made["created_at_ms"] + 60_000
    assert client.ok("security.token.create", name="reports")["role"] == "viewer"
    assert client.ok("security.token.create", label="x", ttl_ms=0)["expires_at_ms"] is None


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("security.token.create", {"name": "a", "label": "b"}),
        ("security.token.create", {"label": "a\nb"}),
        ("security.token.create", {"name": "a", "role": "root"}),
        ("security.token.create", {"label": "a", "ttl_ms": -1}),
        ("security.token.revoke", {}),
        ("security.token.revoke", {"id": "a", "token_id": "b"}),
    ],
)
def test_token_request_with_contradictory_or_invalid_fields_is_refused(
    client: Any, method: str, params: dict[str, Any]
) -> None:
    assert client.error(method, **params)["code"] == "invalid_request"


def form(*tables: dict[str, str]) -> dict[str, Any]:
    return {"body": {"select": {"projection": [{"expr": {"col": "id"}}], "from": list(tables)}}}


def test_json_query_without_db_reads_the_database_of_its_tables(client: Any) -> None:
    query = form({"db": "shop", "table": "orders"})
    assert len(client.ok("query.select", query=query)["data"]["rows"]) == 2
    made = client.ok("query.prepare", query=query)
    assert len(client.ok("query.execute_prepared", query_id=made["query_id"])["data"]["rows"]) == 2
    assert made["query_id"] == client.ok("query.prepare", query=query, db="shop")["query_id"]
    assert client.ok("query.explain", query=query)
    tx = client.ok("tx.begin", db="shop")["tx"]
    assert len(client.ok("query.select", query=form({"table": "orders"}), tx=tx)["data"]["rows"]) == 2
    client.ok("tx.rollback", tx=tx)


def test_json_query_whose_tables_disagree_about_the_database_is_refused(client: Any) -> None:
    query = form({"db": "shop", "table": "orders"})
    assert client.error("query.select", query=query, db="main")["code"] == "not_supported"
    assert client.error("query.select", query=form({"db": "a", "table": "x"}, {"db": "b", "table": "x"}))["code"]
