"""The pipeline's nemesis: kills the driver, executors, the server and its worker while writers continue.

After every kill, and at the end, the rows of the lake must equal the source at the offset that the lake records.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from tests.guarantees.fault_driver import FaultDriver, ServerFaults
from tests.guarantees.pipeline_process import Cluster, PipelineProcess, children, command_of, free_port, kill
from tests.guarantees.server_process import ServerProcess

from headwater.client import Client
from headwater.errors import HeadwaterError, OffsetExpired
from headwater.pipeline.sinks.delta.delta import DeltaSink, Settings

WRITER = Path(__file__).parent / "pipeline_writer.py"
SIZES = (0, 1, 500, 20_000, 150_000, 1_000_000)
TABLES = ("item", "pair", "plain")
EVENTS = ("kill driver", "kill driver", "kill everything", "kill executor", "kill", "kill bulk worker")
SPEC = """
[pipeline]
name = "nemesis"
server = "http://127.0.0.1:{port}"
meta = "sqlite:///meta.db"
master = "{master}"
range_bytes = {range_bytes}
step_rows = {step_rows}
lease_seconds = 5

[pipeline.conf]
"spark.driver.memory" = "1g"
"spark.executor.memory" = "700m"

[[table]]
tables = ["item", "pair", "plain"]

[table.sink]
kind = "delta"
path = "lake/{{table}}"
"""


class Nemesis(ServerFaults, FaultDriver):
    """One run of one seed; `cluster` is a standalone Spark master, or None for local[2]."""

    def __init__(
        self, seed: str, folder: Path, *, cluster: Cluster | None = None, rounds: int = 4, size: int = -1
    ) -> None:
        super().__init__(seed, random.Random(f"{seed} pipeline"))
        self.folder, self.cluster, self.rounds = folder, cluster, rounds
        self.size = self.random.choice(SIZES) if size < 0 else size
        port = free_port()
        self.server = ServerProcess(folder / "data", http=f"127.0.0.1:{port}")
        spec = folder / "lake.toml"
        spec.write_text(
            SPEC.format(
                port=port,
                master="local[2]" if cluster is None else cluster.url,
                range_bytes=self.random.choice((1 << 18, 1 << 20, 8 << 20)),
                step_rows=self.random.choice((2_000, 20_000, 200_000)),
            )
        )
        self.pipeline = PipelineProcess(spec, folder / "elsewhere")
        self.writer: subprocess.Popen[bytes] | None = None
        self.checked = self._reports = 0

    def _run(self) -> None:
        """Run everything, then compare lake and source."""
        print(f"seed {self.seed}: {self.size} rows")
        path = str(self.folder / "data" / "main.db")
        subprocess.run([sys.executable, str(WRITER), "fill", path, str(self.size)], check=True)
        self.server.start()
        self.writer = subprocess.Popen([sys.executable, str(WRITER), path, self.seed, "0.02"], stdin=subprocess.PIPE)
        self.pipeline.start()
        self.drive(self._schedule())
        self.finish()
        print(f"seed {self.seed}: equal at the end, and {self.checked} times in between; {self.events}")

    def _schedule(self) -> Iterator[str]:
        for _ in range(self.rounds):
            yield self.random.choice(EVENTS)

    @property
    def done(self) -> int:
        """Return the number of reports of progress."""
        return self._reports

    def let_work(self) -> None:
        """Wait for some reports of progress."""
        for _ in range(self.random.randrange(1, 9)):
            assert self.pipeline.wait_for_progress(1), "the pipeline gave up"
            self._reports += 1

    def last_words(self) -> str:
        return f"pipeline: {self.pipeline.last_words()}\nserver: {self.server.last_words()[-2000:]}"

    def do_kill_driver(self) -> None:
        """Kill the driver alone; a new one starts while its JVM may still run."""
        self.pipeline.kill_driver()
        self.pipeline.start()

    def do_kill_everything(self) -> None:
        """Kill driver, JVM and Python workers at once."""
        self.pipeline.kill_all()
        self.pipeline.start()

    def do_kill_executor(self) -> None:
        """Kill processes that run tasks; the pipeline must recover by itself."""
        found = (
            self.pipeline.below("-m headwater.pipeline.spark.worker_daemon")
            if self.cluster is None
            else self.cluster.executors()
        )
        kill(*found[: self.random.randrange(1, 3)])

    def do_kill_bulk_worker(self) -> None:
        """Kill the server's worker process."""
        kill(*(pid for pid in children(self.server.pid) if "headwater.worker" in command_of(pid)))

    def check(self) -> None:
        """Compare each lake table with the source at its recorded offset, if the log still retains it."""
        client = Client(self.server.url)
        try:
            for table in TABLES:
                found = version_and_rows(self.folder / "lake" / table)
                if found is None:
                    continue
                version, rows = found
                try:
                    truth = rows_at(client, table, version)
                except (OffsetExpired, HeadwaterError) as error:
                    if error.retryable or isinstance(error, OffsetExpired):
                        continue
                    raise
                assert rows == truth, f"{table} at {version}: {difference(rows, truth)}"
                self.checked += 1
        finally:
            client.close()

    def finish(self) -> None:
        """Stop writers and faults, run the pipeline to the end, and check that lake and source are equal."""
        assert self.writer is not None and self.writer.stdin is not None
        self.writer.stdin.close()
        self.writer.wait(60)
        self.server.wait_caught_up()
        code = self.pipeline.stop()
        assert code == 0, f"stopped with {code}"
        self.pipeline.start("--once")
        code = self.pipeline.finish()
        assert code == 0, f"ended with {code}"
        client = Client(self.server.url)
        try:
            for table in TABLES:
                found = version_and_rows(self.folder / "lake" / table)
                assert found is not None, f"{table} never got there"
                seen = client.describe("main", table)
                truth = rows_at(client, table, f"{seen.generation}.{seen.latest}")
                assert found[1] == truth, f"{table}: {difference(found[1], truth)}"
        finally:
            client.close()

    def close(self, *, keep: bool = False) -> None:
        """Stop everything."""
        if self.writer is not None and self.writer.poll() is None:
            self.writer.kill()
            self.writer.wait(60)
        if self.writer is not None and self.writer.stdin is not None:
            self.writer.stdin.close()
        self.pipeline.close()
        self.server.close()


Row = tuple[Any, ...]


def version_and_rows(path: Path) -> tuple[str, list[Row]] | None:
    """Return the recorded version and the rows of a lake table; None while its spans are at different offsets."""
    for _ in range(100):
        sink = DeltaSink(Settings(str(path)))
        before = sink.state()
        if before is None or not before.is_even:
            return None
        rows = sorted(map(_row, DeltaTable(path).to_pyarrow_table().to_pylist()), key=repr)
        if sink.state() == before:
            return f"{before.plan.generation}.{before.offset}", rows
        time.sleep(0.05)
    return None  # it moves on faster than it can be read


def rows_at(client: Client, table: str, version: str) -> list[Row]:
    """Return the rows of the source at `version`."""
    found = [row for batch in client.snapshot("main", table, version=version) for row in batch.to_pylist()]
    return sorted(map(_row, found), key=repr)


def _row(found: dict[str, Any]) -> Row:
    return tuple(found[name] for name in sorted(found))


def difference(rows: list[Row], truth: list[Row]) -> str:
    """Return a text with the first rows that only one side has."""
    more = [row for row in rows if row not in set(truth)][:3]
    less = [row for row in truth if row not in set(rows)][:3]
    return f"{len(rows)} rows for {len(truth)}; not in the source: {more}; lacking: {less}"
