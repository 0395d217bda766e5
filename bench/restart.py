"""Time of a restart with a full log, and memory of an idle server."""

from __future__ import annotations

import time
from pathlib import Path

import apsw

from bench.drain import _resident, _status
from bench.sides import INSERT, folder, new_file, rows, server, versions

CHANGES = 1_000_000


def main() -> None:
    """Fill a log, restart the server and print the figures."""
    print(versions())
    with folder() as place:
        path, data = Path(place) / "t.db", Path(place) / "data"
        new_file(path, captured=False)
        started = time.perf_counter()
        with server(data, str(path)) as (url, pid):
            print(f"  first start: {time.perf_counter() - started:.2f} s, idle memory {_resident(pid)} MB")
            db = apsw.Connection(str(path))
            db.set_busy_timeout(10_000)
            for start in range(1, CHANGES, 10_000):
                with db:
                    db.executemany(INSERT, rows(10_000, start))
            db.close()
            while _status(url)["lag_changes"]:
                time.sleep(0.1)
        started = time.perf_counter()
        with server(data, str(path)) as (url, pid):
            print(
                f"  restart with {CHANGES:,} changes: {time.perf_counter() - started:.2f} s, memory {_resident(pid)} MB"
            )


if __name__ == "__main__":
    main()
