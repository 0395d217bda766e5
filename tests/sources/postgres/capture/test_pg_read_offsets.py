"""The offset of an answer matches its rows, also when commits are visible before the stream has delivered them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.sources.postgres.pg_server import PATIENCE, Server
from tests.sources.postgres.pg_source import PgRig

from headwater.database import Database
from headwater.errors import SourceMismatch
from headwater.model.change import Transaction
from headwater.ranges.worker.position_requests import PositionClient, PositionServer
from headwater.sources.postgres.capture import barriers
from headwater.sources.query import ReadResult

_numbers = itertools.count(1)


class Gate:
    """Holds the stream before the next transaction, as a slow network would."""

    def __init__(self, own: PgRig) -> None:
        self.came, self.open = threading.Event(), threading.Event()
        assert own.source._stream is not None
        keeper = own.source._stream.keeper
        logged = keeper.logged

        def late(part: Transaction, upto: int) -> None:
            self.came.set()
            assert self.open.wait(PATIENCE)
            logged(part, upto)

        keeper.logged = late  # type: ignore[method-assign]


@pytest.fixture
def own(pg: Server) -> Iterator[PgRig]:
    made = PgRig(pg, f"placed_{os.getpid()}_{next(_numbers)}", "CREATE TABLE t(id int PRIMARY KEY, a text)")
    made.run("INSERT INTO t VALUES (1, 'before')")
    made.pull()
    yield made
    made.close()


@pytest.fixture
def gate(own: PgRig) -> Iterator[Gate]:
    made = Gate(own)
    yield made
    made.open.set()


def _ask(own: PgRig) -> ReadResult:
    found = own.source.answer(own.source.analyse("SELECT a FROM t ORDER BY id"), {})
    assert found is not None
    return found


def test_answer_ahead_of_the_stream_waits_for_its_offset(
    own: PgRig, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barriers, "SECONDS", PATIENCE)
    before = _ask(own)
    assert (before.rows, before.offset, before.settled) == ((("before",),), 1, True)
    own.run("UPDATE t SET a = 'after'")
    assert gate.came.wait(PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_ask, own)
        wait([asked], timeout=0.3)  # long enough to have its rows and, if it did not wait, a wrong place
        gate.open.set()
        after = asked.result(PATIENCE)
    assert (after.rows, after.offset, after.settled) == ((("after",),), 2, True)


def test_answer_without_an_offset_in_time_is_reported_unsettled(own: PgRig, gate: Gate) -> None:
    own.run("UPDATE t SET a = 'after'")
    assert gate.came.wait(PATIENCE)
    for _ in range(2):  # the second one need not wait to know it
        found = _ask(own)
        assert (found.rows, found.offset, found.settled) == ((("after",),), 1, False)
    gate.open.set()
    own.head()
    found = _ask(own)
    assert (found.rows, found.offset, found.settled) == ((("after",),), 2, True)


def test_worker_reading_across_a_new_generation_is_refused_and_leaves_no_thread(own: PgRig, tmp_path: Path) -> None:
    log = SimpleNamespace(generation="before")
    desk = PositionServer(lambda name: cast("Database", SimpleNamespace(source=own.source, log=log)))
    desk.open(str(tmp_path / "desk"))
    others = {*threading.enumerate()}
    asked = PositionClient(str(tmp_path / "desk"), own.name, "before")
    with asked.reading():
        own.source._visibility.start(12)
        log.generation = "after"
        with pytest.raises(SourceMismatch, match="new generation"):
            asked.exact("1:1:")
    for thread in {*threading.enumerate()} - others:
        thread.join(PATIENCE)  # a thread that fails fails the test
    desk.close()
