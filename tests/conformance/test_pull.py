"""Bulk pulls over HTTP: WIRE §8. F63, F98–F108, F162–F167 as far as the server goes.

Exactness for every kind of key, span and shape is in tests/ranges/worker/test_worker.py; here are the routes, the
process behind them, and what happens when one of the two dies.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.conformance.live_server import Live
from tests.ranges.bulk_reads import Rows, folded, rows_and_metadata, rows_in
from tests.suite.deadlines import PATIENCE

from headwater.serve.http.handlers import pulls


def version_of(live: Live, table: str) -> str:
    """Return the current version of a table, after making every commit durable in the log."""
    database = live.app.database("main")
    assert database.catch_up(PATIENCE)
    database.log.flush()
    return live.ok("pull.describe", table=table)["version"]


def latest(live: Live, table: str) -> int:
    return int(version_of(live, table).rpartition(".")[2])


def snapshot_url(table: str, version: str, **more: Any) -> str:
    query = "".join(f"&{name}={quote(str(value), safe='')}" for name, value in more.items())
    return f"/api/v1/pull/main/{table}/snapshot?version={version}{query}"


def log_url(table: str, after: int, upto: int, **more: Any) -> str:
    query = "".join(f"&{name}={quote(str(value), safe='')}" for name, value in more.items())
    return f"/api/v1/pull/main/{table}/log?after={after}&upto={upto}{query}"


def rows(live: Live, url: str) -> Rows:
    response = live.http.get(url)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    return rows_in(response.content)


def problem(live: Live, url: str, status: int) -> dict[str, Any]:
    response = live.http.get(url)
    assert response.status_code == status, (url, response.status_code, response.text)
    assert response.headers["content-type"] == "application/problem+json"
    return response.json()


def fill(live: Live, table: str, count: int, first: int = 1) -> None:
    live.sql(
        f"WITH RECURSIVE n(i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {first + count - 1}) "
        f"INSERT INTO {table} SELECT i, 'status ' || i, i * 0.5 FROM n"
    )


# --- snapshots -------------------------------------------------------------------------------------------


def test_snapshot_of_a_version_and_later_changes_fold_to_the_table(server: Live, table: str) -> None:
    fill(server, table, 20)
    version = version_of(server, table)
    server.sql(f"UPDATE {table} SET total = -total WHERE id % 3 = 0")
    server.sql(f"DELETE FROM {table} WHERE id > 15")
    server.sql(f"UPDATE {table} SET id = id + 100 WHERE id < 4")
    then = rows(server, snapshot_url(table, version))
    assert [(row["id"], row["total"]) for row in then] == [(id, id * 0.5) for id in range(1, 21)]
    now = version_of(server, table)
    changes = rows(server, log_url(table, int(version.split(".")[1]), int(now.split(".")[1])))
    assert folded(then, changes, "id") == sorted(rows(server, snapshot_url(table, now)), key=repr)


def test_ranges_cover_the_table_and_a_split_range_returns_409_with_its_parts(server: Live, table: str) -> None:
    fill(server, table, 300)
    version = version_of(server, table)
    ranges = server.ok("pull.ranges", table=table, target_bytes=1000)["ranges"]
    assert len(ranges) > 2
    parts = [rows(server, snapshot_url(table, version, range=one["id"], epoch=one["epoch"])) for one in ranges]
    assert [row["id"] for part in parts for row in part] == list(range(1, 301))
    one = ranges[1]
    both = [rows(server, snapshot_url(table, version, start=one["start"], end=one["end"])), parts[1]]
    assert both[0] == both[1]
    server.ok("pull.split", table=table, range=one["id"], epoch=one["epoch"])
    stale = problem(server, snapshot_url(table, version, range=one["id"], epoch=one["epoch"]), 409)
    assert stale["code"] == "stale_epoch" and len(stale["ranges"]) == 2
    again = [rows(server, snapshot_url(table, version, range=r["id"], epoch=r["epoch"])) for r in stale["ranges"]]
    assert again[0] + again[1] == parts[1]


def test_reader_resumes_after_its_last_key(server: Live, table: str) -> None:
    fill(server, table, 25_000)
    version = version_of(server, table)
    body = server.http.get(snapshot_url(table, version)).content
    batches = rows_and_metadata(body, b"last_key")
    assert [count for count, _ in batches] == [10_000, 10_000, 5_000]
    seen = 0
    for count, last in batches:
        seen += count
        rest = rows(server, snapshot_url(table, version, after=last.decode()))
        assert [row["id"] for row in rest] == list(range(seen + 1, 25_001))
    assert rows(server, snapshot_url(table, version, after="ff" * 10)) == []


def test_pull_without_a_version_redirects_to_the_current_version(server: Live, table: str) -> None:
    fill(server, table, 3)
    response = server.http.get(f"/api/v1/pull/main/{table}/snapshot?columns=total&where=id%3E1")
    assert response.status_code == 307 and response.headers["cache-control"] == "no-store"
    assert rows(server, response.headers["location"]) == [
        {"id": id, "total": id * 0.5, "_misfit": None} for id in (2, 3)
    ]


def test_pulled_version_is_immutable_and_its_tag_gives_304(server: Live, table: str) -> None:
    fill(server, table, 3)
    url = snapshot_url(table, version_of(server, table))
    first = server.http.get(url)
    assert "immutable" in first.headers["cache-control"] and first.headers["etag"].startswith('W/"')
    server.sql(f"DELETE FROM {table}")
    again = server.http.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert rows_in(server.http.get(url).content) == rows_in(first.content)
    other = server.http.get(url + "&columns=id", headers={"if-none-match": first.headers["etag"]})
    assert other.status_code == 200


def test_head_of_a_pull_returns_headers_without_a_body(server: Live, table: str) -> None:
    fill(server, table, 3)
    for url in (snapshot_url(table, version_of(server, table)), log_url(table, 0, 1)):
        response = server.http.head(url)
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert server.http.head(log_url("nowhere", 0, 1)).status_code == 404


# --- the log ---------------------------------------------------------------------------------------------


def test_log_pull_returns_the_changes_of_several_tables_in_order(server: Live, table: str) -> None:
    other = f"{table}_b"
    server.sql(f"CREATE TABLE {other}(k TEXT PRIMARY KEY)")
    after = latest(server, table)
    fill(server, table, 1)
    server.sql(f"INSERT INTO {other} VALUES ('x')")
    upto = latest(server, table)
    url = f"/api/v1/pull/main/log?after={after}&upto={upto}&tables="
    found = rows(server, url + f"{table},{other}")
    assert [(row["_table"], row["_key"]) for row in found] == [(table, "[1]"), (other, '["x"]')]
    assert rows(server, url + "*") == rows(server, url.removesuffix("&tables=")) == found
    assert [row["_table"] for row in rows(server, url + other)] == [other]
    assert problem(server, url + "nowhere", 404)["code"] == "not_found"


def test_log_pull_beyond_the_latest_offset_is_refused(server: Live, table: str) -> None:
    upto = latest(server, table)
    body = problem(server, log_url(table, 0, upto + 1), 400)
    assert body["code"] == "invalid_request" and "pull.describe" in body["hint"]
    assert rows(server, log_url(table, upto, upto)) == []


def test_pull_before_the_horizon_or_of_another_generation_returns_410_with_its_reason(
    start: Callable[..., Live],
) -> None:
    live = start(log={"retention_events": 4})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    version = version_of(live, "t")
    fill(live, "t", 8)
    upto = latest(live, "t")
    for url in (log_url("t", 1, upto), snapshot_url("t", version)):
        body = problem(live, url, 410)
        assert (body["code"], body["resnapshot_reason"]) == ("resnapshot_required", "wal_horizon_exceeded")
        assert body["earliest_offset"] == upto - 3 and body["latest_offset"] == upto
    assert len(rows(live, log_url("t", upto - 4, upto))) == 4
    for url in (log_url("t", upto - 1, upto, generation="another"), snapshot_url("t", f"another.{upto}")):
        body = problem(live, url, 410)
        assert (body["code"], body["resnapshot_reason"]) == ("resnapshot_required", "log_generation_changed")


def test_pull_across_a_schema_change_is_refused_only_when_rows_cannot_be_read(server: Live, table: str) -> None:
    fill(server, table, 3)
    after = latest(server, table)
    server.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
    server.sql(f"UPDATE {table} SET more = 'm' WHERE id = 1")
    upto = latest(server, table)
    before, now = rows(server, log_url(table, after, upto))
    assert (before["more"], now["more"]) == (None, "m")
    assert "more" not in rows(server, log_url(table, after, upto, shape=1))[0]
    body = problem(server, snapshot_url(table, f"{version_of(server, table).split('.')[0]}.{after}"), 409)
    assert (body["code"], body["resnapshot_reason"]) == ("conflict", "schema_changed")
    server.sql(f"DROP TABLE {table}")
    server.sql(f"CREATE TABLE {table}(id INTEGER PRIMARY KEY)")
    body = problem(server, log_url(table, after, latest(server, table)), 410)
    assert (body["code"], body["resnapshot_reason"]) == ("resnapshot_required", "table_dropped")


NONSENSE = [
    "log",
    "log?after=1",
    "log?after=1&upto=x",
    "log?after=-1&upto=1",
    "log?after=5&upto=4",
    "log?after=0&upto=99999999999999999999",
    "log?after=0&upto=1&shape=x",
    "log?after=0&upto=1&shape=99",
    "log?after=0&upto=1&start=zz",
    "log?after=0&upto=1&start=%20%20",
    "log?after=0&upto=1&start=02&end=01",
    "log?after=0&upto=1&columns=",
    "log?after=0&upto=1&columns=nope",
    "log?after=0&upto=1&columns=%5B%22",
    "log?after=0&upto=1&columns=%5B1%5D",
    "log?after=0&upto=1&where=nope%20%3D%201",
    "log?after=0&upto=1&where=1%3B%20DROP%20TABLE%20x",
    "log?after=0&upto=1&where=%00",
    "log?after=0&upto=1&generation=%F0%9F%92%A5",
    "log?after=0&upto=1&unknown=1",
    "snapshot?version=",
    "snapshot?version=1",
    "snapshot?version=.1",
    "snapshot?version=%F0%9F%92%A5.1",
    "snapshot?version={generation}.999999999",
    "snapshot?version={generation}.99999999999999999999",
    "snapshot?version={version}&range=1",
    "snapshot?version={version}&range=x&epoch=1",
    "snapshot?version={version}&range=999999&epoch=1",
    "snapshot?version={version}&epoch=1",
    "snapshot?version={version}&after=0",
    "snapshot?version={version}&after=-1",
    "snapshot?version={version}&start=" + "00" * 20_000,
    "snapshot?version={version}&where=random()%20%3E%200",
    "snapshot?version={version}&where=(SELECT%201)",
    "snapshot?version={version}&where=" + "1" * 20_000,
    "snapshot?version={version}&columns=" + "a," * 5_000,
    "log?after=0&upto=0&compression=brotli",
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda text: text[:40])
def test_invalid_pull_parameters_are_refused_without_an_internal_error(server: Live, table: str, nonsense: str) -> None:
    version = version_of(server, table)
    named = nonsense.format(version=version, generation=version.split(".")[0])
    response = server.http.get(f"/api/v1/pull/main/{table}/{named}")
    assert 400 <= response.status_code < 500 or response.status_code == 501, response.text
    body = response.json()
    assert body["code"] and body["title"] and "internal" not in body["code"]


@pytest.mark.parametrize("name", ["nowhere", "%FF", "a%2Fb", "_headwater_change", "sqlite_schema", "x%00y", "%22"])
def test_pull_of_an_unknown_table_returns_404(server: Live, table: str, name: str) -> None:
    for rest in ("log?after=0&upto=1", f"snapshot?version={version_of(server, table)}", "snapshot"):
        assert problem(server, f"/api/v1/pull/main/{name}/{rest}", 404)["code"] == "not_found"
    assert problem(server, f"/api/v1/pull/nowhere/{table}/log?after=0&upto=1", 404)["code"] == "not_found"


# --- the process -----------------------------------------------------------------------------------------


def worker_of(live: Live) -> int:
    pid = live._server._pulls._worker.pid
    assert pid is not None
    return pid


def ended(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_worker_is_started_by_the_first_pull_and_ends_with_the_server(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    assert live._server._pulls._worker.pid is None
    assert rows(live, log_url("t", 0, latest(live, "t"))) == []
    pid = worker_of(live)
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"headwater.worker" in command
    live.stop()
    live.until(lambda: ended(pid))


def test_killed_worker_is_restarted_by_the_next_request(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 10)
    url = snapshot_url("t", version_of(live, "t"))
    first = rows(live, url)
    for _ in range(2):
        os.kill(worker_of(live), signal.SIGKILL)
        assert rows(live, url) == first
    assert live.metric("headwater_pull_worker_starts_total") == 3


LARGE = 5_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, str]]:
    """Yield a server, and a pull whose answer of 20 MB does not fit into the socket buffers."""
    live = Live(tmp_path_factory.mktemp("large"))
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    for low in range(0, LARGE, 1000):
        live.sql(
            f"WITH RECURSIVE n(i) AS (SELECT {low + 1} UNION ALL SELECT i + 1 FROM n WHERE i < {low + 1000}) "
            f"INSERT INTO t SELECT i, hex(randomblob(2000)), 0 FROM n"
        )
    yield live, snapshot_url("t", version_of(live, "t"))
    live.stop()


def test_body_has_no_end_marker_when_the_worker_is_killed(large: tuple[Live, str]) -> None:
    live, url = large
    found = b""
    with live.http.stream("GET", url) as response:
        pieces = response.iter_raw()
        found += next(pieces)
        os.kill(worker_of(live), signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            for piece in pieces:
                found += piece
    assert not found.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    assert len(rows(live, url)) == LARGE


def test_pull_job_ends_when_its_reader_disconnects(large: tuple[Live, str]) -> None:
    live, url = large
    with live.http.stream("GET", url) as response:
        pieces = response.iter_raw()
        next(pieces)
        live.until(lambda: live.metric("headwater_pulls") == 1)  # those of earlier tests are over
        threads = len(os.listdir(f"/proc/{worker_of(live)}/task"))
    live.until(lambda: live.metric("headwater_pulls") == 0)
    live.until(lambda: len(os.listdir(f"/proc/{worker_of(live)}/task")) < threads)


def test_pulls_beyond_the_limit_are_refused_with_429(large: tuple[Live, str], monkeypatch: pytest.MonkeyPatch) -> None:
    live, url = large
    live.until(lambda: live.metric("headwater_pulls") == 0)  # those of earlier tests are over
    monkeypatch.setattr(pulls, "AT_ONCE", 1)
    with live.http.stream("GET", url) as response:
        pieces = response.iter_raw()  # it closes the response when it is forgotten
        next(pieces)
        body = problem(live, url, 429)
        assert body["code"] == "limit_exceeded" and body["retryable"]
    live.until(lambda: live.metric("headwater_pulls") == 0)
    assert len(rows(live, url)) == LARGE


def test_many_slow_pull_readers_do_not_delay_another_pull(large: tuple[Live, str]) -> None:
    live, url = large
    streams = [live.http.stream("GET", url) for _ in range(12)]
    responses = [stream.__enter__() for stream in streams]
    try:
        pieces = [response.iter_raw() for response in responses]
        assert all(map(next, pieces))
        assert len(rows(live, snapshot_url("t", url.split("=")[1], columns="id"))) == LARGE
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


def test_recreated_database_serves_only_its_own_rows(start: Callable[..., Live]) -> None:
    live = start()
    for round in range(3):
        live.ok("schema.create_database", db="extra")
        live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)", db="extra")
        live.sql(f"INSERT INTO t VALUES ({round})", db="extra")
        described = live.ok("pull.describe", db="extra", table="t")
        url = f"/api/v1/pull/extra/t/snapshot?version={described['version']}"
        assert [row["id"] for row in rows(live, url)] == [round]
        upto = described["latest"]
        assert [row["id"] for row in rows(live, f"/api/v1/pull/extra/t/log?after=0&upto={upto}")] == [round]
        live.ok("schema.drop_database", db="extra")
        assert problem(live, url, 404)["code"] == "not_found"


def test_pulled_rows_bytes_and_cache_hits_are_counted(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 20_000)
    upto = latest(live, "t")
    size = len(live.http.get(log_url("t", 0, upto)).content)
    live.until(lambda: live.metric("headwater_pulls") == 0)
    assert live.metric("headwater_pull_rows_total") == 20_000
    assert live.metric("headwater_pull_bytes_total") == size
    assert live.metric("headwater_pull_cache_misses_total") == 1
    assert live.metric("headwater_pull_cache_bytes") > 100_000
    rows(live, log_url("t", 0, upto))
    assert live.metric("headwater_pull_cache_hits_total") == 1


def test_damaged_cache_slices_are_rebuilt(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, status TEXT, total REAL)")
    fill(live, "t", 20_000)
    url = log_url("t", 0, latest(live, "t"))
    first = live.http.get(url).content
    (path,) = (Path(live.config.data) / "pull-cache").rglob("*.slice")
    for damage in (lambda data: data[:-9], lambda data: data[:9999] + b"?" + data[10_000:], lambda data: b""):
        path.write_bytes(damage(path.read_bytes()))
        assert live.http.get(url).content == first


def test_writes_succeed_while_a_snapshot_is_pulled(large: tuple[Live, str]) -> None:
    live, url = large
    stop, failures = threading.Event(), []

    def write() -> None:
        number = 0
        try:
            with httpx.Client(base_url=live.url, timeout=PATIENCE) as http:
                while not stop.is_set():
                    number += 1
                    sql = f"UPDATE t SET total = {number} WHERE id % 997 = {number % 997}"
                    body = {"id": 1, "method": "sql.exec", "params": {"sql": sql}}
                    assert http.post("/api/v1/rpc", json=body).json()["ok"]
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2):
            found = rows(live, url)
            assert len(found) == LARGE and {row["total"] for row in found} == {0.0}
    finally:
        stop.set()
        writer.join()
    assert not failures
