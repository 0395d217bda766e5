"""The offset of the last change of every table, also of changes before the horizon of the log.

    log ──advance──> {table: offset}  ──save──> a note stored with the log ──> after a restart: note, then log

An offset that is not known exactly is reported too high, never too low: a table that may have changed in a part of
the log that was trimmed unread counts as changed at its end (`horizon - 1`). Such a token is still correct, because
every reader has seen all changes up to there; an offset too low would let an older answer meet a floor that it does
not reach. Offsets never decrease.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from headwater.errors import OffsetExpired
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Log
from headwater.model.work.try_lock import try_lock
from headwater.queries.etag.causality import WHOLE

NOTE = "table_versions"
SAVE_EVERY = 10_000  # changes; those not saved are read again after a restart, or reported too high
MAX_BEHIND = 100  # changes that the event loop itself may apply
MAX_TABLES = 10_000  # beyond this, the tables unchanged for longest share one offset


class _SavedVersions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The saved versions. `rest` is the offset of every table that is not listed."""

    generation: str
    upto: int
    rest: int
    tables: dict[str, int]


class TableVersions:
    """The table versions of one database. Thread-safe; nothing runs in the background."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.RLock()  # guards all fields below
        self._last: dict[str, int] = {}
        self._reported: dict[str, int] = {}  # offsets reported for reads that were ahead of the log
        # Changes before the horizon are not known, unless the generation begins there.
        self._upto = self._rest = log.horizon - 1
        self._saved = -1
        self._recall()

    def _recall(self) -> None:
        try:
            kept = msgspec.json.decode(self._log.note(NOTE) or b"null", type=_SavedVersions)
        except msgspec.DecodeError:
            return
        if kept.generation == self._log.generation and kept.upto <= self._log.latest:
            self._last, self._rest = dict(kept.tables), kept.rest
            self._upto = self._saved = kept.upto

    def advance(self) -> int:
        """Apply the log up to its end and return that offset. Costs nothing if nothing is new."""
        if self._log.latest <= self._upto:
            return self._upto
        with self._lock:
            while self._log.latest > self._upto:
                try:
                    self._apply_log()
                    break
                except OffsetExpired:  # the log was trimmed past our offset, or a new generation began
                    self._upto = max(self._upto, self._log.horizon - 1)
                    self._rest = max(self._rest, self._upto)
            return self._upto

    @property
    def is_near(self) -> bool:
        """Return whether the backlog is so small that the event loop itself may advance."""
        return self._log.latest - self._upto <= MAX_BEHIND

    @contextmanager
    def try_hold(self) -> Iterator[bool]:
        """Take the lock without waiting; yield whether it was free and `is_near` holds."""
        with try_lock(self._lock) as is_held:
            yield is_held and self.is_near

    def _apply_log(self) -> None:
        for part in self._log.scan(after=self._upto):
            for offset, change in enumerate(part.changes, part.first):
                self._last[change.table.name] = offset
            self._upto = part.upto
            if len(self._last) > MAX_TABLES:
                oldest = sorted(self._last, key=self._last.__getitem__)[: MAX_TABLES // 2]
                self._rest = max(self._rest, *(self._last.pop(name) for name in oldest))

    def at(self, tables: Collection[str], position: int | None = None) -> dict[str, int]:
        """Return the offset of the last change of each of `tables`, as of the last `advance`.

        With `position`, the offset of a read: without later changes. If the log has not reached `position` yet, all
        `tables` count as changed there, now and in later calls.
        """
        with self._lock:
            if position is not None and position > self._upto:
                self._reported |= {name: max(position, self._reported.get(name, 0)) for name in tables}
            found = {name: self._of(name) for name in tables}
            return found if position is None else {name: min(offset, position) for name, offset in found.items()}

    def _of(self, name: str) -> int:
        return max(self._last.get(name, 0), self._reported.get(name, 0), self._rest)

    def reached(self, tables: Collection[str]) -> dict[str, int]:
        """Return the offset that a read now has reached for each of `tables`, for comparison with a floor.

        It is not below the horizon, which another process may have reported for a table it did not know. The value of
        `WHOLE` is the applied offset of the log.
        """
        least = self._log.horizon - 1
        return {name: max(offset, least) for name, offset in self.at(tables).items()} | {WHOLE: self._upto}

    def save(self, *, every: int = SAVE_EVERY) -> bool:
        """Save the versions to the log's notes if at least `every` changes are new; return whether it did.

        Blocks on the disk. Only durable changes count: staged ones are read again after a restart.
        """
        with self._lock:
            durable = self._log.durable if isinstance(self._log, LiveLog) else self._log.latest
            upto = min(self._upto, durable)
            if upto - self._saved < every:
                return False
            tables = {name: min(self._of(name), upto) for name in {*self._last, *self._reported}}
            kept = _SavedVersions(self._log.generation, upto, min(self._rest, upto), tables)
        self._log.set_notes(**{NOTE: msgspec.json.encode(kept).decode()})
        self._saved = upto
        return True
