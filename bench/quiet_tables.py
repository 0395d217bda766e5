"""Tables without changes beside a busy one: the latency of the busy table, and a read of a quiet table's changes.

python -m bench.quiet_tables [ROWS [COMMITS [CHANGES]]]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.lake import DRIVER
from bench.microbatch import EVERY_SECONDS, WIDTH, latencies, live, report
from bench.sides import folder, versions
from bench.spark_log import ROWS, commit, durable, engines, preload, served, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_DEFAULT, COMMITS, CHANGES = 10_000, 20, 1_000_000
QUIET = tuple(f"quiet{number}" for number in range(19))
WARM, READS = 3, 15


def make_quiet(path: Path) -> None:
    """Create the quiet tables, with ten rows each."""
    made = [f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, v TEXT)" for name in QUIET]
    rows = ", ".join(f"({number}, 'v')" for number in range(10))
    commit(path, [*made, *(f"INSERT INTO {name} VALUES {rows}" for name in QUIET)])


def commits_of(lake: Path) -> int:
    """Return the number of commits of all quiet tables in the lake."""
    return sum(len(list((lake / name / "_delta_log").glob("*.json"))) for name in QUIET)


def read_seconds(spark: SparkSession, url: str, after: int) -> float:
    """Return the median time in which Spark reads one quiet table's changes after `after`."""
    found = []
    for _ in range(WARM + READS):
        began = time.perf_counter()
        options = {"url": url, "table": QUIET[0], "after": str(after)}
        rows = spark.read.format("headwater").options(**options).load().count()
        found.append(time.perf_counter() - began)
        if rows:
            raise RuntimeError(f"{rows} rows of a table without changes")
    return statistics.median(found[WARM:])


def main(rows: int = ROWS_DEFAULT, commits: int = COMMITS, changes: int = CHANGES) -> None:
    """Print the latencies and the times."""
    print(versions())
    print(engines())
    print(f"quiet_tables: commits of {WIDTH} rows every {EVERY_SECONDS:g} s to one table, until Delta has them")
    with folder() as place:
        path = place / "orders.db"
        preload(path, rows)
        make_quiet(path)
        first = rows + 1
        with served(place, path) as (url, _):
            medians = []
            for more, name in ((), "1 table"), (QUIET, f"{1 + len(QUIET)} tables, one of them busy"):
                lake = place / f"lake{len(more)}"
                lake.mkdir()
                with live(lake, url, more) as target:
                    found = latencies(path, url, target, first, commits)
                    report(name, found)
                medians.append(statistics.median(found))
                first += (commits + 10) * WIDTH
            print(f"  ratio of the medians: {medians[1] / medians[0]:.2f}x")
            print(f"  commits of the {len(QUIET)} quiet tables after their snapshots: {commits_of(lake / 'lake')}")
            before = durable(url).latest
            with session(spark__driver__memory=DRIVER) as spark:
                empty = read_seconds(spark, url, before)
                for number in range(changes // 50_000):
                    commit(path, [ROWS % (first + number * 50_000, 50_000)])
                durable(url)
                beside = read_seconds(spark, url, before)
            print(f"  Spark reads a quiet table: empty log {empty * 1e3:.0f} ms, beside {changes:,} changes of another")
            print(f"  table {beside * 1e3:.0f} ms: {beside / empty:.2f}x the time")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
