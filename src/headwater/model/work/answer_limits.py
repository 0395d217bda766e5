"""Limits of answers: rows and bytes of one answer, and the memory of all concurrent answers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Iterable
from typing import Any

from headwater.errors import AnswerTooLarge, Busy
from headwater.model.literal import LENGTHS
from headwater.model.table import Row
from headwater.model.work.usage import Usage

MAX_ROWS = 100_000  # of one answer; a longer one is cut and marked `truncated`
MAX_BYTES = 64 << 20  # of the values of one answer, and of its encoded form
MAX_MEMORY = 512 << 20  # of all answers together
LEAST = 16  # fewest bytes that a value counts as
CELL = 48  # bytes of memory of a value in addition to its content
UNCOUNTED = 1 << 20  # bytes of memory; smaller answers are not counted
_ASTRAL = tuple(range(0xF0, 0xF5))  # first bytes of characters above U+FFFF in UTF-8
FEWER = "Select fewer rows or columns, read the rows page by page, or raise queries.answer_bytes."


class AnswerMemory:
    """Counts the memory of all answers in progress in this process. Thread-safe."""

    def __init__(self) -> None:
        self.max_bytes, self.max_memory = MAX_BYTES, MAX_MEMORY
        # Guards `used` and _unread. Reentrant, because the garbage collector can free an answer at any moment.
        self._lock = threading.RLock()
        self.used = 0  # bytes
        self._unread: Usage[Hashable] = Usage()  # bytes of finished answers, by caller

    def configure(self, *, max_bytes: int = MAX_BYTES, max_memory: int = MAX_MEMORY) -> None:
        """Set the limits of one answer and of all answers together; the second is at least the first."""
        self.max_bytes, self.max_memory = max_bytes, max(max_memory, max_bytes)

    def reserve(self, count: int) -> None:
        """Reserve `count` bytes; raise Busy if other answers use them."""
        with self._lock:
            used = self.used
            fits = used + count <= self.max_memory
            if fits:
                self.used = used + count
        if not fits:
            raise Busy(
                f"answers in progress use {used >> 20} MiB of memory already",
                hint="Retry in a moment, or select less at a time.",
            )

    def charge(self, caller: Hashable, count: int) -> None:
        """Count `count` bytes for `caller`; Busy if it has others and all would exceed half of the memory."""
        with self._lock:
            mine = self._unread[caller]
            fits = not mine or mine + count <= self.max_memory // 2
            if fits:
                self._unread.add(caller, count)
        if not fits:
            raise Busy(
                f"you have unread answers of {mine >> 20} MiB already",
                hint="Read them first, or select less at a time.",
            )

    def release(self, count: int, caller: Hashable = None) -> None:
        """Release `count` bytes, which were charged to `caller` unless it is None."""
        with self._lock:
            self.used -= count
            if caller is not None:
                self._unread.remove(caller, count)


MEMORY = AnswerMemory()  # one process has one memory


class Reservation:
    """The memory of one answer. It is released when the object is deleted, or by `release`."""

    __slots__ = ("_caller", "_taken", "bytes", "memory")

    def __init__(self) -> None:
        self.bytes = 0  # of the values
        self.memory = 0  # bytes that the values take
        self._taken = 0
        self._caller: Hashable = None

    def add(self, bytes: int, cells: int, extra: int) -> None:
        """Count `cells` values of `bytes` bytes and `extra` bytes of `extra_memory`; raise AnswerTooLarge or Busy."""
        self.bytes += bytes
        if self.bytes > MEMORY.max_bytes:
            raise too_large()
        self.memory += bytes + CELL * cells + extra
        self.take(self.memory)

    def take(self, memory: int) -> None:
        """Raise the reservation to `memory` bytes, in steps of UNCOUNTED; raise Busy if they are not available."""
        if memory > UNCOUNTED and memory - self._taken >= UNCOUNTED:
            MEMORY.reserve(memory - self._taken)
            self._taken = memory

    def charge(self, caller: Hashable) -> None:
        """Count the memory of a complete answer for `caller`, once; Busy if its unread answers use too much."""
        if self._taken and self._caller is None:
            MEMORY.charge(caller, self._taken)
            self._caller = caller

    def release(self) -> None:
        """Release the memory."""
        taken, self._taken = self._taken, 0
        if taken:
            MEMORY.release(taken, self._caller)

    def __del__(self) -> None:
        self.release()


class AnswerRows(tuple[Row, ...]):
    """Rows of an answer, with their reserved memory."""

    reservation: Reservation

    @classmethod
    def of(cls, rows: Iterable[Row], reservation: Reservation) -> AnswerRows:
        """Return `rows` with `reservation`, which lives as long as they do."""
        made = cls(rows)
        made.reservation = reservation
        return made


def bytes_of(rows: tuple[Row, ...]) -> int:
    """Return the bytes of the values of `rows`; 0 if they were not counted."""
    return rows.reservation.bytes if isinstance(rows, AnswerRows) else 0


def weight(row: Iterable[Any]) -> int:
    """Return the bytes of the values of one row; a small value counts as `LEAST`."""
    total = 0
    for value in row:
        kind = type(value)
        if kind is int or kind is float or value is None:
            total += LEAST
        else:
            size = len(value) if kind is str or kind is bytes else _size(value)
            total += size if size > LEAST else LEAST
    return total


def extra_memory(row: Iterable[Any]) -> int:
    """Return the memory that the non-ASCII texts of a row take in addition to their `weight`.

    Python stores a text with 1, 2 or 4 bytes for every character, by its highest one.
    """
    return sum([sys.getsizeof(value) for value in row if type(value) is str and not value.isascii()])


def extra_memory_of_utf8(texts: Iterable[bytes | None]) -> int:
    """Return the most `extra_memory` that texts in UTF-8 can take once decoded."""
    found = [text for text in texts if text and not text.isascii()]
    return sum([len(text) * (4 if any(map(text.__contains__, _ASTRAL)) else 2) for text in found])


def _size(value: Any) -> int:
    length = LENGTHS.get(type(value))
    return LEAST if length is None else length(value)


def too_large(most: int | None = None) -> AnswerTooLarge:
    """Return the error for an answer of more than `most` bytes, by default the limit of one answer."""
    return AnswerTooLarge(f"the answer has more than {most or MEMORY.max_bytes} bytes", hint=FEWER)
