"""The lake of the demo: the shop's tables carried into Delta by the Spark pipeline, and proven equal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.failure import Failure

if TYPE_CHECKING:
    from headwater.pipeline.run.spec import PipelineSpec
    from headwater.pipeline.run.table_report import TableReport
    from headwater.pipeline.runner import Summary

SPARK_SECONDS = 120.0  # longest wait for one step of Spark on a slow machine
TABLES = ("customers", "orders", "products", "visits")
VISITS = 60_000
SPEC = """\
[pipeline]
name = "shop"
server = "{url}"
range_bytes = 500_000

[[table]]
tables = ["customers", "orders", "products"]
[table.sink]
kind = "delta"
path = "lake/{{table}}"

[[table]]
db = "web"
table = "visits"
[table.sink]
kind = "delta"
path = "lake/visits"
"""


class Lake:
    """The pipeline of the demo's tables into the lake, run by Spark in this process."""

    def __init__(self, folder: Path, url: str) -> None:
        from headwater.pipeline.run.spec import read_spec
        from headwater.pipeline.spark.frames import register
        from headwater.pipeline.spark.session import open_session

        self.folder, self.file = folder, folder / "lake.toml"
        self.file.write_text(SPEC.format(url=url))
        self.spec: PipelineSpec = read_spec(self.file)
        began = time.perf_counter()
        self._spark = open_session("local[2]", "headwater demo", short_lived=True)
        register(self._spark)
        self.seconds = time.perf_counter() - began
        self._stop = threading.Event()
        self._seen: Any = _OffsetWatcher()  # has every method of a Watcher
        self._threads = ThreadPoolExecutor(1)

    @contextmanager
    def running(self) -> Iterator[Future[Summary]]:
        """Run the pipeline: bars on a terminal, lines elsewhere."""
        from headwater.cli.commands.pipeline import progress_display
        from headwater.pipeline.runner import run

        with progress_display() as show:
            self._seen.show = show
            work = self._threads.submit(run, self.spec, watcher=self._seen, stop=self._stop, spark=self._spark)
            self._seen.work = work
            try:
                yield work
            finally:
                self._stop.set()
                work.result(SPARK_SECONDS)

    def wait(self, main: int, web: int) -> None:
        """Wait until every sink has reached the offset of its database; Failure after SPARK_SECONDS."""
        wanted = {table: web if table == "visits" else main for table in TABLES}
        if not self._seen.wait(lambda live: all(live.get(table, -1) >= offset for table, offset in wanted.items())):
            raise Failure("the pipeline did not catch up", hint="Is the machine very busy? Try again.")

    def verify(self) -> list[TableReport]:
        """Compare every table with its source, range by range; return the reports."""
        from headwater.pipeline.verify.verify import verify

        return verify(self.spec, spark=self._spark)

    def rows(self, table: str) -> int:
        """Return the number of rows in the lake, as any reader of Delta counts them."""
        from deltalake import DeltaTable

        return DeltaTable(self.folder / "lake" / table).count()

    def close(self) -> None:
        """Stop Spark."""
        from headwater.pipeline.spark.session import close_session, forget_log

        self._stop.set()
        self._threads.shutdown()
        close_session(self._spark)
        forget_log()


class _OffsetWatcher:
    """A watcher that forwards events to the display `show`, and keeps the offset of each table."""

    def __init__(self) -> None:
        self.show: Any = None
        self.work: Future[Summary] | None = None
        self._live: dict[str, int] = {}
        self._moved = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.show, name)

    def live(self, task: Any, offset: int, latest: int) -> None:
        """Forward the event `live`, and keep the offset that it reports for the table."""
        self.show.live(task, offset, latest)
        with self._moved:
            self._live[task.table] = offset
            self._moved.notify_all()

    def wait(self, holds: Callable[[dict[str, int]], bool]) -> bool:
        """Wait until `holds` is true of the offsets; return False if that takes too long or the pipeline ended."""
        end = time.monotonic() + SPARK_SECONDS
        with self._moved:
            while not holds(self._live):
                if time.monotonic() > end or (self.work is not None and self.work.done()):
                    return False
                self._moved.wait(0.2)
        return True
