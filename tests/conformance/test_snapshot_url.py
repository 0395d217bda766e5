"""`snapshot_url`: a whole table at one version, immutable, and a redirect to the next version when it has expired.

WIRE §4 "Horizon", §11.14. F61, F68, F104.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

from headwater.errors import Unavailable
from headwater.ranges.pull.snapshot import read_as_of, shape_of


@pytest.fixture
def lost(start: Callable[..., Live]) -> tuple[Live, dict[str, Any]]:
    """Return a server that retains four changes, and the answer to a subscriber behind the horizon."""
    live = start(log={"retention_events": 4})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
    sub = live.subscribe("t")
    for id in range(8):
        live.sql(f"INSERT INTO t VALUES({id}, 'x')")
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    return live, live.poll(sub)


def rows_of(text: str) -> list[list[Any]]:
    return [list(json.loads(line).values()) for line in text.splitlines()]


def test_snapshot_url_returns_the_rows_of_its_version_and_the_offset_to_continue_from(
    lost: tuple[Live, dict[str, Any]],
) -> None:
    live, page = lost
    then = live.sql("SELECT * FROM t")
    live.sql("DELETE FROM t WHERE id = 0")
    live.sql("UPDATE t SET v = 'y' WHERE id = 1")
    response = live.http.get(page["snapshot_url"])
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    assert rows_of(response.text) == then, "as it was, not as it is"
    offset = int(response.headers["x-headwater-offset"])
    assert offset == page["latest_offset"]
    sub = live.subscribe("t", start={"offset": offset})
    assert [(change["op"], change["pk"]) for change in live.changes(sub)] == [("delete", [0]), ("update", [1])]


def test_snapshot_version_is_immutable_and_its_tag_gives_304(lost: tuple[Live, dict[str, Any]]) -> None:
    live, page = lost
    first = live.http.get(page["snapshot_url"])
    assert "immutable" in first.headers["cache-control"] and first.headers["etag"].startswith('"')
    live.sql("DELETE FROM t")
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["latest_offset"] == 17)
    tag = first.headers["etag"]
    for match in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        response = live.http.get(page["snapshot_url"], headers={"if-none-match": match})
        if response.status_code == 410:  # that many changes later it is gone
            break
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)


def test_any_tag_gives_no_304_for_a_missing_table_or_column(server: Live, table: str) -> None:
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    pull = url.replace(f"/snapshot/main/{table}", f"/pull/main/{table}/snapshot")
    star = {"if-none-match": "*"}
    assert server.http.get(url, headers=star).status_code == 304
    assert server.http.get(url.replace(table, "absent"), headers=star).status_code == 404
    assert server.http.get(pull.replace(table, "absent"), headers=star).status_code == 404
    assert server.http.get(f"{pull}&columns=absent", headers=star).status_code == 400
    for answer in (server.http.get(url), server.http.get(url, headers=star), server.http.get(pull)):
        assert "authorization" in answer.headers["vary"]


def test_snapshot_version_returns_the_same_bytes_after_a_write(server: Live, table: str) -> None:
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1), (2, 'b', 2)")
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    first = server.http.get(url)
    server.sql(f"UPDATE {table} SET total = 5")
    again = server.http.get(url)
    assert (first.content, first.headers["etag"]) == (again.content, again.headers["etag"])
    not_modified = server.http.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (not_modified.status_code, not_modified.content) == (304, b"")
    assert server.http.get(url, headers={"if-none-match": '"other"'}).status_code == 200


def test_head_of_a_snapshot_returns_its_tag_without_rows(server: Live, table: str) -> None:
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    head, whole = server.http.head(url), server.http.get(url)
    assert (head.status_code, head.content) == (200, b"") and whole.content
    assert head.headers["etag"] == whole.headers["etag"]


def test_snapshot_without_a_version_redirects_to_the_current_version(server: Live, table: str) -> None:
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    response = server.http.get(f"/api/v1/snapshot/main/{table}?format=objects_json")
    assert response.status_code == 307 and response.headers["cache-control"] == "no-store"
    found = server.http.get(response.headers["location"])
    assert json.loads(found.text)["id"] == {"t": "i64", "v": 1}
    assert f"/api/v1/snapshot/main/{table}?version=" in response.headers["location"]


def test_expired_snapshot_version_returns_410_with_the_current_url(lost: tuple[Live, dict[str, Any]]) -> None:
    live, page = lost
    for id in range(100, 110):
        live.sql(f"INSERT INTO t VALUES({id}, 'x')")
    live.until(lambda: live.ok("stats.snapshot")["cdc"]["latest_offset"] == 19)
    live.until(lambda: live.http.get(page["snapshot_url"]).status_code == 410)
    gone = live.http.get(page["snapshot_url"]).json()
    assert gone["code"] == "resnapshot_required" and gone["resnapshot_reason"] == "wal_horizon_exceeded"
    fresh = live.http.get(gone["snapshot_url"])
    assert fresh.status_code == 200 and rows_of(fresh.text) == live.sql("SELECT * FROM t")
    foreign = live.http.get("/api/v1/snapshot/main/t?version=ffffffffffffffff.3")
    assert foreign.status_code == 410 and foreign.json()["resnapshot_reason"] == "log_generation_changed"


@pytest.mark.parametrize("version", ["", "x", "1.x", ".5", "1.-5", "1.99999999999999999999", "%00.1"])
def test_invalid_snapshot_version_is_refused(server: Live, table: str, version: str) -> None:
    response = server.http.get(f"/api/v1/snapshot/main/{table}?version={version}")
    assert response.status_code in (400, 410), response.text
    assert response.headers["content-type"] == "application/problem+json"


def test_future_snapshot_version_is_refused(server: Live, table: str) -> None:
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    stem, _, offset = url.rpartition(".")
    assert server.http.get(f"{stem}.{int(offset) + 1000}").status_code == 400


def test_unknown_table_or_database_is_not_found(server: Live) -> None:
    for path in ("main/nowhere", "nowhere/t", "main/%ff", "%ff/t"):
        response = server.http.get(f"/api/v1/snapshot/{path}")
        assert response.status_code == 404 and response.json()["code"] == "not_found", path


def test_arrow_snapshot_contains_the_same_rows(server: Live, table: str) -> None:
    import pyarrow as pa

    server.sql(f"INSERT INTO {table} VALUES(1, 'ü', 1.5), (2, NULL, NULL)")
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    kind = "application/vnd.apache.arrow.stream"
    response = server.http.get(url, headers={"accept": kind})
    assert response.headers["content-type"] == kind
    found = pa.ipc.open_stream(response.content).read_all().to_pylist()
    assert [[row[name] for name in ("id", "status", "total")] for row in found] == [[1, "ü", 1.5], [2, None, None]]
    assert response.headers["etag"] != server.http.get(url).headers["etag"]


def test_resnapshot_page_has_a_snapshot_url_for_every_table(start: Callable[..., Live]) -> None:
    live = start(log={"retention_events": 2})
    for name in ("a", "b c"):
        live.sql(f'CREATE TABLE "{name}"(id INTEGER PRIMARY KEY)')
    sub = live.subscribe()
    for id in range(4):
        live.sql(f'INSERT INTO "b c" VALUES({id})')
    live.until(lambda: live.poll(sub)["resnapshot_required"])
    page = live.poll(sub)
    assert sorted(page["snapshot_urls"]) == ["a", "b c"]
    assert rows_of(live.http.get(page["snapshot_urls"]["a"]).text) == []
    assert rows_of(live.http.get(page["snapshot_urls"]["b c"]).text) == [[0], [1], [2], [3]]


# --- many at a time --------------------------------------------------------------------------------------


class Stuck:
    """Replaces `read_as_of`: reads until released, or until the client has disconnected."""

    def __init__(self) -> None:
        self.go, self.entered, self.gone = threading.Event(), 0, 0
        self.threads: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, *args: Any, gone: Callable[[], bool], **named: Any) -> Any:
        with self._lock:
            self.entered += 1
            self.threads.add(threading.current_thread().name)
        while not self.go.wait(0.01):
            if gone():
                with self._lock:
                    self.gone += 1
                raise Unavailable("gone")
        return read_as_of(*args, gone=gone, **named)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck()
    monkeypatch.setattr("headwater.serve.http.handlers.table_snapshots.read_as_of", made)
    monkeypatch.setattr("headwater.serve.http.handlers.table_snapshots.AT_ONCE", 2)
    yield made
    made.go.set()


def test_snapshots_beyond_the_limit_are_refused_with_429_without_delaying_feeds(
    server: Live, table: str, stuck: Stuck
) -> None:
    sub = server.subscribe(table)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(server.http.get, url) for _ in range(2)]
        try:
            server.until(lambda: stuck.entered == 2)
            refused = server.http.get(url)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["code"] == "limit_exceeded" and refused.json()["hint"]
            assert len(server.changes(sub)) >= 1 and server.sse(sub).changes(1)
        finally:
            stuck.go.set()
        assert [(found.result().status_code, rows_of(found.result().text)) for found in reading] == [
            (200, [[1, "a", 1.0]])
        ] * 2
    assert all(name.startswith("headwater-snapshot") for name in stuck.threads)
    assert server.http.get(url).status_code == 200


def test_disconnected_client_releases_its_snapshot_slot(
    server: Live, table: str, stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.http.get(f"/api/v1/snapshot/main/{table}").headers["location"]
    where = urlsplit(server.url)
    request = f"GET {url} HTTP/1.1\r\nhost: {where.netloc}\r\n\r\n".encode()
    with contextlib.ExitStack() as asking:
        for _ in range(2):
            one = asking.enter_context(socket.create_connection((where.hostname, where.port), PATIENCE))
            one.sendall(request)
        server.until(lambda: stuck.entered == 2)
        assert server.http.get(url).status_code == 429
    server.until(lambda: stuck.gone == 2)
    stuck.go.set()
    server.until(lambda: server.http.get(url).status_code == 200)
    assert [found.message for found in caplog.records if found.levelname == "ERROR"] == []


def test_historical_read_stops_after_its_reader_disconnects(server: Live, table: str) -> None:
    database = server.feeds.databases.database("main")
    before = database.source.head()
    server.sql(
        f"WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 3000) INSERT INTO {table}(id) SELECT i FROM n"
    )
    looks = 0

    def gone() -> bool:
        nonlocal looks
        looks += 1
        return looks == 3

    with pytest.raises(Unavailable, match="left"):
        read_as_of(database.source, database.log, shape_of(database.source, table), before, gone=gone)
    assert looks == 3


def test_server_stop_ends_a_running_snapshot_read(start: Callable[..., Live], stuck: Stuck) -> None:
    live = start(serve={"drain_seconds": 0.1})
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY)")
    url = live.http.get("/api/v1/snapshot/main/t").headers["location"]
    where = urlsplit(live.url)
    with socket.create_connection((where.hostname, where.port), PATIENCE) as asking:
        asking.sendall(f"GET {url} HTTP/1.1\r\nhost: {where.netloc}\r\n\r\n".encode())
        live.until(lambda: stuck.entered == 1)
        live.stop()
        assert asking.recv(65536)[:12] in (b"HTTP/1.1 503", b"")
    live.until(lambda: stuck.gone == 1)
