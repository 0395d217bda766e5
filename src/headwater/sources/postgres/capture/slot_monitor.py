"""Monitor of the replication slot: logs once when the slot is in danger, lost or recovered; `check` serves metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from headwater.errors import HeadwaterError
from headwater.sources.postgres.capture.slot.slot import Slot
from headwater.sources.postgres.setup.doctor import KEEP

logger = logging.getLogger("headwater.postgres")

SECONDS = 5.0  # between two checks
SCARCE = 0.2  # warn when less than this share of the WAL that the server may keep for the slot is left


class Health(msgspec.Struct, frozen=True):
    """The state of a slot at one check."""

    wal_status: str  # as PostgreSQL reports: reserved, extended, unreserved, lost; or "gone"
    lag_bytes: int  # WAL that the server keeps for the slot
    safe_bytes: int | None  # WAL that the server may still keep; None: no limit
    confirmed_seconds: float  # since the confirmed LSN last advanced, while there is WAL to confirm


def concern(slot: Slot | None) -> str:
    """Return the warning about a slot, without its name; "" if there is none. Pure."""
    if slot is None:
        return "is gone"
    if slot.wal_status == "lost":
        return "is lost: the server removed changes that were not read yet"
    if slot.wal_status == "unreserved":
        return "is about to be lost: the server may remove changes that were not read yet at its next checkpoint"
    if slot.safe_bytes is not None and slot.safe_bytes < SCARCE * (slot.safe_bytes + slot.lag_bytes):
        return "has little room left before the server removes changes that were not read yet"
    if slot.wal_status == "extended":
        return "makes the server keep more of its log than max_wal_size"
    return ""


class SlotMonitor:
    """The thread that checks a slot from `start` to `stop`; `check` may also be called from other threads."""

    def __init__(self, name: str, slot: str, find: Callable[[], Slot | None], *, seconds: float = SECONDS) -> None:
        self._name, self._slot, self._find, self._seconds = name, slot, find, seconds
        self._lock = threading.Lock()  # guards the fields below
        self._logged = ""
        self._confirmed, self._moved_at = -1, time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-slot-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread, which first checks the slot after the interval."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended. Call it once."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.check()
            except HeadwaterError:
                continue  # the stream reports an unreachable server

    def check(self) -> Health:
        """Read the state of the slot and return it; log a new concern, or the end of a concern, once."""
        slot = self._find()
        with self._lock:
            found = self._judged(slot)
            text = concern(slot)
            if text != self._logged:
                self._logged = text
                self._log(text, found)
        return found

    def _judged(self, slot: Slot | None) -> Health:
        now = time.monotonic()
        if slot is None:
            return Health("gone", 0, None, now - self._moved_at)
        if slot.confirmed != self._confirmed or slot.confirmed >= slot.restart + slot.lag_bytes:
            self._confirmed, self._moved_at = slot.confirmed, now
        return Health(slot.wal_status, slot.lag_bytes, slot.safe_bytes, now - self._moved_at)

    def _log(self, text: str, found: Health) -> None:
        if not text:
            logger.info("the slot %s of %s has recovered", self._slot, self._name)
            return
        room = "without a limit" if found.safe_bytes is None else f"{found.safe_bytes:,} bytes until it may be lost"
        logger.warning(
            "the slot %s of %s %s (%s, %s bytes kept, %s). More room: %s",
            self._slot, self._name, text, found.wal_status, f"{found.lag_bytes:,}", room, KEEP,
        )  # fmt: skip
