"""Our side of the PostgreSQL benchmarks: source, capture and log as in the app, until CHANGES changes are durable.

`python -m bench.pg_child URL FOLDER CHANGES` prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

from bench.pg import used
from headwater.capture.capture import Capture
from headwater.config import LogConfig
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.source import PostgresSource


def main(url: str, data: str, changes: int) -> None:
    """Print the figures from the start of connecting until `changes` changes are durable."""
    settings = LogConfig()
    Path(data).mkdir(exist_ok=True)
    disk = DiskLog.open(Path(data) / "main.log.db")
    log = LiveLog(disk, retention_changes=None)
    source = PostgresSource("main", url, notes=log, config=PostgresConfig())
    capture = Capture(source, log, retention=Retention(), flush_seconds=settings.flush_ms / 1000)
    target = log.latest + changes
    gc.freeze()  # as `headwater serve` does
    gc.set_threshold(20_000, 20, 50)
    (before, _), started = used(), time.monotonic()
    capture.start()
    while changes and disk.latest < target - changes + 1:
        time.sleep(0.002)
    first_at = time.monotonic()
    while disk.latest < target:
        time.sleep(0.005)
    ended_at = time.monotonic()
    after, mib = used()
    capture.stop()
    source.close()
    disk.close()
    found = {
        "seconds": ended_at - started,
        "cpu": after - before,
        "mib": mib,
        "first_at": first_at,
        "ended_at": ended_at,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
