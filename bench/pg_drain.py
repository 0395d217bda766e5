"""A backlog of PostgreSQL: into our durable log against pg_recvlogical, and to a subscriber against Debezium.

`python -m bench.pg_drain [rows [repeats]]`: each row is inserted and updated, in transactions of 1,000 rows.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from bench import debezium
from bench.generator import Missing
from bench.pg import SLOT, Database, Ours, Reading, database
from bench.pg_subscriber import until
from bench.sides import cpu_seconds, server, versions
from headwater.sources.postgres.capture.decode.row_decoder import twin

ROWS, PER = 500_000, 1_000
LOG_BAR, SUBSCRIBER_BAR = 0.9, 3.0
SETTINGS = "[log]\nretention_events = 10_000_000\n"
STREAM = "/api/v1/changes/main/t?start=earliest&format=debezium_json"

RECV, LOG = "pg_recvlogical > /dev/null", "ours, durable log"
PEER, SUBSCRIBER = "Debezium, JSON made in its process", "ours, Debezium's envelope by SSE"


def subscriber(base: Database, data: Path, count: int) -> Reading:
    """Time a server that captures the backlog while one subscriber reads all of it; its start is not counted."""
    copy = data.with_name("served")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data, copy)
    settings = copy.with_suffix(".toml")
    settings.write_text(SETTINGS)
    with base.slot(SLOT), server(copy, base.url, "--config", str(settings)) as (url, pid):
        used, started = cpu_seconds(pid), time.monotonic()
        ended = until(urlsplit(url).port or 80, STREAM, count)
        return Reading(ended - started, cpu_seconds(pid) - used, 0)


def peer(base: Database, place: Path, count: int) -> Reading:
    """Time Debezium on a copy of the slot from its first batch on; the start of its engine is not counted."""
    with base.slot("debezium") as slot:
        found = debezium.finish(debezium.start(base, slot, place, count), place)
        return Reading(count / found["rate"], found["cpu"], found["mib"], start=found["start"])


def report(runs: dict[str, list[Reading]], count: int) -> None:
    """Print medians, and ratios to the side that each is measured against."""
    rates = {name: count / statistics.median(run.seconds for run in found) for name, found in runs.items()}
    bars = {RECV: (RECV, 0.0), LOG: (RECV, LOG_BAR), PEER: (PEER, 0.0), SUBSCRIBER: (PEER, SUBSCRIBER_BAR)}
    for name, (against, bar) in bars.items():
        if name not in runs:
            continue
        cpu = statistics.median(run.cpu for run in runs[name]) / count * 1e6
        ratio = rates[name] / rates[against] if against in rates else 0.0
        said = f"   bar {bar:g}x {'holds' if ratio >= bar else 'missed'}" if bar and ratio else ""
        print(f"  {name:36} {rates[name]:>9,.0f} changes/s   {cpu:>6.2f} CPU s/M   {ratio:.2f}x{said}", flush=True)


def main(rows: int = ROWS, repeats: int = 3) -> None:
    """Run the sides alternately; print medians and ratios."""
    count = 2 * rows
    with database() as (base, place):
        print(f"{versions()} · {base.version()} · decoder {twin().name}")
        print(f"pg_drain: {count:,} changes, 6 columns, REPLICA IDENTITY FULL, transactions of {PER:,}")
        data = place / "data"
        base.attach(data)
        end = base.load(rows, PER)
        sides: dict[str, Callable[[], Reading]] = {
            RECV: lambda: base.recvlogical(end),
            LOG: lambda: Ours(base, data).fresh(count),
            SUBSCRIBER: lambda: subscriber(base, data, count),
        }
        try:
            debezium.installed()
            sides[PEER] = lambda: peer(base, place, count)
        except Missing as missing:
            print(f"  NOT MEASURED against Debezium: {missing}")
        runs = defaultdict(list)
        for _ in range(repeats):
            for name, run in sides.items():
                runs[name].append(run())
        report(runs, count)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
