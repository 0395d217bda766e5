"""A stop ends the statements of callers that run longer than `serve.drain_seconds`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import serving
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import DatabaseConfig
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.settings import SqliteConfig

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
HOUR = 3600.0


@pytest.mark.parametrize("method", ["query.select", "sql.exec"])
def test_stop_ends_a_running_statement_of_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    runs, is_late = threading.Event(), Guard._is_late

    def noted(self: Guard) -> bool:
        if self._is_limited:
            runs.set()
        return is_late(self)

    monkeypatch.setattr(Guard, "_is_late", noted)
    sources: dict[str, Any] = {"sqlite": SqliteConfig(statement_seconds=HOUR)}
    with ThreadPoolExecutor() as threads, Whole(tmp_path, sources=sources) as files:
        files.run("CREATE TABLE t(k INTEGER PRIMARY KEY)")
        sql = ENDLESS if method == "query.select" else f"INSERT INTO t {ENDLESS}"
        with serving(files, drain_seconds=0.1) as client:
            asked = threads.submit(_ask, client.server.url, method, sql)
            assert runs.wait(PATIENCE)
        asked.result(PATIENCE)
        assert files.rows("SELECT count(*) FROM t") == [(0,)]


@pytest.fixture
def database() -> Iterator[str]:
    """Yield the name of a new PostgreSQL database, which is also that of its slot; drop both at the end."""
    name = f"stopping_{os.getpid()}"
    with shared_server().connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        yield name
        left = f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}' AND active"
        wait_until(lambda: admin.execute(left.encode()).fetchone() == (0,), "the slot is free")
        admin.execute(
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{name}'".encode()
        )
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("method", ["query.select", "sql.exec"])
def test_stop_ends_a_running_statement_of_postgresql(tmp_path: Path, database: str, method: str) -> None:
    url = f"postgresql://postgres@/{database}?host={shared_server().folder}"
    settings = PostgresConfig(slot=database, publication=database, statement_seconds=HOUR)
    running = (
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}' AND query LIKE '%RECURSIVE%' "
        "AND state = 'active'"
    )
    with (
        ThreadPoolExecutor() as threads,
        shared_server().connect() as admin,
        Whole(tmp_path, sources={"postgres": settings}, databases=(DatabaseConfig("main", url),)) as files,
    ):
        files.run("CREATE TABLE t(k int PRIMARY KEY)")
        sql = ENDLESS if method == "query.select" else f"INSERT INTO t {ENDLESS}"
        with serving(files, drain_seconds=0.1) as client:
            asked = threads.submit(_ask, client.server.url, method, sql)
            wait_until(lambda: admin.execute(running.encode()).fetchone() != (0,), "the statement runs")
        asked.result(PATIENCE)


def _ask(url: str, method: str, sql: str) -> None:
    with contextlib.suppress(httpx.TransportError):  # the server has stopped
        httpx.post(f"{url}/api/v1/rpc", json={"id": 1, "method": method, "params": {"sql": sql}}, timeout=None)
