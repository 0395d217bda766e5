"""Shapes from the catalogue equal those of the stream: no table changes its shape when it is written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import SourceUnfit
from headwater.model.change import Op
from headwater.sources.postgres.protocol_session import Pool
from headwater.sources.postgres.schema.catalog import describe
from headwater.sources.postgres.schema.table_shapes import Shapes

TABLES = {
    "plain": ('(a int, b text COLLATE "C" NOT NULL, c numeric(10, 2) DEFAULT 1, PRIMARY KEY (b, a))', "(1, 'x', 2)"),
    "bare": ("(a int, b jsonb)", "(1, '{}')"),
    "whole": ("(a serial PRIMARY KEY, b text[])", "(1, '{a}')"),
    "made": ("(a int PRIMARY KEY, b int GENERATED ALWAYS AS (a + 1) STORED, c text)", "(1, DEFAULT, 'x')"),
    "indexed": ("(a int NOT NULL UNIQUE, b bigint GENERATED ALWAYS AS IDENTITY, c varchar(7))", "(1, DEFAULT, 'x')"),
    "typed": (
        "(a uuid PRIMARY KEY, b e, c d, d timestamptz(3), e char(4), f bit(3))",
        "('00000000-0000-0000-0000-000000000001', 'x', 5, now(), 'ab', '101')",
    ),
    '"Odd ""Name"""': ('("The Key" int PRIMARY KEY, "a.b" text)', "(1, 'x')"),
    "other.plain": ("(a int PRIMARY KEY)", "(1)"),
    "parted": ("(a int PRIMARY KEY, b text) PARTITION BY RANGE (a)", "(1, 'x')"),
    "included": ("(a int, b int, c int, PRIMARY KEY (a) INCLUDE (b))", "(1, 2, 3)"),
    "included_whole": ("(a int, b int, c int, PRIMARY KEY (a) INCLUDE (b))", "(1, 2, 3)"),
    "late": ("(a int PRIMARY KEY DEFERRABLE, b int)", "(1, 2)"),
    "unread": ("()", ""),
}


@pytest.fixture
def own(pg: Server, request: pytest.FixtureRequest) -> Iterator[Callable[..., PgRig]]:
    made: list[PgRig] = []

    def start(*statements: str, **settings: Any) -> PgRig:
        made.append(
            PgRig(pg, f"described_{len(made)}_{abs(hash(request.node.name)) % 10_000}", *statements, **settings)
        )
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_tables_that_were_there_are_known_as_the_stream_sends_them(own: Callable[..., PgRig]) -> None:
    setup = ["CREATE SCHEMA other", "CREATE TYPE e AS ENUM ('x')", "CREATE DOMAIN d AS int CHECK (value > 0)"]
    setup += [f"CREATE TABLE {name} {columns}" for name, (columns, _) in TABLES.items()]
    setup += ["CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)"]
    setup += [
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "ALTER TABLE included_whole REPLICA IDENTITY FULL",
        "ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_a_key",
    ]
    rig = own(*setup)
    described = rig.source.describe()
    rig.run(*(f"INSERT INTO {name} VALUES {row}" for name, (_, row) in TABLES.items() if row))
    changes = [change for part in rig.pull() for change in part.changes]
    assert [change for change in changes if change.op is Op.SCHEMA_CHANGE] == []
    assert len(changes) == len(TABLES) - 1
    for change in changes:
        assert change.table == described[change.table.name]
    assert {'"Odd ""Name"""', "other.plain", "parted_1", "unread"} <= described.keys()
    assert described["plain"].key == ("b", "a") and described["bare"].key == ()
    assert described["indexed"].key == ("a",) and described["whole"].key == ("a",)
    assert described["included"].key == described["included_whole"].key == ("a",)
    assert described["late"].key == ()  # to PostgreSQL a key that is checked at the commit is no replica identity
    keys = {name: rig.source.chunk(name, after=None, span=None, limit=9).table.key for name in ("included", "plain")}
    assert keys == {"included": ("a",), "plain": ("b", "a")}
    assert rig.source.describe() == described


def test_deferrable_key_is_reported_as_missing_identity(own: Callable[..., PgRig]) -> None:
    rig = own(
        "CREATE TABLE late(a int PRIMARY KEY DEFERRABLE, b int)",
        "CREATE TABLE wide(a int, b text, PRIMARY KEY (a) INCLUDE (b))",
        "CREATE TABLE plain(a int PRIMARY KEY)",
    )
    found = {each.problem: each for each in rig.source.findings() if "ALTER TABLE" in each.remedy}
    late, wide = sorted(found)
    assert late.startswith("late has no replica identity") and found[late].refuses_writes
    assert wide.startswith("wide sends only the key of the old row")  # without the columns of INCLUDE
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        rig.run("INSERT INTO late VALUES (1, 1)", "UPDATE late SET b = 2")
    rig.run(found[late].remedy, "UPDATE late SET b = 2")


def test_described_version_of_an_altered_table_equals_that_of_its_next_row(own: Callable[..., PgRig]) -> None:
    rig = own("CREATE TABLE t(a int PRIMARY KEY)")
    assert rig.source.describe()["t"].version == 1
    rig.run("ALTER TABLE t ADD COLUMN b text", "CREATE TABLE fresh(a int PRIMARY KEY)")
    described = rig.source.describe()
    assert (described["t"].version, described["fresh"].version) == (2, 1)
    rig.run("INSERT INTO t VALUES (1, 'x')", "INSERT INTO fresh VALUES (1)")
    changes = [change for part in rig.pull() for change in part.changes]
    assert [(change.op, change.table.name, change.resnapshot) for change in changes] == [
        (Op.SCHEMA_CHANGE, "t", False),
        (Op.INSERT, "t", False),
        (Op.SCHEMA_CHANGE, "fresh", False),
        (Op.INSERT, "fresh", False),
    ]
    assert [change.table for change in changes[1::2]] == [described["t"], described["fresh"]]
    rig.acknowledge()
    rig.run("DROP TABLE fresh", "CREATE TABLE fresh(a int PRIMARY KEY, b int)", "INSERT INTO fresh VALUES (1, 2)")
    rig.pull()
    rig.acknowledge()
    rig.open()
    rig.run("INSERT INTO fresh VALUES (2, 3)")
    (part,) = rig.pull()
    assert part.changes[0].table.version == 2 and rig.source.describe()["fresh"] == part.changes[0].table


def test_role_without_superuser_captures_its_own_tables(own: Callable[..., PgRig], pg: Server) -> None:
    rig = own("CREATE TABLE t(a int PRIMARY KEY)", "CREATE TABLE u(a int PRIMARY KEY)")
    rig.source.close()
    role = f"role_{rig.name}"
    rig.run(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT CREATE ON DATABASE {rig.name} TO {role}")
    rig.run(f"ALTER TABLE t OWNER TO {role}", f"DROP PUBLICATION {rig.slot}")
    try:
        plain = rig.config
        rig.user = role
        rig.notes.kept.clear()
        with pytest.raises(SourceUnfit) as caught:
            rig.open()
        assert f'CREATE PUBLICATION "{rig.slot}" FOR ALL TABLES' in caught.value.hint
        rig.config = type(plain)(tables=("t",), heartbeat_seconds=0.05)
        rig.open()
        rig.run("INSERT INTO t VALUES (1)", "INSERT INTO u VALUES (1)", "INSERT INTO t VALUES (2)")
        assert [change.after for part in rig.pull() for change in part.changes] == [(1,), (2,)]
        assert list(rig.source.describe()) == ["t"]
    finally:
        rig.kill()
        rig.user = "postgres"
        rig.run("ALTER TABLE t OWNER TO postgres", f"ALTER PUBLICATION {rig.slot} OWNER TO postgres")
        rig.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


DEFAULTS = {
    "libc": (140000, "LC_COLLATE 'C'"),
    "icu": (150000, "LOCALE_PROVIDER icu ICU_LOCALE 'de-DE'"),
    "builtin": (170000, "LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8'"),
}


@pytest.mark.every_server
@pytest.mark.parametrize("provider", DEFAULTS)
def test_default_collation_is_the_database_collation_in_stream_and_reads(pg: Server, provider: str) -> None:
    since, locale = DEFAULTS[provider]
    name = f"collated_{provider}_{os.getpid()}"
    with pg.connect() as admin:
        if admin.info.server_version < since:
            pytest.skip("this server has no such provider")
        try:
            admin.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' {locale} TEMPLATE template0".encode())
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this server was built without it")
        try:
            with pg.connect(name) as db:
                db.execute('CREATE TABLE t(k text PRIMARY KEY, c text COLLATE "C", n int)')
                db.execute("CREATE PUBLICATION p FOR ALL TABLES")
                told = describe(db, "p").tables["t"]
            pool = Pool(lambda: pg.connect(name))
            found = pool.read(lambda link: Shapes().shape(link, "t")).table
            pool.close()
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    assert found.columns == told.columns
    assert provider != "icu" or found.columns[0].collation == "de-DE"
