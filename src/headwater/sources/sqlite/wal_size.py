"""Limit on the size of the `-wal` file, which SQLite cannot reuse while somebody reads an old snapshot of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import apsw

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.database_file import File, wait_for_lock

logger = logging.getLogger("headwater.sqlite")

MAX_WAL = 256 << 20  # bytes of committed pages in the `-wal` file; above this, reads are ended until it is empty
GRACE_SECONDS = 5.0  # oldest age of a read just above the limit; it falls to zero while the file stays above the limit
CHECK_SECONDS = 1.0
LOCK_SECONDS = 0.2  # a checkpoint holds the write lock while it waits for reads, and commits of other programs wait
WARN_SECONDS = 60.0  # between two attempts, and warnings, once ending all of our own reads did not help
PAUSE_SECONDS = 2.0  # longest wait of a new read
FRAME_HEADER = 24  # bytes before each page in the file


class OpenReads:
    """Registry of the reads that may hold a snapshot, each with the function that ends it. Thread-safe."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[float, Callable[[], None]]] = {}  # the interpreter's lock guards single calls
        self._may_begin = threading.Event()
        self._may_begin.set()

    def add(self, read: object, end: Callable[[], None]) -> None:
        """Register `read`, which `end` ends."""
        self._open[read] = (time.monotonic(), end)

    def discard(self, read: object) -> None:
        """Remove `read`, which has ended."""
        self._open.pop(read, None)

    def wait(self) -> None:
        """Wait while new reads are paused; call before a read takes its snapshot."""
        if not self._may_begin.is_set():
            self._may_begin.wait(PAUSE_SECONDS)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep new reads waiting inside the block, for a short time at most."""
        self._may_begin.clear()
        try:
            yield
        finally:
            self._may_begin.set()

    def end_older(self, seconds: float) -> None:
        """End the reads that are older than `seconds`."""
        until = time.monotonic() - seconds
        for began, end in list(self._open.values()):
            if began <= until:
                end()


class WalLimit:
    """Thread that empties the `-wal` file once it is above MAX_WAL, and ends our own reads if they prevent this.

    Overlapping reads would otherwise let the file grow without end: SQLite reuses it only when nobody reads from it.
    """

    def __init__(self, file: File, reads: OpenReads) -> None:
        self._file, self._reads = file, reads
        self._wal = os.path.realpath(file.path) + "-wal"
        self._since: float | None = None  # when the file was first found above the limit
        self._retry_at = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._loop, name="headwater-wal", daemon=True).start()

    def stop(self) -> None:
        """End the thread; closing the file interrupts a running checkpoint."""
        self._stopped.set()

    def _loop(self) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            try:
                self._check(time.monotonic())
            except (apsw.Error, HeadwaterError) as error:
                if not self._stopped.is_set() and self._file.is_there():
                    logger.warning("cannot empty %s: %s", self._wal, error)

    def _check(self, now: float) -> None:
        if self._size() <= MAX_WAL:
            self._since, self._retry_at = None, 0.0
            return
        if now < self._retry_at:
            return
        if self._since is None:
            self._since = now
        above = now - self._since
        if self._empty(GRACE_SECONDS - above):
            self._since = None
        elif above > 2 * GRACE_SECONDS:
            self._retry_at = now + WARN_SECONDS
            logger.warning(
                "%s has %d MiB, above the limit of %d MiB: another program keeps a read transaction or the write lock"
                " for so long that SQLite cannot reuse the file; end that transaction",
                self._wal,
                self._size() >> 20,
                MAX_WAL >> 20,
            )

    def _size(self) -> int:
        try:
            return os.stat(self._wal).st_size
        except FileNotFoundError:
            return 0

    def _empty(self, age: float) -> bool:
        """Empty the file, ending reads older than `age` if needed; return whether the file is below the limit."""
        db = self._file.connect_bare()
        try:
            db.set_busy_handler(wait_for_lock(LOCK_SECONDS))
            db.pragma("schema_version")  # SQLite opens the `-wal` file at the first read
            # This checkpoint takes no lock that others need, and leaves little work for the one that does.
            frames = _checkpoint(db, apsw.SQLITE_CHECKPOINT_PASSIVE)
            if frames is None:
                return False
            if frames * (int(str(db.pragma("page_size"))) + FRAME_HEADER) <= MAX_WAL:
                return True  # the rest belongs to a transaction in progress, or is space that SQLite reuses
            with self._reads.paused():
                if _checkpoint(db, apsw.SQLITE_CHECKPOINT_TRUNCATE) is not None:
                    return True
                self._reads.end_older(age)
                return _checkpoint(db, apsw.SQLITE_CHECKPOINT_TRUNCATE) is not None
        finally:
            self._file.disconnect(db)


def _checkpoint(db: apsw.Connection, mode: int) -> int | None:
    """Return the number of pages that were in the file; None if a lock prevented the checkpoint."""
    try:
        frames, _ = db.wal_checkpoint(mode=mode)
    except apsw.BusyError:
        return None
    return frames
