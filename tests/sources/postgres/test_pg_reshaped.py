"""Changes of tables that change their rows, or whose rows they are: a snapshot is asked for, and only then."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.model.change import Change, Op

TABLE = "CREATE TABLE t(k int PRIMARY KEY, a int, b int)"
ROWS = "INSERT INTO t VALUES (1, 10, 20)"
_numbers = itertools.count(1)


@pytest.fixture
def rig(pg: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PgRig]]:
    """Looks at what the stream does not tell at every step."""
    monkeypatch.setattr("headwater.sources.postgres.source.LOOK_SECONDS", -1.0)
    made: list[PgRig] = []

    def start(*statements: str, **settings: Any) -> PgRig:
        made.append(PgRig(pg, f"reshaped_{os.getpid()}_{next(_numbers)}", *statements, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


def changes(own: PgRig) -> list[Change]:
    """What is new, once the catalogue was looked at."""
    parts = own.pull()
    own.acknowledge()
    parts += own.pull()
    return [change for part in parts for change in part.changes]


# --- whose rows they are --------------------------------------------------------------------------------------

SWAP = "BEGIN; ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; COMMIT"


@pytest.mark.parametrize("how", ["goes on", "begins again", "was killed before its note"])
def test_a_table_that_lost_its_name_to_another_comes_back_for_a_snapshot(rig: Callable[..., PgRig], how: str) -> None:
    own = rig(TABLE, ROWS, "CREATE TABLE t_new(k int PRIMARY KEY, a int, b int)")
    own.run("UPDATE t SET a = 11", SWAP, "INSERT INTO t VALUES (8, 8, 8)")
    if how == "was killed before its note":
        own.pull()
    else:
        changes(own)
    if how != "goes on":
        own.open()
    own.run("UPDATE t_old SET a = 2")
    told = [change for change in changes(own) if change.table.name == "t_old"]
    assert [(change.op, change.resnapshot) for change in told] == [(Op.SCHEMA_CHANGE, True), (Op.UPDATE, False)]
    own.run("UPDATE t_old SET a = 3", "CREATE TABLE fresh(k int PRIMARY KEY)", "INSERT INTO fresh VALUES (1)")
    assert not [change for change in changes(own) if change.resnapshot]


def test_whose_a_name_is_that_was_learnt_late_is_kept(rig: Callable[..., PgRig]) -> None:
    """The log does not say it: of a table that is new in it when we are killed nobody knows at first."""
    own = rig()
    own.run(TABLE, ROWS)
    own.pull()
    own.open()
    own.run("UPDATE t SET a = 11")
    changes(own)
    own.open()
    own.run("DROP TABLE t", TABLE, "INSERT INTO t VALUES (2, 2, 2)")
    assert [(change.op, change.ddl, change.resnapshot) for change in changes(own)[:2]] == [
        (Op.SCHEMA_CHANGE, "DROP TABLE t", False),
        (Op.SCHEMA_CHANGE, "", True),
    ]


def test_a_table_that_is_renamed_before_we_are_killed_keeps_its_owner(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, ROWS)
    own.run("ALTER TABLE t RENAME TO u", "UPDATE u SET a = 11")
    own.pull()
    own.open()
    own.run("ALTER TABLE u RENAME TO w", "UPDATE w SET a = 12")
    assert [change.ddl for change in changes(own)][:1] == ["ALTER TABLE u RENAME TO w"]


def test_a_table_that_is_gone_before_the_stream_tells_of_it_is_told_as_dropped(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE)
    changes(own)
    held, attachment = own.source._held, own.source._attachment
    assert held is not None
    held._most_changes = 10  # a reader that is behind by ten changes instead of 32,768
    own.run("INSERT INTO t SELECT n, n, n FROM generate_series(1, 20) n")
    end = time.monotonic() + PATIENCE
    while held.has_room:
        assert time.monotonic() < end
        own.source.wait(0.01)
    own.run("CREATE TABLE x(k int PRIMARY KEY)", "INSERT INTO x VALUES (1)", "DROP TABLE x")
    attachment.announce(held.whole.shapes)
    held._most_changes = 32_768
    held.acknowledge(0)  # wakes the reader
    told = changes(own)
    assert "x" in {change.table.name for change in told}
    assert [change.ddl for change in told if change.ddl] == ["DROP TABLE x"]
    assert sorted(held.whole.shapes.tables) == ["t"]
