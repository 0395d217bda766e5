"""X-Headwater-Causality of rows, in requests and answers, on every method (WIRE §6, §11.21)."""

from __future__ import annotations

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.queries.etag.causality import from_header, to_header, token
from headwater.sources.read import SourceHead

NAME = "x-headwater-causality"


@pytest.fixture
def row(server: Live, table: str) -> str:
    server.sql(f"INSERT INTO {table} VALUES (1, 'open', 1)")
    assert server.app.database("main").catch_up(PATIENCE)  # while a new schema is taken in, floors are answered by 503
    return f"/api/v1/t/main/{table}/1"


def write(server: Live, method: str, path: str, given: str) -> int:
    body = {} if method == "DELETE" else {"json": {"status": "x"}}
    return server.http.request(method, path, headers={NAME: given}, **body).status_code


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_row_write_with_an_unreached_causality_floor_is_refused_and_writes_nothing(
    server: Live, row: str, table: str, method: str
) -> None:
    ahead = to_header(token("main", {table: 99_999_999}))
    assert write(server, method, row, "!!!") == 400
    assert write(server, method, row, ahead) == 412
    assert write(server, method, row, to_header(token("main", {"*": 99_999_999}))) == 412
    assert server.sql(f"SELECT status FROM {table}") == [["open"]]
    seen = server.http.get(row).headers[NAME]
    assert write(server, method, row, seen) in (200, 204)
    assert server.sql(f"SELECT status FROM {table}") != [["open"]]


def test_causality_token_of_a_row_read_is_stable_and_accepted_by_queries(server: Live, row: str, table: str) -> None:
    query = server.ok("query.prepare", sql=f"SELECT status FROM {table}")["query_id"]

    def caught_up() -> None:  # before that a token may tell more than there was, never less
        server.http.get(f"/api/v1/q/{query}")

    caught_up()
    got = server.http.get(row)
    (dep,) = from_header(got.headers[NAME]).deps
    assert dep.table == f"main.{table}" and dep.v is not None
    same = server.http.get(row, headers={"if-none-match": got.headers["etag"]})
    assert (same.status_code, same.headers[NAME]) == (304, got.headers[NAME])
    assert server.http.head(row).headers[NAME] == got.headers[NAME]
    server.sql("CREATE TABLE IF NOT EXISTS quiet_or_not(id INTEGER PRIMARY KEY)")  # the log goes on, the table does not
    caught_up()
    assert server.http.get(row).headers[NAME] == got.headers[NAME]
    assert server.http.get(f"/api/v1/q/{query}", headers={NAME: got.headers[NAME]}).status_code == 200
    written = server.http.patch(row, json={"status": "y"})
    caught_up()
    assert from_header(server.http.get(row).headers[NAME]) == from_header(written.headers[NAME])


def test_causality_token_of_an_older_log_is_refused_by_rows_and_queries(
    server: Live, row: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = server.http.get(row).headers[NAME]
    query = server.ok("query.prepare", sql=f"SELECT status FROM {table}")["query_id"]
    log = server.api.asking().answering("main").database.log
    monkeypatch.setattr(type(log), "generation_first", property(lambda self: self.latest + 10))
    for path in (row, f"/api/v1/q/{query}"):
        refused = server.http.get(path, headers={NAME: seen})
        assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    assert write(server, "PATCH", row, seen) == 412


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_row_write_with_an_undecidable_causality_floor_returns_503(
    server: Live, row: str, table: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = server.ok("query.prepare", sql=f"SELECT status FROM {table}")["query_id"]
    server.http.get(f"/api/v1/q/{query}")  # the log is caught up
    seen = server.http.get(row).headers[NAME]
    database = server.api.asking().answering("main").database
    look, latest = database.source.read_head, database.log.latest
    with monkeypatch.context() as behind:
        behind.setattr(database.source, "read_head", lambda: SourceHead(latest + 1, look().schema, settled=False))
        assert write(server, method, row, to_header(token("main", {table: latest + 1}))) == 503  # head is a guess
        assert write(server, method, row, to_header(token("main", {table: 99_999_999}))) == 503
        assert write(server, method, row, seen) in (200, 204)
    assert write(server, method, row, to_header(token("main", {table: 99_999_999}))) == 412
