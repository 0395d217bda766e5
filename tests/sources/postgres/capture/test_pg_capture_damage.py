"""Changes by others to the slot, the publication and the server's WAL: no change is lost silently."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
import pytest
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.model.change import Change, Op
from headwater.sources.postgres.capture.slot import server_history

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"
pytestmark = pytest.mark.usefixtures("watchful")


def goes_on_anew(own: PgRig) -> None:
    """Check that a new generation receives later changes."""
    own.source.reopen()
    own.source.restart(generation="next", first=100)
    own.run("INSERT INTO t VALUES (1000, 'seen')")
    assert own.head() == 100


ALTERED = {
    "dropped": ["DROP PUBLICATION {name}"],
    "made anew": ["DROP PUBLICATION {name}", "CREATE PUBLICATION {name} FOR ALL TABLES"],
    "altered": ["ALTER PUBLICATION {name} SET (publish = 'insert')"],
    "altered, and back": [
        "ALTER PUBLICATION {name} SET (publish = 'insert')",
        "DELETE FROM t",
        "ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')",
    ],
}


@pytest.mark.parametrize("how", ALTERED)
def test_publication_altered_while_headwater_reads_ends_the_history(how: str, rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (1, 'a')")
    own.run(*(statement.format(name=own.slot) for statement in ALTERED[how]), "INSERT INTO t VALUES (2, 'b')")
    assert "publication" in own.lost()
    goes_on_anew(own)


@pytest.mark.parametrize("how", ALTERED)
def test_publication_altered_while_headwater_is_stopped_ends_the_history(how: str, rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (1, 'a')")
    own.source.close()
    own.run(*(statement.format(name=own.slot) for statement in ALTERED[how]), "INSERT INTO t VALUES (2, 'b')")
    own.open(expect="publication")
    goes_on_anew(own)


def test_dropped_table_keeps_the_history_but_an_unpublished_table_ends_it(rig: Callable[..., PgRig]) -> None:
    tables = [TABLE, "CREATE TABLE u(k int PRIMARY KEY)", "CREATE TABLE w(k int PRIMARY KEY)"]
    own = rig(*tables, tables=("t", "u", "w"))
    own.run("DROP TABLE w", "INSERT INTO u VALUES (1)")
    own.pull()
    own.acknowledge()
    own.open()
    own.acknowledge()
    assert [change.ddl for part in own.pull() for change in part.changes] == ["DROP TABLE w"]
    own.run(f"ALTER PUBLICATION {own.slot} DROP TABLE u", "INSERT INTO u VALUES (2)")
    assert "publication" in own.lost()


# --- tables --------------------------------------------------------------------------------------------------


def reshaped(own: PgRig) -> list[Change]:
    """Follow twice, so that the catalogue is compared; return the schema changes."""
    parts = own.pull()
    own.acknowledge()
    parts += own.pull()
    return [change for part in parts for change in part.changes if change.op is Op.SCHEMA_CHANGE]


def test_dropped_table_is_reported_without_a_later_row(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE u(k int PRIMARY KEY)", "CREATE TABLE w(k int PRIMARY KEY)")
    own.run("INSERT INTO u VALUES (1)", "DROP TABLE u", "ALTER TABLE w RENAME TO x")
    told = [("u", "DROP TABLE u"), ("w", "-- table w is gone")]  # its next row tells what w is called now
    assert [(change.table.name, change.ddl) for change in reshaped(own)] == told
    assert reshaped(own) == []
    own.run("CREATE TABLE u(k int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'anew')")
    parts = own.pull()
    assert [change.op for change in parts[-1].changes] == [Op.SCHEMA_CHANGE, Op.INSERT]
    assert parts[-1].changes[0].table.version == 2 and not parts[-1].changes[0].resnapshot
    own.pull()  # what it set off
    own.source.close()
    own.run("DROP TABLE u")  # also when we are away
    own.open()
    assert [change.ddl for change in reshaped(own)] == ["DROP TABLE u"]


def test_altered_nullability_and_key_are_reported_without_a_row(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE bare(x int NOT NULL)", "ALTER TABLE bare REPLICA IDENTITY FULL")
    own.run("INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t ALTER v SET NOT NULL")
    (change,) = reshaped(own)
    assert (change.table.name, change.table.version, change.resnapshot) == ("t", 2, False)
    assert not change.table.columns[1].nullable
    assert own.source.describe()["t"] is change.table
    own.run("INSERT INTO t VALUES (2, 'b')")
    assert own.pull()[-1].changes[0].table is change.table
    own.run("INSERT INTO bare VALUES (1)", "ALTER TABLE bare ADD PRIMARY KEY (x)")
    (change,) = reshaped(own)
    assert (change.table.key, change.resnapshot) == (("x",), True)  # what tells its rows apart is another
    known = own.source.describe()["t"]
    own.run("ALTER TABLE t ADD w int")  # the next row tells that; queries are told at once
    (change,) = reshaped(own)
    assert (change.table, change.ddl, change.resnapshot) == (known, "-- table t was redefined", False)
    assert reshaped(own) == []
    own.run("INSERT INTO t VALUES (3, 'c', 3)")
    assert [change.op for change in own.pull()[-1].changes] == [Op.SCHEMA_CHANGE, Op.INSERT]


def test_rows_resent_after_a_schema_change_keep_their_offsets(rig: Callable[..., PgRig]) -> None:
    """Changes that readers saw, but that were not durable at the kill."""
    own = rig(TABLE)
    own.run("INSERT INTO t VALUES (1, 'a')", "ALTER TABLE t ADD w int", "INSERT INTO t VALUES (2, 'b', 2)")
    once = own.pull()
    own.log.clear()
    own.run("ALTER TABLE t ALTER v SET NOT NULL", "ALTER TABLE t ALTER v SET DEFAULT 'x'")
    own.open()
    again = own.pull()
    assert [(part.first, [change.op for change in part.changes]) for part in again] == [
        (part.first, [change.op for change in part.changes]) for part in once
    ]
    assert reshaped(own) == []
    assert own.source.describe()["t"] is again[-1].changes[-1].table


def test_table_locked_by_an_open_alter_is_reported_after_its_commit(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    own.run("ALTER TABLE t ALTER v SET NOT NULL")
    with own.server.connect(own.name) as other, other.transaction():
        other.execute("ALTER TABLE t ADD w int")
        own.acknowledge()
        assert list(own.source.follow(after=0)) == []
    (change,) = reshaped(own)  # it has another column now: that is for its next row to tell
    assert (change.ddl, [column.name for column in change.table.columns]) == ("-- table t was redefined", ["k", "v"])
    own.run("ALTER TABLE t DROP w")
    assert [column.nullable for change in reshaped(own) for column in change.table.columns] == [False, False]


MEANT = {
    "CREATE OR REPLACE VIEW v AS SELECT k FROM u": ["t", "u"],  # the tables it had, and has
    "CREATE OR REPLACE VIEW v AS SELECT k FROM inner_v": ["t", "u"],
    "CREATE OR REPLACE VIEW inner_v AS SELECT k FROM t WHERE k > 1": ["t"],
    "CREATE VIEW another AS SELECT 1": [],
    "CREATE TABLE other(k int)": [],
    "CREATE INDEX another_i ON t(k)": [],
    "ANALYZE": [],
    "GRANT SELECT ON v TO PUBLIC": [],
    "COMMENT ON VIEW v IS 'x'": [],
    "ALTER VIEW v RENAME TO w": ["t"],
    "DROP VIEW w": ["t"],
    "ALTER TABLE p DETACH PARTITION p1": ["p1", "p2"],
    "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES IN (3)": ["p2", "p3"],
    "ALTER TABLE t ENABLE ROW LEVEL SECURITY": ["t"],
    "CREATE POLICY few ON t USING (k > 1)": ["t"],
    "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'": ["t"],
    "ALTER TYPE pair RENAME ATTRIBUTE a TO x": ["u"],
    "CREATE OR REPLACE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 2'": ["u"],
}


def test_ddl_on_a_type_view_or_partition_is_reported_for_every_table_it_affects(rig: Callable[..., PgRig]) -> None:
    own = rig(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN moods AS mood[]",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE t(k int PRIMARY KEY, v moods)",
        "CREATE TABLE u(k int PRIMARY KEY, v pair)",
        "CREATE TABLE p(k int PRIMARY KEY) PARTITION BY LIST (k)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)",
        "CREATE TABLE p3(k int PRIMARY KEY)",
        "CREATE VIEW inner_v AS SELECT k FROM t",
        "CREATE VIEW v AS SELECT k FROM inner_v",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE VIEW called AS SELECT k, f() FROM u",
    )
    assert reshaped(own) == []
    for what, again in MEANT.items():
        own.run(what)
        found = reshaped(own)
        assert sorted(change.table.name for change in found) == again, what
        assert all(change.ddl and change.ddl.startswith("-- ") for change in found)
        assert all(change.resnapshot is ("RENAME VALUE" in what) for change in found)  # see test_pg_definition_changes
        tables = own.source.describe()
        assert all(change.table == tables[change.table.name] for change in found)
        assert reshaped(own) == []
    own.open()
    assert reshaped(own) == []


def test_view_dropped_or_created_while_headwater_is_stopped_is_reported(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, 'CREATE VIEW "a.b" AS SELECT k FROM t')
    own.source.close()
    own.run('DROP VIEW "a.b"')
    own.open()
    assert [(change.table.name, change.ddl) for change in reshaped(own)] == [("t", '-- view "a.b" is gone')]
    own.open()
    own.run('CREATE VIEW "a.b" AS SELECT k FROM t')  # also one that comes back
    assert [change.ddl for change in reshaped(own)] == ['-- view "a.b" was redefined']


def test_view_replaced_over_a_table_without_rows_is_reported(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE VIEW v AS SELECT k FROM t")
    own.run("CREATE TABLE fresh(k int PRIMARY KEY)", "CREATE OR REPLACE VIEW v AS SELECT k FROM fresh")
    found = reshaped(own)
    assert sorted((change.table.name, change.ddl) for change in found) == [
        ("fresh", 'CREATE TABLE fresh ("k" integer NOT NULL, PRIMARY KEY ("k"))'),
        ("t", "-- view v was redefined"),
    ]
    assert not any(change.resnapshot for change in found)
    own.run("INSERT INTO fresh VALUES (1)")
    (part,) = own.pull()
    assert [(change.op, change.table.version) for change in part.changes] == [(Op.INSERT, 1)]
    own.log.clear()
    own.open()  # and all of it comes again as it was
    assert [change.table.name for part in own.pull() for change in part.changes] == ["fresh", "t", "fresh"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "{}", '{"tables": {"1": 5}}', '{"gone": [[1, "t"], [0, "t"]]}', '{"gone": 7}'),
        *('{"moved": {"u": "DROP TABLE u"}}', '{"moved": ["t"]}'),
    ],
)
def test_malformed_message_with_the_headwater_prefix_is_ignored(text: str, rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    own.db.execute("SELECT pg_logical_emit_message(true, 'headwater.shapes', %s)", [text])
    own.db.execute("SELECT pg_logical_emit_message(false, 'headwater.shapes', %s)", [text])
    own.run("INSERT INTO t VALUES (1, 'a')")
    assert [change.op for part in own.pull() for change in part.changes] == [Op.INSERT]


def forged(own: PgRig, user: str, **told: Any) -> None:
    """Emit an announcement of shapes as `user`."""
    with psycopg.connect(f"host={own.server.folder} user={user} dbname={own.name}", autocommit=True) as other:
        content = msgspec.json.encode(told)
        other.execute("SELECT pg_logical_emit_message(true, 'headwater.shapes', %s::bytea)", [content])


def test_forged_messages_about_tables_are_ignored(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (1, 'x')")
    user = f"nobody_{own.name}"
    own.run(f"CREATE ROLE {user} LOGIN")
    try:
        (oid,) = own.db.execute("SELECT 't'::regclass::oid::bigint").fetchone() or (0,)
        table = own.source.describe()["t"]
        key = {str(oid): msgspec.structs.replace(table, key=("v",))}
        for told in ({"gone": [[oid, "t"]]}, {"tables": key}, {"unseen": {"t": "x"}}, {"moved": {"t": "x"}}):
            forged(own, user, **told)
            forged(own, user, secret="", **told)
            forged(own, user, secret="0" * 32, **told)
        assert reshaped(own) == []
        odd = msgspec.structs.replace(table, key=("nope",))
        shapes = server_history.load(own.notes.note(server_history.NOTE)).point.shapes  # type: ignore[union-attr]
        forged(own, "postgres", secret=shapes.secret, tables={str(oid): odd})
        assert reshaped(own) == []
        forged(own, "postgres", secret=shapes.secret, unseen={"t": "we know our own"})
        assert [(change.ddl, change.resnapshot) for change in reshaped(own)] == [("-- we know our own", True)]
    finally:
        own.run(f"DROP ROLE {user}")


def test_schema_changes_reported_before_a_kill_are_delivered_again_unchanged(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE u(k int PRIMARY KEY)", "CREATE VIEW v AS SELECT k FROM t")
    own.run("ALTER TABLE t ALTER v SET NOT NULL", "CREATE OR REPLACE VIEW v AS SELECT k FROM u")
    own.run("INSERT INTO u VALUES (1)")
    once = own.pull() + own.pull()
    assert len({change.table.name for part in once for change in part.changes if change.op is Op.SCHEMA_CHANGE}) == 2
    own.log.clear()
    own.open()
    again = own.pull()
    assert [(part.first, part.changes) for part in again] == [(part.first, part.changes) for part in once]


def test_log_without_a_secret_receives_a_secret_once(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "CREATE TABLE u(k int PRIMARY KEY)")
    own.source.close()
    kept = server_history.load(own.notes.note(server_history.NOTE))
    assert kept is not None and len(kept.point.shapes.secret) == 32
    shapes = msgspec.structs.replace(kept.point.shapes, secret="")
    bare = msgspec.structs.replace(kept, point=msgspec.structs.replace(kept.point, shapes=shapes))
    own.notes.set_notes(**{server_history.NOTE: server_history.save(bare)})
    made = []
    for _ in range(2):
        own.open()
        kept = server_history.load(own.notes.note(server_history.NOTE))
        assert kept is not None and len(kept.point.shapes.secret) == 32
        made.append(kept.point.shapes.secret)
    assert made[0] == made[1]
    forged(own, "postgres", gone=[[kept.point.shapes.oids["t"], "t"]])
    own.run("DROP TABLE u")
    assert [change.ddl for change in reshaped(own)] == ["DROP TABLE u"]


# --- the server's log ----------------------------------------------------------------------------------------


def test_slot_whose_wal_was_removed_ends_the_history(pg: Server) -> None:
    server = Server(pg.programs, max_slot_wal_keep_size="1MB", max_wal_size="32MB")
    try:
        own = PgRig(server, "removed", TABLE)
        own.source.close()
        status = "SELECT wal_status FROM pg_replication_slots"
        end = time.monotonic() + PATIENCE
        while own.db.execute(status).fetchone() != ("lost",):
            assert time.monotonic() < end
            own.run(
                "INSERT INTO t SELECT coalesce(max(k), 0) + 1, 'unseen' FROM t", "SELECT pg_switch_wal()", "CHECKPOINT"
            )
        own.open(expect="removed changes")
        goes_on_anew(own)
        own.close()
    finally:
        server.stop()


def test_slot_of_an_idle_database_releases_wal(rig: Callable[..., PgRig]) -> None:
    """Others write in other databases: the slot releases that WAL, too, by its confirmed position and its restart
    position.
    """
    own = rig(TABLE)
    lag = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) FROM pg_replication_slots WHERE slot_name = %s"
    with own.server.connect() as other:
        other.execute("CREATE TABLE IF NOT EXISTS busy(x text)")
        other.execute("INSERT INTO busy SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
        end = time.monotonic() + PATIENCE
        while (own.db.execute(lag, [own.slot]).fetchone() or (0,))[0] > 1_000_000:
            assert time.monotonic() < end, own.slot_row()
            other.execute("CHECKPOINT")  # says which transactions run: from there a slot can restart
            own.acknowledge()
            own.source.wait(0.05)
        other.execute("DROP TABLE busy")
    assert own.pull() == []
