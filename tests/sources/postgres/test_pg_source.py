"""The source on real servers: what is committed is followed once, in order, whatever breaks in between."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import PgRig

TABLE = "CREATE TABLE t(k int PRIMARY KEY, v text)"
FULL = "ALTER TABLE t REPLICA IDENTITY FULL"
_numbers = itertools.count(1)


@pytest.fixture
def rig(pg: Server) -> Iterator[Callable[..., PgRig]]:
    made: list[PgRig] = []

    def start(*statements: str, **settings: Any) -> PgRig:
        made.append(PgRig(pg, f"src_{os.getpid()}_{next(_numbers)}", *statements, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_what_is_committed_is_followed(rig: Callable[..., PgRig]) -> None:
    own = rig(TABLE, "INSERT INTO t VALUES (0, 'before')")
    own.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", "UPDATE t SET v = 'A' WHERE k = 1", "DELETE FROM t WHERE k = 2")
    assert [len(part.changes) for part in own.pull()] == [2, 1, 1]
    assert own.fold() == {1: (1, "A")}
    assert own.source.describe()["t"] is own.log[-1].changes[0].table
    assert own.source.read("SELECT k, v FROM t ORDER BY k").rows == ((0, "before"), (1, "A"))
    assert own.source.read("SELECT :a::int + 1, ':b'", {"a": 4}).rows == ((5, ":b"),)
    assert own.source.read("SELECT $1::text", ["x"]).offset == 4
