"""Text that is not UTF-8 in answers of queries and statements: it is returned as bytes, as in feeds and rows."""

from __future__ import annotations

import base64
import io
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.live_server import Live

BROKEN = b"a\xffb"
LIT = {"t": "bytes", "b64": base64.b64encode(BROKEN).decode()}


@pytest.fixture
def query(server: Live, table: str) -> str:
    server.sql(f"INSERT INTO {table} VALUES (1, CAST(x'{BROKEN.hex()}' AS TEXT), 5), (2, 'fine', 6)")
    sql = f"SELECT id, status FROM {table} WHERE id < ? ORDER BY id -- a comment"
    return str(server.ok("query.prepare", sql=sql)["query_id"])


def rows(answer: dict[str, Any]) -> list[Any]:
    return [row[1] for row in answer["data"]["rows"]]


def test_invalid_utf8_in_a_query_answer_is_returned_as_bytes(server: Live, table: str, query: str) -> None:
    found = server.ok("query.execute_prepared", query_id=query, args=[9])
    assert rows(found) == [LIT, {"t": "str", "v": "fine"}]
    assert rows(server.ok("query.select", sql=f"SELECT id, status FROM {table} ORDER BY id;"))[0] == LIT
    statement = server.ok("sql.exec", sql=f"SELECT id, status FROM {table} ORDER BY id")["result"]
    assert rows(statement)[0] == LIT
    assert server.ok("data.get", table={"table": table}, pk=[1])["row"]["status"] == LIT


def test_query_answer_with_invalid_utf8_has_a_tag_that_gives_304(server: Live, query: str) -> None:
    path = f"/api/v1/q/{query}?args=[9]"
    first = server.http.get(path)
    assert rows(first.json())[0] == LIT
    assert server.http.get(path, headers={"if-none-match": first.headers["etag"]}).status_code == 304


def test_query_answer_with_invalid_utf8_is_returned_in_every_format(server: Live, query: str) -> None:
    path = f"/api/v1/q/{query}?args=[9]"
    for accept in ("application/json", "text/csv", "application/vnd.apache.arrow.stream"):
        answer = server.http.get(path, headers={"accept": accept})
        assert answer.status_code == 200, (accept, answer.text)
    table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
    assert table.num_rows == 2 and table.column("status")[1].as_py() == "fine"


def test_write_that_returns_invalid_utf8_is_refused_and_writes_nothing(server: Live, table: str) -> None:
    sql = f"INSERT INTO {table} VALUES (7, CAST(x'ff' AS TEXT), 1) RETURNING status"
    assert server.error("sql.exec", sql=sql)["code"] == "invalid_request"
    assert server.sql(f"SELECT count(*) FROM {table}") == [[0]]
