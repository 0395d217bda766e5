"""Turns of callers in the writer's queue, and the end of a group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.source import SqliteSource
from headwater.sources.sqlite.write import writer
from headwater.sources.write import Session

Attach = Callable[..., Rig]
Step = Callable[[Session], Any]


@contextmanager
def _held(source: SqliteSource) -> Iterator[None]:
    """Keep the writer busy, so that writes in the block are queued."""
    started, released = threading.Event(), threading.Event()

    def hold(_: Session) -> None:
        started.set()
        assert released.wait(PATIENCE)

    holding = source.write(hold, caller="holder")
    assert started.wait(PATIENCE)
    try:
        yield
    finally:
        released.set()
    holding.result(PATIENCE)


def _insert(ran: list[str], name: str) -> Step:
    def work(session: Session) -> None:
        ran.append(name)
        session.execute("INSERT INTO t(v) VALUES (?)", [name])

    return work


def test_caller_with_many_writes_yields_the_next_turn_to_another_caller(rig: Attach) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)").source
    ran: list[str] = []
    with _held(source):
        names = ["x1", "x2", "x3", "y1", "x4"]
        futures = [source.write(_insert(ran, name), caller=name[0]) for name in names]
    for future in futures:
        future.result(PATIENCE)
    assert ran == ["x1", "y1", "x2", "x3", "x4"]


def test_group_that_ran_long_is_committed_before_its_next_member(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)").source
    late = threading.Event()
    monkeypatch.setattr(source._writer, "_clock", lambda: 1_000.0 if late.is_set() else 0.0)
    futures: list[Any] = []

    def slow(session: Session) -> None:
        session.execute("INSERT INTO t(v) VALUES ('slow')")
        late.set()

    def is_first_done(_: Session) -> bool:
        late.clear()
        return bool(futures[0].done())

    with _held(source):
        futures += [source.write(work, caller="x") for work in (slow, is_first_done, is_first_done)]
    assert [future.result(PATIENCE).value for future in futures] == [None, True, True]
    assert source.read("SELECT count(*) FROM t").rows == ((1,),)


def test_later_caller_runs_before_the_rest_of_a_long_group(rig: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)").source
    ran: list[str] = []
    futures: list[Any] = []
    monkeypatch.setattr(writer, "GROUP_SECONDS", -1.0)  # every group ends after its first member

    def slow(session: Session) -> None:
        ran.append("x1")
        futures.append(source.write(_insert(ran, "y1"), caller="y"))

    with _held(source):
        futures += [source.write(work, caller="x") for work in (slow, _insert(ran, "x2"), _insert(ran, "x3"))]
    for future in list(futures):
        future.result(PATIENCE)
    assert futures[-1].result(PATIENCE).offset
    assert ran == ["x1", "x2", "y1", "x3"]


def test_write_cancelled_in_the_queue_does_not_run(rig: Attach) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)").source
    ran: list[str] = []
    futures: list[Any] = []

    def cancel(_: Session) -> bool:
        return bool(futures[1].cancel())

    with _held(source):
        futures += [source.write(work, caller="x") for work in (cancel, _insert(ran, "x1"), _insert(ran, "x2"))]
    assert futures[0].result(PATIENCE).value
    futures[2].result(PATIENCE)
    assert ran == ["x2"]


def test_writes_grouped_with_an_insert_or_rollback_are_committed(rig: Attach) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v UNIQUE)").source
    killer = "INSERT OR ROLLBACK INTO t(v) VALUES ('a')"

    def kill(session: Session) -> None:
        session.execute(killer)

    ran: list[str] = []
    with _held(source):
        works = [_insert(ran, "a"), kill, _insert(ran, "b"), kill, _insert(ran, "c")]
        futures = [source.write(work, caller=str(place)) for place, work in enumerate(works)]
    for future in (futures[1], futures[3]):
        with pytest.raises(HeadwaterError):
            future.result(PATIENCE)
    assert [bool(futures[place].result(PATIENCE).offset) for place in (0, 2, 4)] == [True] * 3
    assert source.read("SELECT v FROM t ORDER BY v").rows == (("a",), ("b",), ("c",))


class Answer:
    """A value whose lifetime a test can observe."""


def test_idle_writer_keeps_no_answer(rig: Attach) -> None:
    source = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)").source

    def work(session: Session) -> Answer:
        session.execute("INSERT INTO t(v) VALUES (1)")
        return Answer()

    kept = weakref.ref(source.write(work).result(PATIENCE).value)
    wait_until(lambda: kept() is None, "the answer was freed")
