"""Continuous runs: stopped, cancelled, taken over and fenced, each soon and with nothing lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from tests.conformance.live_server import Live
from tests.pipeline.lakes import Lake, Watching, fill
from tests.suite.deadlines import PATIENCE

from headwater.errors import HeadwaterError, NotOwner, Unavailable
from headwater.pipeline.run import ownership
from headwater.pipeline.run.meta_database import SUBSCRIBE
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.task import Task
from headwater.pipeline.runner import Summary, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = 6 * PATIENCE  # for what Spark does when it does it the first time


class EachTime(Watching):
    """A watcher that sets an event at each event of its kind, not only at the first."""

    def __init__(self, live: threading.Event, waiting: threading.Event, stepped: threading.Event) -> None:
        super().__init__()
        self._live, self._waiting, self._stepped = live, waiting, stepped

    def live(self, task: Task, offset: int, latest: int) -> None:
        self._live.set()

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        super().retrying(task, error, failures)
        self._waiting.set()

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        self._stepped.set()


class Going:
    """A continuous run in a thread."""

    def __init__(self, lake: Lake, pipeline: str = "") -> None:
        self.stop, self.live, self.waiting, self.stepped = (threading.Event() for _ in range(4))
        self._lake, self._spec = lake, lake.spec(pipeline=pipeline)
        self.watcher = EachTime(self.live, self.waiting, self.stepped)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._summary = run(self._spec, spark=self._lake.spark, watcher=self.watcher, stop=self.stop)

    def ended(self) -> Summary:
        """Wait for the end of the run; return its result."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it goes on"
        return self._summary

    def leave(self) -> None:
        self.stop.set()
        self._thread.join(LONG)


@pytest.fixture
def lake(spark: SparkSession, server: Live, tmp_path: Path) -> Lake:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    fill(server, 20)
    return Lake(spark, server, tmp_path)


@pytest.fixture
def go(lake: Lake) -> Iterator[Callable[..., Going]]:
    begun: list[Going] = []

    def start(pipeline: str = "") -> Going:
        begun.append(Going(lake, pipeline))
        return begun[-1]

    yield start
    for each in begun:
        each.leave()


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[MetaStore]:
    with MetaStore.open(str(tmp_path / "headwater-pipeline.db")) as store:
        yield store


def test_run_ends_on_stop_and_on_cancel_and_a_cancelled_pipeline_carries_nothing(
    lake: Lake, go: Callable[..., Going], meta: MetaStore
) -> None:
    one = go()
    assert one.live.wait(LONG)
    lake.server.sql("UPDATE t SET v = 'new' WHERE id = 1")
    assert one.stepped.wait(LONG)
    one.stop.set()
    assert one.ended().is_good and lake.is_equal()
    assert not lake.task().is_owned

    two = go()
    assert two.live.wait(LONG)
    assert meta.cancel("lake") == 1
    assert two.ended().is_good
    lake.server.sql("DELETE FROM t WHERE id = 2")
    assert lake.carry().rows == 0  # still cancelled
    meta.cancel("lake", undo=True)
    assert lake.carry().rows == 1 and lake.is_equal()


def test_second_run_waits_and_takes_over_when_the_first_run_ends(lake: Lake, go: Callable[..., Going]) -> None:
    one = go()
    assert one.live.wait(LONG)
    two = go()
    assert two.waiting.wait(PATIENCE)
    assert not two.live.is_set()
    one.stop.set()
    assert one.ended().is_good
    assert two.live.wait(LONG)
    lake.server.sql("UPDATE t SET v = 'by the second'")
    assert two.stepped.wait(LONG)
    two.stop.set()
    assert two.ended().is_good and lake.is_equal()


def test_run_that_lost_its_lease_takes_it_again_and_goes_on_from_the_sink(
    lake: Lake, go: Callable[..., Going], meta: MetaStore
) -> None:
    one = go("lease_seconds = 15")  # which a busy machine can keep
    assert one.live.wait(LONG)
    one.stepped.clear()
    with meta.database.transaction() as connection:  # as if the lease had expired while this process was paused
        connection.execute(sa.update(SUBSCRIBE).values(owner="", fence=SUBSCRIBE.c.fence + 1))
    assert one.waiting.wait(LONG)
    lake.server.sql("UPDATE t SET v = 'after the loss' WHERE id = 3")
    assert one.stepped.wait(LONG)
    one.stop.set()
    assert one.ended().is_good and lake.is_equal()
    assert [type(error) for error in one.watcher.errors] == [NotOwner]
    assert (one.watcher.reasons, lake.task().error) == (["first"], "")


def test_run_whose_table_is_reset_by_force_takes_a_new_snapshot(
    lake: Lake, go: Callable[..., Going], meta: MetaStore
) -> None:
    one = go("lease_seconds = 15")
    assert one.live.wait(LONG)
    meta.reset("lake", force=True)
    assert one.waiting.wait(LONG)
    one.live.clear()
    assert one.live.wait(LONG)
    one.stop.set()
    assert one.ended().is_good and lake.is_equal()
    first, *later = one.watcher.reasons
    assert first == "first" and set(later) == {"reset"}, "begun once more if it began before the loss was noticed"


def test_meta_store_that_does_not_answer_is_asked_again(
    lake: Lake, go: Callable[..., Going], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([Unavailable("the meta store is away")])
    take = ownership.take

    def sometimes(*args: Any) -> int:
        if (error := next(answers, None)) is not None:
            raise error
        return take(*args)

    monkeypatch.setattr(ownership, "take", sometimes)
    one = go()
    assert one.waiting.wait(LONG) and one.live.wait(LONG)
    one.stop.set()
    assert one.ended().is_good and lake.is_equal()


def test_run_once_ends_while_writers_keep_writing(lake: Lake) -> None:
    stop, wrote = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            lake.server.sql("UPDATE t SET v = ? WHERE id = ?", f"w{number}", number % 20 + 1)
            wrote.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert wrote.wait(PATIENCE)
        first = lake.carry()
        second = lake.carry()
        assert second.offset > first.offset
    finally:
        stop.set()
        writer.join()
    lake.carry()
    assert lake.is_equal()
