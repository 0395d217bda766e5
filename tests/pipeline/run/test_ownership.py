"""Continuous runs: stopped, cancelled, taken over and fenced, each soon and with nothing lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conformance.live_server import Live
from tests.pipeline.lakes import Lake, Watching, fill
from tests.suite.deadlines import PATIENCE

from headwater.errors import NotOwner
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.runner import Summary, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = 6 * PATIENCE  # for what Spark does when it does it the first time


class Going:
    """A continuous run in a thread."""

    def __init__(self, lake: Lake, pipeline: str = "") -> None:
        self.stop, self.live, self.waiting, self.stepped = (threading.Event() for _ in range(4))
        self._lake, self._spec = lake, lake.spec(pipeline=pipeline)
        self._watcher = Watching(live=self.live.set, retrying=self.waiting.set, stepped=self.stepped.set)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._summary = run(self._spec, spark=self._lake.spark, watcher=self._watcher, stop=self.stop)

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


def test_run_that_lost_its_lease_ends_without_writing_an_error_to_the_task(
    lake: Lake, go: Callable[..., Going], meta: MetaStore
) -> None:
    one = go("lease_seconds = 15")  # which a busy machine can keep
    assert one.live.wait(LONG)
    meta.reset("lake", force=True)
    (done,) = one.ended().tables
    assert isinstance(done.error, NotOwner)
    assert lake.task().error == ""  # it is not for us to say any more
    watcher = Watching()
    lake.carry(watcher=watcher)
    assert watcher.reasons == ["reset"] and lake.is_equal()


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
