"""Unusual databases and roles: settings, encodings, policies, partitions, unlogged tables."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig
from tests.suite.deadlines import PATIENCE

from headwater.errors import Forbidden, SourceUnfit
from headwater.model.change import Change, Op
from headwater.sources.postgres.capture.slot.server_history import NOTE
from headwater.sources.postgres.capture.stream.replication_stream import pace_for
from headwater.sources.postgres.connection import Server as Address

_numbers = itertools.count(1)
TABLE = "CREATE TABLE t(k serial PRIMARY KEY, v text, m money, d timestamptz, i interval, f float8, b bytea, e mood)"
MOOD = "CREATE TYPE mood AS ENUM ('sad', 'ok')"
VALUES = r"E'x\\y', 1234.5, '2024-02-03 04:05Z', '1 day 2:03', 0.1, '\x00ff', 'ok'"
ROW = f"INSERT INTO t(v, m, d, i, f, b, e) VALUES ({VALUES})"


@pytest.fixture
def role(pg: Server) -> Iterator[Callable[..., str]]:
    """Return `role("statement_timeout = 1", …)`, which makes a superuser with these settings, or a role with the rights
    `of`.
    """
    made: list[str] = []

    def make(*settings: str, of: str = "SUPERUSER") -> str:
        made.append(f"role_{os.getpid()}_{next(_numbers)}")
        with pg.connect() as admin:
            admin.execute(f"CREATE ROLE {made[-1]} LOGIN {of}".encode())
            for setting in settings:
                admin.execute(f"ALTER ROLE {made[-1]} SET {setting}".encode())
        return made[-1]

    yield make
    with pg.connect() as admin:
        for each in made:
            admin.execute(f"DROP ROLE IF EXISTS {each}".encode())


@pytest.fixture
def rig(pg: Server, role: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PgRig]]:
    """Return a function that opens sources, which are closed before the roles that own objects in them are dropped."""
    monkeypatch.setattr("headwater.sources.postgres.capture.capture.CHECK_SECONDS", -1.0)
    made: list[PgRig] = []

    def start(*statements: str, **more: Any) -> PgRig:
        made.append(PgRig(pg, f"hostile_{os.getpid()}_{next(_numbers)}", *statements, **more))
        return made[-1]

    yield start
    for each in made:
        each.user = "postgres"
        each.close()


def changes(own: PgRig) -> list[Change]:
    """Return all new changes, including those that comparing the catalogue yields."""
    found = own.pull()
    own.acknowledge()
    return [change for part in [*found, *own.pull()] for change in part.changes]


# --- settings -------------------------------------------------------------------------------------------------

SETTINGS = (
    "DateStyle = 'SQL, DMY'",
    "IntervalStyle = 'iso_8601'",
    "TimeZone = 'Asia/Kolkata'",
    "extra_float_digits = -5",
    "bytea_output = 'escape'",
    "lc_monetary = 'C'",
    "client_encoding = 'LATIN1'",
    "standard_conforming_strings = off",
    "quote_all_identifiers = on",
    "default_transaction_read_only = on",
    "default_transaction_isolation = 'serializable'",
    "default_transaction_deferrable = on",
    "lock_timeout = '100ms'",
    "row_security = off",
    "synchronous_commit = off",
)


def test_settings_of_a_role_do_not_change_values_shapes_or_filters(
    rig: Callable[..., PgRig], role: Callable[..., str]
) -> None:
    plain, odd = rig(MOOD, TABLE), rig(MOOD, TABLE, user=role(*SETTINGS))
    found = []
    for own in (plain, odd):
        own.run(ROW)
        (change,) = changes(own)
        table = own.source.describe()["t"]
        chunk = own.source.chunk("t", after=None, span=None, limit=5)
        assert chunk.rows == (change.after,) and chunk.table == change.table == table
        assert own.source.read("SELECT * FROM t").rows == chunk.rows
        assert own.source.condition(table, r"v = 'x\y' AND b = '\x00ff'").holds([change.after]) == [True]
        written = own.source.write(lambda session: session.insert("t", [{"v": "new"}])).result(PATIENCE)
        own.run("ALTER TABLE t ALTER v SET NOT NULL")  # nothing tells that but a mark of ours
        assert [each.op for each in changes(own)] == [Op.INSERT, Op.SCHEMA_CHANGE]
        found.append((change.after, table.columns, table.key, written.offset))
    assert found[0] == found[1]


def test_role_with_short_session_timeouts_keeps_its_stream(rig: Callable[..., PgRig], role: Callable[..., str]) -> None:
    short = "idle_session_timeout = '200ms'", "idle_in_transaction_session_timeout = '200ms'"
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", user=role(*short, "wal_sender_timeout = '12s'"))
    for key in range(6):
        time.sleep(0.4)  # what ends is what idles: there is nothing to wait for
        own.run(f"INSERT INTO t VALUES ({key})", f"CREATE TABLE t{key}(k int)", f"INSERT INTO t{key} VALUES (1)")
    own.pull()
    assert [row[0] for row in own.fold().values()] == [0, 1, 2, 3, 4, 5]
    assert own.source._stream is not None and own.source._stream.sessions == 1
    with Address(own.name, own.url).connect() as side:
        assert own.source._stream._pace(side) == pace_for(12)  # not the pace for the server's own 60 seconds


# --- encodings ------------------------------------------------------------------------------------------------


def test_schema_changes_of_a_latin1_database_are_captured(rig: Callable[..., PgRig]) -> None:
    own = rig('CREATE TABLE "tä"(k int PRIMARY KEY, "ü" text)', encoding="LATIN1")
    own.run("INSERT INTO \"tä\" VALUES (1, 'é')")
    assert [change.after for change in changes(own)] == [(1, "é")]
    own.run('ALTER TABLE "tä" ALTER "ü" SET NOT NULL')
    assert [change.table.name for change in changes(own)] == ["tä"]
    own.run('DROP TABLE "tä"')
    assert [change.ddl for change in changes(own)] == ["DROP TABLE tä"]


def test_sql_ascii_database_is_refused(pg: Server) -> None:
    name = f"ascii_{os.getpid()}_{next(_numbers)}"
    with pg.connect() as admin:
        admin.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0".encode())
        with pytest.raises(SourceUnfit, match="SQL_ASCII"):
            Address(name, f"postgresql://postgres@/{name}?host={pg.folder}").connect()
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("content", [b"\xff", b'{"gone": [[0, "\xe4"]]}', b"\x00"])
@pytest.mark.parametrize("prefix", ["headwater", "headwater.shapes"])
def test_forged_bytes_with_a_headwater_prefix_are_ignored(
    rig: Callable[..., PgRig], prefix: str, content: bytes
) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY)")
    own.db.execute("SELECT pg_logical_emit_message(true, %s, %s::bytea)", [prefix, content])
    own.run("INSERT INTO t VALUES (1)")
    assert [change.after for change in changes(own)] == [(1,)]


# --- rows that nobody was sent --------------------------------------------------------------------------------


def test_snapshot_under_row_level_security_is_refused(rig: Callable[..., PgRig], role: Callable[..., str]) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 5)")
    user = role(of="REPLICATION")
    own.run(
        f"GRANT ALL ON t TO {user}", "ALTER TABLE t ENABLE ROW LEVEL SECURITY", "CREATE POLICY p ON t USING (k < 3)"
    )
    own.user = user
    own.open()
    for read in (lambda: own.source.chunk("t", after=None, span=None, limit=9), lambda: own.source.sample("t", 9)):
        with pytest.raises(Forbidden, match="row-level security") as caught:
            read()
        assert "BYPASSRLS" in caught.value.hint
    (found,) = [each for each in own.source.findings() if "row security" in each.problem]
    own.run(found.remedy)
    own.source.reopen()
    own.open()
    assert len(own.source.chunk("t", after=None, span=None, limit=9).rows) == 5


def test_table_filled_while_unlogged_asks_for_a_snapshot(rig: Callable[..., PgRig]) -> None:
    own = rig()
    own.run("CREATE UNLOGGED TABLE u(k int PRIMARY KEY)", "INSERT INTO u SELECT generate_series(1, 5)")
    own.run("ALTER TABLE u SET LOGGED", "INSERT INTO u VALUES (6)")
    own.run("CREATE TABLE fresh(k int PRIMARY KEY)", "INSERT INTO fresh VALUES (6)")
    told = {change.table.name: change.resnapshot for change in changes(own) if change.op is Op.SCHEMA_CHANGE}
    assert told == {"u": True, "fresh": False}


def test_table_set_unlogged_ends_and_asks_for_a_snapshot_when_logged_again(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    own.run("ALTER TABLE t SET UNLOGGED", "INSERT INTO t VALUES (2)")
    assert [change.ddl for change in changes(own)] == ["DROP TABLE t -- not published"]
    assert changes(own) == []
    own.run("ALTER TABLE t SET LOGGED", "INSERT INTO t VALUES (3)")
    found = [(each.op, each.resnapshot) for each in changes(own)]
    assert found[:2] == [(Op.SCHEMA_CHANGE, True), (Op.INSERT, False)]


ROUND_TRIP = ("ALTER TABLE t SET UNLOGGED", "INSERT INTO t VALUES (2)", "ALTER TABLE t SET LOGGED")


@pytest.mark.parametrize("away", [False, True])
def test_table_unlogged_between_two_checks_asks_for_a_snapshot(rig: Callable[..., PgRig], away: bool) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    own.run("INSERT INTO t VALUES (10)")
    changes(own)
    if away:
        own.source.close()
    own.run(*ROUND_TRIP, "INSERT INTO t VALUES (3)")
    if away:
        own.open()
    (told,) = [each for each in changes(own) + changes(own) if each.resnapshot]
    assert told.table.name == "t" and (told.ddl or "").startswith("-- its rows were rewritten")
    own.open()
    assert not [each for each in changes(own) if each.resnapshot]


def test_table_unlogged_and_logged_again_before_the_first_check_asks_for_a_snapshot(
    rig: Callable[..., PgRig],
) -> None:
    own = rig()
    own.run("CREATE TABLE t(k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    assert [each.resnapshot for part in own.pull() for each in part.changes] == [False, False]
    own.run(*ROUND_TRIP)
    assert [each.resnapshot for each in changes(own)] == [True]


@pytest.mark.parametrize("also", ["ALTER TABLE t ALTER v SET NOT NULL", "ALTER TABLE t ADD w int", ""])
def test_table_logged_again_without_a_row_asks_for_a_snapshot(rig: Callable[..., PgRig], also: str) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY, v int DEFAULT 0)", "INSERT INTO t VALUES (1)")
    own.run(*ROUND_TRIP, *([also] if also else []))
    assert [each.resnapshot for each in changes(own)].count(True) == 1
    own.run(*ROUND_TRIP[:1])
    assert [each.ddl for each in changes(own)] == ["DROP TABLE t -- not published"]
    own.run(*ROUND_TRIP[2:])
    assert [each.resnapshot for each in changes(own)].count(True) == 1


@pytest.mark.parametrize("what", ["VACUUM FULL t", "CLUSTER t USING t_pkey", "ALTER TABLE t ALTER v TYPE bigint"])
def test_rewritten_table_asks_for_a_snapshot_once(rig: Callable[..., PgRig], what: str) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1)")
    own.run(what)
    found = changes(own)
    own.run("INSERT INTO t VALUES (2)")  # another type is told by the next row
    assert [each.resnapshot for each in found + changes(own)].count(True) == 1


@pytest.mark.parametrize("away", [False, True])
def test_truncated_table_asks_for_no_snapshot(rig: Callable[..., PgRig], away: bool) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", "CREATE TABLE u(k int REFERENCES t)", "INSERT INTO t VALUES (1)")
    if away:
        own.source.close()
    own.run("TRUNCATE t CASCADE", "INSERT INTO t VALUES (2)", "TRUNCATE t CASCADE", "INSERT INTO t VALUES (3)")
    if away:
        own.open()
    found = changes(own) + changes(own)
    assert [each.op for each in found].count(Op.TRUNCATE) == 4 and not [each for each in found if each.resnapshot]
    own.run("TRUNCATE t CASCADE", "DROP TABLE u", *ROUND_TRIP)
    assert [(each.table.name, each.resnapshot) for each in changes(own) if each.resnapshot] == [("t", True)]


def test_truncate_announced_before_a_crash_asks_for_no_snapshot(rig: Callable[..., PgRig]) -> None:
    """The stream resumes after the position at which the table was emptied."""
    own = rig("CREATE TABLE t(k int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    own.run("TRUNCATE t")
    assert [each.op for part in own.pull() for each in part.changes] == [Op.TRUNCATE]
    own.acknowledge()  # and tells
    own.open()
    assert changes(own) == []


PARTITIONS = (
    "CREATE TABLE p(k int PRIMARY KEY) PARTITION BY RANGE (k)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
)
DETACH, ATTACH = "ALTER TABLE p DETACH PARTITION p1", "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (10)"


def test_detached_partition_ends_and_asks_for_a_snapshot_when_attached_again(rig: Callable[..., PgRig]) -> None:
    own = rig(*PARTITIONS, tables=("p",))
    own.run("INSERT INTO p VALUES (1), (11)")
    assert [change.table.name for change in changes(own)] == ["p1", "p2"]
    own.run(DETACH, "INSERT INTO p1 VALUES (2)")
    assert "DROP TABLE p1 -- not published" in [change.ddl for change in changes(own)]
    own.run(ATTACH, "INSERT INTO p VALUES (3)")
    assert [each.resnapshot for each in changes(own) if each.table.name == "p1"][0]


@pytest.mark.parametrize("away", [False, True])
def test_partition_detached_between_two_checks_asks_for_a_snapshot(rig: Callable[..., PgRig], away: bool) -> None:
    own = rig(*PARTITIONS, tables=("p",))
    own.run("INSERT INTO p VALUES (1), (11)")
    changes(own)
    if away:
        own.source.close()
    own.run(DETACH, "INSERT INTO p1 VALUES (2)", ATTACH)
    if away:
        own.open()
    told = [(each.table.name, each.resnapshot) for each in changes(own) if each.resnapshot]
    assert told == [("p1", True)]
    assert not [each for each in changes(own) if each.resnapshot]


def test_detached_partition_is_captured_where_all_tables_are_published(rig: Callable[..., PgRig]) -> None:
    own = rig(*PARTITIONS)
    own.run("INSERT INTO p VALUES (1), (11)", DETACH, "INSERT INTO p1 VALUES (2)", ATTACH, "INSERT INTO p VALUES (3)")
    assert not [change for change in changes(own) if change.resnapshot]
    assert sorted(own.fold("p1")) == [1, 2, 3]


def test_publication_via_partition_root_is_refused(rig: Callable[..., PgRig]) -> None:
    own = rig(*PARTITIONS)
    own.source.close()
    own.run(f"ALTER PUBLICATION {own.slot} SET (publish_via_partition_root = true)")
    own.notes.set_notes(**{NOTE: ""})
    with pytest.raises(SourceUnfit) as caught:
        own.open()
    own.run(caught.value.hint.removeprefix("Run: "))
    own.open()


def test_table_streamed_before_its_commit_is_visible_is_described_fully(rig: Callable[..., PgRig]) -> None:
    """As if a standby must confirm the commit first; or, for a moment, always."""
    own = rig()
    make = "CREATE TABLE t(k int PRIMARY KEY, v text NOT NULL); ALTER TABLE t REPLICA IDENTITY FULL"

    def write() -> None:
        with own.server.connect(own.name) as db, db.transaction():
            db.execute(f"{make}; INSERT INTO t VALUES (1, 'a')".encode())

    with own.server.connect() as admin:
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        try:
            thread = threading.Thread(target=write)
            thread.start()
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            while not admin.execute(waits.encode()).fetchone():
                time.sleep(0.02)
            own.source.wait(0.5)  # the stream has it by now, or soon: later the test shows less
        finally:
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")
            thread.join()
    first, second = (change for part in own.pull() for change in part.changes)
    assert first.table == second.table and second.after == (1, "a")
    assert first.table.key == ("k",) and not first.table.columns[1].nullable


def test_table_that_the_role_may_not_read_does_not_block_other_tables(
    rig: Callable[..., PgRig], role: Callable[..., str]
) -> None:
    own = rig("CREATE TABLE t(k int PRIMARY KEY, v text)", "CREATE TABLE secret(k int PRIMARY KEY, v text)")
    user = role(of="REPLICATION")
    own.run(f"GRANT SELECT ON t TO {user}")
    own.user = user
    own.open()
    own.run("INSERT INTO secret VALUES (1, 'x')")
    assert [(change.table.name, change.after) for change in changes(own)] == [("secret", (1, "x"))]
    with pytest.raises(Forbidden, match="secret"):
        own.source.chunk("secret", after=None, span=None, limit=5)
    own.run("ALTER TABLE secret ALTER v SET NOT NULL", "ALTER TABLE t ALTER v SET NOT NULL")
    assert [change.table.name for change in changes(own)] == ["t"]
