"""The log into Spark, warm and cold, against the same rows from Parquet; also shared parts of pipeline benchmarks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.drain import _status
from bench.sides import folder, medians, server, versions
from headwater.client import Client, Described
from headwater.pipeline.spark.frames import register
from headwater.pipeline.spark.java import find_java
from headwater.pipeline.spark.session import close_session, open_session
from headwater.pipeline.transform.schema import changes_schema, struct_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGES = 1_500_000
REPEATS = 5
PARTITIONS = 2
WARM_BAR, COLD_BAR = 0.8, 0.3  # rows/s, of those from Parquet
SLICE = 16_384  # offsets of a slice that the server keeps
SETTINGS = "[log]\nretention_events = 20_000_000\n"

# Foreign writers are plain sqlite3 in processes of their own. %d is where rows begin and how many there are.
TABLE = (
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer INTEGER, status TEXT, total REAL, currency TEXT,"
    " placed_at TEXT, note TEXT, items INTEGER, paid INTEGER)"
)
ROWS = """
WITH RECURSIVE n(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM n LIMIT %d)
INSERT INTO orders SELECT i, i * 7 %% 100003, CASE i %% 3 WHEN 0 THEN 'open' WHEN 1 THEN 'sent' ELSE 'paid' END,
 i * 0.25, 'EUR',
 printf('2026-%%02d-%%02dT%%02d:%%02d:%%02dZ', 1 + i %% 12, 1 + i %% 28, i %% 24, i %% 60, i / 60 %% 60),
 printf('order %%d of customer %%d, %%x', i, i * 7 %% 100003, i * 2654435761 %% 4294967296), 1 + i %% 9, i %% 2 FROM n
"""
EVERYTHING = "SELECT id, customer, status, total, currency, placed_at, note, items, paid FROM orders"
PRELOAD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = OFF")
db.execute("PRAGMA synchronous = OFF")
for statement in sys.argv[2:]:
    db.execute(statement)
db.execute("PRAGMA journal_mode = WAL")
"""
WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for statement in sys.stdin:
    db.execute(statement)
"""
BATCH = 10_000  # changes of a commit


def preload(path: Path, rows: int) -> None:
    """Create a file with the table and its rows in another process, before capture starts."""
    fill = [ROWS % (1, rows)] if rows else []
    subprocess.run([sys.executable, "-c", PRELOAD, str(path), TABLE, *fill], check=True)


def commit(path: Path, statements: list[str]) -> None:
    """Commit each statement separately in another process."""
    lines = "\n".join(" ".join(each.split()) for each in statements)
    subprocess.run([sys.executable, "-c", WRITER, str(path)], input=lines, text=True, check=True)


@contextlib.contextmanager
def served(place: Path, path: Path) -> Iterator[tuple[str, int]]:
    """Run a server over the file whose log retains everything; yield its URL and process id."""
    settings = place / "settings.toml"
    settings.write_text(SETTINGS)
    with server(place / "data", str(path), "--config", str(settings)) as found:
        yield found


def durable(url: str) -> Described:
    """Wait until everything committed is in the durable log; return the description of `orders`."""
    with Client(url) as client:
        while True:
            status = _status(url)
            seen = client.describe("main", "orders")
            if status["lag_changes"] == 0 and seen.latest >= status["latest"]:
                return seen
            time.sleep(0.1)


def engines() -> str:
    """Return the versions of the other engines in one line."""
    names = ("pyspark", "deltalake", "pyarrow", "pandas")
    told = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return f"{' · '.join(told)} · Java {find_java().version}"


# Rows from the log and from Parquet


def statements(changes: int) -> list[str]:
    """Return statements that make `changes` changes: two thirds inserts, one third updates."""
    inserts = changes - changes // 3
    found = [ROWS % (start, min(BATCH, inserts - start + 1)) for start in range(1, inserts + 1, BATCH)]
    for start in range(0, changes // 3, BATCH):
        last = min(start + BATCH, changes // 3)
        found.append(
            f"UPDATE orders SET status = 'back', total = total + 1 WHERE id > {start * 2} AND id <= {last * 2}"
            " AND id % 2 = 0"
        )
    return found


class Sides:
    """Both sides of the benchmark in one session: the same rows, columns and partitions."""

    def __init__(self, spark: SparkSession, url: str, seen: Described, place: Path) -> None:
        self._spark, self._url, self._seen = spark, url, seen
        self._cache, self._parquet = place / "data" / "pull-cache", str(place / "parquet")
        self._schema = struct_of(changes_schema(seen.table))
        self._log().write.option("compression", "snappy").parquet(self._parquet)
        counted = [frame.count() for frame in (self._log(), self._files())]
        parts = [frame.rdd.getNumPartitions() for frame in (self._log(), self._files())]
        if counted[0] != counted[1] or parts[0] != parts[1]:
            raise RuntimeError(f"the sides differ: rows {counted}, partitions {parts}")
        self.rows, self.columns, self.partitions = counted[0], len(self._schema), parts[0]

    def parquet(self) -> float:
        return _seconds(self._files)

    def warm(self) -> float:
        return _seconds(self._log)

    def cold(self) -> float:
        for each in self._cache.glob("*"):
            shutil.rmtree(each)
        return _seconds(self._log)

    def sizes(self) -> str:
        """Return the bytes on disk of both sides as text."""
        kept, written = (_mib(Path(each)) for each in (self._cache, self._parquet))
        return f"{kept:,.0f} MiB of slices, {written:,.0f} MiB of Parquet (snappy)"

    def _log(self) -> DataFrame:
        size = -(-self._seen.latest // (PARTITIONS * SLICE)) * SLICE
        read = self._spark.read.format("headwater").options(url=self._url, table="orders", rowsPerPartition=size)
        read = read.options(generation=self._seen.generation, shape=self._seen.table.version)
        return read.schema(self._schema).options(after=0, upto=self._seen.latest).load()

    def _files(self) -> DataFrame:
        return self._spark.read.schema(self._schema).parquet(self._parquet)


def _seconds(frame: Callable[[], DataFrame]) -> float:
    started = time.perf_counter()
    frame().write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def _mib(place: Path) -> float:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 2**20


@contextlib.contextmanager
def session(**conf: Any) -> Iterator[SparkSession]:
    """Yield a Spark session of two threads that knows our format."""
    spark = open_session(
        "local[2]", "bench", conf={name.replace("__", "."): str(value) for name, value in conf.items()}
    )
    try:
        register(spark)
        yield spark
    finally:
        close_session(spark)


def main(changes: int = CHANGES, repeats: int = REPEATS) -> None:
    """Print medians and ratios."""
    print(versions())
    print(engines())
    print(
        f"spark_log: {changes:,} changes into a no-op sink (bars: {WARM_BAR} warm, {COLD_BAR} cold, of Parquet's rate)"
    )
    with folder() as place:
        path = place / "orders.db"
        preload(path, 0)
        with served(place, path) as (url, _):
            started = time.perf_counter()
            commit(path, statements(changes))
            seen = durable(url)
            print(f"  {seen.latest:,} offsets were durable after {time.perf_counter() - started:.1f} s", flush=True)
            # A partition per file, whatever their sizes.
            whole = {"spark__sql__files__maxPartitionBytes": 2**30, "spark__sql__files__openCostInBytes": 2**30}
            with session(**whole) as spark:
                report(Sides(spark, url, seen, place), repeats)


def report(sides: Sides, repeats: int) -> None:
    """Warm up each side, then run them alternately and print medians and ratios."""
    runs = {"Parquet": sides.parquet, "log, cold": sides.cold, "log, warm": sides.warm}
    for run in runs.values():
        run()
    found = medians(runs, repeats)
    print(f"  {sides.rows:,} rows of {sides.columns} columns, {sides.partitions} partitions; {sides.sizes()}")
    for name, seconds in found.items():
        ratio = found["Parquet"] / seconds
        bar = {"log, cold": COLD_BAR, "log, warm": WARM_BAR}.get(name)
        missed = "" if bar is None or ratio >= bar else "   missed"
        print(
            f"  {name:10} {seconds:>7.2f} s   {sides.rows / seconds:>11,.0f} rows/s   {ratio:.2f}x{missed}", flush=True
        )


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
