"""Prepared queries on PostgreSQL over HTTP: tags, 304s, causality, feeds, also after foreign writes and restarts."""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from tests.conformance.live_server import Live
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import Unavailable
from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, psycopg.Connection[Any]]]:
    postgres, name = shared_server(), f"queries_{os.getpid()}"
    with postgres.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}")
    url, own = f"postgresql://postgres@/{name}?host={postgres.folder}", f"headwater_{name}"
    live = Live(tmp_path_factory.mktemp("queries"), url=url, postgres={"slot": own, "publication": own})
    other = postgres.connect(name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("headwater.sources.postgres.capture.capture.CHECK_SECONDS", 0.05)  # every test makes a table
        yield live, other
    live.stop()
    other.close()
    with Address(name, url).connect() as admin:
        drop(admin, own, own)
    with postgres.connect() as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def live(shared: tuple[Live, Any]) -> Iterator[Live]:
    yield shared[0]
    shared[0].leave()


@pytest.fixture
def other(shared: tuple[Live, Any]) -> Any:
    """Return a session that bypasses our server."""
    return shared[1]


@pytest.fixture
def table(live: Live, other: Any) -> str:
    name = f"orders{next(_numbers)}"
    other.execute(f"CREATE TABLE {name}(id int PRIMARY KEY, status text, total numeric(10,2), note text)")
    other.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    other.execute(f"INSERT INTO {name} VALUES (1, 'open', 2.5), (2, 'shut', 1), (3, 'open', NULL)")
    wait_until(lambda: name in live.app.get("main").describe(), "the table to join the publication")
    return name


def prepared(live: Live, sql: str) -> str:
    found: str = live.ok("query.prepare", sql=sql)["query_id"]
    return found


def get(live: Live, query: str, *args: Any, **headers: str) -> httpx.Response:
    path = f"/api/v1/q/{query}" + (f"?args={quote(json.dumps(args))}" if args else "")
    return live.http.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_tag_is_valid_until_a_relevant_row_is_written(live: Live, other: Any, table: str) -> None:
    query = prepared(live, f"SELECT id, total FROM {table} WHERE status = $1 ORDER BY id")
    full = get(live, query, "open")
    assert full.status_code == 200 and not full.headers["etag"].startswith("W/")
    assert full.json()["data"]["rows"][0] == [{"t": "i64", "v": 1}, {"t": "dec", "v": "2.50"}]
    tag = full.headers["etag"]
    for outside in (
        f"INSERT INTO {table} VALUES (4, 'shut', 1)",
        f"UPDATE {table} SET note = 'x' WHERE id = 1",
        f"UPDATE {table} SET total = 9 WHERE id = 2",
        f"UPDATE {table} SET total = total WHERE id = 1",
        "CREATE TABLE IF NOT EXISTS elsewhere(id int)",
    ):
        other.execute(outside)
        assert get(live, query, "open", if_none_match=tag).status_code == 304, outside
    for inside in (
        f"UPDATE {table} SET total = 9 WHERE id = 1",
        f"UPDATE {table} SET status = 'open' WHERE id = 2",
        f"DELETE FROM {table} WHERE id = 3",
        f"TRUNCATE {table}",
        f"ALTER TABLE {table} ALTER COLUMN total TYPE numeric(10,3)",
    ):
        other.execute(inside)
        fresh = get(live, query, "open", if_none_match=tag)
        assert fresh.status_code == 200 and fresh.headers["etag"] != tag, inside
        tag = fresh.headers["etag"]


def test_update_without_a_before_image_invalidates_every_tag_it_may_affect(live: Live, other: Any, table: str) -> None:
    other.execute(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT")
    query = prepared(live, f"SELECT id FROM {table} WHERE status = 'open' ORDER BY id")
    by_key = prepared(live, f"SELECT note FROM {table} WHERE id = 1")
    tag, other_tag = get(live, query).headers["etag"], get(live, by_key).headers["etag"]
    other.execute(f"UPDATE {table} SET status = 'gone' WHERE id = 3")  # what it was is not told
    assert get(live, query, if_none_match=tag).status_code == 200
    assert get(live, by_key, if_none_match=other_tag).status_code == 304  # the key is
    tag = get(live, query).headers["etag"]
    other.execute(f"DELETE FROM {table} WHERE id = 2")
    assert get(live, query, if_none_match=tag).status_code == 200


def test_replaced_view_invalidates_its_tags(live: Live, other: Any, table: str) -> None:
    other.execute(f"CREATE VIEW {table}_v AS SELECT id FROM {table} WHERE status = 'open'")
    query = prepared(live, f"SELECT count(*) FROM {table}_v")
    tag = get(live, query).headers["etag"]
    assert get(live, query, if_none_match=tag).status_code == 304
    other.execute(f"CREATE OR REPLACE VIEW {table}_v AS SELECT id FROM {table}")
    found = get(live, query, if_none_match=tag)
    assert found.status_code == 200 and found.json()["data"]["rows"] == [[{"t": "i64", "v": 3}]]
    other.execute(f"CREATE OR REPLACE VIEW {table}_v AS SELECT id FROM {table} WHERE status = 'open'")
    assert get(live, query, if_none_match=tag).status_code == 200


def test_uncacheable_query_returns_no_tag(live: Live, table: str) -> None:
    found = get(live, prepared(live, f"SELECT now(), count(*) FROM {table}"))
    assert found.status_code == 200 and "etag" not in found.headers
    assert "no-store" in found.headers["cache-control"]


def test_nearest_rows_of_an_approximate_index_have_no_tag(live: Live, other: Any, table: str) -> None:
    other.execute("CREATE EXTENSION IF NOT EXISTS vector")
    other.execute(f"ALTER TABLE {table} ADD e vector(2)")
    other.execute(f"UPDATE {table} SET e = ARRAY[id, id]::vector")
    other.execute(f"CREATE INDEX ON {table} USING hnsw (e vector_l2_ops)")
    query = prepared(live, f"SELECT id FROM {table} WHERE status = 'open' ORDER BY e <-> $1::vector, id LIMIT 1")
    found = get(live, query, "[1,2]")
    assert found.json()["data"]["rows"] == [[{"t": "i64", "v": 1}]]
    assert "etag" not in found.headers and "approximate index" in json.dumps(live.ok("query.explain", query_id=query))


def test_least_citext_has_a_weak_tag_that_every_update_invalidates(live: Live, other: Any, table: str) -> None:
    other.execute("CREATE EXTENSION IF NOT EXISTS citext")
    other.execute(f"ALTER TABLE {table} ADD c citext")
    other.execute(f"UPDATE {table} SET c = CASE id WHEN 1 THEN 'ada' ELSE 'ADA' END")
    query = prepared(live, f"SELECT min(c)::text AS least FROM {table}")
    before = get(live, query)
    other.execute(f"UPDATE {table} SET note = 'moved behind the others' WHERE id = 1")
    found = get(live, query, if_none_match=before.headers["etag"])
    assert before.headers["etag"].startswith("W/")
    assert found.status_code == 200 and found.json()["data"]["rows"] != before.json()["data"]["rows"]


def test_ordered_aggregate_of_an_enclosing_query_has_no_tag(live: Live, table: str) -> None:
    query = prepared(live, f"SELECT (SELECT string_agg({table}.id::text, ',' ORDER BY {table}.note)) FROM {table}")
    assert "etag" not in get(live, query).headers


def test_condition_after_a_comment_that_a_carriage_return_ends_is_kept(live: Live, table: str) -> None:
    sql = f"SELECT count(*) AS n FROM {table} --all\rWHERE false"
    assert get(live, prepared(live, sql)).json()["data"]["rows"] == [[{"t": "i64", "v": 0}]]


def test_query_in_json_form_returns_304_for_its_tag(live: Live, table: str) -> None:
    where = {"op": "eq", "a": {"col": "status"}, "b": {"param": 0}}
    body = {"projection": [{"expr": {"col": "id"}}], "from": [{"table": "o"}], "where": where}
    inner = {"projection": [{"expr": {"col": "*"}}], "from": [{"table": table}]}
    form = {"with": [{"name": "o", "query": {"body": {"select": inner}}}], "body": {"select": body}}
    query = live.ok("query.prepare", query=form)["query_id"]
    found = get(live, query, "open")
    assert [row[0]["v"] for row in found.json()["data"]["rows"]] == [1, 3]
    assert get(live, query, "open", if_none_match=found.headers["etag"]).status_code == 304


def test_request_after_a_commit_never_returns_304_for_the_old_tag(live: Live, other: Any, table: str) -> None:
    """Many requests at once, each after its own commit: none gets a 304 for its earlier tag."""
    query = prepared(live, f"SELECT id, total FROM {table} WHERE id = $1")
    stale: list[int] = []

    def work(key: int) -> None:
        session = shared_server().connect(other.info.dbname)
        with httpx.Client(base_url=live.http.base_url, timeout=PATIENCE) as http:
            path = f"/api/v1/q/{query}?args=[{key}]"
            session.execute(f"INSERT INTO {table} VALUES ({key}, 'x', 0)".encode())
            for number in range(12):
                tag = http.get(path).headers["etag"]
                session.execute(f"UPDATE {table} SET total = {number + 1} WHERE id = {key}".encode())
                found = http.get(path, headers={"if-none-match": tag})
                if found.status_code != 200 or found.json()["data"]["rows"][0][1]["v"] != f"{number + 1}.00":
                    stale.append(key)
        session.close()

    threads = [threading.Thread(target=work, args=(key,)) for key in range(100, 106)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stale == []


def test_read_with_a_causality_token_sees_the_write(live: Live, table: str) -> None:
    query = prepared(live, f"SELECT count(*) FROM {table}")
    done = live.ok("data.insert", into={"table": table}, rows=[{"id": {"t": "i64", "v": 50}}])
    token = base64.urlsafe_b64encode(json.dumps(done["causality"]).encode()).decode()
    found = get(live, query, x_headwater_causality=token)
    assert found.status_code == 200 and found.json()["data"]["rows"] == [[{"t": "i64", "v": 4}]]


def test_feeds_report_a_stale_answer_also_after_a_restart(live: Live, other: Any, table: str) -> None:
    query = prepared(live, f"SELECT id, total FROM {table} WHERE status = $1 ORDER BY id")
    params = {"query_id": query, "args": [{"t": "str", "v": "open"}], "format": "plain_json"}
    sub = live.ok("cdc.subscribe_query", **params)
    stream = live.get(f"/api/v1/q/{query}/events?args={quote(json.dumps(['open']))}")
    other.execute(f"INSERT INTO {table} VALUES (10, 'shut', 1)")
    other.execute(f"INSERT INTO {table} VALUES (11, 'open', 1)")
    event = stream.next("invalidate").data
    assert event["table"] == table
    live.caught_up(sub)
    (told,) = live.changes(sub)
    assert told["pk"] == [11] and told["reason"]["condition"] == "status = 'open'"
    assert get(live, query, "open").headers["etag"] == event["etag"]
    live.restart()
    live.until(lambda: get(live, query, "open", if_none_match=event["etag"]).status_code == 304)
    other.execute(f"UPDATE {table} SET total = 5 WHERE id = 11")
    live.caught_up(sub)
    assert [each["reason"]["columns"] for each in live.changes(sub)][-1] == ["total"]
    assert get(live, query, "open", if_none_match=event["etag"]).status_code == 200


@pytest.mark.parametrize("is_first", [False, True])
def test_feed_of_a_replaced_view_reports_changes_of_its_new_table(
    live: Live, other: Any, table: str, is_first: bool
) -> None:
    other.execute(f"CREATE TABLE {table}_b(id int PRIMARY KEY)")
    other.execute(f"CREATE VIEW {table}_v AS SELECT id FROM {table}")
    query = prepared(live, f"SELECT count(*) FROM {table}_v")
    stream = live.get(f"/api/v1/q/{query}/events")
    if not is_first:
        other.execute(f"INSERT INTO {table} VALUES (20, 'open', 1)")
        assert stream.next("invalidate").data["table"] == table
    other.execute(f"CREATE OR REPLACE VIEW {table}_v AS SELECT id FROM {table}_b")
    other.execute(f"INSERT INTO {table}_b VALUES (1)")
    # Of the row and of the view: one event for both if the row is in the log when the new view is noticed.
    heard = [stream.next("invalidate").data]
    while get(live, query, if_none_match=heard[-1]["etag"]).status_code != 304:
        heard.append(stream.next("invalidate").data)
    assert {event["table"] for event in heard} == {f"{table}_b"} and len(heard) <= 2
    assert get(live, query).json()["data"]["rows"] == [[{"t": "i64", "v": 1}]]


@pytest.mark.parametrize("first", ["the view", "the row"])
def test_tag_of_replaced_view_equals_tag_of_last_invalidate(
    live: Live, other: Any, table: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log may have the new view and a row of its new table in either order."""
    other.execute(f"CREATE TABLE {table}_b(id int PRIMARY KEY)")
    wait_until(lambda: f"{table}_b" in live.app.get("main").describe(), "the table to join the publication")
    other.execute(f"CREATE VIEW {table}_v AS SELECT id FROM {table}")
    query = prepared(live, f"SELECT count(*) FROM {table}_v")
    stream = live.get(f"/api/v1/q/{query}/events")
    statements = [f"CREATE OR REPLACE VIEW {table}_v AS SELECT id FROM {table}_b", f"INSERT INTO {table}_b VALUES (1)"]
    heard = []
    if first == "the view":
        for statement in statements:
            other.execute(statement)
            heard.append(stream.next("invalidate").data)
    else:
        with monkeypatch.context() as held:
            held.setattr(live.app.get("main")._attachment, "announce", refuse)  # type: ignore[attr-defined]
            for statement in statements:
                other.execute(statement)
            heard.append(stream.next("invalidate").data)
        heard.append(stream.next("invalidate").data)
    assert [event["table"] for event in heard] == [f"{table}_b"] * 2
    assert get(live, query).headers["etag"] == heard[1]["etag"] != heard[0]["etag"]


def refuse(*_: Any) -> None:
    raise Unavailable("the announcement of new definitions is held back")


def test_replaced_view_is_reported_to_its_subscribers_once(live: Live, other: Any, table: str) -> None:
    """Exactly once, with the tag of the next answer; confirmed feeds report it if the answer differs."""
    other.execute(f"CREATE VIEW {table}_v AS SELECT id FROM {table} WHERE status = 'open'")
    query = prepared(live, f"SELECT count(*) FROM {table}_v")
    plain = prepared(live, f"SELECT id FROM {table} WHERE status = 'shut' ORDER BY id")
    before = get(live, query).headers["etag"]
    sub = live.ok("cdc.subscribe_query", query_id=query, format="plain_json")
    quiet = live.ok("cdc.subscribe_query", query_id=plain, confirm=True)
    stream = live.get(f"/api/v1/q/{query}/events")
    other.execute(f"CREATE OR REPLACE VIEW {table}_v AS SELECT id FROM {table}")
    event = stream.next("invalidate").data
    found = get(live, query, if_none_match=before)
    assert found.status_code == 200 and found.json()["data"]["rows"] == [[{"t": "i64", "v": 3}]]
    assert found.headers["etag"] == event["etag"]
    assert get(live, query, if_none_match=event["etag"]).status_code == 304
    other.execute(f"INSERT INTO {table} VALUES (30, 'open', 1)")
    assert stream.next("invalidate").data["etag"] == get(live, query).headers["etag"]
    live.caught_up(sub)
    told, row = live.changes(sub)
    assert (told["table"], told["ddl"]) == (table, f"-- view {table}_v was redefined")
    assert (told["etag"], row["pk"]) == (event["etag"], [30])
    live.caught_up(quiet)
    assert live.changes(quiet) == []  # its answer is the same


def test_tags_are_valid_in_every_format_and_patches_have_the_change(live: Live, other: Any, table: str) -> None:
    query = prepared(live, f"SELECT id, total, status FROM {table} ORDER BY id")
    for accept in ("text/csv", "application/vnd.apache.arrow.stream", "application/json"):
        found = get(live, query, accept=accept)
        assert found.status_code == 200 and found.content
        assert get(live, query, accept=accept, if_none_match=found.headers["etag"]).status_code == 304
    tag = get(live, query).headers["etag"]
    assert live.ok("query.patch", query_id=query, base_etag=tag)["not_modified"]
    other.execute(f"UPDATE {table} SET total = 77 WHERE id = 1")
    after = live.ok("query.patch", query_id=query, base_etag=tag)
    assert not after["not_modified"] and after["data"]["key"] == [0] and "77.00" in json.dumps(after)


def test_explain_reports_why_a_query_is_not_cacheable(live: Live, table: str) -> None:
    query = prepared(live, f"SELECT id FROM {table} WHERE status = $1 LIMIT 1")
    assert "add a key to ORDER BY" in json.dumps(live.ok("query.explain", query_id=query))
