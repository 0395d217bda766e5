"""Attacks by SQL on a SQLite database over the wire: callers of every role, and of one table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.errors import Forbidden
from headwater.model.dependencies.dependency import Analysis, Dependency
from headwater.model.principal import VIEWER, Principal, Scope

ADMIN = "admin-token"
FOREIGN = [  # SQL whose functions or modules reach outside the database
    ("SELECT hex(fts3_tokenizer(?1))", ["simple"]),
    ("SELECT FTS3_Tokenizer(?1, ?2)", ["simple", "x"]),
    ("SELECT token FROM fts3tokenize WHERE input = 'a b'", []),
    ("SELECT 1 FROM orders JOIN fts3tokenize USING (input)", []),
    ("SELECT load_extension(?1)", ["x"]),
    ("SELECT sqlite_log(1, ?1)", ["x"]),
    ("SELECT geopoly_debug(1)", []),
]
# SQLite drops each of these conditions before it looks for the table in it.
DROPPED = [
    "SELECT (0 AND EXISTS (SELECT 1 FROM {} WHERE pin >= '5'))",
    "SELECT id FROM orders WHERE 0 AND EXISTS (SELECT 1 FROM {} WHERE pin >= '5')",
    "SELECT (SELECT pin FROM {} LIMIT 1) IN ()",
    "SELECT id FROM orders WHERE (SELECT max(pin) FROM {}) IN ()",
    "WITH x AS (SELECT pin FROM {}) SELECT 1",
    "WITH x AS (SELECT nothing FROM {}) SELECT id FROM orders",
    "WITH x AS (SELECT * FROM {} JOIN orders USING (id)) SELECT id FROM orders",
]


class Callers:
    """Clients of one server, by role; `held` is a viewer of one table."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.owner = self._client(ADMIN)
        self.editor = self._made("editor", ["main"])
        self.viewer = self._made("viewer", ["main"])
        self.held = self._made("viewer", ["main.orders"])

    def _client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers={"x-api-key": key}, timeout=PATIENCE)

    def _made(self, role: str, scopes: list[str]) -> httpx.Client:
        name = f"{role} of {scopes[0]}"
        made = call(self.owner, "security.token.create", name=name, role=role, scopes=scopes)
        return self._client(made["result"]["token"])

    def close(self) -> None:
        for client in (self.owner, self.editor, self.viewer, self.held):
            client.close()


def call(client: httpx.Client, method: str, **params: Any) -> Any:
    return client.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params}).json()


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    folder = Path(tmp_path_factory.mktemp("attacked"))
    with Whole(folder) as files:
        for sql in (
            "CREATE TABLE orders(id INTEGER PRIMARY KEY, input TEXT)",
            "CREATE TABLE secret(id INTEGER PRIMARY KEY, pin TEXT)",
            "CREATE VIEW secret_view AS SELECT id, pin FROM secret",
            "CREATE VIRTUAL TABLE ft USING fts5(body)",
            "CREATE VIEW found AS SELECT snippet(ft, 0, '[', ']', '', 5) AS part FROM ft('river')",
            "INSERT INTO ft VALUES ('a river runs')",
            "INSERT INTO orders VALUES (1, 'one')",
            "INSERT INTO secret VALUES (1, '1234')",
            "CREATE INDEX orders_input ON orders(input)",
        ):
            files.run(sql)
        with serving(files, folder=folder, token=Secret(ADMIN)) as client:
            made = Callers(str(client.http.base_url))
            yield made
            made.close()


@pytest.mark.parametrize(("sql", "args"), FOREIGN)
def test_function_that_reaches_outside_the_database_is_refused_for_every_role(
    callers: Callers, sql: str, args: list[str]
) -> None:
    bound = [{"t": "str", "v": arg} for arg in args]
    for client in (callers.owner, callers.editor):
        answer = call(client, "sql.exec", sql=sql, args=bound)
        assert not answer["ok"] and answer["error"]["code"] == "invalid_request", answer
        assert not call(client, "sql.exec", sql=sql, args=args)["ok"]
    for client in (callers.owner, callers.viewer, callers.held):
        for method in ("query.select", "query.prepare", "query.explain"):
            assert not call(client, method, sql=sql)["ok"], method
    assert not call(callers.owner, "sql.exec", sql="CREATE VIRTUAL TABLE tok USING fts3tokenize('simple')")["ok"]


def test_helper_functions_of_full_text_search_still_work_in_views(callers: Callers) -> None:
    answer = call(callers.viewer, "query.select", sql="SELECT part FROM found")
    assert answer["ok"] and "[river]" in json.dumps(answer)
    assert call(callers.editor, "sql.exec", sql="SELECT bm25(ft), highlight(ft, 0, '<', '>') FROM ft('river')")["ok"]


@pytest.mark.parametrize(
    "sql", ["DELETE FROM ft_content", "UPDATE ft_data SET block = x'00'", "DELETE FROM ft_idx", "DELETE FROM ft_config"]
)
def test_write_to_a_shadow_table_is_refused(callers: Callers, sql: str) -> None:
    for client in (callers.editor, callers.owner):
        assert not call(client, "sql.exec", sql=sql)["ok"]
    assert call(callers.editor, "sql.exec", sql="INSERT INTO ft VALUES ('written by FTS5 itself')")["ok"]


@pytest.mark.parametrize(
    "sql",
    [
        "REINDEX",
        "REINDEX orders",
        "ANALYZE",
        "EXPLAIN SELECT * FROM orders",
        "EXPLAIN QUERY PLAN SELECT * FROM orders",
        "/* SELECT */ -- SELECT\n ; explain DELETE FROM orders",
    ],
)
def test_statement_that_neither_reads_nor_writes_rows_needs_an_owner(callers: Callers, sql: str) -> None:
    answer = call(callers.editor, "sql.exec", sql=sql)
    assert not answer["ok"] and answer["error"]["code"] == "forbidden", answer
    begun = call(callers.editor, "tx.begin")["result"]
    answer = call(callers.editor, "sql.exec", sql=sql, tx=begun["tx"])
    assert not answer["ok"] and answer["error"]["code"] == "forbidden", answer
    call(callers.editor, "tx.rollback", tx=begun["tx"])
    assert call(callers.owner, "sql.exec", sql=sql)["ok"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        " ;; -- x\n/* y */ select 1",
        "VALUES (1)",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "REPLACE INTO orders VALUES (7, 'x')",
        "WITH a AS (SELECT 8) INSERT INTO orders SELECT *, 'x' FROM a",
        "UPDATE orders SET input = 'y' WHERE id = 7",
        "DELETE FROM orders WHERE id IN (7, 8)",
    ],
)
def test_editor_reads_and_writes_rows(callers: Callers, sql: str) -> None:
    assert call(callers.editor, "sql.exec", sql=sql)["ok"]


@pytest.mark.parametrize("form", DROPPED)
def test_table_in_a_dropped_condition_is_no_dependency(callers: Callers, form: str) -> None:
    said = []
    for table in ("secret", "secret_view", "nosuch"):
        answer = call(callers.held, "query.explain", sql=form.format(table))
        if answer["ok"]:
            found = answer["result"]
            assert set(found["table_keys"]) <= {"main.orders"}, found
            assert not any("secret" in text or "nosuch" in text for text in found["dependencies"]), found
            del found["query_id"]
        said.append(json.dumps(answer).replace(table, "NAME"))
    assert said[0] == said[1] == said[2]


def test_dependency_outside_the_scope_is_refused_whatever_tables_are_named() -> None:
    held = Principal("reports", VIEWER, (Scope("main", ("orders",)),))
    found = Analysis(
        sql="SELECT 1",
        parameters=(),
        columns=("1",),
        tables=("orders",),
        objects=("orders",),
        dependencies=(Dependency("orders"),),
        epoch="",
    )
    held.check_reads("main", found)
    with pytest.raises(Forbidden):
        held.check_reads("main", msgspec.structs.replace(found, dependencies=(Dependency("secret"),)))
