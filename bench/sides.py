"""Shared parts of the benchmarks: alternating runs, medians, new files, a server as a child process."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, a INTEGER, b TEXT, c REAL, d TEXT, e INTEGER)"
INSERT = "INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)"


class Notes(dict[str, str]):
    """Notes of a source that has no log."""

    def note(self, name: str) -> str:
        return self.get(name, "")

    def set_notes(self, **notes: str) -> None:
        self.update(notes)


def rows(count: int, start: int = 1) -> list[tuple[int, int, str, float, str, int]]:
    """Return `count` rows of about 90 bytes."""
    return [
        (n, n * 7, f"{n * 2654435761 % 2**64:020x}", n * 0.5, f"{n * 40503:048x}", n % 100)
        for n in range(start, start + count)
    ]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Yield a new folder on the disk to be measured (BENCH_DIR, or the system's temporary folder); remove it at the
    end.
    """
    path = Path(tempfile.mkdtemp(prefix="headwater-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def new_file(path: Path, *, captured: bool, setup: str = TABLE) -> None:
    """Create a WAL database with the table `t`, with or without capture."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(setup)
    db.close()
    if captured:
        source = SqliteSource("bench", str(path), notes=Notes(), config=SqliteConfig())
        source.prove(generation="bench", latest=0, read=lambda after: iter(()))
        source.close()


def medians(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Run the sides alternately; return the median of each."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(run())
    return {name: statistics.median(times) for name, times in found.items()}


@contextlib.contextmanager
def server(data: Path, *urls: str) -> Iterator[tuple[str, int]]:
    """Run a real `headwater serve` as a child process; yield its URL and process id."""
    with announced(data, *urls) as (words, pid):
        yield words[3], pid


@contextlib.contextmanager
def announced(data: Path, *urls: str) -> Iterator[tuple[list[str], int]]:
    """Run `headwater serve`; yield the words of its first line (fourth: the URL, sixth: gRPC's address) and its pid."""
    command = [sys.executable, "-m", "headwater", "serve", *urls, "--data", str(data), "--http", "127.0.0.1:0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _ready(child), child.pid
    finally:
        child.terminate()
        child.wait()
        if child.stdout:
            child.stdout.close()


def _ready(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout
    words = child.stdout.readline().split()
    if words[:3] != ["headwater", "ready", "at"]:
        raise RuntimeError("the server did not start")
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(words[3] + "/readyz") as answer:
            if answer.status == 200:
                return words
        time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def versions() -> str:
    """Return one line with the date, the versions and the machine."""
    return (
        f"{time.strftime('%Y-%m-%d')} · Python {platform.python_version()} · SQLite {apsw.sqlite_lib_version()} · "
        f"{platform.system()} {platform.machine()} · {os.cpu_count()} cores"
    )
