"""Latency from an insert in PostgreSQL to a subscriber: ours by SSE against Debezium, both on the same inserts.

`python -m bench.pg_latency [inserts]`: one row every 30 ms, timed from just before its statement.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from bench import debezium
from bench.generator import Missing
from bench.pg import Database, database
from bench.pg_subscriber import events
from bench.sides import server, versions
from headwater.sources.postgres.capture.decode.row_decoder import twin

COUNT, SECONDS, WARM = 400, 0.030, 100
BAR = 1 / 3
STREAM = "/api/v1/changes/main/t?start=latest&format=debezium_json"
INSERT = b"INSERT INTO t VALUES (%s, 1, %s, 0.5, 'latency', 1)"


class Listener(threading.Thread):
    """Reads our stream and records the latency of each change in milliseconds."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self._port, self._count = port, count
        self.times: list[float] = []

    def run(self) -> None:
        for data in events(self._port, STREAM):
            now = time.monotonic_ns()
            self.times.append((now - int(json.loads(data)["after"]["b"])) / 1e6)
            if len(self.times) >= self._count:
                return


class Writer:
    """Commits one row after another; each row holds the time at which its insert began."""

    def __init__(self, base: Database) -> None:
        self._db, self.written = base.db, 0
        self._db.execute("SET synchronous_commit = on")

    def write(self, until: Callable[[], bool]) -> None:
        """Insert a row every SECONDS until `until` returns True."""
        began, number = time.monotonic(), 0
        while not until():
            self.written += 1
            number += 1
            self._db.execute(INSERT, (self.written, str(time.monotonic_ns())))
            time.sleep(max(0.0, began + number * SECONDS - time.monotonic()))


def report(name: str, times: list[float], floor: float = 0.0) -> float:
    """Print p50 and p99 of `times`, and the ratio to `floor`; return p50."""
    times = sorted(times)
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    said = f"   {p50 / floor:.2f}x, bar {BAR:.2f}x {'holds' if p50 <= BAR * floor else 'missed'}" if floor else ""
    print(f"  {name:28} p50 {p50:>7.2f} ms   p99 {p99:>7.2f} ms{said}", flush=True)
    return p50


def main(count: int = COUNT) -> None:
    """Print the figures of both sides."""
    # Without PostgreSQL's own fsync: how long its disk takes to commit would be in both figures.
    with database(fsync="off") as (base, place), contextlib.ExitStack() as stack:
        print(f"{versions()} · {base.version()} · decoder {twin().name}")
        print(f"pg_latency: {count} single-row transactions, one every {SECONDS * 1000:.0f} ms, to one subscriber")
        url, _ = stack.enter_context(server(place / "data", base.url))
        writer = Writer(base)
        peer: subprocess.Popen[str] | None = None
        try:
            debezium.installed()
            base.one("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')")
            peer = debezium.start(base, "debezium", place, 0, latency=True)
            assert peer.stdout
            current = threading.Thread(target=peer.stdout.readline, daemon=True)
            current.start()
            writer.write(lambda: not current.is_alive())  # its start is not measured
        except Missing as missing:
            print(f"  NOT MEASURED against Debezium: {missing}")
        listener = Listener(urlsplit(url).port or 80, WARM + count)
        listener.start()
        writer.write(lambda: not listener.is_alive())
        floor = 0.0
        if peer is not None:
            floor = report("Debezium, poll of 5 ms", debezium.finish(peer, place)["times"][-count:])
        report("ours", listener.times[-count:], floor)
        base.drop("debezium")


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
