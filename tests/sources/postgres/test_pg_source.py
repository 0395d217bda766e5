"""The source on real servers: committed changes are followed once, in order, over every failure."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psycopg
import pytest
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import GENERATION, PgRig

from headwater.errors import (
    Busy,
    HeadwaterError,
    InvalidRequest,
    NotSupported,
    SourceUnfit,
    Unavailable,
)
from headwater.sources.postgres.capture.slot.slot import LogOrigin, ServerIdentity, Slot, drop_slot, judge
from headwater.sources.postgres.connection import Server as Address
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.source import PostgresSource

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"
FULL = "ALTER TABLE t REPLICA IDENTITY FULL"


def test_committed_changes_are_followed_in_order(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (0, 'before')")
    own.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "UPDATE t SET v = 'A' WHERE k = 1", "DELETE FROM t WHERE k = 2")
    assert [len(part.changes) for part in own.pull()] == [2, 1, 1]
    assert own.fold() == {1: (1, "A")}
    assert own.source.describe()["t"] is own.log[-1].changes[0].table
    assert own.source.read("SELECT k, v FROM t ORDER BY k").rows == ((0, "before"), (1, "A"))
    assert own.source.read("SELECT :a::int + 1, ':b'", {"a": 4}).rows == ((5, ":b"),)
    assert own.source.read("SELECT $1::text", ["x"]).offset == 4


# --- nothing lost, nothing twice -----------------------------------------------------------------------------


def test_changes_are_delivered_again_until_they_are_acknowledged(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "DELETE FROM t")
    own.head()
    once = list(own.source.follow(after=0))
    assert list(own.source.follow(after=0)) == once
    assert [part.first for part in own.source.follow(after=1)] == [2, 3]
    own.source.acknowledge(2)
    assert [part.first for part in own.source.follow(after=2)] == [3]


def test_killed_connection_is_reopened_and_each_change_is_captured_once(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    for number in range(30):
        own.run(f"INSERT INTO t VALUES ({number}, 'x')")
        if number % 7 == 3:
            own.kill_stream()
        if number % 5 == 0:
            own.pull()
        if number % 10 == 0:
            own.acknowledge()
    own.pull()
    assert own.fold() == own.rows() and own.latest == 30
    assert own.source.status()["connections"] > 1


def test_unlogged_changes_are_delivered_again_under_the_same_offsets(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, FULL)
    own.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO t VALUES (2, 'b')")
    own.pull()
    own.acknowledge()
    own.run("UPDATE t SET v = 'c'", "ALTER TABLE t ADD COLUMN w int", "INSERT INTO t VALUES (3, 'd', 4)")
    own.head()
    lost = list(own.source.follow(after=own.latest))
    own.open()
    assert own.pull() == lost
    own.run("INSERT INTO t VALUES (5, 'e', 6)")
    own.open()  # logged, but not acknowledged: the server sends it again
    own.open()
    assert [change.after for part in own.pull() for change in part.changes] == [(5, "e", 6)]
    assert own.fold() == own.rows()
    assert own.log[-1].changes[0].table.version == 2


def test_capture_continues_after_the_server_restarts(own_server: Server) -> None:
    own = PgRig(own_server, "restarted", TABLE)
    try:
        for number in range(4):
            own.run(f"INSERT INTO t SELECT {number * 1000} + n, 'x' FROM generate_series(1, 700) n")
            if number % 2:
                own.pull()
                own.acknowledge()
            kill = threading.Thread(target=own_server.kill, args=(signal.SIGQUIT if number < 2 else signal.SIGINT,))
            kill.start()
            while kill.is_alive():  # an orderly end waits until we have everything
                with contextlib.suppress(HeadwaterError):
                    own.log += own.source.follow(after=own.latest) if number == 3 else ()
                own.acknowledge()
                time.sleep(0.01)
            with pytest.raises(HeadwaterError):
                own.source.head()
            own_server.start()
            own.db.close()
            own.db = own_server.connect(own.name)
        own.pull()
        assert own.fold() == own.rows() and own.latest == 2800
    finally:
        own.close()


@pytest.fixture
def own_server(pg: Server) -> Iterator[Server]:
    server = Server(pg.programs)
    yield server
    server.stop()


# --- continuity ----------------------------------------------------------------------------------------------


def test_slot_dropped_and_created_again_ends_the_history(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.acknowledge()
    own.source.close()
    drop_slot(own.db, own.slot)
    own.run("INSERT INTO t VALUES (2, 'unseen')")
    own.open(expect="slot is gone")
    own.run(f"SELECT pg_create_logical_replication_slot('{own.slot}', 'pgoutput')")
    own.open(expect="re-created")
    own.source.restart(generation="next", first=100)
    own.run("INSERT INTO t VALUES (3, 'seen')")
    assert own.head() == 100
    assert [(part.first, part.changes[0].after) for part in own.source.follow(after=99)] == [(100, (3, "seen"))]
    assert own.source.prove(generation=GENERATION, latest=1, read=own.read) != ""
    assert own.source.prove(generation="next", latest=99, read=lambda after: iter(())) == ""


def test_slot_dropped_while_headwater_reads_ends_the_history(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    while own.slot_row() is not None:
        own.kill_stream()
        with contextlib.suppress(psycopg.errors.ObjectInUse):
            own.run(f"SELECT pg_drop_replication_slot('{own.slot}')")
    own.run("INSERT INTO t VALUES (1, 'unseen')")
    assert re.search("gone|does not exist", own.lost())
    own.source.reopen()
    own.source.restart(generation="next", first=7)
    own.run("INSERT INTO t VALUES (2, 'seen')")
    assert own.head() == 7


def test_log_is_not_continued_from_another_server(rig: Callable[..., PgRig], own_server: Server) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.acknowledge()
    other = PgRig(own_server, own.name, TABLE)
    other.source.close()
    other.notes, other.log = own.notes, own.log
    other.open(expect="another server")
    other.close()


def _end(own: PgRig) -> None:
    """Shut the server down in good order, for which we must receive all of its WAL."""
    kill = threading.Thread(target=own.server.kill, args=(signal.SIGINT,))
    kill.start()
    while kill.is_alive():
        with contextlib.suppress(HeadwaterError):
            own.log += own.source.follow(after=own.latest)
        own.acknowledge()
        time.sleep(0.01)
    own.db.close()


def test_server_shuts_down_while_a_streamed_prepared_transaction_is_open(own_server: Server) -> None:
    """The server waits until we confirm all of its WAL, and the transaction stays open beyond that."""
    own = PgRig(own_server, "prepared", TABLE)
    try:
        own.run("INSERT INTO t VALUES (0, 'first')")
        own.run("BEGIN", "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 5000) n", "PREPARE TRANSACTION 'p'")
        assert own.head() == 1
        for _ in range(2):
            _end(own)
            own_server.start()
            own.db = own_server.connect(own.name)
            own.run(f"INSERT INTO t VALUES ({9000 + own.latest}, 'between')")
            own.pull()
        own.run("COMMIT PREPARED 'p'")
        own.pull()
        assert own.fold() == own.rows() and own.latest == 5003
    finally:
        own.close()


def test_failover_without_loss_keeps_the_history_and_a_lossy_failover_ends_it(own_server: Server) -> None:
    own = PgRig(own_server, "promoted", TABLE)
    try:
        own.run("INSERT INTO t VALUES (1, 'a')")
        own.pull()
        _end(own)
        own_server.promote()
        own.db = own_server.connect(own.name)
        own.run("INSERT INTO t VALUES (2, 'b')")
        assert [part.first for part in own.pull()] == [2]
        own.open()  # also when it is proven anew, after the place where the histories parted
        own.run("INSERT INTO t VALUES (3, 'c')")
        own.pull()
        _end(own)
        behind = own_server.copy()
        own_server.start()
        own.db = own_server.connect(own.name)
        own.run("INSERT INTO t VALUES (4, 'lost')")
        own.pull()
        _end(own)
        own_server.promote(behind)
        own.db = own_server.connect(own.name)
        own.run("INSERT INTO t VALUES (5, 'other')")
        assert "failover lost" in own.lost()
        own.open(expect="failover lost")
    finally:
        own.close()


def _set_back(own: PgRig) -> None:
    """Log a change, then restore the server's files from before it."""
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    _end(own)
    copy = own.server.copy()
    own.server.start()
    own.db = own.server.connect(own.name)
    own.run("INSERT INTO t VALUES (2, 'ours')")
    own.pull()
    _end(own)
    own.source.close()
    own.server.restore(copy)
    own.db = own.server.connect(own.name)


def test_backup_older_than_the_log_ends_the_history(own_server: Server) -> None:
    own = PgRig(own_server, "behind", TABLE)
    try:
        _set_back(own)
        own.open(expect="restored from a backup")
        own.source.restart(generation="next", first=10)
        own.run("INSERT INTO t VALUES (3, 'seen')")
        assert own.head() == 10
    finally:
        own.close()


def test_copy_with_different_later_transactions_ends_the_history(own_server: Server) -> None:
    """The copy has our identity and a longer WAL: only its transactions differ."""
    own = PgRig(own_server, "copied", TABLE)
    try:
        _set_back(own)
        own.run("INSERT INTO t SELECT n, 'theirs' FROM generate_series(2, 500) n", "SELECT pg_switch_wal()", "VACUUM t")
        own.open()
        own.run("INSERT INTO t VALUES (1000, 'theirs')")
        assert "its history differs" in own.lost()
        own.source.reopen()
        own.source.restart(generation="next", first=10)
        own.run("INSERT INTO t VALUES (1001, 'seen')")
        assert own.head() == 10
    finally:
        own.close()


FACTS = LogOrigin(system="1", timeline=1, database="d", position=500, confirmed=600)
SLOT = Slot("pgoutput", "d", 0, 600, 400, "reserved", False, 0, None)


@pytest.mark.parametrize(
    ("identity", "slot", "reason"),
    [
        (ServerIdentity("1", 1, 900), SLOT, ""),
        (ServerIdentity("1", 2, 900, {1: 600}), SLOT, ""),
        # What we told of the old history ends where the histories parted: a slot behind that was made there.
        (ServerIdentity("1", 2, 900, {1: 550}), msgspec.structs.replace(SLOT, confirmed=550), ""),
        (ServerIdentity("1", 2, 900, {1: 550}), msgspec.structs.replace(SLOT, confirmed=551), "re-created"),
        (ServerIdentity("1", 2, 900, {1: 499}), SLOT, "failover lost"),
        (ServerIdentity("1", 3, 900, {2: 700}), SLOT, "does not come from"),
        (ServerIdentity("2", 1, 900), SLOT, "another server"),
        (ServerIdentity("1", 1, 499), SLOT, "restored"),
        (ServerIdentity("1", 1, 599), SLOT, "beyond the end"),
        (ServerIdentity("1", 1, 599), msgspec.structs.replace(SLOT, confirmed=599), ""),
        (ServerIdentity("1", 1, 900), None, "gone"),
        (ServerIdentity("1", 1, 900), msgspec.structs.replace(SLOT, wal_status="lost"), "removed changes"),
        (ServerIdentity("1", 1, 900), msgspec.structs.replace(SLOT, confirmed=601), "re-created"),
    ],
)
def test_server_or_slot_of_another_history_is_rejected_with_the_reason(
    identity: ServerIdentity, slot: Slot | None, reason: str
) -> None:
    found = judge(FACTS, identity, slot, "d")
    assert (found == "") if not reason else reason in found


def test_role_that_may_not_replicate_is_refused_with_the_statement_that_fixes_it(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE bare(x int)", "CREATE TABLE whole(x int)", "ALTER TABLE whole REPLICA IDENTITY FULL")
    found = own.source.findings()
    assert not [each for each in found if each.fatal]
    assert 'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;' in {each.remedy for each in found}
    role = f"weak_{own.name}"
    own.run(f"CREATE ROLE {role} LOGIN")
    try:
        weak = PostgresSource("weak", own.url.replace("postgres@", f"{role}@"), notes=own.notes, config=own.config)
        with pytest.raises(SourceUnfit, match="may not replicate") as caught:
            weak.prove(generation="x", latest=0, read=lambda after: iter(()))
        assert f'ALTER ROLE "{role}" REPLICATION;' in caught.value.hint
        weak.close()
    finally:
        own.run(f"DROP ROLE {role}")


def test_connection_error_does_not_show_the_password() -> None:
    for url in ("postgresql://u:s3cret@nowhere.invalid/d", "postgresql://u:s3cret@[bad/d", "postgresql://u@h:s3cret/d"):
        with pytest.raises(HeadwaterError) as caught:
            Address("main", url).connect()
        assert "s3cret" not in caught.value.message + caught.value.hint


# --- bounds --------------------------------------------------------------------------------------------------


def test_slot_of_an_idle_table_does_not_retain_the_wal_of_other_tables(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE other(x text)", "ALTER TABLE other REPLICA IDENTITY FULL", tables=("t",))
    own.run("INSERT INTO t VALUES (1, 'a')")
    own.pull()
    own.acknowledge()
    first = own.slot_row()[1]
    own.run("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
    assert own.slot_row()[2] > 1_000_000
    end = time.monotonic() + PATIENCE
    while own.slot_row()[2] > 100_000:
        assert time.monotonic() < end, own.slot_row()
        own.acknowledge()
        time.sleep(0.05)
    assert own.slot_row()[1] != first and own.pull() == []
    own.open()
    own.run("INSERT INTO t VALUES (2, 'b')")
    assert [part.first for part in own.pull()] == [2]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.sources.postgres.capture.replication_buffer.MOST_CHANGES", 2_000)


def test_large_transaction_is_delivered_in_parts_within_the_buffer_limit(
    small: None, rig: Callable[..., PgRig]
) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (0, 'first')", "INSERT INTO t SELECT n, 'x' FROM generate_series(1, 50000) n")
    most = 0
    end = time.monotonic() + PATIENCE
    while own.latest < 50_001:
        assert time.monotonic() < end
        for part in own.source.follow(after=own.latest):
            most = max(most, own.source._held.changes)  # type: ignore[union-attr]
            own.log.append(part)
        own.acknowledge()
        time.sleep(0.01)
    assert most <= 2_000 + 512
    assert own.fold() == own.rows()
    assert [part.start for part in own.log[1:]] == [part.first - 2 for part in own.log[1:]]
    assert own.pull() == []


def test_large_transaction_that_was_not_logged_is_delivered_again(small: None, rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    own.run("INSERT INTO t SELECT n, 'x' FROM generate_series(1, 10000) n", "ALTER TABLE t ADD w int")
    own.run("INSERT INTO t SELECT n, 'y', n FROM generate_series(10001, 20000) n")
    end = time.monotonic() + PATIENCE
    kills, begun = 6, 0
    while own.latest < 20_001:
        assert time.monotonic() < end
        parts = own.source.follow(after=own.latest)
        taken = list(itertools.islice(parts, 3)) if kills else list(parts)
        if taken and taken[-1].last:
            own.log += taken
            own.acknowledge()
        elif taken:
            begun += 1
            # Only what has begun is cut off, and not for ever: a slow machine would never get to the end of it.
            if kills and begun % 2 == 0:
                kills -= 1
                own.kill_stream()
        time.sleep(0.05)
    assert not kills
    assert own.fold() == own.rows()
    assert own.latest == 20_001  # one of them tells the new shape


# --- where it stands -----------------------------------------------------------------------------------------


def test_head_includes_every_earlier_commit(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    counted, wrong = itertools.count(1), []

    def keys_up_to(head: int) -> set[Any]:
        return {part.changes[0].after[0] for part in own.source.follow(after=0) if part.upto <= head}  # type: ignore[index]

    def write() -> None:
        with own.server.connect(own.name) as db:
            for _ in range(40):
                key = next(counted)
                db.execute("INSERT INTO t VALUES (%s, 'x')", [key])
                head, end = own.head(), time.monotonic() + PATIENCE
                while key not in keys_up_to(head):  # one before it may be a moment from being visible
                    if time.monotonic() > end:
                        wrong.append(key)
                        return

    threads = [threading.Thread(target=write) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert own.head() == 240


def test_head_is_unavailable_while_the_stream_is_behind(
    monkeypatch: pytest.MonkeyPatch, rig: Callable[..., PgRig]
) -> None:
    own = rig(TABLE)
    monkeypatch.setattr("headwater.sources.postgres.capture.replication_buffer.MOST_CHANGES", 1)
    own.open()
    own.run("INSERT INTO t VALUES (1, 'a')", "INSERT INTO t VALUES (2, 'b')", "INSERT INTO t VALUES (3, 'c')")
    assert own.source.read_head().settled is False
    with pytest.raises(Unavailable):
        own.source.head()
    while own.latest < 3:
        own.log += own.source.follow(after=own.latest)
        own.acknowledge()
    assert own.head() == 3  # as soon as the stream can tell


def test_schema_number_changes_with_every_schema_change(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE VIEW w AS SELECT k FROM t", "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    seen = [own.source.read_head().schema]
    own.run("INSERT INTO t VALUES (1, 'a')", "ANALYZE t", "VACUUM t", "CREATE TEMP TABLE x(a int PRIMARY KEY)")
    assert own.source.read_head().schema == seen[0]
    for statement in (
        "ALTER TABLE t RENAME COLUMN v TO vv",
        "ALTER TABLE t ALTER COLUMN vv SET NOT NULL",
        "CREATE OR REPLACE VIEW w AS SELECT k + 1 AS k FROM t WHERE k > 1",
        "CREATE OR REPLACE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 2'",
        "CREATE TYPE e AS ENUM ('a')",
        "ALTER TYPE e ADD VALUE 'b'",
        "CREATE INDEX ON t(vv)",
        "DROP VIEW w",
        "DROP TABLE t",
    ):
        own.run(statement)
        seen.append(own.source.read_head().schema)
    assert len({*seen}) == len(seen)


def test_order_of_keys_is_known_without_a_read_after_a_schema_change(
    rig: Callable[..., PgRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rig("CREATE TABLE t(k text PRIMARY KEY, v text)")
    own.head()
    has_icu = own.db.execute("SELECT 1 FROM pg_collation WHERE collname = 'en-x-icu'").fetchone() is not None
    if has_icu:
        own.run("CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    own.run(f"CREATE TABLE u(k text COLLATE {'ci' if has_icu else 'ucs_basic'} PRIMARY KEY)")
    own.head()
    tables = own.source.describe()

    def fail_if_called(*_: Any) -> None:
        raise AssertionError("the loop would wait for the database")

    monkeypatch.setattr(own.source._pool, "read", fail_if_called)
    assert own.source.order(tables["t"], ["k"])(("a",)) < own.source.order(tables["t"], ["k"])(("b",))
    with pytest.raises(NotSupported) if has_icu else contextlib.nullcontext():
        own.source.order(tables["u"], ["k"])


def test_rows_of_a_read_equal_the_log_up_to_its_offset(rig: Callable[..., PgRig]) -> None:
    """Under concurrent commits, long and short, the rows read are the log up to the offset of the read."""
    own = rig(TABLE, "INSERT INTO t SELECT n, '0' FROM generate_series(1, 20) n", FULL)
    base = own.rows()
    stopping = threading.Event()

    def write(number: int) -> None:
        choose = random.Random(number)
        with own.server.connect(own.name) as db:
            while not stopping.is_set():
                with db.transaction():
                    for key in sorted(choose.sample(range(1, 21), 2)):
                        db.execute("UPDATE t SET v = %s WHERE k = %s", [str(choose.random()), key])
                        time.sleep(choose.choice([0, 0.001, 0.01]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    exact: list[tuple[int, dict[Any, Any]]] = []
    rough: list[tuple[int, dict[Any, Any]]] = []
    try:
        end = time.monotonic() + PATIENCE
        while len(rough) < 150 or len(exact) <= 50:  # on a busy machine more snapshots lie between commits
            assert time.monotonic() < end, len(exact)
            read = own.source.read("SELECT * FROM t")
            rough.append((read.offset, {row[0]: row for row in read.rows}))
            with contextlib.suppress(Busy):
                chunk = own.source.chunk("t", after=None, span=None, limit=100)
                exact.append((chunk.offset, {row[0]: row for row in chunk.rows}))
            own.log += own.source.follow(after=own.latest)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    own.pull()
    states = {0: dict(base)}
    table = dict(base)
    for part in own.log:
        assert part.last
        for change in part.changes:
            table[change.after[0]] = change.after  # type: ignore[index]
        states[part.upto] = dict(table)
    for offset, rows in exact:
        assert rows == states[offset]
    ends = sorted(states)
    for offset, rows in rough:  # it never claims more than it saw: what it lacks comes after its offset
        assert any(rows == states[end] for end in ends if end >= offset) or _is_between(own.log, states, offset, rows)


def _is_between(log: Any, states: Any, offset: int, rows: Any) -> bool:
    """Return whether every row is as at `offset`, or as some later change left it."""
    later: dict[Any, set[Any]] = {key: {row} for key, row in states[offset].items()}
    for part in log:
        if part.first > offset:
            for change in part.changes:
                later[change.after[0]].add(change.after)
    return all(row in later[key] for key, row in rows.items())


def test_planning_that_takes_too_long_is_stopped(rig: Callable[..., PgRig]) -> None:
    r = rig(statement_seconds=0.2)
    slow = r"SELECT 1 WHERE repeat('a', 2001) ~ '^(a+)(a+)(a+)(a+)\1\2\3\4$'"  # PostgreSQL computes it to plan it
    with pytest.raises(InvalidRequest, match="timeout"):
        r.source.is_read_only(slow)


def test_statement_whose_connection_ended_is_not_sent_again(rig: Callable[..., PgRig]) -> None:
    r = rig()
    r.source.read("SELECT 1")  # a connection is idle now
    sent = []

    def work(link: Link) -> None:
        sent.append(link.run("SELECT pg_backend_pid()").values()[0][0])
        with r.server.connect() as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 120000)", [sent[-1]])
        link.run("SELECT 1")

    with pytest.raises(HeadwaterError):
        r.source._pool.read(work)
    assert len(sent) == 1
