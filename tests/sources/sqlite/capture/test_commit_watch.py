"""Waiting for commits: a foreign commit or `wake` ends a wait without polling, also when the WAL is replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sources.sqlite_source import Rig
from tests.sources.sqlite_writer_process import Foreign
from tests.suite.deadlines import PATIENCE

from headwater.sources.sqlite.capture.commit_watch import Waker

Attach = Callable[..., Rig]
LONG = PATIENCE  # nothing here waits as long as this unless it is broken


class Waiting:
    """A wait in another thread."""

    def __init__(self, wait: Callable[[float], None]) -> None:
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(wait,))
        self._started = time.monotonic()
        self._thread.start()
        self.began.wait()

    def _run(self, wait: Callable[[float], None]) -> None:
        self.began.set()
        wait(LONG)

    def ended(self) -> bool:
        self._thread.join(LONG)
        return time.monotonic() - self._started < LONG / 2

    def running(self) -> bool:
        return self._thread.is_alive()


def test_foreign_commit_ends_the_wait(rig: Attach) -> None:
    r = rig("CREATE TABLE t(x)", poll_seconds=60.0)
    for turn in range(3):
        r.source.wait(0)  # forget what happened so far
        waiting = Waiting(r.source.wait)
        r.foreign.run("INSERT INTO t VALUES (?)", turn)
        assert waiting.ended()
        assert len(r.check()) == 1


def test_wake_ends_the_wait_and_is_kept_for_the_next(rig: Attach) -> None:
    r = rig("CREATE TABLE t(x)", poll_seconds=60.0)
    r.source.wait(0)
    waiting = Waiting(r.source.wait)
    r.source.wake()
    assert waiting.ended()
    for _ in range(100_000):  # more than the pipe holds
        r.source.wake()
    r.source.wait(LONG)
    r.source.wait(0)


def test_own_write_ends_the_wait(rig: Attach) -> None:
    r = rig("CREATE TABLE t(x)", poll_seconds=60.0)
    r.source.wait(0)
    waiting = Waiting(r.source.wait)
    r.write("INSERT INTO t VALUES (1)")
    assert waiting.ended()


def test_wait_ends_after_the_poll_interval(rig: Attach) -> None:
    r = rig("CREATE TABLE t(x)", poll_seconds=0.01)
    r.source.wait(LONG)
    r.source.wait(LONG)


@pytest.mark.parametrize("how", ["unlink", "replace"])
def test_replaced_wal_is_watched_again(tmp_path: Path, how: str) -> None:
    wal = tmp_path / "x-wal"
    wal.write_bytes(b"1")
    waker = Waker(str(wal))
    waker.wait(0)
    if how == "unlink":
        wal.unlink()
    else:
        (tmp_path / "new").write_bytes(b"2")
        (tmp_path / "new").replace(wal)
    waker.wait(LONG)  # told that the old one is gone
    wal.write_bytes(b"3")
    waker.wait(0)
    waker.wait(0)
    waiting = Waiting(waker.wait)
    while waiting.running():  # the watch may begin after the first of these
        wal.write_bytes(b"4")
    assert waiting.ended()
    waker.close()


def test_wal_created_later_is_watched(tmp_path: Path, foreign_process: Foreign) -> None:
    waker = Waker(str(tmp_path / "x-wal"))
    waker.wait(0)
    (tmp_path / "x-wal").write_bytes(b"")
    waker.wait(0)
    waiting = Waiting(waker.wait)
    while waiting.running():
        (tmp_path / "x-wal").write_bytes(b"more")
    assert waiting.ended()
    waker.close()


def test_wake_and_close_of_a_closed_waker_raise_no_error(tmp_path: Path) -> None:
    waker = Waker(str(tmp_path / "x-wal"))
    waker.close()
    waker.wake()
    waker.close()
