"""The log: append, read, trim, and what single-row commits cost after merging. `python -m bench.log [changes]`."""

from __future__ import annotations

import cProfile
import io
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from headwater.log.disk.disk_log import DiskLog
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table

ORDERS = Table(
    "orders", tuple(Column(name) for name in ("id", "customer", "status", "amount", "note", "updated")), ("id",)
)


def changes(count: int, seed: int = 1) -> tuple[Change, ...]:
    """Return updates of six columns with both images, each about 170 bytes of msgpack."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz "
    made = []
    for number in range(count):
        note = "".join(rng.choices(letters, k=40))
        when = f"2026-01-{number % 28 + 1:02}T10:{number % 60:02}:00"
        before = (number, rng.randrange(10**6), "new", round(rng.random() * 100, 2), note, when)
        made.append(Change(Op.UPDATE, ORDERS, before, (*before[:2], "paid", before[3] + 1, note, when)))
    return tuple(made)


def transactions(rows: tuple[Change, ...], size: int) -> Iterator[Transaction]:
    """Yield `rows` as commits of `size` changes, a millisecond apart."""
    ms = 1_767_225_600_000
    for place in range(0, len(rows), size):
        ms += 1
        upto = min(place + size, len(rows))
        yield Transaction(str(upto), rows[place:upto], place + 1, ms << 16, ms, position=str(upto))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def append_each(log: DiskLog, parts: Iterable[Transaction]) -> None:
    """Append each transaction with its own fsync."""
    for part in parts:
        log.append([part])


def merge_all(log: DiskLog) -> None:
    """Merge blocks until none are left to merge."""
    while log.merge():
        pass


def trim_all(log: DiskLog, keep: int) -> None:
    """Apply retention until only `keep` changes take space."""
    while log.retain(Retention(changes=keep), now_ms=0):
        pass


def read_all(log: DiskLog) -> int:
    """Read every change as an object; return their number."""
    return sum(len(part.changes) for part in log.scan(after=0))


def read_rates(count: int, *logs: DiskLog) -> list[float]:
    """Return the changes per second of each log, the best of five alternating reads."""
    best = [float("inf")] * len(logs)
    for _ in range(5):
        for place, log in enumerate(logs):
            best[place] = min(best[place], timed(partial(read_all, log)))
    return [count / seconds for seconds in best]


def profile(title: str, work: Callable[[], object]) -> None:
    """Print the functions of `work` with the largest own time."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(6)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    print(f"\nprofile of {title}")
    print("\n".join(lines[3:]))


def append_rates(new: Callable[[str], DiskLog], rows: tuple[Change, ...]) -> None:
    """Print the rate of durable appends by size of the commit."""
    for size, total in ((1, 5000), (100, 50_000), (10_000, len(rows))):
        log = new(f"append{size}.db")
        seconds = timed(partial(append_each, log, transactions(rows[:total], size)))
        print(f"append, commits of {size:>6}: {len(rows[:total]) / seconds:>10,.0f} changes/s")
        log.close()


def main(count: int = 200_000) -> None:
    """Run all measurements in a temporary folder and print them."""
    rows = changes(count)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as logs:

        def new(name: str) -> DiskLog:
            log = DiskLog.open(Path(folder) / name)
            logs.callback(log.close)
            return log

        append_rates(new, rows)
        large, bulk, single = new("large.db"), new("bulk.db"), new("single.db")
        append_each(large, transactions(rows, 10_000))
        bulk.append(transactions(rows, 1))
        append_each(single, transactions(rows, 1))
        (unmerged,), small = read_rates(count, single), single.bytes
        print(f"merge{'':<20}: {count / timed(partial(merge_all, single)):>10,.0f} changes/s")
        rates = read_rates(count, large, bulk, single)
        for name, rate, size in (
            ("10k-row commits", rates[0], large.bytes),
            ("1-row, bulk-loaded", rates[1], bulk.bytes),
            ("1-row, merged", rates[2], single.bytes),
            ("1-row, not merged", unmerged, small),
        ):
            print(f"read, {name:<19}: {rate:>10,.0f} changes/s, {size / count:6.1f} bytes/change")
        print(
            f"merged : bulk-loaded, the same commits: bytes {single.bytes / bulk.bytes:.2f}x (<= 1.3), "
            f"read {rates[2] / rates[1]:.2f}x (>= 0.8)"
        )
        print(
            f"merged : bulk-loaded, 10k-row commits : bytes {single.bytes / large.bytes:.2f}x, "
            f"read {rates[2] / rates[0]:.2f}x"
        )
        profile("read", partial(read_all, large))
        profile("append", partial(append_each, new("profile.db"), transactions(rows[:100_000], 10_000)))
        seconds = timed(partial(trim_all, large, count // 2))
        print(f"\ntrim of {count // 2:,} changes: {seconds * 1000:.0f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
