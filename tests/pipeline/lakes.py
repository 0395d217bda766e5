"""A pipeline from a real server into Delta tables: specs, runs, their rows, and watchers."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from tests.conformance.live_server import Live

from headwater.client import Client
from headwater.pipeline import runner as running
from headwater.pipeline.run.carry import CarryResult
from headwater.pipeline.run.events import Watcher
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.resources import sink_of
from headwater.pipeline.run.spec import PipelineSpec, spec_of
from headwater.pipeline.run.table_report import TableReport
from headwater.pipeline.run.task import RangeProgress, Task
from headwater.pipeline.runner import Summary, run
from headwater.pipeline.transform.schema import TYPED, fit, rows_schema
from headwater.pipeline.verify.verify import verify

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

    from headwater.errors import HeadwaterError

Row = dict[str, Any]
DELTA = 'kind = "delta"\npath = "lake/{table}"'
SMALL = 400  # bytes of a range: a dozen rows or so


class Watching(Watcher):
    """A watcher that records its events; each `on` function is called at the first event of its name."""

    def __init__(self, **on: Callable[[], object]) -> None:
        self._on = on
        self.reasons: list[str] = []
        self.loads: list[int] = []
        self.steps: list[int] = []
        self.errors: list[HeadwaterError] = []
        self.moves: list[RangeProgress] = []

    def _run_action(self, what: str) -> None:
        """Run the action that the test has registered for this event; it runs once."""
        if act := self._on.pop(what, None):
            act()

    def started(self, task: Task, reason: str, rows: int, ranges: int) -> None:
        self.reasons.append(reason)
        self._run_action("started")

    def range_moved(self, task: Task, row: RangeProgress) -> None:
        self.moves.append(row)

    def loaded(self, task: Task, parts: int, rows: int, seconds: float) -> None:
        self.loads.append(rows)
        self._run_action("loaded")

    def stepped(self, task: Task, upto: int, changes: int, seconds: float) -> None:
        self.steps.append(changes)
        self._run_action("stepped")

    def live(self, task: Task, offset: int, latest: int) -> None:
        self._run_action("live")

    def retrying(self, task: Task, error: HeadwaterError, failures: int) -> None:
        self.errors.append(error)
        self._run_action("retrying")


class Lake:
    """A pipeline of tables of `server` into Delta tables in `folder`."""

    def __init__(self, spark: SparkSession, server: Live, folder: Path) -> None:
        self.spark, self.server, self.folder = spark, server, folder

    def spec(self, *tables: str, pipeline: str = "", sink: str = DELTA, **settings: str) -> PipelineSpec:
        """Return the spec of named tables, or of tables with lines of TOML in `settings`; of t by default."""
        text = f'[pipeline]\nname = "lake"\nserver = "{self.server.url}"\nrange_bytes = {SMALL}\nparallelism = 1\n'
        told = dict.fromkeys(tables or (() if settings else ("t",)), "") | settings
        blocks = [f'[[table]]\ntable = "{name}"\n{lines}\n[table.sink]\n{sink}' for name, lines in told.items()]
        return spec_of(tomllib.loads("\n".join([text, pipeline, *blocks])), self.folder, "test", os.environ)

    def run(self, spec: PipelineSpec | None = None, watcher: Watcher | None = None, **more: Any) -> Summary:
        """Run until caught up; return the summary, which includes errors."""
        return run(spec or self.spec(), once=True, spark=self.spark, watcher=watcher, **more)

    def carry(self, spec: PipelineSpec | None = None, watcher: Watcher | None = None) -> CarryResult:
        """Run for one table until caught up; fail on an error."""
        (done,) = self.run(spec, watcher).tables
        assert done.error is None, done.error
        return done

    def failure(self, spec: PipelineSpec | None = None, watcher: Watcher | None = None) -> HeadwaterError:
        """Run for one table; return its error."""
        (done,) = self.run(spec, watcher).tables
        assert done.error is not None
        return done.error

    def verify(self, spec: PipelineSpec | None = None, **more: Any) -> TableReport:
        (report,) = verify(spec or self.spec(), spark=self.spark, **more)
        return report

    # --- looking -----------------------------------------------------------------------------------------

    def table(self, name: str = "t") -> DeltaTable:
        return DeltaTable(str(self.folder / "lake" / name))

    def rows(self, name: str = "t") -> list[Row]:
        """Return the rows of a lake table in order; duplicates appear twice."""
        return in_order(self.table(name).to_pyarrow_table().to_pylist())

    def source(self, name: str = "t", types: str = TYPED, **options: Any) -> list[Row]:
        """Return the rows of the server's table, in Spark's types."""
        with Client(self.server.url) as client:
            schema = rows_schema(client.describe("main", name).table, options.get("columns", ()), types)
            batches = client.snapshot("main", name, **options)
            return in_order([row for batch in batches for row in fit(batch, schema).to_pylist()])

    def is_equal(self, name: str = "t") -> bool:
        assert self.rows(name) == self.source(name)
        return True

    def task(self, name: str = "t") -> Task:
        with MetaStore.open(str(self.folder / "headwater-pipeline.db")) as meta:
            (found,) = meta.tasks("lake", "main", name)
            return found

    def progress(self, name: str = "t") -> list[RangeProgress]:
        with MetaStore.open(str(self.folder / "headwater-pipeline.db")) as meta:
            (task,) = meta.tasks("lake", "main", name)
            return meta.progress(task)


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: repr(sorted(row.items())))


def fill(server: Live, count: int, *, first: int = 1, table: str = "t") -> None:
    """Insert `count` rows (id, v) with ids from `first` on."""
    server.sql(f"INSERT INTO {table} VALUES " + ",".join(f"({n}, 'v{n}')" for n in range(first, first + count)))


# --- sinks that break ------------------------------------------------------------------------------------


class Broken(Exception):
    """The error that a broken sink raises."""


class Breaking:
    """A sink that fails before or after one call of a method."""

    def __init__(self, sink: Any, point: str, error: Exception) -> None:
        self._sink, self._error = sink, error
        self._when, self._name = point.split()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._sink, name)
        if name != self._name:
            return found

        def call(*args: Any) -> None:
            if self._when == "after":
                found(*args)
            raise self._error

        return call


def break_at(patch: pytest.MonkeyPatch, point: str, error: Exception | None = None) -> None:
    """Make later sinks fail at a point such as "before load" or "after apply"."""

    @contextmanager
    def broken(*args: Any, **more: Any) -> Iterator[Any]:
        with sink_of(*args, **more) as sink:
            yield Breaking(sink, point, error or Broken(point))

    patch.setattr(running, "sink_of", broken)
