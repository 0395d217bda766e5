"""Feeds during a bulk pull: latency from commit to client, with and without a concurrent pull of a large table."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from bench.generator import Generator, Run, figures
from bench.latency import WRITER, database
from bench.ours import Ours, ours
from bench.sides import folder, versions
from headwater.client import Client

RATES = (1000, 100)  # changes a second; the first is that of bench.latency
SUBSCRIBERS = 100

# Round after round until its standard input ends; then it says how many rows it had, and in how many seconds.
PULLER = """
import sys, threading, time
from headwater.client import Client
over, rows = threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
with Client(sys.argv[1]) as client:
    while not over.is_set():
        for batch in client.snapshot("main", "big", ranges=client.ranges("main", "big")):
            if not rows:
                began = time.monotonic()
                print("pulling", flush=True)
            rows += batch.num_rows
            if over.is_set():
                break
print(rows, time.monotonic() - began, flush=True)
"""


class Beside(NamedTuple):
    """A run, and the rows per second that were pulled during it."""

    run: Run
    pulled: float = 0.0


def fed(generator: Generator, side: Ours, path: Path, rate: int, seconds: float) -> Run:
    """Return a run whose changes another process commits to the file, timed from just before each commit."""
    streams = side.subscribers("sse", SUBSCRIBERS)
    command = [sys.executable, "-c", WRITER, str(path), str(rate), str(seconds + 1.5)]
    with subprocess.Popen(command):
        return figures(generator.start(side, streams, None, warm=0.8, seconds=seconds))


def beside(generator: Generator, side: Ours, path: Path, rate: int, seconds: float) -> Beside:
    """Return a run of `fed` while another process pulls the table."""
    command = [sys.executable, "-c", PULLER, side.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as puller:
        assert puller.stdout
        if puller.stdout.readline() != "pulling\n":
            raise RuntimeError("the pull did not start; its reason is above")
        run = fed(generator, side, path, rate, seconds)
        rows, took = puller.communicate()[0].split()
    return Beside(run, int(rows) / float(took))


def whole(url: str) -> float:
    """Return the rows per second of a pull of the whole table without other load."""
    with Client(url) as client:
        with closing(client.snapshot("main", "big")) as first:
            next(first)  # the bulk worker is started by it
        started, rows = time.perf_counter(), 0
        for batch in client.snapshot("main", "big", ranges=client.ranges("main", "big")):
            rows += batch.num_rows
    return rows / (time.perf_counter() - started)


def report(rate: int, alone: list[Run], together: list[Beside]) -> None:
    """Print medians of both runs, and the ratio that the pull adds."""
    without = _line(f"{rate} changes/s", alone, "")
    pulled = statistics.median(each.pulled for each in together)
    during = _line("    beside a pull", [each.run for each in together], f"   {pulled:,.0f} rows/s pulled")
    print(f"      p50 {during[0] / without[0]:.2f}x, p99 {during[1] / without[1]:.2f}x", flush=True)


def _line(name: str, runs: list[Run], more: str) -> tuple[float, float]:
    p50, p99 = (statistics.median(getattr(run, which) for run in runs) for which in ("p50_us", "p99_us"))
    rate = statistics.median(run.deliveries / run.seconds for run in runs)
    cores = statistics.median(run.server_s / run.seconds for run in runs)
    print(
        f"  {name:20} p50 {p50 / 1000:>8.2f} ms   p99 {p99 / 1000:>8.2f} ms   {rate:>8,.0f} deliveries/s"
        f"   {cores:.2f} cores{more}"
    )
    return p50, p99


def main(repeats: int = 3, seconds: float = 6.0, rows: int = 5_000_000) -> None:
    """Print medians and ratios."""
    print(versions())
    print(f"pull: commits of another process to {SUBSCRIBERS} SSE subscribers, beside a pull of {rows:,} rows")
    with folder() as place:
        path = place / "shop.db"
        database(path, rows)
        with ours(place / "data", str(path)) as side:
            print(f"  the pull alone: {whole(side.url):,.0f} rows/s", flush=True)
            generator = Generator(place)
            for rate in RATES:
                alone, together = [], []
                for _ in range(repeats):
                    alone.append(fed(generator, side, path, rate, seconds))
                    together.append(beside(generator, side, path, rate, seconds))
                report(rate, alone, together)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
