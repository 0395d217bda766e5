"""A source, its log and the capture thread between them, on files of a test; and other processes that write."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.suite.deadlines import PATIENCE

from headwater.app import Database
from headwater.capture.capture import Capture
from headwater.errors import Unavailable
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.change import Change, Transaction
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.source import SqliteSource

FOREIGN = """
import json, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
for sql in json.loads(sys.argv[2]):
    db.execute(sql)
db.close()
"""


class Running(msgspec.Struct):
    """One captured database: its source, log and capture thread."""

    source: SqliteSource
    disk: DiskLog
    log: LiveLog
    capture: Capture

    def run(self, sql: str) -> int:
        """Run statements in one transaction through the source; return its offset."""
        return self.source.write(lambda session: session.execute(sql)).result(PATIENCE).offset

    def caught_up(self) -> None:
        """Wait until the log has every committed change; retry while a replaced file is unavailable."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                assert self.capture.catch_up(20), f"capture does not catch up: {self.capture.error}"
                return
            except Unavailable:
                if time.monotonic() > end:
                    raise
                self.log.wait_beyond(self.log.latest, 0.01)

    def changes(self) -> list[Change]:
        """Return every change in the log, staged changes included."""
        self.caught_up()
        return flat(self.log.scan(after=self.log.horizon - 1))


def flat(parts: Any) -> list[Change]:
    return [change for part in parts for change in part.changes]


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    flush_seconds: float = 0.005,
    stop_when_lost: bool = False,
    retention: Retention | None = None,
    log_vfs: str | None = None,
    vfs: str | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Capture of `app.db` into `app.log.db`, closed in the order a server uses."""
    disk = DiskLog.open(folder / "app.log.db", vfs=log_vfs)
    log = LiveLog(disk)
    with contextlib.ExitStack() as undo:
        undo.callback(log.close)
        config = SqliteConfig(**{"wal": True} | settings)
        source = SqliteSource("app", str(folder / "app.db"), notes=log, config=config, vfs=vfs)
        undo.callback(source.close)
        kept = retention or Retention()
        capture = Capture(source, log, retention=kept, flush_seconds=flush_seconds, stop_when_lost=stop_when_lost)
        capture.start()
        undo.pop_all()
    try:
        yield Running(source, disk, log, capture)
    finally:
        Database(source, log, disk, capture, kept, embedded=True).close()


def foreign(path: Path, *statements: str) -> None:
    """Run `statements` in another process with the standard library's SQLite."""
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(path), msgspec.json.encode(statements).decode()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def logged(folder: Path, name: str = "app") -> list[Transaction]:
    """Return everything retained in the log file, read as another process reads it."""
    log = DiskLog.open(folder / f"{name}.log.db", read_only=True)
    try:
        return list(log.scan(after=log.horizon - 1))
    finally:
        log.close()
