"""Cost of capture per commit: bare SQLite, with our triggers, and with a server that captures concurrently."""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import apsw

from bench.sides import INSERT, folder, medians, new_file, rows, server, versions

SIZES = ((1, 1_500), (100, 30_000), (10_000, 200_000))  # rows per transaction, rows in all


def write(path: Path, op: str, per: int, total: int, sync: str) -> float:
    """Return the seconds in which a foreign writer writes `total` rows in transactions of `per`."""
    db = apsw.Connection(str(path))
    db.set_busy_timeout(10_000)
    db.execute(f"PRAGMA synchronous = {sync}")
    data: list[tuple[object, ...]] = list(rows(total))
    sql = INSERT
    if op == "update":
        with db:
            db.executemany(INSERT, data)
        db.wal_checkpoint()
        sql, data = "UPDATE t SET a = a + 1, b = ? WHERE id = ?", [(f"changed {row[0]}", row[0]) for row in data]
    started = time.perf_counter()
    for place in range(0, total, per):
        db.execute("BEGIN IMMEDIATE")
        db.executemany(sql, data[place : place + per])
        db.execute("COMMIT")
    seconds = time.perf_counter() - started
    db.close()
    return seconds


def side(*, captured: bool, drained: bool, op: str, per: int, total: int, sync: str) -> float:
    """Return the seconds of one run of one side on fresh files."""
    with folder() as place:
        path = place / "t.db"
        new_file(path, captured=captured)
        if not drained:
            return write(path, op, per, total, sync)
        with server(place / "data", str(path)):
            return write(path, op, per, total, sync)


def latencies(drained: bool, count: int = 3_000) -> tuple[float, float]:
    """Return p50 and p99 of single-row commits of a foreign writer, in milliseconds."""
    with folder() as place:
        path = place / "t.db"
        new_file(path, captured=False)
        if not drained:
            return _latencies(path, count)
        with server(place / "data", str(path)):
            return _latencies(path, count)


def _latencies(path: Path, count: int) -> tuple[float, float]:
    db = apsw.Connection(str(path))
    db.set_busy_timeout(10_000)
    db.execute("PRAGMA synchronous = FULL")
    times = []
    for row in rows(count):
        started = time.perf_counter()
        db.execute(INSERT, row)
        times.append(1000 * (time.perf_counter() - started))
    db.close()
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


def main(repeats: int = 5) -> None:
    """Print ratios to bare SQLite."""
    print(versions())
    print("commit: time against bare SQLite (bars at FULL: 1.1 / 1.7 / 2.3; drained 1.2 / 2.0 / 3.0)")
    for sync in ("FULL", "NORMAL"):
        for op in ("insert", "update"):
            for per, total in SIZES:
                run = partial(side, op=op, per=per, total=total, sync=sync)
                found = medians(
                    {
                        "bare": partial(run, captured=False, drained=False),
                        "captured": partial(run, captured=True, drained=False),
                        "drained": partial(run, captured=False, drained=True),
                    },
                    repeats,
                )
                bare = found["bare"]
                print(
                    f"  {sync:6} {op:6} {per:>6} rows/commit: bare {total / bare:>9,.0f} rows/s   "
                    f"captured {found['captured'] / bare:.2f}x   drained {found['drained'] / bare:.2f}x",
                    flush=True,
                )
    for name, drained in (("bare", False), ("with a server", True)):
        p50, p99 = latencies(drained)
        print(f"  foreign single-row commit, {name}: p50 {p50:.2f} ms  p99 {p99:.2f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
