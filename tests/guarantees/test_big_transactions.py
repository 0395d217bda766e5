"""A transaction of a million rows: captured, logged and read within bounded memory, in parts that say so (B20)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.capture.captured_database import foreign

from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Op

MILLION = 1_000_000
BOUND_KB = 200 << 10
ROOT = Path(__file__).parent.parent.parent
NUMBERS = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {MILLION})"


class Measured:
    """A capture process and its memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.began_kb = self._hear("ready")

    def catch_up(self) -> int:
        """Wait until the log holds everything; return the peak memory of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._hear("caught_up")

    def _hear(self, expected: str) -> int:
        assert self._process.stdout is not None
        word, _, kb = self._process.stdout.readline().partition(" ")
        assert word == expected, "the capturing process died"
        return int(kb)


@contextmanager
def measured(folder: Path, trim_seconds: float) -> Iterator[Measured]:
    command = [sys.executable, "-m", "tests.guarantees.measured_capture", str(folder), str(trim_seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Measured(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0


@pytest.mark.soak(seconds=50, every_time=True)
def test_foreign_transaction_of_a_million_rows_is_captured_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with measured(tmp_path, trim_seconds=3600) as capture:
        small = capture.began_kb
        foreign(path, "CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        capture.catch_up()
        foreign(path, "BEGIN", f"{NUMBERS} INSERT INTO t SELECT i, 'row ' || i FROM n", "COMMIT")
        assert capture.catch_up() - small < BOUND_KB
    check_log(tmp_path)
    # Nothing was trimmed: the next start proves a million changes against the log, in bounded memory too.
    with measured(tmp_path, trim_seconds=0.01) as capture:
        assert capture.began_kb - small < BOUND_KB
        assert capture.catch_up() - small < BOUND_KB


def check_log(folder: Path) -> None:
    """Check that one transaction is logged in ordered parts of limited size, and only the last is marked as last."""
    log = DiskLog.open(folder / "app.log.db", read_only=True)
    try:
        created = log.read(after=0, limit=1)
        assert created[0].changes[0].op is Op.SCHEMA_CHANGE and created[0].last
        offset, start, ids, lasts = 1, 0, set(), []
        while page := log.read(after=offset, limit=4096):
            for part in page:
                assert part.first == offset + 1 and len(part.changes) <= 4096
                if part.last and part.start == 0:
                    raise AssertionError(f"{part.first} is a transaction of its own")
                assert part.start == start
                assert all(change.after == (offset + n, f"row {offset + n}") for n, change in enumerate(part.changes))
                offset, start = part.upto, start + len(part.changes)
                ids.add((part.id, part.ts))
                lasts.append(part.last)
        assert (offset, start, len(ids)) == (MILLION + 1, MILLION, 1)
        assert lasts[-1] and not any(lasts[:-1])
        assert log.first_whole(3) == log.latest + 1, "no whole transaction begins inside it"
    finally:
        log.close()
