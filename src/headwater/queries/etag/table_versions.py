"""Table versions: the offset of the last change of every table, kept past the horizon of the log.

    log ──advance──> {table: offset}  ──save──> a note beside the log ──> after a restart, and the log from there on

What is not known exactly is told too high, never too low: a table that may have changed in a stretch of the log that
was dropped unread counts as changed at its end (`horizon - 1`). That is still true of a token, for whoever reads now
has seen every change up to there; a number too low would let an older answer pass for one that saw as much.
Numbers never go back.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from headwater.errors import OffsetExpired
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Log
from headwater.model.try_lock import try_lock
from headwater.queries.etag.causality import WHOLE

NOTE = "table_versions"
SAVE_EVERY = 10_000  # changes; what was not saved is read again after a restart, or told too high
MAX_BEHIND = 100  # changes that the loop itself may take in
MAX_TABLES = 10_000  # beyond this the tables that stood still the longest share one number


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is saved. `rest` holds for every table that is not named."""

    generation: str
    upto: int
    rest: int
    tables: dict[str, int]


class TableVersions:
    """Of one database. From any thread; nothing runs by itself."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.RLock()  # guards what follows
        self._last: dict[str, int] = {}
        self._told: dict[str, int] = {}  # ahead of the log
        # Nothing is known of what lies before the horizon, unless that is where the generation begins.
        self._upto = self._rest = log.horizon - 1
        self._saved = -1
        self._recall()

    def _recall(self) -> None:
        try:
            kept = msgspec.json.decode(self._log.note(NOTE) or b"null", type=_Kept)
        except msgspec.DecodeError:
            return
        if kept.generation == self._log.generation and kept.upto <= self._log.latest:
            self._last, self._rest = dict(kept.tables), kept.rest
            self._upto = self._saved = kept.upto

    def advance(self) -> int:
        """Look at all that is in the log by now; the offset that was reached. Costs nothing where nothing is new."""
        if self._log.latest <= self._upto:
            return self._upto
        with self._lock:
            while self._log.latest > self._upto:
                try:
                    self._look()
                    break
                except OffsetExpired:  # retention was faster, or a new generation began: offsets never go back
                    self._upto = max(self._upto, self._log.horizon - 1)
                    self._rest = max(self._rest, self._upto)
            return self._upto

    @property
    def is_near(self) -> bool:
        """Return whether so little is new in the log that the loop itself may advance."""
        return self._log.latest - self._upto <= MAX_BEHIND

    @contextmanager
    def try_hold(self) -> Iterator[bool]:
        """Take the lock without waiting; yield whether it was free and `is_near` holds."""
        with try_lock(self._lock) as is_held:
            yield is_held and self.is_near

    def _look(self) -> None:
        for part in self._log.scan(after=self._upto):
            for offset, change in enumerate(part.changes, part.first):
                self._last[change.table.name] = offset
            self._upto = part.upto
            if len(self._last) > MAX_TABLES:
                self._forget_some()

    def _forget_some(self) -> None:
        oldest = sorted(self._last, key=self._last.__getitem__)[: MAX_TABLES // 2]
        self._rest = max(self._rest, *(self._last.pop(name) for name in oldest))

    def at(self, tables: Collection[str], position: int | None = None) -> dict[str, int]:
        """The offset of the last change of each of `tables`, as the log was last looked at.

        With `position`: at that offset, which a read saw. Changes that came since do not count. Where the log is not
        there yet, all of them count as changed at `position`, now and from now on.
        """
        with self._lock:
            if position is not None and position > self._upto:
                self._told |= {name: max(position, self._told.get(name, 0)) for name in tables}
            found = {name: self._of(name) for name in tables}
            return found if position is None else {name: min(offset, position) for name, offset in found.items()}

    def _of(self, name: str) -> int:
        return max(self._last.get(name, 0), self._told.get(name, 0), self._rest)

    def reached(self, tables: Collection[str]) -> dict[str, int]:
        """How far each of `tables` is seen by whoever reads now: what a floor is held against.

        Not below the horizon, which another process may have told for a table it did not know. `WHOLE` is how far the
        log itself was seen.
        """
        least = self._log.horizon - 1
        return {name: max(offset, least) for name, offset in self.at(tables).items()} | {WHOLE: self._upto}

    def save(self, *, every: int = SAVE_EVERY) -> bool:
        """Keep what is known beside the log, if `every` changes came since; whether it did. Waits for the disk.

        Only what is durable in the log is told: what is staged comes again.
        """
        with self._lock:
            durable = self._log.durable if isinstance(self._log, LiveLog) else self._log.latest
            upto = min(self._upto, durable)
            if upto - self._saved < every:
                return False
            tables = {name: min(self._of(name), upto) for name in {*self._last, *self._told}}
            kept = _Kept(self._log.generation, upto, min(self._rest, upto), tables)
        self._log.set_notes(**{NOTE: msgspec.json.encode(kept).decode()})
        self._saved = upto
        return True
