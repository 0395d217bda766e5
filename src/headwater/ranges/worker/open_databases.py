"""The open databases of a worker, by location; closed when they are idle or their files were replaced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headwater.errors import HeadwaterError, SourceMismatch, Unavailable
from headwater.log.disk.disk_log import DiskLog
from headwater.ranges.pull.jobs import LOG_GENERATION_CHANGED, DatabaseLocation, changes_gone
from headwater.sources.read import BulkReader

POLL_SECONDS = 0.005  # between two checks whether the log has grown
IDLE_SECONDS = 30.0  # after which an unused database is closed: its files may have been deleted

OpenReader = Callable[[DatabaseLocation, DiskLog], BulkReader]


class DurableLog(DiskLog):
    """The log of another process, which is polled: no event reports its growth. Implements `snapshot.PastLog`."""

    def wait_beyond(self, offset: int, timeout: float | None = None) -> bool:
        """Block until `latest` is above `offset` or `timeout` ends; return whether it is above."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.latest <= offset:
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        return True


class OpenDatabase:
    """One open database and its users."""

    def __init__(self, reader: BulkReader, log: DurableLog) -> None:
        self.reader, self.log = reader, log
        self.users = 0
        self.used = 0.0
        self.is_stale = False

    def close(self) -> None:
        """Close its files."""
        with suppress(HeadwaterError):
            self.reader.close()
        self.log.close()


class Databases:
    """The open databases by location. Thread-safe."""

    def __init__(self, open_reader: OpenReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._open_reader, self._clock = open_reader, clock
        self._lock = threading.Lock()  # guards all fields below
        self._open: dict[DatabaseLocation, OpenDatabase] = {}

    @contextmanager
    def use(self, place: DatabaseLocation) -> Iterator[OpenDatabase]:
        """Open the database at `place` while in use; OffsetExpired if its log has another generation."""
        opened = self._take(place)
        try:
            log = opened.log
            if log.generation != place.generation:
                raise changes_gone(0, log.horizon, log.latest, LOG_GENERATION_CHANGED, "the log began a new generation")
            try:
                yield opened
            except SourceMismatch as error:
                raise changes_gone(0, log.horizon, log.latest, LOG_GENERATION_CHANGED, error.message) from error
        finally:
            self._give_back(opened)

    def _take(self, place: DatabaseLocation) -> OpenDatabase:
        with self._lock:
            self._retire(place)
            opened = self._open.get(place)
            if opened is None:
                opened = self._open[place] = self._opened(place)
            opened.users += 1
            return opened

    def _opened(self, place: DatabaseLocation) -> OpenDatabase:
        _check_inode(place)
        log = DurableLog.open(place.log, read_only=True)
        try:
            _check_inode(place)
            return OpenDatabase(self._open_reader(place, log), log)
        except BaseException:
            log.close()
            raise

    def _retire(self, place: DatabaseLocation) -> None:
        """Close databases of the same name in other files, and databases that are idle for long."""
        for other, opened in list(self._open.items()):
            is_idle = not opened.users and self._clock() - opened.used > IDLE_SECONDS
            if other != place and (other.db == place.db or is_idle):
                del self._open[other]
                opened.is_stale = True
                if not opened.users:
                    opened.close()

    def _give_back(self, opened: OpenDatabase) -> None:
        with self._lock:
            opened.users -= 1
            opened.used = self._clock()
            if opened.is_stale and not opened.users:
                opened.close()

    def close(self) -> None:
        """Close all databases, those in use as soon as their users are done."""
        with self._lock:
            for opened in self._open.values():
                opened.is_stale = True
                if not opened.users:
                    opened.close()
            self._open.clear()


def _check_inode(place: DatabaseLocation) -> None:
    try:
        found = os.stat(place.log).st_ino
    except OSError as error:
        raise Unavailable(f"the log {place.log} cannot be read: {error.strerror}", hint="Retry.") from None
    if found != place.log_inode:
        raise Unavailable(f"the log {place.log} was replaced", hint="Retry in a moment.")
