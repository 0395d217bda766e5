"""Which tables are published by default: those whose writers the publication does not block."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
from tests.sources.postgres.pg_server import PATIENCE
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import SourceUnfit
from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.sources.postgres.capture.slot import publication
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.inspection import inspect
from headwater.sources.write import Session

TABLE = "CREATE TABLE t(k int PRIMARY KEY, a int)"
KEYLESS = "CREATE TABLE visits(a int, b text)"
pytestmark = pytest.mark.usefixtures("watchful")
Start = Callable[..., PgRig]


@pytest.fixture
def start(rig: Start) -> Start:
    """Start a source with the default settings: no table is named, and not all are published."""
    return lambda *statements, **settings: rig(*statements, **{"publish_all": False, **settings})


def asks_for_snapshot(changes: list[Change]) -> bool:
    return any(change.resnapshot for change in changes)


def test_table_without_key_is_not_published_and_can_be_updated(start: Start) -> None:
    own = start(TABLE, KEYLESS, "INSERT INTO visits VALUES (1, 'a')")
    own.run("UPDATE visits SET b = 'b'", "INSERT INTO t VALUES (1, 1)", "DELETE FROM visits")
    assert [change.table.name for change in own.changes_until()] == ["t"]
    assert sorted(own.source.describe()) == ["t"]
    status = own.source.status()
    assert status["tables"] == ["t"]
    assert status["uncaptured"] == {"visits": "it has neither a primary key nor another replica identity"}


def test_table_without_key_is_named_at_the_start(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        start(TABLE, KEYLESS)
    (line,) = [each.getMessage() for each in caplog.records if "visits" in each.getMessage()]
    assert "it is not captured" in line and 'ALTER TABLE "public"."visits" REPLICA IDENTITY FULL;' in line


def test_table_that_gets_a_replica_identity_is_captured_and_readers_must_resnapshot(start: Start) -> None:
    own = start(TABLE, KEYLESS, "INSERT INTO visits VALUES (1, 'a')")
    own.run("ALTER TABLE visits REPLICA IDENTITY FULL")
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "visits"
    own.run("UPDATE visits SET b = 'c'")
    (change,) = own.changes_until()
    assert (change.op, change.before, change.after) == (Op.UPDATE, (1, "a"), (1, "c"))


def test_table_that_another_program_creates_is_captured_and_readers_must_resnapshot(start: Start) -> None:
    own = start(TABLE)
    own.run("CREATE TABLE late(k int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "late"
    own.run("INSERT INTO late VALUES (2)")
    assert [change.after for change in own.changes_until()] == [(2,)]


def test_head_is_not_settled_until_a_table_of_another_program_is_published(start: Start) -> None:
    own = start(TABLE)
    own.changes_until(lambda changes: own.source.read_head().settled)
    own.run("CREATE TABLE late(k int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    assert not own.source.read_head().settled
    own.changes_until(lambda changes: own.source.read_head().settled)
    assert "late" in own.source.describe()


def test_table_created_while_headwater_is_stopped_is_captured_and_readers_must_resnapshot(start: Start) -> None:
    own = start(TABLE)
    own.source.close()
    own.run("CREATE TABLE late(k int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    own.open()
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "late"


@pytest.mark.parametrize("how", ["statement", "method"])
def test_table_created_through_headwater_is_captured_from_its_first_row(start: Start, how: str) -> None:
    own = start(TABLE)

    def work(session: Session) -> None:
        if how == "statement":
            session.execute("CREATE TABLE made(k int PRIMARY KEY)")
        else:
            session.create_table(Table("made", (Column("k", "i64", nullable=False),), key=("k",)))
        session.execute("INSERT INTO made VALUES (1), (2)")

    own.source.write(work).result(PATIENCE)
    changes = own.changes_until(lambda found: sum(change.op is Op.INSERT for change in found) == 2)
    assert [(change.op, change.resnapshot) for change in changes] == [
        (Op.SCHEMA_CHANGE, False),
        (Op.INSERT, False),
        (Op.INSERT, False),
    ]


def test_old_table_published_by_a_statement_through_headwater_asks_for_a_snapshot(start: Start) -> None:
    own = start(TABLE, KEYLESS, "INSERT INTO visits VALUES (1, 'a')")
    own.source.write(lambda s: s.execute("ALTER TABLE visits ADD PRIMARY KEY (a)")).result(PATIENCE)
    assert asks_for_snapshot(own.changes_until(asks_for_snapshot))


@pytest.mark.parametrize("by", ["headwater", "another program"])
def test_table_filled_before_it_is_published_asks_for_a_snapshot(start: Start, by: str) -> None:
    own = start(TABLE)
    if by == "headwater":
        text = "DO $$BEGIN CREATE TABLE made(k int PRIMARY KEY); INSERT INTO made VALUES (1); END$$"
        own.source.write(lambda s: s.execute(text)).result(PATIENCE)
    else:
        with own.db.transaction():
            own.run("CREATE TABLE made(k int PRIMARY KEY)", "INSERT INTO made VALUES (1)")
            own.run(f"ALTER PUBLICATION {own.slot} ADD TABLE made")
    assert asks_for_snapshot(own.changes_until(asks_for_snapshot))


def test_table_that_cannot_be_published_does_not_block_the_rest(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    own = start(TABLE)
    real = publication.run_as_owner

    def refuse(connection: object, statement: str) -> None:
        if '"late_a"' in statement:
            raise SourceUnfit("must be owner of table late_a", hint="…")
        real(connection, statement)  # type: ignore[arg-type]

    monkeypatch.setattr(publication, "run_as_owner", refuse)
    own.run("CREATE TABLE late_a(k int PRIMARY KEY)", "CREATE TABLE late_b(k int PRIMARY KEY)")
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "late_b"


def test_publication_for_all_tables_is_kept_with_a_warning(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    own = start(TABLE, KEYLESS, publish_all=True)
    own.source.close()
    own.config = PostgresConfig(heartbeat_seconds=0.05)
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        own.open()  # which asserts that the history goes on
    assert any("is FOR ALL TABLES" in each.getMessage() for each in caplog.records)
    own.run("CREATE TABLE late(k int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    created, inserted = own.changes_until(lambda found: len(found) == 2)
    assert (created.op, created.resnapshot, inserted.after) == (Op.SCHEMA_CHANGE, False, (1,))


def test_publication_of_listed_tables_is_refused_when_all_tables_are_configured(start: Start) -> None:
    own = start(TABLE)
    own.source.close()
    own.config = PostgresConfig(heartbeat_seconds=0.05, publish_all=True)
    with pytest.raises(SourceUnfit, match="is not for all tables"):
        own.open()


def test_partitioned_table_is_published_with_its_partitions(start: Start) -> None:
    own = start(
        "CREATE TABLE p(k int PRIMARY KEY) PARTITION BY RANGE (k)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE q(k int) PARTITION BY RANGE (k)",
        "CREATE TABLE q1 PARTITION OF q FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE q2 PARTITION OF q FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE q2 ADD PRIMARY KEY (k)",
    )
    assert sorted(own.source.describe()) == ["p1", "q2"]
    own.run("INSERT INTO p VALUES (1)", "INSERT INTO q VALUES (1), (11)", "UPDATE q SET k = k + 1")
    assert {(change.table.name, change.after) for change in own.changes_until(lambda found: len(found) >= 3)} == {
        ("p1", (1,)),
        ("q2", (11,)),
        ("q2", (12,)),
    }
    own.run("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)", "INSERT INTO p VALUES (12)")
    assert ("p2", (12,)) in [
        (change.table.name, change.after) for change in own.changes_until(lambda found: len(found) >= 2)
    ]


ROOT = "CREATE TABLE p(k int NOT NULL, a int) PARTITION BY RANGE (k)"
KEYED_ROOT = "CREATE TABLE p(k int PRIMARY KEY, a int) PARTITION BY RANGE (k)"
P1 = "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)"
P2 = "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)"
P3 = "CREATE TABLE p3 PARTITION OF p FOR VALUES FROM (20) TO (30)"
FULL = "ALTER TABLE {} REPLICA IDENTITY FULL"
# Partitioned tables with a replica identity of their own, and the partitions that have one, too.
PARTITIONED = {
    "whole rows of the root": ((ROOT, FULL.format("p"), P1, P2), []),
    "index of the root": (
        (ROOT, "CREATE UNIQUE INDEX p_k ON p(k)", "ALTER TABLE p REPLICA IDENTITY USING INDEX p_k", P1, P2),
        [],
    ),
    "key of the root": ((KEYED_ROOT, P1, P2, "ALTER TABLE p2 REPLICA IDENTITY NOTHING"), ["p1"]),
    "key of the root and a partition of a partition": (
        (
            KEYED_ROOT,
            P1,
            f"{P2} PARTITION BY LIST (k)",
            "CREATE TABLE p2a PARTITION OF p2 FOR VALUES IN (10)",
            "CREATE TABLE p2b PARTITION OF p2 DEFAULT",
            "ALTER TABLE p2b REPLICA IDENTITY NOTHING",
        ),
        ["p1", "p2a"],
    ),
    "whole rows of all": ((ROOT, FULL.format("p"), P1, P2, FULL.format("p1"), FULL.format("p2")), ["p1", "p2"]),
}


@pytest.mark.parametrize("which", PARTITIONED)
def test_partition_without_identity_is_left_out_and_can_be_updated(start: Start, which: str) -> None:
    statements, published = PARTITIONED[which]
    own = start(TABLE, *statements, P3)
    published = [*published, "p3"] if statements[0] == KEYED_ROOT else published
    own.run("INSERT INTO p VALUES (1, 1), (11, 1), (21, 1)", "UPDATE p SET a = 2", "DELETE FROM p WHERE a = 2")
    assert sorted(own.source.describe()) == [*published, "t"]
    found = inspect(own.name, own.url, own.config).findings
    assert not any(each.refuses_writes for each in found)
    assert {each for each, why in own.source.status()["uncaptured"].items() if "replica identity" in why} == {
        each.problem.split(" ")[0] for each in found if "it is not captured" in each.problem
    }


def test_partition_without_identity_created_later_takes_updates_and_joins_with_an_identity(start: Start) -> None:
    own = start(ROOT, FULL.format("p"), P1, FULL.format("p1"))
    own.run(P2, "INSERT INTO p VALUES (11, 1)")
    own.source._attachment.join()
    own.run("UPDATE p SET a = 2", FULL.format("p2"))
    joined = [change.table.name for change in own.changes_until(asks_for_snapshot) if change.resnapshot]
    assert joined == ["p2"]
    own.run("UPDATE p SET a = 3")
    assert [(change.table.name, change.after) for change in own.changes_until()] == [("p2", (11, 3))]


def test_last_partition_that_gets_an_identity_publishes_the_root(start: Start) -> None:
    own = start(KEYED_ROOT, P1, P2, "ALTER TABLE p2 REPLICA IDENTITY NOTHING")
    own.run("ALTER TABLE p2 REPLICA IDENTITY DEFAULT")
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "p2"
    own.run(P3, "INSERT INTO p VALUES (1, 1), (21, 1)")
    changes = own.changes_until(lambda found: len(found) == 3)
    rows = [(change.table.name, change.after) for change in changes if change.after]
    assert rows == [("p1", (1, 1)), ("p3", (21, 1))]
    own.open()  # which asserts that the history goes on


def test_published_root_without_key_goes_on_with_warnings(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    name = f"earlier_{os.getpid()}"
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        publication = f"CREATE PUBLICATION headwater_{name} FOR TABLE ONLY p"  # as earlier versions did
        own = start(TABLE, ROOT, FULL.format("p"), P1, FULL.format("p1"), P2, publication, name=name)
    lines = [each.getMessage() for each in caplog.records]
    assert any("p2 has neither" in each and FULL.format('"public"."p2"') in each for each in lines)
    assert any("p has no primary key" in each and "partitions created later" in each for each in lines)
    own.changes_until(asks_for_snapshot)
    assert sorted(own.source.describe()) == ["p1", "p2", "t"]
    members = "SELECT prrelid::regclass::text FROM pg_publication_rel ORDER BY 1"
    assert own.db.execute(members).fetchall() == [("p",), ("t",)]
    own.open()  # which asserts that the history goes on


def test_named_root_without_key_is_reported_before_the_start(start: Start) -> None:
    own = start(TABLE, ROOT, P1)
    config = PostgresConfig(tables=("p",))
    found = inspect(own.name, own.url, config).findings
    assert [each.problem.split(" ")[0] for each in found if each.refuses_writes] == ["p1"]
    assert any("p has no primary key" in each.problem for each in found)


def test_table_locked_at_the_start_joins_later(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        own = start(TABLE, "CREATE TABLE held(k int PRIMARY KEY)", "BEGIN", "LOCK TABLE held IN SHARE MODE")
    assert sorted(own.source.describe()) == ["t"]
    assert any("other sessions lock held" in each.getMessage() for each in caplog.records)
    own.run("COMMIT")
    (joined,) = own.changes_until(asks_for_snapshot)
    assert joined.table.name == "held"


def test_named_table_locked_at_the_start_keeps_no_other_from_being_published_or_removed(start: Start) -> None:
    own = start("CREATE TABLE a(k int PRIMARY KEY)", "CREATE TABLE b(k int PRIMARY KEY)", tables=("a",))
    own.source.close()
    own.config = PostgresConfig(heartbeat_seconds=0.05, tables=("b", "held"))
    own.run("CREATE TABLE held(k int PRIMARY KEY)", "BEGIN", "LOCK TABLE held IN SHARE MODE")
    own.open()
    assert sorted(own.source.describe()) == ["b"]
    own.run("COMMIT")
    own.changes_until(lambda found: {"b", "held"} <= {change.table.name for change in found if change.resnapshot})
    own.open()  # which asserts that the history goes on


def test_locked_table_is_reported_by_doctor(start: Start) -> None:
    own = start(TABLE)
    own.run("CREATE TABLE held(k int PRIMARY KEY)", "BEGIN", "LOCK TABLE held IN SHARE MODE")
    found = inspect("another", own.url, PostgresConfig()).findings
    assert any("locked by another session" in each.problem for each in found)
    own.run("ROLLBACK")


def test_published_table_that_loses_its_key_is_logged_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    own = start(TABLE)
    own.acknowledge()
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        for statement in ("DROP CONSTRAINT t_pkey", "ADD b int", "ADD PRIMARY KEY (k)", "DROP CONSTRAINT t_pkey"):
            own.run(f"ALTER TABLE t {statement}")
            own.acknowledge()
    line, again = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert "t has neither a primary key" in line and FULL.format('"public"."t"') in line and again == line
    own.run(FULL.format("t"), "INSERT INTO t VALUES (1, 1)", "UPDATE t SET a = 2")


def test_partition_without_identity_attached_to_a_published_root_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    own = start(TABLE, KEYED_ROOT, P1)
    own.acknowledge()
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        own.run("CREATE TABLE p2(k int PRIMARY KEY, a int)", "ALTER TABLE p2 REPLICA IDENTITY NOTHING")
        own.run("ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (10) TO (20)")
        own.acknowledge()
    (line,) = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert "p2 has no replica identity" in line and FULL.format('"public"."p2"') in line


def test_role_without_superuser_publishes_only_the_tables_it_owns(start: Start) -> None:
    role = f"owner_{os.getpid()}"  # it goes with the server
    own = start(
        f"DO $$BEGIN CREATE ROLE {role} LOGIN REPLICATION; EXCEPTION WHEN duplicate_object THEN NULL; END$$",
        TABLE,
        "CREATE TABLE foreign_one(k int PRIMARY KEY)",
        f"ALTER TABLE t OWNER TO {role}",
        f"DO $$BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO {role}', current_database()); END$$",
        user=role,
    )
    assert sorted(own.source.describe()) == ["t"]
    assert own.source.status()["uncaptured"] == {"foreign_one": "it belongs to another role"}
    found = inspect(own.name, own.url, own.config).findings
    assert any("foreign_one belongs to a role" in each.problem and not each.fatal for each in found)
    own.run("INSERT INTO t VALUES (1, 1)")
    assert [change.table.name for change in own.changes_until()] == ["t"]


def test_table_with_full_identity_and_an_omitted_stored_column_is_not_published(start: Start) -> None:
    name = f"unsent_{os.getpid()}"
    own = start(TABLE, f"CREATE PUBLICATION headwater_{name} FOR TABLE t", name=name)  # as pg_upgrade leaves it
    if own.db.info.server_version < 180000:
        pytest.skip("publications send generated columns since PostgreSQL 18")
    own.source.close()
    own.run(
        "CREATE TABLE inv(id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) STORED)",
        "ALTER TABLE inv REPLICA IDENTITY FULL",
        "CREATE TABLE keyed(id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) STORED)",
    )
    own.open()
    own.changes_until(lambda found: "keyed" in {change.table.name for change in found})
    for table in ("inv", "keyed"):
        own.run(f"INSERT INTO {table} VALUES (1, 1)", f"UPDATE {table} SET net = 2", f"DELETE FROM {table}")
    reason = "it has REPLICA IDENTITY FULL and a STORED generated column, which the publication does not send"
    assert own.source.status()["uncaptured"] == {"inv": reason}
    (finding,) = [each for each in inspect(own.name, own.url, own.config).findings if each.problem.startswith("inv ")]
    assert "it is not captured" in finding.problem
    own.run(f"ALTER PUBLICATION {own.slot} ADD TABLE inv", "INSERT INTO inv VALUES (1, 1)")
    (finding,) = [each for each in inspect(own.name, own.url, own.config).findings if each.problem.startswith("inv ")]
    assert finding.refuses_writes
    own.run(finding.remedy.replace("…", own.slot), "UPDATE inv SET net = 2", "DELETE FROM inv")


def test_table_with_full_identity_and_a_virtual_column_is_not_published_and_can_be_updated(start: Start) -> None:
    own = start(TABLE)
    if own.db.info.server_version < 180000:
        pytest.skip("virtual generated columns exist since PostgreSQL 18")
    own.source.close()
    own.run(
        "CREATE TABLE inv(id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) VIRTUAL)",
        "ALTER TABLE inv REPLICA IDENTITY FULL",
        "CREATE TABLE keyed(id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) VIRTUAL)",
        "CREATE TABLE stored(id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) STORED)",
        "ALTER TABLE stored REPLICA IDENTITY FULL",
    )
    own.open()
    own.changes_until(lambda found: {"keyed", "stored"} <= {change.table.name for change in found})
    for table in ("inv", "keyed", "stored"):
        own.run(f"INSERT INTO {table} VALUES (1, 1)", f"UPDATE {table} SET net = 2", f"DELETE FROM {table}")
    status = own.source.status()
    reason = "it has REPLICA IDENTITY FULL and a VIRTUAL generated column, which PostgreSQL cannot publish"
    assert status["uncaptured"] == {"inv": reason}
    (finding,) = [each for each in inspect(own.name, own.url, own.config).findings if each.problem.startswith("inv ")]
    assert "it is not captured" in finding.problem and finding.remedy.endswith("REPLICA IDENTITY DEFAULT;")
    own.run("ALTER TABLE inv REPLICA IDENTITY DEFAULT")
    own.changes_until(lambda found: any(change.table.name == "inv" and change.resnapshot for change in found))
    own.run("ALTER TABLE inv REPLICA IDENTITY FULL")
    (finding,) = [each for each in inspect(own.name, own.url, own.config).findings if each.problem.startswith("inv ")]
    assert finding.refuses_writes and finding.remedy.endswith("REPLICA IDENTITY DEFAULT;")
    own.run("ALTER TABLE inv REPLICA IDENTITY DEFAULT", "INSERT INTO inv VALUES (1, 1)", "UPDATE inv SET net = 3")
