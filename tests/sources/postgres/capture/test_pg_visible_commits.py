"""Commits that are streamed before they are visible, because a standby must confirm them first: no reader receives them
and no answer has their offset until they are visible.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.conformance.live_server import Live
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig, shared_server
from tests.sources.sqlite_source import MemoryNotes

from headwater.errors import HeadwaterError
from headwater.sources.postgres.capture import replication_buffer
from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.query import ReadResult

TABLE = ("CREATE TABLE t(id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'old')")
LOCALLY = "SET synchronous_commit = local"
_numbers = itertools.count(1)


def until(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := ask()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def await_standby(server: Server) -> None:
    """Let commits wait for a standby that does not exist, except those of `LOCALLY`."""
    with server.connect() as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        until(lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))


def forget_standby(server: Server) -> None:
    with server.connect() as admin:
        admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
        admin.execute("SELECT pg_reload_conf()")
        until(lambda: admin.execute("SHOW synchronous_standby_names").fetchone() == ("",))


class Unseen:
    """A statement that is committed and stays invisible until `release`."""

    def __init__(self, server: Server, database: str, sql: str) -> None:
        self._connection, self._admin = server.connect(database), server.connect()
        self._pid = self._connection.info.backend_pid
        self._thread = threading.Thread(target=self._commit, args=(sql.encode(),))
        self._thread.start()
        question = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = %s"
        until(lambda: self._admin.execute(question, [self._pid]).fetchone())

    def _commit(self, sql: bytes) -> None:
        with contextlib.suppress(psycopg.OperationalError):
            self._connection.execute(sql)

    def release(self) -> None:
        """End the wait for the standby, so that the commit becomes visible."""
        if self._thread.is_alive():
            self._admin.execute("SELECT pg_cancel_backend(%s)", [self._pid])
            self._thread.join(PATIENCE)
        self._connection.close()
        self._admin.close()


@pytest.fixture
def own(pg: Server) -> Iterator[PgRig]:
    made = PgRig(pg, f"unseen_{os.getpid()}_{next(_numbers)}", *TABLE)
    made.run("UPDATE t SET a = 'older'", "UPDATE t SET a = 'old'", LOCALLY)
    made.pull()
    await_standby(pg)
    yield made
    forget_standby(pg)
    made.close()


def ask(source: PostgresSource) -> tuple[Any, int, bool]:
    found = source.answer(source.analyse("SELECT a FROM t ORDER BY id"), {})
    assert isinstance(found, ReadResult)
    return [row[0] for row in found.rows], found.offset, found.settled


def test_commit_that_is_not_visible_is_held_with_every_later_commit(own: PgRig) -> None:
    hidden = Unseen(own.server, own.name, "UPDATE t SET a = 'new'")
    assert own.head() == 3  # the mark that tells this waits for no standby
    assert list(own.source.follow(after=2)) == []
    assert ask(own.source) == (["old"], 2, True)
    own.run("INSERT INTO t VALUES (2, 'behind')")
    assert own.head() == 4
    assert list(own.source.follow(after=2)) == []
    found = ask(own.source)
    assert (found[0], found[2]) == (["old", "behind"], False)  # of no place in the log: it has no tag
    hidden.release()
    assert [part.changes[0].after for part in own.pull()] == [(1, "new"), (2, "behind")]
    assert ask(own.source) == (["new", "behind"], 4, True)


def test_commit_that_is_not_visible_is_held_after_a_restart(own: PgRig) -> None:
    hidden = Unseen(own.server, own.name, "UPDATE t SET a = 'new'")
    own.run("CREATE TABLE mass(n int)", "INSERT INTO mass SELECT generate_series(1, 12000)")
    assert list(own.source.follow(after=2)) == []
    own.open()
    own.head()
    assert ask(own.source)[1:] != (own.source._held.latest, True)  # type: ignore[union-attr]
    hidden.release()
    own.pull()
    assert own.log[2].changes[0].after == (1, "new")
    assert ask(own.source) == (["new"], own.latest, True)


def test_large_transaction_that_is_not_visible_is_held(own: PgRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_buffer, "MOST_CHANGES", 1_000)
    own.open()
    hidden = Unseen(own.server, own.name, "INSERT INTO t SELECT n, 'many' FROM generate_series(10, 5009) n")
    until(lambda: own.source._held is not None and own.source._held.large)
    assert list(own.source.follow(after=2)) == []
    hidden.release()
    parts: list[Any] = until(lambda: list(own.source.follow(after=2)))
    assert (parts[0].first, parts[-1].upto, parts[-1].last) == (3, 5_002, True)


def test_server_shutdown_does_not_wait_for_invisible_commits(
    pg: Server,
) -> None:
    server = Server(pg.programs)
    own = PgRig(server, "stopped", *TABLE)
    await_standby(server)
    stopping = threading.Event()

    def follow() -> None:
        while not stopping.is_set():
            with contextlib.suppress(HeadwaterError):
                list(own.source.follow(after=0))
            own.source.wait(0.01)

    capture = threading.Thread(target=follow)
    try:
        hidden = Unseen(server, own.name, "UPDATE t SET a = 'new'")
        capture.start()
        own.head()
        server.kill(signal.SIGINT)
        server.start()
        stopping.set()
        capture.join(PATIENCE)
        own.db.close()
        own.db = server.connect(own.name)
        assert [part.changes[0].after for part in own.pull()] == [(1, "new")]
    finally:
        stopping.set()
        hidden.release()
        forget_standby(server)
        own.close()
        server.stop()


def test_new_slot_waits_for_commits_that_its_stream_would_omit(pg: Server) -> None:
    name = f"unseen_{os.getpid()}_{next(_numbers)}"
    url = f"postgresql://postgres@/{name}?host={pg.folder}"
    with pg.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    db, first, second = (pg.connect(name) for _ in range(3))
    for sql in TABLE:
        db.execute(sql.encode())
    source = PostgresSource(name, url, notes=MemoryNotes(), config=PostgresConfig())
    await_standby(pg)

    def is_awaited(one: Any) -> Any:
        """Whether the slot waits for the end of a transaction."""
        return db.execute(
            "SELECT 1 FROM pg_locks w JOIN pg_locks h USING (transactionid) "
            "WHERE NOT w.granted AND h.granted AND h.pid = %s",
            [one.info.backend_pid],
        ).fetchone()

    try:
        first.execute("BEGIN; SELECT pg_current_xact_id()")
        proof = threading.Thread(target=lambda: source.prove(generation="g", latest=0, read=lambda after: iter(())))
        proof.start()
        until(lambda: is_awaited(first))
        second.execute("BEGIN; SELECT pg_current_xact_id()")
        first.execute("ROLLBACK")
        until(lambda: is_awaited(second))
        hidden = Unseen(pg, name, "UPDATE t SET a = 'new'")  # before the slot is consistent, which does not tell of it
        second.execute("ROLLBACK")
        made = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND confirmed_flush_lsn IS NOT NULL"
        until(lambda: db.execute(made, [f"headwater_{name}"]).fetchone())
        hidden.release()
        proof.join(PATIENCE)
        assert ask(source) == (["new"], 0, True)
    finally:
        forget_standby(pg)
        source.close()
        for each in (db, first, second):
            each.close()
        with Address(name, url).connect() as admin:
            drop(admin, f"headwater_{name}", f"headwater_{name}")
        with pg.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_subscriber_of_a_stale_answer_reads_the_new_answer(tmp_path: Path) -> None:
    server, name = shared_server(), f"unseen_{os.getpid()}_{next(_numbers)}"
    url, slot = f"postgresql://postgres@/{name}?host={server.folder}", f"headwater_{name}"
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    with server.connect(name) as db:
        for sql in TABLE:
            db.execute(sql.encode())
    live = Live(tmp_path, url=url, postgres={"slot": slot, "publication": slot})
    try:
        query = live.ok("query.prepare", sql="SELECT a FROM t ORDER BY id")["query_id"]
        path = f"/api/v1/q/{query}"
        before = live.http.get(path)
        sub = live.ok("cdc.subscribe_query", query_id=query, start={"etag": before.headers["etag"]})
        await_standby(server)
        hidden = Unseen(server, name, "UPDATE t SET a = 'new'")
        page = live.ok("cdc.poll", sub_id=sub["sub_id"])
        assert (page["events"], page["caught_up"]) == ([], False)
        again = live.http.get(path, headers={"If-None-Match": before.headers["etag"]})
        assert (again.status_code, again.json()["data"]["rows"]) == (200, before.json()["data"]["rows"])
        hidden.release()
        told = until(lambda: live.ok("cdc.poll", sub_id=sub["sub_id"])["events"])
        after = live.http.get(path)
        assert after.json()["data"]["rows"] == [[{"t": "str", "v": "new"}]]
        assert told[-1]["new_etag"] == after.headers["etag"]
    finally:
        forget_standby(server)
        live.stop()
        with Address(name, url).connect() as admin:
            drop(admin, slot, slot)
        with server.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
