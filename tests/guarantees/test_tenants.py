"""Isolation: users of one database cannot stop, slow down or damage another database."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.guarantees.raw_streams import HttpStream, Said
from tests.guarantees.server_process import Asking, Gone, Refused, ServerProcess
from tests.suite.deadlines import PATIENCE

SETTINGS = """
[databases.a]
rate = 40
burst = 10
max_streams = 4
max_subscriptions = 3
retention_bytes = 200000
[databases.b]
[sqlite]
statement_seconds = 5
"""
TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, doc TEXT)"
GROW = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) "
    "INSERT INTO t(doc) SELECT json_object('big', hex(randomblob(5000))) FROM n"
)
POISON = "INSERT INTO t(doc) VALUES (CAST(x'ff00fe' AS TEXT)), ('{not json')"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
ROWS = 60


@contextlib.contextmanager
def serving(folder: Path, settings: str = SETTINGS) -> Iterator[tuple[ServerProcess, Asking]]:
    server = ServerProcess(folder, settings)
    try:
        server.start()
        ask = Asking(server)
        for db in "ab":
            ask("sql.exec", db=db, sql=TABLE)
        yield server, ask
        ask.close()
        server.stop()
    finally:
        server.close()


class Flood:
    """Clients of `a` that send requests as fast as they can until stopped."""

    def __init__(self, server: ServerProcess, clients: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._url = server.url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        ask = {"id": 1, "method": "sql.exec", "params": {"db": "a", "sql": "SELECT count(*) FROM t"}}
        with httpx.Client(timeout=PATIENCE) as http:
            while not self._over.is_set():
                self.statuses[http.post(self._url + "/api/v1/rpc", json=ask).status_code] += 1

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def changes(stream: HttpStream, count: int) -> list[Said]:
    """Return the next `count` changes of a stream."""
    found: list[Said] = []
    while len(found) < count:
        piece = stream.read(65536)
        assert piece is not None, "the stream ended"
        found += [said for said in piece if said.word in ("insert", "update", "delete")]
    return found


def patiently(ask: Asking, method: str, **params: Any) -> Any:
    """Call as a tenant above its rate: retry until the call is admitted."""
    while True:
        try:
            return ask(method, **params)
        except Refused as refused:
            assert refused.code == "limit_exceeded"


def metric(url: str, name: str, db: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and f'db="{db}"' in line)


def test_misbehaving_tenant_does_not_affect_another_tenant(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, ask):
        bad = patiently(
            ask, "cdc.subscribe_table", db="a", table="t", where="json_extract(doc, '$.x') = 1", start="earliest"
        )
        never_read = HttpStream(server.url, "/api/v1/changes/a/t?from_offset=0", {}, sse=True)
        broken = HttpStream(server.url, bad["sse_url"], {}, sse=True)
        good = HttpStream(server.url, "/api/v1/changes/b/t", {}, sse=True)
        sub = ask("cdc.subscribe_table", db="b", table="t", include={"after": True})["sub_id"]
        query = ask("query.prepare", db="b", sql="SELECT count(*) FROM t")["query_id"]
        patiently(ask, "sql.exec", db="a", sql=POISON)
        with Flood(server, clients=3) as flood:
            while not flood.statuses[429]:
                pass
            before = flood.statuses.total()
            for number in range(ROWS):  # every one of these is answered, while the flood goes on
                done = ask("sql.exec", db="b", sql="INSERT INTO t(doc) VALUES (?)", args=[f"row {number}"])
                assert done["result"]["affected"] == 1
                if number % 20 == 0:
                    patiently(ask, "sql.exec", db="a", sql=GROW)
                    counted = ask("query.execute_prepared", query_id=query)["data"]["rows"]
                    assert counted[0][0]["v"] == number + 1
            told = changes(good, ROWS)
            assert flood.statuses.total() > before, "the flood went on meanwhile"
            assert set(flood.statuses) == {200, 429}
        docs = [said.body["after"]["doc"]["v"] for said in told]
        offsets = [said.id for said in told]
        assert docs == [f"row {number}" for number in range(ROWS)], "complete, in order, and nothing of another"
        assert offsets == sorted(set(offsets))  # type: ignore[type-var]
        page = ask("cdc.poll", sub_id=sub, limit=1000)
        assert [event["after"]["doc"]["v"] for event in page["events"]] == docs
        assert metric(server.url, "headwater_limited_total", "a") > 0
        assert metric(server.url, "headwater_limited_total", "b") == 0
        assert metric(server.url, "headwater_database_delivered_changes_total", "b") == ROWS
        stats = ask("stats.snapshot", db="b")["databases"]["b"]
        assert stats["horizon"] == 1, "the log of b is whole"
        for stream in (never_read, broken, good):
            stream.close()


def test_reached_quota_refuses_only_its_own_database_and_loses_no_rows(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS.replace("rate = 40", 'rate = "none"')) as (server, ask):
        for db, most in (("a", 3), ("b", 10)):
            for _ in range(most):
                ask("cdc.subscribe_table", db=db, table="t")
        with pytest.raises(Refused, match="limit_exceeded"):
            ask("cdc.subscribe_table", db="a", table="t")
        assert len(ask("cdc.list", db="a")["subscriptions"]) == 3
        for _ in range(5):
            for db in "ab":
                ask("sql.exec", db=db, sql=GROW)
        while ask("stats.snapshot", db="a")["databases"]["a"]["horizon"] == 1:
            pass  # the log is trimmed in steps
        while (found := ask("stats.snapshot", db="b")["databases"]["b"])["latest"] <= 1000:
            pass  # it is captured later than the other
        assert found["horizon"] == 1
        assert ask("sql.exec", db="a", sql="SELECT count(*) FROM t")["result"]["data"]["rows"][0][0]["v"] == 1000


@pytest.mark.slow
def test_long_running_statements_do_not_delay_another_database(tmp_path: Path) -> None:
    settings = SETTINGS.replace("rate = 40", 'rate = "none"').replace("= 5", f"= {2 * PATIENCE}")
    with serving(tmp_path, settings) as (server, ask):
        over: list[str] = []

        def run_long() -> None:
            mine = Asking(server, timeout=2 * PATIENCE)
            with contextlib.suppress(Refused, Gone):
                mine("sql.exec", db="a", sql=ENDLESS)
            over.append("a")
            mine.close()

        threads = [threading.Thread(target=run_long) for _ in range(12)]
        for thread in threads:
            thread.start()
        while metric(server.url, "headwater_requests_total", "a") < 1 + len(threads):
            pass  # until all of them are in
        for _ in range(20):
            ask("sql.exec", db="b", sql="SELECT count(*) FROM t")
        assert not over, "b was answered while a had all the threads it may have"
        server.kill()  # the statements would run for minutes
        for thread in threads:
            thread.join()
