"""The publication: one that omits rows or columns is refused, and configured tables that are created later join it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import SourceUnfit
from headwater.model.change import Change, Op
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.setup.inspection import inspect

TABLE = "CREATE TABLE t(k int PRIMARY KEY, a int, b int)"
PARTLY = {"rows": "t WHERE (k > 10)", "columns": "t (k, a)"}
_numbers = itertools.count(1)
pytestmark = pytest.mark.usefixtures("watchful")
Start = Callable[..., PgRig]


@pytest.fixture
def name() -> str:
    return f"published_{os.getpid()}_{next(_numbers)}"


@pytest.fixture
def filters(pg: Server) -> None:
    with pg.connect() as admin:
        if admin.info.server_version < 150000:
            pytest.skip("publications have filters from PostgreSQL 15 on")


# --- a part of a table ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize("part", PARTLY)
def test_publication_of_some_rows_or_columns_is_refused_with_the_statement_that_fixes_it(
    part: str, pg: Server, name: str
) -> None:
    publication = f"headwater_{name}"
    with pg.connect() as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
        with pg.connect(name) as db:
            db.execute(TABLE)
            db.execute("CREATE TABLE u(k int PRIMARY KEY)")
            db.execute(f"CREATE PUBLICATION {publication} FOR TABLE u, {PARTLY[part]}".encode())
            config, url = PostgresConfig(tables=("t", "u")), f"postgresql://postgres@/{name}?host={pg.folder}"
            (found,) = [each for each in inspect(name, url, config).findings if each.fatal]
            assert "only some rows or columns of t:" in found.problem
            assert found.remedy == f'ALTER PUBLICATION "{publication}" SET TABLE ONLY "public"."t", ONLY "public"."u";'
            db.execute(found.remedy.encode())
            assert not [each for each in inspect(name, url, config).findings if each.fatal]
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize("part", PARTLY)
def test_filter_added_to_the_publication_ends_the_history_and_a_restart_is_refused(part: str, rig: Start) -> None:
    own = rig(TABLE, tables=("t",))
    own.run(f"ALTER PUBLICATION {own.slot} SET TABLE {PARTLY[part]}", "INSERT INTO t VALUES (1, 1, 1)")
    assert "publication" in own.lost()
    own.source.reopen()
    with pytest.raises(SourceUnfit, match="only some rows or columns") as caught:
        own.source.restart(generation="next", first=100)
    own.run(caught.value.hint.removeprefix("Run: "))
    own.source.restart(generation="next", first=100)
    own.run("INSERT INTO t VALUES (2, 2, 2)")
    assert own.head() == 100


@pytest.mark.usefixtures("filters")
def test_filter_added_while_headwater_is_stopped_ends_the_history(rig: Start) -> None:
    own = rig(TABLE, tables=("t",))
    own.source.close()
    own.run(f"ALTER PUBLICATION {own.slot} SET TABLE t WHERE (k > 10)")
    own.open(expect="publication")


def test_publication_of_inserts_only_is_fixed_at_the_start(rig: Start, name: str) -> None:
    publish = f"CREATE PUBLICATION headwater_{name} FOR TABLE t WITH (publish = 'insert')"
    own = rig(TABLE, publish, name=name, tables=("t",))
    own.run("INSERT INTO t VALUES (1, 1, 1)", "UPDATE t SET a = 2", "DELETE FROM t", "TRUNCATE t")
    ops = [change.op for part in own.pull() for change in part.changes]
    assert ops == [Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE]


# --- tables that are made later ------------------------------------------------------------------------------


def is_anew(found: list[Change]) -> bool:
    return any(change.resnapshot for change in found)


def test_table_dropped_and_created_again_is_captured_again(rig: Start) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (1, 1, 1)", tables=("t",))
    own.run("DROP TABLE t", "CREATE TABLE t(k int PRIMARY KEY, c text)", "INSERT INTO t VALUES (5, 'unseen')")
    drop, anew = own.changes_until(is_anew)
    assert drop.ddl == "DROP TABLE t" and anew.op is Op.SCHEMA_CHANGE  # though no row of it was sent
    assert anew.table.names == ("k", "c") and anew.table.version > drop.table.version
    own.run("INSERT INTO t VALUES (6, 'seen')")
    (change,) = own.changes_until(bool)
    assert (change.op, change.after) == (Op.INSERT, (6, "seen"))
    assert own.source.chunk("t", after=None, span=None, limit=9).rows == ((5, "unseen"), (6, "seen"))
    own.open()  # the publication is as we left it
    own.run("DELETE FROM t WHERE k = 6")
    assert [change.op for change in own.changes_until(bool)] == [Op.DELETE]


def test_listed_table_created_after_the_start_is_captured(rig: Start) -> None:
    own = rig(TABLE, tables=("t", "s.late"))
    assert sorted(own.source.describe()) == ["t"]
    own.run("CREATE SCHEMA s", "CREATE TABLE s.late(k int PRIMARY KEY)", "CREATE TABLE other(k int PRIMARY KEY)")
    (anew,) = own.changes_until(is_anew)
    assert anew.table.name == "s.late"
    own.run("INSERT INTO s.late VALUES (1)", "INSERT INTO other VALUES (1)")
    assert [(change.table.name, change.after) for change in own.changes_until(bool)] == [("s.late", (1,))]
    assert sorted(own.source.describe()) == ["s.late", "t"]


def test_listed_table_created_while_headwater_is_stopped_is_reported(rig: Start) -> None:
    own = rig(TABLE, tables=("t", "late"))
    own.source.close()
    own.run("CREATE TABLE late(k int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    own.open()
    (anew,) = own.changes_until(is_anew)
    assert anew.table.name == "late"


def test_publishing_a_locked_table_does_not_wait_for_the_lock(rig: Start) -> None:
    own = rig(TABLE, tables=("t", "late"))
    with own.server.connect(own.name) as other:
        own.run("CREATE TABLE late(k int PRIMARY KEY)")
        with other.transaction():
            other.execute("LOCK TABLE late IN ACCESS EXCLUSIVE MODE")
            own.source._attachment.join()
            assert sorted(own.source.describe()) == ["t"]
        own.source._attachment.join()
    assert sorted(own.source.describe()) == ["late", "t"]


def test_table_that_cannot_be_published_is_logged_once(
    rig: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rig(TABLE, tables=("t", "late"))

    def refuse(*_: Any) -> None:
        raise SourceUnfit("must be owner of table late", hint="As a superuser run: …")

    own.run("CREATE TABLE late(k int PRIMARY KEY)")
    monkeypatch.setattr("headwater.sources.postgres.capture.slot.publication.run_as_owner", refuse)
    with caplog.at_level(logging.WARNING, "headwater.postgres.fitness"):
        for _ in range(3):
            own.source._attachment.join()
    assert [each.getMessage() for each in caplog.records if "late" in each.getMessage()] == [
        f"{own.name}: a new table is not published: must be owner of table late; As a superuser run: …"
    ]
    own.run("INSERT INTO t VALUES (1, 1, 1)")
    assert len(own.changes_until(bool)) == 1


def test_last_table_removed_from_the_settings_is_removed_from_the_publication(rig: Start) -> None:
    own = rig(TABLE, tables=("t",))
    own.source.close()
    own.config = PostgresConfig(heartbeat_seconds=0.05, tables=("late",))
    own.open()
    assert own.source.describe() == {}
