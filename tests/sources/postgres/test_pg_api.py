"""The API over PostgreSQL: rows, statements, transactions, REST and feeds, with the codes that SQLite has."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.conformance.test_pull import log_url, rows, snapshot_url, version_of
from tests.conformance.test_snapshot_feeds import Folded
from tests.ranges.bulk_reads import folded
from tests.sources.postgres.pg_source import shared_server

from headwater.model.principal import ADMIN
from headwater.serve.gateway.kv import Entry, Kv
from headwater.serve.thread_bridge import Bridge
from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address

BY_ID = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
AFTER = {"after": True}
_numbers = count(1)


def i64(value: int) -> dict[str, Any]:
    return {"t": "i64", "v": value}


def text(value: str) -> dict[str, Any]:
    return {"t": "str", "v": value}


def changes(live: Live, sub: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row changes: the first of a new table comes after its schema change."""
    live.caught_up(sub)
    return [change for change in live.changes(sub) if change["op"] != "schema_change"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    postgres, name = shared_server(), f"api_{os.getpid()}"
    with postgres.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}")
    url, own = f"postgresql://postgres@/{name}?host={postgres.folder}", f"headwater_{name}"
    live = Live(tmp_path_factory.mktemp("api"), url=url, postgres={"slot": own, "publication": own})
    yield live
    live.stop()
    with Address(name, url).connect() as admin:
        drop(admin, own, own)
    with postgres.connect() as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    yield shared
    shared.leave()


@pytest.fixture
def table(live: Live) -> str:
    """Return a new table: id, numbered; email; score."""
    name = f"users{next(_numbers)}"
    live.ok(
        "schema.create_table",
        table=name,
        columns=[
            {"name": "id", "type": {"kind": "i64"}, "nullable": False, "auto_increment": True},
            {"name": "email", "type": {"kind": "str"}, "nullable": False},
            {"name": "score", "type": {"kind": "f64"}, "nullable": True},
        ],
        primary_key=["id"],
    )
    return name


# --- rows ------------------------------------------------------------------------------------------------


def test_described_table_has_its_key_and_column_types(live: Live, table: str) -> None:
    assert table in live.ok("schema.list_tables")["tables"]
    found = live.ok("schema.describe_table", table=table)
    assert found["primary_key"] == ["id"]
    kinds = [(column["name"], column["type"]["kind"], column["nullable"]) for column in found["columns"]]
    assert kinds == [("id", "i64", False), ("email", "str", False), ("score", "f64", True)]
    error = live.error("schema.create_table", table=table, columns=[{"name": "a", "type": {"kind": "i64"}}])
    assert error["code"] in ("conflict", "invalid_request")


def test_inserted_row_is_read_updated_and_deleted_with_its_tag(live: Live, table: str) -> None:
    users = {"table": table}
    done = live.ok("data.insert", into=users, rows=[{"email": text("a")}], returning=["id"])
    head = live.app.get("main").head()
    assert done == {
        "affected": 1,
        "last_insert_id": 1,
        "returning": [{"id": i64(1)}],
        "causality": {"format": "vector_clock_v2", "deps": [{"table": f"main.{table}", "v": head}]},
    }
    found = live.ok("data.get", table=users, pk=[i64(1)])
    assert found["row"] == {"id": i64(1), "email": text("a"), "score": {"t": "null"}}
    assert re.fullmatch(r'"row:[A-Za-z0-9_-]+"', found["etag"])
    change = {"table": users, "where": BY_ID, "args": [i64(1)], "set": {"score": {"t": "f64", "v": 0.5}}}
    done = live.ok("data.update", **change, if_match="W/" + found["etag"])
    assert done["affected"] == 1
    assert done["etag"] == live.ok("data.get", table=users, pk=[1])["etag"] != found["etag"]
    error = live.error("data.delete", table=users, where=BY_ID, args=[1], expected_etag=found["etag"])
    assert error["code"] == "conflict"
    assert live.ok("data.delete", table=users, where=BY_ID, args=[1])["affected"] == 1
    assert live.error("data.get", table=users, pk=[1])["code"] == "not_found"


def test_insert_with_a_failing_third_row_inserts_no_row(live: Live, table: str) -> None:
    users = {"table": table}
    live.ok("data.insert", into=users, rows=[{"id": i64(7), "email": text("x")}])
    head = live.app.get("main").head()
    rows = [{"id": i64(n), "email": text("y")} for n in (5, 6, 7)]
    assert live.error("data.insert", into=users, rows=rows)["code"] == "duplicate_key"
    rows[2] = {"email": {"t": "null"}}
    assert live.error("data.insert", into=users, rows=rows)["code"] == "invalid_request"
    assert live.sql(f"SELECT id FROM {table}") == [[7]] and live.app.get("main").head() == head


@pytest.mark.parametrize(
    ("method", "params", "code", "named"),
    [
        ("data.get", {"pk": [i64(1), i64(2)]}, "invalid_request", "1 values"),
        ("data.get", {"pk": [text("1")]}, "invalid_request", "kind i64"),
        ("data.insert", {"rows": [{"emial": 1}]}, "invalid_request", "emial"),
        ("data.update", {"where": BY_ID, "set": {"score": 1}}, "invalid_request", "param 0"),
        ("data.update", {"where": BY_ID, "args": [1], "set": {"nothing": 1}}, "invalid_request", "nothing"),
        ("data.delete", {"where": {"subquery": {}}}, "not_supported", "where"),
    ],
)
def test_bad_data_request_returns_its_error_code(
    live: Live, table: str, method: str, params: dict[str, Any], code: str, named: str
) -> None:
    error = live.error(method, **{"into" if method == "data.insert" else "table": {"table": table}}, **params)
    assert (error["code"], named in error["message"]) == (code, True), error


# --- statements ------------------------------------------------------------------------------------------


def test_statements_with_arguments_read_and_write_rows(live: Live, table: str) -> None:
    done = live.ok("sql.exec", sql=f"INSERT INTO {table} (email) VALUES ($1), ($2)", args=["a", "b"])["result"]
    assert done["affected"] == 2 and done["causality"]["deps"][0]["table"] == f"main.{table}"
    assert live.sql(f"SELECT id, email FROM {table} WHERE id > $1 ORDER BY id", 0) == [[1, "a"], [2, "b"]]
    assert live.sql("SELECT $1::numeric + 1", {"t": "dec", "v": "1.50"}) == [["2.50"]]


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("SELEC", "invalid_request"),
        ("SELECT * FROM nothing", "invalid_request"),
        ("SELECT 1; SELECT 2", "invalid_request"),
        ("BEGIN", "invalid_request"),
        ("COPY pg_class TO STDOUT", "invalid_request"),
        ("SELECT $1::int", "invalid_request"),
        ("SELECT 1 / 0", "invalid_request"),
        ("SELECT pg_drop_replication_slot('x')", "invalid_request"),
        ("DROP PUBLICATION x", "invalid_request"),
    ],
)
def test_refused_statement_returns_its_error_code(live: Live, sql: str, code: str) -> None:
    assert live.error("sql.exec", sql=sql)["code"] == code


@pytest.mark.parametrize("rest", ["WHERE id = ?", "WHERE id IN (?, ?)", "WHERE id = ? AND email = ?", "WHERE ? < id"])
def test_question_mark_parameter_is_refused_with_a_hint_on_dollar_parameters(live: Live, table: str, rest: str) -> None:
    sql = f"SELECT * FROM {table} {rest}"
    for method, more in (("sql.exec", {"args": [1]}), ("query.prepare", {})):
        error = live.error(method, sql=sql, **more)
        assert error["code"] == "invalid_request" and "$1, $2" in error["details"]["hint"], error
    assert "$1, $2" not in live.error("sql.exec", sql="SELEC '?'")["details"]["hint"]


def test_missing_table_is_reported_with_the_nearest_name(live: Live, table: str) -> None:
    for method in ("sql.exec", "query.select", "query.prepare"):
        hint = live.error(method, sql=f"SELECT * FROM {table}x")["details"]["hint"]
        assert hint.startswith("Did you mean 'users"), method


def test_transaction_shows_its_writes_and_ends_once_and_a_read_only_one_refuses_writes(live: Live, table: str) -> None:
    tx = live.ok("tx.begin")["tx"]
    live.ok("data.insert", into={"table": table}, rows=[{"email": "in"}], tx=tx)
    assert live.ok("data.get", table={"table": table}, pk=[1], tx=tx)["row"]["email"] == text("in")
    assert live.sql(f"SELECT count(*) FROM {table}") == [[0]]
    over = live.ok("tx.commit", tx_id=tx)
    assert (over["status"], len(over["causality"]["deps"])) == ("committed", 1)
    assert live.error("tx.commit", tx_id=tx)["code"] == "not_found"
    again = live.ok("tx.begin", read_only=True)["tx"]
    assert live.error("sql.exec", sql=f"DELETE FROM {table}", tx=again)["code"] == "invalid_request"
    assert live.ok("tx.rollback", tx=again)["status"] == "rolled_back"
    assert live.sql(f"SELECT email FROM {table}") == [["in"]]


def test_transaction_that_holds_locks_too_long_expires(live: Live, table: str) -> None:
    tx = live.ok("tx.begin")["tx"]
    live.sql(f"INSERT INTO {table} (email) VALUES ('late')", tx=tx)
    live.until(lambda: not live.app.get("main").status()["open_transactions"])
    assert live.error("tx.commit", tx=tx)["code"] in ("tx_expired", "not_found")
    assert live.sql(f"SELECT * FROM {table}") == []


def test_concurrent_writers_each_receive_their_own_answer(live: Live, table: str) -> None:
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for place in range(10):
                row = {"email": f"{worker}-{place}"}
                done = live.ok("data.insert", into={"table": table}, rows=[row], returning=["email"])
                assert done["returning"] == [{"email": text(row["email"])}]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert live.sql(f"SELECT count(*), count(DISTINCT email) FROM {table}") == [[60, 60]]


# --- REST ------------------------------------------------------------------------------------------------


def test_row_at_its_url_is_created_read_patched_and_deleted(live: Live, table: str) -> None:
    path = f"/api/v1/t/main/{table}/1"
    made = live.http.put(path, json={"email": "a@x", "score": 0.5})
    assert (made.status_code, made.headers["location"]) == (201, path)
    assert made.json() == {"id": 1, "email": "a@x", "score": 0.5}
    got = live.http.get(path)
    assert (got.status_code, got.content, got.headers["etag"]) == (200, made.content, made.headers["etag"])
    assert live.http.get(path, headers={"if-none-match": got.headers["etag"]}).status_code == 304
    changed = live.http.patch(path, json={"score": None})
    assert changed.json() == {"id": 1, "email": "a@x", "score": None}
    stale = live.http.patch(path, json={"score": 1}, headers={"if-match": got.headers["etag"]})
    assert stale.status_code == 412
    assert live.http.patch(path, json={"email": None}).status_code == 400
    assert live.http.delete(path).status_code == 204
    gone = live.http.get(path)
    assert (gone.status_code, gone.json()["code"]) == (404, "not_found")


# --- feeds -----------------------------------------------------------------------------------------------


def test_filter_delivers_the_rows_that_postgresql_matches(live: Live, table: str) -> None:
    cheap = live.subscribe(table, include=AFTER, where="score > 1.5 AND email <> 'no'")
    asked = live.subscribe(table, include=AFTER, where="email ~ '^a.c$' AND score IS DISTINCT FROM 2")
    live.sql(f"INSERT INTO {table} (email, score) VALUES ('abc', 2), ('no', 3), ('axc', 4), ('b', 1), ('ayc', NULL)")
    assert [change["after"]["email"] for change in changes(live, cheap)] == ["abc", "axc"]
    assert [change["after"]["email"] for change in changes(live, asked)] == ["axc", "ayc"]
    for where, code in (("nothing = 1", "invalid_request"), ("random() > score", "not_supported")):
        assert live.error("cdc.subscribe_table", table=table, where=where)["code"] == code


def test_feed_of_a_key_delivers_changes_of_that_key_only(live: Live, table: str) -> None:
    sub = live.subscribe(table, pk=[i64(2)])
    live.sql(f"INSERT INTO {table} (email) VALUES ('a'), ('b'), ('c')")
    live.sql(f"UPDATE {table} SET score = id")
    assert [(change["op"], change["pk"]) for change in changes(live, sub)] == [("insert", [2]), ("update", [2])]


@pytest.mark.parametrize("where", [None, "score >= 0"])
def test_snapshot_rows_and_later_changes_fold_to_the_table(live: Live, table: str, where: str | None) -> None:
    live.sql(f"INSERT INTO {table} (email, score) SELECT 'row', n FROM generate_series(1, 400) n")
    sub = live.subscribe(table, start="snapshot", **({} if where is None else {"where": where}))
    known, cursor = Folded(), {}
    writer = threading.Thread(target=_write, args=(live, table, 60))
    writer.start()
    while True:
        page = live.poll(sub, limit=50, **cursor)
        known.take(page["events"])
        if page["snapshot"]["done"]:
            break
        cursor = {"cursor": page["snapshot"]["cursor"]}
    writer.join()
    live.ok("cdc.ack", sub_id=sub["sub_id"], cursor=page["snapshot"]["cursor"])
    live.caught_up(sub)
    known.take(live.changes(sub, limit=10_000))
    names = ("id", "email", "score")
    assert known.rows == {row[0]: dict(zip(names, row, strict=True)) for row in live.sql(f"SELECT * FROM {table}")}


def _write(live: Live, table: str, times: int) -> None:
    dice = random.Random(1)
    for step in range(times):
        key = dice.randrange(1, 400)
        match dice.randrange(3):
            case 0:
                live.sql(f"INSERT INTO {table} (email, score) VALUES ('new', {step})")
            case 1:
                live.sql(f"UPDATE {table} SET score = {step} WHERE id BETWEEN {key} AND {key + 3}")
            case _:
                live.sql(f"DELETE FROM {table} WHERE id = {key}")


def test_feed_continues_after_a_restart(live: Live, table: str) -> None:
    sub = live.subscribe(table, include=AFTER)
    stream = live.sse(sub)
    live.sql(f"INSERT INTO {table} (email) VALUES ('a')")
    assert stream.next("insert").data["after"]["email"] == "a"
    live.restart()
    live.sql(f"INSERT INTO {table} (email) VALUES ('b')")
    assert [change["after"]["email"] for change in changes(live, sub)] == ["a", "b"]


# --- pulls -----------------------------------------------------------------------------------------------


def fill(live: Live, table: str, count: int) -> None:
    live.sql(f"INSERT INTO {table} (email, score) SELECT 'row ' || n, n FROM generate_series(1, {count}) n")


def test_snapshot_of_a_version_and_later_changes_fold_to_the_table(live: Live, table: str) -> None:
    fill(live, table, 400)
    version = version_of(live, table)
    writer = threading.Thread(target=_write, args=(live, table, 60))
    writer.start()
    found = []
    while writer.is_alive():
        found.append(rows(live, snapshot_url(table, version)))
    writer.join()
    live.sql(f"UPDATE {table} SET id = id + 1000 WHERE id < 4")
    found.append(rows(live, snapshot_url(table, version)))
    whole = [{"id": n, "email": f"row {n}", "score": float(n), "_misfit": None} for n in range(1, 401)]
    for then in found:
        assert then == whole
    now = version_of(live, table)
    changes = rows(live, log_url(table, int(version.split(".")[1]), int(now.split(".")[1])))
    assert folded(whole, changes, "id") == sorted(rows(live, snapshot_url(table, now)), key=repr)


def test_ranges_together_are_the_table_and_where_picks_rows(live: Live, table: str) -> None:
    fill(live, table, 300)
    version = version_of(live, table)
    ranges = live.ok("pull.ranges", table=table, target_bytes=1000)["ranges"]
    assert len(ranges) > 2
    parts = [rows(live, snapshot_url(table, version, range=one["id"], epoch=one["epoch"])) for one in ranges]
    assert [row["id"] for part in parts for row in part] == list(range(1, 301))
    some = rows(live, snapshot_url(table, version, where="email ~ '^row 1.$' AND score > 12"))
    assert [row["id"] for row in some] == list(range(13, 20))


def test_command_line_of_the_worker_does_not_show_the_database_url(live: Live, table: str) -> None:
    version = version_of(live, table)
    assert rows(live, snapshot_url(table, version)) == []
    pid = live._server._pulls._worker.pid
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"headwater.worker" in line and b"postgresql:" not in line


def test_snapshot_of_an_old_version_is_refused_without_before_images(live: Live, table: str) -> None:
    live.sql(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT")
    fill(live, table, 5)
    version = version_of(live, table)
    live.sql(f"UPDATE {table} SET score = 0 WHERE id = 3")
    assert live.http.get(snapshot_url(table, version)).status_code in (409, 410, 501)


def test_key_value_entries_are_stored_scanned_deleted_and_expired(live: Live) -> None:
    bridge, now = Bridge(threads=1), [1_000]
    kv = Kv(live.api, bridge, lambda: now[0])
    keys = [b"", b"\0", b"a", b"a\0", b"a\xff", b"b", b"\xff", b"\xff\xff"]

    async def use() -> None:
        assert await kv.get(ADMIN, "", b"a") is None
        assert await kv.put(ADMIN, "", [Entry(key, key * 2, 9) for key in keys]) == len(keys)
        assert await kv.put(ADMIN, "main", [Entry(b"a", b"\0new")]) == 1
        assert await kv.get_many(ADMIN, "default", [b"a", b"x", b""]) == [b"\0new", None, b""]
        assert [key async for key, _ in kv.scan(ADMIN, "main", b"a")] == [b"a", b"a\0", b"a\xff"]
        assert [key async for key, _ in kv.scan(ADMIN, "main", b"\xff")] == [b"\xff", b"\xff\xff"]
        assert await kv.delete(ADMIN, "main", b"b")
        now[0] += 9_000
        assert [key async for key, _ in kv.scan(ADMIN, "main")] == [b"a"]
        assert await kv.sweep(ADMIN, "main") == len(keys) - 2

    try:
        asyncio.run(use())
    finally:
        bridge.close()
