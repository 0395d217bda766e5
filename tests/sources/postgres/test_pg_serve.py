"""A whole server over PostgreSQL: committed changes arrive in a feed, also after a kill of our server."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.cli.cli_process import Served, run, run_json, served
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE

from headwater.app import App, Database
from headwater.config import Config, DatabaseConfig, LogConfig
from headwater.errors import HeadwaterError
from headwater.model.change import Op

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"


class Base:
    """A separate database: its name, its URL, and a session."""

    def __init__(self, name: str) -> None:
        self.name = name
        server = shared_server()
        with server.connect() as admin:
            admin.execute(f"CREATE DATABASE {name}")
        self.url = f"{name}=postgresql://postgres@/{name}?host={server.folder}"
        self.db = server.connect(name)
        self.db.execute(TABLE)

    def close(self) -> None:
        self.db.close()
        run("source", "detach", self.url)
        with shared_server().connect() as admin:
            admin.execute(f"DROP DATABASE {self.name} WITH (FORCE)")


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Iterator[Base]:
    made = Base(f"serve_{os.getpid()}_{abs(hash(request.node.name)) % 10_000}")
    yield made
    made.close()


def tailed(server: Served, base: Base, count: int) -> list[Any]:
    more = ("--since", "earliest", "--limit", str(count), "-o", "json")
    done = run("tail", f"{base.name}.t", "--server", server.url, *more)
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_feed_from_the_command_line_keeps_its_offsets_after_a_kill(base: Base, tmp_path: Path) -> None:
    with served(tmp_path, base.url) as server:
        base.db.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        found = tailed(server, base, 2)
        assert [each["offset"] for each in found] == [1, 2]
        base.db.execute("UPDATE t SET v = 'c' WHERE k = 1")
        server.process.send_signal(signal.SIGKILL)
    with served(tmp_path, base.url) as server:
        base.db.execute("DELETE FROM t WHERE k = 2")
        found = tailed(server, base, 4)
        assert [each["offset"] for each in found] == [1, 2, 3, 4]
        assert [each["op"] for each in found] == ["insert", "insert", "update", "delete"]
    assert run_json("source", "detach", base.url, cwd=tmp_path)["changed"] is True
    assert base.db.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
    assert run_json("source", "detach", base.url, cwd=tmp_path)["changed"] is False


def test_served_database_captures_every_row_of_a_large_transaction(base: Base, tmp_path: Path) -> None:
    name, _, url = base.url.partition("=")
    config = Config(data=str(tmp_path), databases=(DatabaseConfig(name, url),), log=LogConfig(flush_ms=5))
    app = App(config)
    app.start()
    try:
        database = app.database(name)
        base.db.execute("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 60000) n")
        base.db.execute("DELETE FROM t WHERE k <= 10")
        end = time.monotonic() + PATIENCE
        while not database.catch_up(1) or database.log.latest < 60_010:
            assert time.monotonic() < end, (database.log.latest, database.capture.error)
        parts = list(database.log.scan(after=0))
        assert {part.id for part in parts[:-1]} == {parts[0].id} and parts[-1].last
        assert sum(change.op is Op.INSERT for part in parts for change in part.changes) == 60_000
        found, reached = database.wait_for_head(PATIENCE)
        assert reached and found.head == 60_010
        assert app.status()[name].error is None and app.status()[name].lag_changes == 0
        database.log.flush()
        while database.source.status()["capture_rows"]:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        app.close()


def follows(database: Database) -> bool:
    """Return whether the source follows the database again."""
    try:
        return database.catch_up(1)
    except HeadwaterError:
        return False


def test_lost_slot_begins_a_new_generation(base: Base, tmp_path: Path) -> None:
    name, _, url = base.url.partition("=")
    config = Config(data=str(tmp_path), databases=(DatabaseConfig(name, url),), log=LogConfig(flush_ms=5))
    app = App(config)
    app.start()
    try:
        database = app.database(name)
        base.db.execute("INSERT INTO t VALUES (1, 'a')")
        assert database.catch_up(PATIENCE)
        before = database.log.generation
        slot = f"headwater_{name}"
        end = time.monotonic() + PATIENCE
        while True:  # once: a new slot of that name is made as soon as this one is gone
            assert time.monotonic() < end
            base.db.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            try:
                base.db.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            except psycopg.Error:
                continue
            break
        end = time.monotonic() + PATIENCE
        while database.log.generation == before:
            assert time.monotonic() < end, database.capture.error
            time.sleep(0.02)
        while not follows(database):
            assert time.monotonic() < end, database.capture.error
        base.db.execute("INSERT INTO t VALUES (2, 'b')")
        assert database.catch_up(PATIENCE)
        assert database.log.generation_first == 3 and database.log.latest == 3
    finally:
        app.close()
