"""Tags of rows and queries where the stream lacks a stored generated column: a change of its operands is relevant."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.conformance.live_server import Live
from tests.sources.postgres.pg_server import Server, drop_slot
from tests.suite.deadlines import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.every_server]

TABLE = "CREATE TABLE t (id int PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED)"
QUERIES = (
    "SELECT id, twice FROM t",
    "SELECT id FROM t WHERE twice = 4",
    "SELECT count(*) FROM t WHERE twice > 3",
    "SELECT max(twice) FROM t",
)
_numbers = count(1)


class Site:
    """A server over `t`, whose publication was created without generated columns if `is_old`, as before version 18."""

    def __init__(self, pg: Server, folder: Path, identity: str, *, is_old: bool) -> None:
        self.pg, self.name = pg, f"generated_{os.getpid()}_{next(_numbers)}"
        with pg.connect() as admin:
            admin.execute(f"CREATE DATABASE {self.name}".encode())
        self.db = pg.connect(self.name)
        publication = f"CREATE PUBLICATION {self.name} FOR TABLE t"
        for statement in (TABLE, f"ALTER TABLE t REPLICA IDENTITY {identity}", publication if is_old else "SELECT 1"):
            self.db.execute(statement.encode())
        self.db.execute("INSERT INTO t VALUES (1, 1)")
        url = f"postgresql://postgres@/{self.name}?host={pg.folder}"
        self.live = Live(folder, url=url, postgres={"slot": self.name, "publication": self.name})

    def tag(self, path: str) -> str:
        """Return the tag of the answer at `path`, once it has one."""
        wait_until(lambda: "etag" in self.live.http.get(path).headers, "a tag")
        return self.live.http.get(path).headers["etag"]

    def is_modified(self, path: str, tag: str) -> bool:
        """Return whether the answer at `path` has another tag now."""
        return self.live.http.get(path, headers={"if-none-match": tag}).status_code == 200

    def close(self) -> None:
        self.live.stop()
        self.db.close()
        with self.pg.connect() as admin:
            drop_slot(admin, self.name)
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)".encode())


@pytest.fixture(params=["DEFAULT old", "FULL old", "FULL new"])
def site(pg: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    identity, age = request.param.split()
    with pg.connect() as admin:
        version = admin.info.server_version
    if request.param == "FULL old" and version >= 180000:
        pytest.skip("PostgreSQL 18 refuses every update of such a table")
    made = Site(pg, tmp_path, identity, is_old=age == "old")
    yield made
    made.close()


def test_update_of_an_operand_changes_every_tag(site: Site) -> None:
    prepared = [site.live.ok("query.prepare", sql=sql)["query_id"] for sql in QUERIES]
    paths = [f"/api/v1/q/{query}" for query in prepared] + ["/api/v1/t/main/t/1"]
    known = {path: (site.tag(path), site.live.http.get(path).text) for path in paths}
    site.db.execute("UPDATE t SET a = 2")
    for path, (tag, body) in known.items():
        wait_until(functools.partial(site.is_modified, path, tag), path)
        assert site.tag(path) != tag and site.live.http.get(path).text != body
