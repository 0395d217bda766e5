"""Answers that change although no relevant row does: no 304 for the old one, over the real endpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import apsw
import httpx
import pytest
from tests.conformance.live_server import Live

TABLES = (
    "CREATE TABLE g(id INTEGER PRIMARY KEY, a INTEGER, b INTEGER, c INTEGER)",
    "INSERT INTO g VALUES (1, 3, 99, 0), (2, 1, 99, 7), (3, 1, 0, 5), (4, 1, 0, 6), (5, 2, 1, 1)",
    "CREATE TABLE er(id INTEGER PRIMARY KEY, a TEXT, b INTEGER)",
    "INSERT INTO er VALUES (1, '[1]', 1)",
)
PLANNED = [
    "SELECT (SELECT a FROM g)",
    "SELECT a, b FROM g GROUP BY a",
    "SELECT x FROM (SELECT b AS x FROM g WHERE a = 1 LIMIT 2)",
    "SELECT group_concat(b) FROM g WHERE a = 1",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(tmp_path_factory.mktemp("plans"))
    try:
        for sql in TABLES:
            live.sql(sql)
        yield live
    finally:
        live.stop()


@pytest.fixture
def other(server: Live) -> Iterator[apsw.Connection]:
    (file,) = Path(server.config.data).rglob("main.db")
    with contextlib.closing(apsw.Connection(str(file))) as db:
        db.set_busy_timeout(5_000)
        yield db


def get(server: Live, sql: str, tag: str = "") -> httpx.Response:
    query = server.ok("query.prepare", sql=sql)["query_id"]
    return server.http.get(f"/api/v1/q/{query}", headers={"if-none-match": tag} if tag else {})


def came_true(server: Live, sql: str, tag: str, held: object) -> bool:
    """Return whether the answer has changed by now; fail if it has and the tag still gives 304."""
    again, fresh = get(server, sql, tag), get(server, sql)
    is_other = fresh.json()["data"] != held
    assert again.status_code == 200 or not is_other, f"304 over {held}, now {fresh.json()['data']}"
    return is_other


@pytest.mark.parametrize("sql", PLANNED)
@pytest.mark.parametrize("by", ["us", "others"])
def test_no_304_is_returned_for_an_answer_that_an_index_changed(
    server: Live, other: apsw.Connection, sql: str, by: str
) -> None:
    def write(text: str) -> None:
        server.sql(text) if by == "us" else other.execute(text)

    before = get(server, sql)
    assert before.headers["etag"].startswith("W/")
    write("CREATE INDEX gi ON g(a, b)")
    during = get(server, sql)
    try:
        assert came_true(server, sql, before.headers["etag"], before.json()["data"])
    finally:
        write("DROP INDEX gi")
    assert came_true(server, sql, during.headers["etag"], during.json()["data"])


def test_no_304_is_returned_for_an_answer_that_foreign_statistics_changed(server: Live, other: apsw.Connection) -> None:
    sql = "SELECT (SELECT id FROM g WHERE a = 1 AND b = 0)"
    other.execute("CREATE INDEX ga ON g(a, c); CREATE INDEX gb ON g(b, c DESC); ANALYZE")
    try:
        seen = set()
        for a, b in (("5000 1 1", "5000 5000 1"), ("5000 5000 1", "5000 1 1"), ("5000 1 1", "5000 5000 1")):
            held = get(server, sql)
            other.execute("DELETE FROM sqlite_stat4")
            other.execute("UPDATE sqlite_stat1 SET stat = CASE idx WHEN 'ga' THEN ? ELSE ? END", (a, b))
            came_true(server, sql, held.headers["etag"], held.json()["data"])
            seen.add(get(server, sql).text.partition('"data"')[2])
        assert len(seen) == 2  # the plan did move
    finally:
        other.execute("DROP INDEX ga; DROP INDEX gb; DROP TABLE sqlite_stat1; DROP TABLE sqlite_stat4")


def test_row_outside_the_answer_that_makes_the_query_fail_returns_400_despite_the_tag(server: Live) -> None:
    sql = "SELECT id FROM er WHERE json_extract(a, '$[0]') = 1 AND b = 1"
    tag = get(server, sql).headers["etag"]
    assert get(server, sql, tag).status_code == 304
    server.sql("INSERT INTO er VALUES (2, '{bad', 2)")
    assert get(server, sql).status_code == get(server, sql, tag).status_code == 400
    server.sql("DELETE FROM er WHERE id = 2")
    assert get(server, sql).status_code == 200
