"""A PostgreSQL source whose log is removed or damaged under the running server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.conformance.live_server import Live
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import wait_until

from headwater.sources.postgres.capture.slot.slot import drop
from headwater.sources.postgres.connection import Server as Address

_numbers = count(1)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    postgres, name = shared_server(), f"lost_{os.getpid()}_{next(_numbers)}"
    with postgres.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    url, own = f"postgresql://postgres@/{name}?host={postgres.folder}", f"headwater_{name}"
    made = Live(tmp_path / "data", url=url, postgres={"slot": own, "publication": own})
    made.sql("CREATE TABLE t (id int PRIMARY KEY)")
    made.sql("INSERT INTO t VALUES (1)")
    yield made
    made.stop()
    with Address(name, url).connect() as admin:
        drop(admin, own, own)
    with postgres.connect() as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def remove(log: Path) -> None:
    for path in log.parent.glob(f"{log.name}*"):
        path.unlink()


def damage(log: Path) -> None:
    for path in log.parent.glob(f"{log.name}-wal"):
        path.write_bytes(b"")
    with log.open("r+b") as file:
        file.write(os.urandom(log.stat().st_size))


@pytest.mark.slow
@pytest.mark.parametrize("harm", [remove, damage])
def test_write_after_loss_of_log_is_refused_and_walsender_released(live: Live, harm: object) -> None:
    log, database = Path(live.config.data) / "main.log.db", live.app.database("main")
    with Address("x", database.source.address).connect() as other:  # type: ignore[attr-defined]
        harm(log)  # type: ignore[operator]
        other.execute("INSERT INTO t VALUES (2)")
        wait_until(lambda: live.http.get("/readyz").json().get("reasons") == ["log_damaged"], "readyz tells the damage")
        assert live.http.get("/readyz").status_code == 503
        refused = live.error("sql.exec", sql="INSERT INTO t VALUES (3)")
        assert refused["code"] == "unavailable" and "capture has failed" in refused["message"]
        assert (
            live.error("data.insert", into={"table": "t"}, rows=[{"id": {"t": "i64", "v": 4}}])["code"] == "unavailable"
        )
        tx = live.ok("tx.begin")["tx"]
        live.ok("sql.exec", sql="INSERT INTO t VALUES (5)", tx=tx)
        assert live.error("tx.commit", tx=tx)["code"] == "unavailable"
        assert other.execute("SELECT id FROM t ORDER BY id").fetchall() == [(1,), (2,)]
        walsenders = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'headwater'"
        slots = "SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()"
        wait_until(lambda: other.execute(slots).fetchone() == (0,), "no reader of the slot")
        assert other.execute(walsenders).fetchone() is not None
        assert live.http.get("/healthz").status_code == 200


@pytest.mark.slow
def test_restart_after_loss_of_log_begins_a_new_generation(live: Live) -> None:
    before = live.app.database("main").log.generation
    remove(Path(live.config.data) / "main.log.db")
    with Address("x", live.app.database("main").source.address).connect() as other:  # type: ignore[attr-defined]
        other.execute("INSERT INTO t VALUES (2)")
        wait_until(lambda: live.http.get("/readyz").status_code == 503, "readyz 503")
    live.restart()
    assert live.app.database("main").log.generation != before
    live.sql("INSERT INTO t VALUES (3)")
    assert live.http.get("/readyz").status_code == 200
