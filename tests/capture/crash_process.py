"""Runs as a process of its own: captures databases in forks that kill themselves at a named point.

Each line of JSON on stdin is [FOLDER, POINT, SKEW_MS, ROUNDS, OUTPUT, ERRORS]; the answer is the fork's exit status, as
`subprocess` gives it. A fork starts in milliseconds, a new Python in half a second.

POINT is `Class.method:before|after:N` (the Nth call), or `none`. Collaborators are wrapped from outside: the
product knows nothing of it. Lines of OUTPUT: `told N` (transaction N was acknowledged), `read OFFSET TS N`
(a live reader saw transaction N there), `closed TS OFFSET` (a checkpoint was visible), `generation NAME`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.capture.captured_database import running

from headwater.capture import capture
from headwater.capture.capture import Capture
from headwater.capture.commit_timestamps import Stamper
from headwater.log.disk.disk_log import DiskLog
from headwater.log.disk.retained_blocks import RetainedBlocks
from headwater.log.live.head import Head
from headwater.log.live.live_log import LiveLog
from headwater.sources.sqlite.capture.capture_trim import Trimmer
from headwater.sources.sqlite.source import SqliteSource
from headwater.sources.sqlite.write.writer import Writer

OWNERS = {
    cls.__name__: cls
    for cls in (Capture, DiskLog, Head, LiveLog, RetainedBlocks, SqliteSource, Stamper, Trimmer, Writer)
}


def arm(point: str) -> None:
    """Make the Nth call of a method kill this process before or after the call."""
    name, when, number = point.split(":")
    owner, method = name.split(".")
    real, calls = getattr(OWNERS[owner], method), 0

    def wrapped(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        last = calls == int(number)
        if last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(OWNERS[owner], method, wrapped)


def skew(milliseconds: int) -> None:
    """Shift the wall clock of this process."""
    real = time.time_ns
    time.time_ns = lambda: real() + milliseconds * 1_000_000


def work(folder: Path, rounds: int) -> None:
    """Write numbered transactions of three changes; report each acknowledged transaction and each read."""
    capture.HOUSEKEEPING_SECONDS = capture.CLOSE_SECONDS = 0.002
    with running(folder, flush_seconds=0.001, trim_rows=4, trim_seconds=0.001) as one:
        print_line("generation", one.log.generation)
        one.run("CREATE TABLE IF NOT EXISTS t(n INTEGER, part INTEGER, PRIMARY KEY (n, part))")
        done = one.source.read("SELECT ifnull(max(n), 0) FROM t").rows[0][0]
        seen = one.log.latest
        one.log.add_listener(lambda: None)  # time is closed for those who listen
        for n in range(int(str(done)) + 1, int(str(done)) + 1 + rounds):
            one.run(f"INSERT INTO t VALUES ({n}, 1), ({n}, 2), ({n}, 3)")
            print_line("told", n)
            one.caught_up()
            for part in one.log.read(after=seen):
                seen = part.upto
                for place, change in enumerate(part.changes):
                    if change.after is not None:
                        print_line("read", part.first + place, part.ts, change.after[0])
            print_line("closed", *one.log.closed)
            one.log.wait_beyond(seen, 0.004)  # nothing comes: flush, trim and housekeeping get their moment


def print_line(*words: object) -> None:
    """Write one line for the test in a single system call: another thread may end this process between two."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def run(folder: str, point: str, milliseconds: int, rounds: int) -> None:
    """Run one process until it ends or crashes."""
    skew(milliseconds)
    if point != "none":
        arm(point)
    work(Path(folder), rounds)


def fork(folder: str, point: str, milliseconds: int, rounds: int, output: str, errors: str) -> int:
    """Run in a child and return its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        run(folder, point, milliseconds, rounds)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for line in sys.stdin:
        print(fork(*json.loads(line)), flush=True)
