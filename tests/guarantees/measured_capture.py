"""Runs as a separate process: captures a database, and reports its peak memory.

    python -m tests.guarantees.measured_capture FOLDER TRIM_SECONDS

Says `ready KB` once it follows; at each line on stdin catches up with the database and says `caught_up KB`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.capture.captured_database import running

from headwater.log.log import Retention


def highest_kb() -> int:
    """Return the peak memory of this process in KiB."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1])


def print_peak_memory(word: str) -> None:
    """Print a word and the peak memory for the test."""
    print(word, highest_kb(), flush=True)


if __name__ == "__main__":
    keep_all = Retention(changes=None)
    with running(Path(sys.argv[1]), retention=keep_all, flush_seconds=0.05, trim_seconds=float(sys.argv[2])) as one:
        print_peak_memory("ready")
        for _ in sys.stdin:
            assert one.capture.catch_up(300), one.capture.error
            one.log.flush()
            print_peak_memory("caught_up")
