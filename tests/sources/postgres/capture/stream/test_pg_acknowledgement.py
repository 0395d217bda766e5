"""Positions acknowledged to a server: only those that it has sent on the same connection."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.log.memory_log import MemoryLog
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig
from tests.sources.sqlite_source import MemoryNotes

from headwater.capture.capture import Capture
from headwater.errors import SourceMismatch
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of, status_update
from headwater.sources.postgres.capture.stream.transaction_assembly import Assembly
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.source import PostgresSource

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"


@pytest.fixture
def server(pg: Server) -> Iterator[Server]:
    """Yield a server that a test may stop."""
    found = Server(pg.programs)
    yield found
    found.stop()


def until(is_so: Callable[[], Any], step: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        step()
        time.sleep(0.01)


def end_server(own: PgRig) -> None:
    """Shut the server down in good order: it waits until we confirm all of its WAL."""
    kill = threading.Thread(target=own.server.kill, args=(signal.SIGINT,))
    kill.start()
    until(lambda: not kill.is_alive(), own.acknowledge)
    own.db.close()


def busy(server: Server, rows: int) -> None:
    """Write in another database: the server's WAL grows, and no change is for us."""
    with server.connect() as other:
        other.execute("CREATE TABLE busy(x text)")
        other.execute(f"INSERT INTO busy SELECT repeat('x', 1000) FROM generate_series(1, {rows})".encode())
        other.execute("DROP TABLE busy")


def rest(own: PgRig) -> None:
    """Acknowledge until the server retains no WAL for us."""
    until(lambda: own.slot_row()[2] < 100_000, own.acknowledge)


def end_of_log(own: PgRig) -> int:
    return lsn_of(own.db.execute("SELECT pg_current_wal_lsn()::text").fetchone()[0])  # type: ignore[index]


def idle_history(own: PgRig) -> Any:
    """Return a copy of the server's files from before an acknowledgement far behind the end of our log."""
    own.run("INSERT INTO t VALUES (1, 'logged')")
    own.pull()
    end_server(own)
    copy = own.server.copy()
    own.server.start()
    own.db = own.server.connect(own.name)
    busy(own.server, 5000)
    own.head()
    rest(own)
    return copy


def goes_on(own: PgRig) -> None:
    """Check that changes committed while we are stopped, below the position another history reached, are not lost."""
    assert lsn_of(own.slot_row()[1]) <= end_of_log(own)
    own.kill()
    own.run("INSERT INTO t VALUES (2, 'away')", "INSERT INTO t VALUES (3, 'away')")
    own.open()
    busy(own.server, 9000)
    own.run("INSERT INTO t VALUES (4, 'later')")
    own.pull()
    rest(own)
    assert own.fold() == own.rows()


def test_positions_of_the_old_primary_are_not_acknowledged_to_a_new_primary(server: Server) -> None:
    own = PgRig(server, "failed", TABLE)
    try:
        standby = idle_history(own)
        end_server(own)
        server.promote(standby)
        own.db = server.connect(own.name)
        own.head()
        assert own.source._pool._epoch == 1  # links may still lead to the old one
        own.acknowledge()
        goes_on(own)
    finally:
        own.close()


def test_positions_from_before_a_restore_are_not_acknowledged_to_the_restored_server(server: Server) -> None:
    own = PgRig(server, "restored", TABLE)
    try:
        backup = idle_history(own)
        own.kill()
        own.db.close()
        server.kill(signal.SIGINT)
        server.restore(backup)
        own.db = server.connect(own.name)
        own.open()
        own.run("INSERT INTO t VALUES (9, 'restored')")
        own.pull()
        own.acknowledge()
        own.source.close()  # it is remembered, and the server is told
        goes_on(own)
    finally:
        own.close()


def test_slot_created_again_after_a_failover_ends_the_history(server: Server) -> None:
    own = PgRig(server, "renewed", TABLE)
    try:
        standby = idle_history(own)
        own.kill()
        own.db.close()
        server.kill(signal.SIGINT)
        server.promote(standby)
        own.db = server.connect(own.name)
        own.run(f"SELECT pg_drop_replication_slot('{own.slot}')", "INSERT INTO t VALUES (2, 'unseen')")
        own.run(f"SELECT pg_create_logical_replication_slot('{own.slot}', 'pgoutput')")
        own.open(expect="re-created")
    finally:
        own.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_failover_after_a_crash_of_headwater_begins_a_new_history(server: Server, in_order: bool) -> None:
    """Changes sent but not logged may be lost with the old primary."""
    own = PgRig(server, f"beside_{in_order}".lower(), TABLE)
    try:
        own.run("INSERT INTO t VALUES (1, 'logged')")
        own.pull()
        own.acknowledge()
        own.source.close() if in_order else own.kill()
        own.db.close()
        server.kill(signal.SIGINT)
        server.promote()
        own.db = server.connect(own.name)
        own.open(expect="" if in_order else "unclean stop of ours")
        if not in_order:
            own.open(expect="unclean stop of ours")  # it does not forget
    finally:
        own.close()


def test_offsets_of_unlogged_changes_are_not_used_again_after_a_restart(own: PgRig) -> None:
    own.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO t VALUES (2, 'b')", "INSERT INTO t VALUES (3, 'c')")
    told = own.head()
    assert own.source.restart(generation="next", first=2) > told + 1


def test_offsets_continue_past_the_old_ones_after_the_log_is_lost(own: PgRig) -> None:
    own.run(*(f"INSERT INTO t VALUES ({n}, 'a')" for n in range(20)))
    own.pull()
    own.acknowledge()
    told = own.latest
    own.source.close()
    own.run("INSERT INTO t VALUES (100, 'away')")
    log = LiveLog(MemoryLog())
    source = PostgresSource(own.name, own.url, notes=log, config=own.config)
    capture = Capture(source, log, retention=Retention(), flush_seconds=0.01)
    try:
        generation = log.generation
        capture.start()
        assert capture.catch_up(PATIENCE)
        assert log.generation == generation and log.horizon > told + 1
        assert [change.after for part in log.scan(after=log.horizon - 1) for change in part.changes] == [(100, "away")]
    finally:
        capture.stop()
        source.close()


def test_slot_beyond_the_end_of_the_wal_is_not_used(own: PgRig) -> None:
    """Such a slot was acknowledged by another history, which the server accepts."""
    own.kill()
    wire = Address("x", own.url).replicate()
    options = f"proto_version '1', publication_names '{own.slot}'"
    until(lambda: own.slot_row()[0] is None, lambda: None)
    wire.exec_(f"START_REPLICATION SLOT {own.slot} LOGICAL 0/0 ({options})".encode())
    far = end_of_log(own) + (1 << 30)
    wire.put_copy_data(status_update(far, now_ms=0))
    wire.flush()
    until(lambda: own.slot_row()[2] < 0, lambda: None)
    wire.finish()
    own.notes = MemoryNotes()
    own.open()
    own.run("INSERT INTO t VALUES (1, 'seen')")
    own.pull()
    assert own.fold() == own.rows()


@pytest.fixture
def own(pg: Server, request: pytest.FixtureRequest) -> Iterator[PgRig]:
    found = PgRig(pg, "told_" + str(abs(hash(request.node.nodeid))), TABLE)
    yield found
    found.close()


def test_mismatched_history_is_refused_after_the_first_connection_broke(
    own: PgRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(own.server, 9000)
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.kill()
    own.log[-1] = msgspec.structs.replace(own.log[-1], id="1")  # not the transaction that this server has there
    tried = threading.Event()
    with monkeypatch.context() as broken:

        def feed(assembly: Assembly, message: bytes) -> Any:
            if tried.is_set():
                raise OSError("the connection is lost")
            tried.wait(0.2)  # a status that was sent is on its way
            tried.set()
            raise OSError("the connection is lost")

        broken.setattr(Assembly, "feed", feed)
        until(lambda: own.slot_row()[0] is None, lambda: None)  # the server has read all that we sent before
        before = own.slot_row()[1]
        own.open()
        assert tried.wait(PATIENCE)
        assert own.slot_row()[1] == before
    own.run("INSERT INTO t VALUES (2, 'b')")
    with pytest.raises(SourceMismatch, match="its history differs"):
        until(lambda: False, lambda: list(own.source.follow(after=own.latest)))


def test_idle_log_is_acknowledged_after_a_connection_broke(own: PgRig) -> None:
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    for _ in range(2):
        busy(own.server, 500)
        own.head()
        rest(own)
        own.kill_stream()
