"""Latency from a commit to the Delta version that holds it: the live pipeline, and plain Structured Streaming.

python -m bench.microbatch [ROWS [COMMITS]]    the stream runs as `python -m bench.microbatch stream …`, in a process
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lake import DRIVER, PIPELINE
from bench.sides import folder, versions
from bench.spark_log import ROWS, commit, durable, engines, preload, served, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_DEFAULT, COMMITS = 100_000, 30
WIDTH, EVERY_SECONDS = 100, 2.0  # rows of a commit, and how often there is one
WARM = 3  # commits before those that count
POLL_SECONDS = 0.005
PATIENCE_SECONDS = 180.0
APP = "bench"

# The time is taken before COMMIT: its fsync is part of the latency.
WRITER = """
import sqlite3, sys, time
path, first, width, commits, every, insert = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]), sys.argv[6]
db = sqlite3.connect(path, timeout=60, isolation_level=None)
began = time.monotonic()
for number in range(commits):
    time.sleep(max(0.0, began + number * every - time.monotonic()))
    db.execute("BEGIN IMMEDIATE")
    db.execute(insert.replace("9999999", str(first + number * width)))
    at = time.monotonic_ns()
    db.execute("COMMIT")
    print(at, flush=True)
"""


class Versions:
    """Records when each version of a Delta table appears and the offset it holds; checks every 5 ms."""

    def __init__(self, table: Path) -> None:
        self._log = table / "_delta_log"
        self._next = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: list[tuple[int, int]] = []  # offset, ns

    def __enter__(self) -> Versions:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def when(self, offset: int) -> int | None:
        """Return when the first version appeared that holds everything up to `offset`; None if there is none."""
        return next((at for reached, at in self.seen if reached >= offset), None)

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            while (path := self._log / f"{self._next:020d}.json").exists():
                at = time.monotonic_ns()
                self.seen += [(offset, at) for offset in _offsets(path)]
                self._next += 1


def _offsets(commit: Path) -> list[int]:
    """Return the offsets of the step transactions in a commit, without those of snapshot parts."""
    told = [json.loads(line).get("txn") for line in commit.read_text().splitlines()]
    return [txn["version"] for txn in told if txn and txn["appId"].count("/") < 2]


# The two sides


@contextlib.contextmanager
def live(place: Path, url: str, more: Sequence[str] = ()) -> Iterator[Path]:
    """Run `headwater pipeline run`, also for `more` tables, until the block ends; yield the lake table of `orders`."""
    file = place / "lake.toml"
    names = ", ".join(f'"{name}"' for name in ("orders", *more))
    text = PIPELINE.format(url=url, step=200_000, memory=DRIVER)
    file.write_text(text.replace('table = "orders"', f"tables = [{names}]"))
    command = [sys.executable, "-m", "headwater", "pipeline", "run", str(file), "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        try:
            yield place / "lake" / "orders"
        finally:
            child.terminate()
            child.wait()


@contextlib.contextmanager
def streaming(place: Path, url: str) -> Iterator[Path]:
    """Run Structured Streaming with foreachBatch until the block ends; yield the table it writes."""
    target = place / "stream"
    command = [sys.executable, "-m", "bench.microbatch", "stream", url, str(target), str(place / "checkpoint")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            yield target
        finally:
            assert child.stdin
            child.stdin.close()
            child.wait()


def stream(url: str, target: str, checkpoint: str) -> None:
    """Append batches of the log with delta-rs, as a user would, until stdin ends."""
    from deltalake import CommitProperties, Transaction, write_deltalake

    def append(frame: DataFrame, number: int) -> None:
        rows = frame.toArrow()
        offset = max(rows["_offset"].to_pylist(), default=0)
        told = CommitProperties(app_transactions=[Transaction(APP, offset)])
        write_deltalake(target, rows, mode="append", commit_properties=told)

    with session(spark__driver__memory=DRIVER) as spark:
        read = spark.readStream.format("headwater").options(url=url, table="orders", startingOffset="latest")
        query = read.load().writeStream.foreachBatch(append).option("checkpointLocation", checkpoint).start()
        sys.stdin.read()
        query.stop()


# Measuring


def latencies(path: Path, url: str, target: Path, first: int, commits: int) -> list[float]:
    """Return the milliseconds from each commit to the version that holds it, without the first WARM commits."""
    with Versions(target) as versions:
        _ready(path, url, versions)
        before = durable(url).latest
        found = write(path, first, WARM + commits)
        last = durable(url).latest
        if last != before + len(found) * WIDTH:
            raise RuntimeError(f"{last - before} changes came of {len(found)} commits of {WIDTH} rows")
        _wait(lambda: versions.when(last) is not None)
        held = [versions.when(before + (number + 1) * WIDTH) for number in range(len(found))]
    return [(at - began) / 1e6 for began, at in zip(found, held, strict=True) if at is not None][WARM:]


def _ready(path: Path, url: str, versions: Versions) -> None:
    """Repeat a change until the first one has arrived in the table, then wait for the last."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not any(reached for reached, _ in versions.seen):
        if time.monotonic() > end:
            raise RuntimeError("no change came through")
        commit(path, ["UPDATE orders SET items = items + 1 WHERE id = 1"])
        time.sleep(EVERY_SECONDS)
    latest = durable(url).latest
    _wait(lambda: versions.when(latest) is not None)


def _wait(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        if time.monotonic() > end:
            raise RuntimeError("the last change did not come through")
        time.sleep(0.05)


def write(path: Path, first: int, commits: int) -> list[int]:
    """Commit in another process; return when each commit was made."""
    insert = " ".join((ROWS % (9999999, WIDTH)).split())
    command = [
        sys.executable,
        "-c",
        WRITER,
        str(path),
        str(first),
        str(WIDTH),
        str(commits),
        str(EVERY_SECONDS),
        insert,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def report(name: str, found: list[float]) -> None:
    """Print percentiles."""
    p50, p90 = (statistics.quantiles(found, n=10, method="inclusive")[each] for each in (4, 8))
    print(
        f"  {name:52} p50 {p50:>7.0f} ms   p90 {p90:>7.0f} ms   max {max(found):>7.0f} ms   n {len(found)}", flush=True
    )


def main(rows: int = ROWS_DEFAULT, commits: int = COMMITS) -> None:
    """Print percentiles of both."""
    print(versions())
    print(engines())
    print(f"microbatch: commits of {WIDTH} rows every {EVERY_SECONDS:g} s to a table of {rows:,}, until Delta has them")
    with folder() as place:
        path = place / "orders.db"
        preload(path, rows)
        with served(place, path) as (url, _):
            with live(place, url) as target:
                report("headwater pipeline (merge, exactly once)", latencies(path, url, target, rows + 1, commits))
            first = rows + 1 + (WARM + commits) * WIDTH
            with streaming(place, url) as target:
                report("Structured Streaming (append by foreachBatch)", latencies(path, url, target, first, commits))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stream", url, target, checkpoint]:
            stream(url, target, checkpoint)
        case sizes:
            main(*map(int, sizes))
