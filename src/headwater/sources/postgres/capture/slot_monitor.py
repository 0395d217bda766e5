"""How the slot fares: looked at every few seconds, for metrics, and told in the log before anything is lost."""

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

SECONDS = 5.0  # between two looks
SCARCE = 0.2  # of what the server may keep for the slot: less than this left is told


class Health(msgspec.Struct, frozen=True):
    """A slot in numbers, as of one look."""

    wal_status: str  # as the server says: reserved, extended, unreserved, lost; or "gone"
    lag_bytes: int  # of its log that the server keeps for us
    safe_bytes: int | None  # how much more it may keep; None: no limit
    confirmed_seconds: float  # since it was last told that it may forget some, while there is something to forget
    is_read: bool


def concern(slot: Slot | None) -> str:
    """What somebody should know about a slot before it is lost; "" if nothing. Pure."""
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


class Watch:
    """One thread, from `start` to `stop`; `look` may also be called by others."""

    def __init__(self, name: str, slot: str, find: Callable[[], Slot | None], *, seconds: float = SECONDS) -> None:
        self._name, self._slot, self._find, self._seconds = name, slot, find, seconds
        self._lock = threading.Lock()  # guards what follows
        self._told = ""
        self._confirmed, self._moved_at = -1, time.monotonic()
        self.health: Health | None = None  # of the newest look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"headwater-slot-{name}", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End it. Once."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            try:
                self.look()
            except HeadwaterError:
                continue  # the stream tells of a server that is away

    def look(self) -> Health:
        """Ask now; what is new and bad goes into the log, once."""
        slot = self._find()
        with self._lock:
            found = self.health = self._judged(slot)
            text = concern(slot)
            if text != self._told:
                self._told = text
                self._tell(text, found)
        return found

    def _judged(self, slot: Slot | None) -> Health:
        now = time.monotonic()
        if slot is None:
            return Health("gone", 0, None, now - self._moved_at, False)
        if slot.confirmed != self._confirmed or slot.confirmed >= slot.restart + slot.lag_bytes:
            self._confirmed, self._moved_at = slot.confirmed, now
        return Health(
            slot.wal_status, slot.lag_bytes, slot.safe_bytes, now - self._moved_at, is_read=slot.active_pid != 0
        )

    def _tell(self, text: str, found: Health) -> None:
        if not text:
            logger.info("the slot %s of %s is well again", self._slot, self._name)
            return
        room = "without a limit" if found.safe_bytes is None else f"{found.safe_bytes:,} bytes until it may be lost"
        logger.warning(
            "the slot %s of %s %s (%s, %s bytes kept, %s). More room: %s",
            self._slot, self._name, text, found.wal_status, f"{found.lag_bytes:,}", room, KEEP,
        )  # fmt: skip
