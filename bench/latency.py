"""From commit to client at 1,000 changes/s and 100 SSE subscribers, against Redis; also while a snapshot is read."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import apsw

from bench.generator import MARK, Generator, Missing, Run, Side, figures
from bench.ours import TABLE, Ours, ours
from bench.peers import redis
from bench.sides import folder, versions

RATE = 1000
SUBSCRIBERS = 100
BAR = 6.0  # times Redis, p50
BIG = "CREATE TABLE big(id INTEGER PRIMARY KEY, note TEXT)"
FILL = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?2)
INSERT INTO big SELECT i, ?1 FROM n
"""
CONNECTIONS = 4  # that publish in turn, so that no request waits for the answer to the one before

# The time is taken before the statement: the commit itself, with its fsync, is part of the latency.
WRITER = """
import apsw, sys, time
db = apsw.Connection(sys.argv[1])
db.set_busy_timeout(10_000)
db.execute("PRAGMA synchronous = FULL")
rate, end, number = float(sys.argv[2]), time.monotonic() + float(sys.argv[3]), 0
began = time.monotonic()
while time.monotonic() < end:
    number += 1
    note = f"@hw{time.monotonic_ns():016x}{number:08x}".ljust(64, "x")
    db.execute("INSERT INTO orders(customer, note) VALUES (1, ?)", (note,))
    time.sleep(max(0.0, began + number / rate - time.monotonic()))
"""


def published(generator: Generator, side: Side, seconds: float) -> Run:
    """Return a run whose changes the generator publishes, timed from sending the request."""
    streams = side.subscribers("sse", SUBSCRIBERS)
    return generator.run(side, streams, side.shot(1), seconds=seconds, rate=RATE, publishers=CONNECTIONS)


def foreign(generator: Generator, side: Ours, path: Path, seconds: float) -> Run:
    """Return a run whose changes another process commits to the file, timed from just before each commit."""
    streams = side.subscribers("sse", SUBSCRIBERS)
    command = [sys.executable, "-c", WRITER, str(path), str(RATE), str(seconds + 1.5)]
    with subprocess.Popen(command):
        return figures(generator.start(side, streams, None, warm=0.8, seconds=seconds))


def during_snapshot(generator: Generator, side: Ours, rows: int, seconds: float) -> Run:
    """Return a run of `published` while another client reads a large table as fast as possible."""
    found = side.subscribe(table="big", start="snapshot")
    stream = side.streams([found], "sse", start="")
    reader = generator.start(side, stream, None, warm=0, seconds=seconds + 1.5)
    run = published(generator, side, seconds)
    read = figures(reader)
    side.ask("cdc.close", sub_id=found["sub_id"])
    over = " and was over before the end" if read.deliveries >= rows else ""
    print(f"  the snapshot of {rows:,} rows gave {read.deliveries / read.seconds:,.0f} rows/s meanwhile{over}")
    return run


def database(path: Path, rows: int) -> None:
    """Create a file with the empty table `orders` and the table `big`."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(TABLE)
    db.execute(BIG)
    db.execute(FILL, (MARK, rows))
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def report(runs: dict[str, list[Run]]) -> None:
    """Print the median of each side's figures and the ratios to Redis."""
    floor = statistics.median(run.p50_us for run in runs["Redis"]) if "Redis" in runs else 0
    for name, found in runs.items():
        p50, p99 = (statistics.median(getattr(run, which) for run in found) for which in ("p50_us", "p99_us"))
        cores = statistics.median(run.server_s / run.seconds for run in found)
        rate = statistics.median(run.deliveries / run.seconds for run in found)
        ratio = f"   {p50 / floor:.1f}x Redis" if floor else ""
        print(
            f"  {name:42} p50 {p50 / 1000:>7.2f} ms   p99 {p99 / 1000:>7.2f} ms   {rate:>8,.0f} deliveries/s"
            f"   {cores:.2f} cores{ratio}"
        )


def main(repeats: int = 3, seconds: float = 2.0, rows: int = 5_000_000) -> None:
    """Print medians and ratios."""
    print(versions())
    print(f"latency: {RATE} changes/s to {SUBSCRIBERS} SSE subscribers (bar: p50 at most {BAR:g}x Redis)")
    with folder() as place:
        path = place / "shop.db"
        database(path, rows)
        with ours(place / "data", str(path)) as side:
            generator = Generator(place)
            sides: dict[str, Callable[[], Run]] = {
                "ours: insert request -> client": lambda: published(generator, side, seconds),
                "ours: commit of another process -> client": lambda: foreign(generator, side, path, seconds),
                "ours: insert request, during a snapshot": lambda: during_snapshot(generator, side, rows, seconds),
            }
            try:
                with redis(place, side.size()) as floor:
                    rounds({"Redis": lambda: published(generator, floor, seconds), **sides}, repeats)
            except Missing as missing:
                print(f"  without Redis: {missing}")
                rounds(sides, repeats)


def rounds(sides: dict[str, Callable[[], Run]], repeats: int) -> None:
    """Run the sides alternately and print the report."""
    runs = defaultdict(list)
    for _ in range(repeats):
        for name, run in sides.items():
            runs[name].append(run())
    report(runs)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
