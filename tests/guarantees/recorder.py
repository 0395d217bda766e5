"""The recorder of the truth: it reads the log's file as another process would, before retention evicts anything."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from headwater.errors import OffsetExpired
from headwater.log.disk.disk_log import DiskLog
from headwater.model.change import Transaction


class Recorder(threading.Thread):
    """Reads new transactions until `stop`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.parts: list[Transaction] = []
        self.read_at = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.failure = ""

    def run(self) -> None:
        while not self._over.wait(0.03):
            self.read()

    def stop(self) -> None:
        """Stop the thread, after reading what is in the log by now."""
        self._over.set()
        self.join()
        self.read()

    def read(self) -> None:
        """Read new transactions."""
        with self._lock:
            while not self._read():
                pass

    def _read(self) -> bool:
        """Read new transactions; return False if a new generation began meanwhile."""
        with contextlib.closing(DiskLog.open(self.path, read_only=True)) as log:
            after = self.parts[-1].upto if self.parts else 0
            after = max(after, log.generation_first - 1)
            try:
                self.parts += list(log.scan(after=min(after, log.latest)))
                self.read_at = time.monotonic()
            except OffsetExpired as error:
                if after < self.generation() - 1:
                    return False
                self.failure = f"the recorder of the truth was too slow: {error.message}"
            return True

    def whole(self) -> tuple[str, int, list[Transaction]]:
        """Return the generation, its newest offset and all retained transactions; retry if retention evicts some
        meanwhile.
        """
        while True:
            log = DiskLog.open(self.path, read_only=True)
            with contextlib.closing(log), contextlib.suppress(OffsetExpired):
                return log.generation, log.latest, list(log.scan(after=log.horizon - 1))

    def tail(self) -> list[Transaction]:
        """Return the last transactions of the log."""
        with contextlib.closing(DiskLog.open(self.path, read_only=True)) as log:
            return list(log.scan(after=max(log.horizon - 1, log.latest - 200)))

    def generation(self) -> int:
        """Return the first offset of the newest generation."""
        with contextlib.closing(DiskLog.open(self.path, read_only=True)) as log:
            return log.generation_first

    def may_write(self) -> None:
        """Hold a writer back while reading is behind."""
        while time.monotonic() - self.read_at > 0.15 and not self._over.is_set() and not self.failure:
            time.sleep(0.01)
