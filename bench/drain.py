"""Does capture keep up? A foreign writer at full speed for minutes: the capture table must stay bounded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import apsw

from bench.sides import TABLE, folder, new_file, server, versions

WRITER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
db.execute("PRAGMA synchronous = " + sys.argv[3])
end, n, per = time.time() + float(sys.argv[2]), 0, int(sys.argv[4])
while time.time() < end:
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO t(a, b, c, d, e) VALUES (?, ?, ?, ?, ?)",
                   [(n + i, "text %d" % (n + i), 0.5 * i, "x" * 48, i % 100) for i in range(per)])
    db.execute("COMMIT")
    n += per
print(n)
"""


def drain(seconds: float, sync: str, per: int) -> None:
    """Run one writer against one server; print the size of the capture table and the lag of the log."""
    with folder() as place:
        path = Path(place) / "t.db"
        new_file(path, captured=False, setup=TABLE)
        with server(Path(place) / "data", str(path)) as (url, pid):
            command = [sys.executable, "-c", WRITER, str(path), str(seconds), sync, str(per)]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            waiting, lag, memory = [], [], []
            while writer.poll() is None:
                time.sleep(min(1.0, seconds / 10))
                status = _status(url)
                waiting.append(status["capture_rows"])
                lag.append(status["lag_changes"])
                memory.append(_resident(pid))
            written = int(writer.communicate()[0])
            started = time.perf_counter()
            while _status(url)["lag_changes"]:
                time.sleep(0.05)
            caught_up = time.perf_counter() - started
        db = apsw.Connection(str(path))
        (left,) = next(db.execute("SELECT count(*) FROM _headwater_capture"))
        db.close()
        print(
            f"  {sync:6} {per:>4} rows/commit: {written / seconds:>8,.0f} rows/s for {seconds:g} s · capture rows "
            f"max {max(waiting):,} last {waiting[-1]:,}, {left} at the end · lag max {max(lag):,}, caught up in "
            f"{caught_up:.2f} s · memory max {max(memory)} MB",
            flush=True,
        )


def _status(url: str) -> dict[str, int]:
    body = json.dumps({"id": 1, "method": "stats.snapshot"}).encode()
    asked = urllib.request.Request(url + "/api/v1/rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        found: dict[str, int] = json.load(answer)["result"]["databases"]["main"]
    return found


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return 0


def main(seconds: float = 300) -> None:
    """Write single-row commits for `seconds`, then commits of 100 rows for at most a minute, at full speed."""
    print(versions())
    print("drain: a foreign writer at full speed (bar: the capture table stays bounded)")
    drain(seconds, "NORMAL", 1)
    drain(min(seconds, 60), "NORMAL", 100)
    drain(min(seconds, 60), "FULL", 1)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 300)
