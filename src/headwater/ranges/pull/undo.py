"""Reconstruction of earlier rows of a table by undoing changes; the state moves to disk when it is large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any

import apsw

from headwater.errors import Conflict, LimitExceeded, NotSupported, StorageFull, Unavailable
from headwater.model.change import Change
from headwater.model.keys.key import Span
from headwater.model.literal import UNAVAILABLE
from headwater.model.row_msgpack import decode_row, encode_row
from headwater.model.table import Key, Row, Table

CACHE_KIB = 8 << 10
MAX_BYTES = 4 << 30  # of one file, because many stalled readers would fill the disk
LOG_DISAGREES = "log_disagrees"
EVERYTHING = Span()

# `first`: the row at a place before its first change and the row after its last change, NULL if there was none.
# `twin`: rows may share a key that contains NULLs; `more` is how many more of each such row there were before.
_SCHEMA = f"""
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -{CACHE_KIB};
CREATE TABLE first (place BLOB PRIMARY KEY, row BLOB, last BLOB) WITHOUT ROWID;
CREATE TABLE twin (place BLOB, row BLOB, more INTEGER, PRIMARY KEY (place, row)) WITHOUT ROWID;
"""
_ADD_FIRST = "INSERT INTO first VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET last = ?3"
_ADD_TWIN = "INSERT INTO twin VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET more = more + excluded.more"
_NOW, _FIRST, _TWIN = range(3)
_PAST = (
    f"SELECT place, {_FIRST}, row, last FROM first WHERE {{}} ORDER BY place",
    f"SELECT place, {_TWIN}, row, more FROM twin WHERE {{}} ORDER BY place",
)
_place_of = itemgetter(0)


class Undo:
    """Turns current rows into the rows at an earlier offset, given the changes since, in order.

    A place is a key encoded so that bytes sort like the rows. Places outside `span` are ignored. Not thread-safe.
    """

    def __init__(self, table: Table, place: Callable[[Key], bytes], span: Span = EVERYTHING) -> None:
        self._table, self._place, self._span = table, place, span
        self._key_of = table.key_of
        self._is_empty = True
        self._unmeasured = 0  # bytes added since the file was measured
        with _storage_errors():
            self._db = apsw.Connection("")  # a private temporary database, which SQLite deletes
            self._db.execute(_SCHEMA).fetchall()

    def close(self) -> None:
        """Free the memory and disk space."""
        self._db.close()

    def add_all(self, changes: Iterable[Change]) -> None:
        """Add the next changes, all of this table."""
        with _storage_errors():
            self._db.execute("BEGIN")
            for change in changes:
                self._add(change)
                if self._unmeasured > MAX_BYTES // 64:
                    self._check_size()
            self._db.execute("COMMIT")

    def _add(self, change: Change) -> None:
        for image, was_there in ((change.before, True), (change.after, False)):
            if image is None:
                continue
            key = self._key_of(image)
            place = self._place(key)
            if not self._span.contains(place):
                continue
            self._is_empty = False
            packed = _packed(image)
            self._unmeasured += len(packed)
            if None in key:
                self._db.execute(_ADD_TWIN, (place, packed, 1 if was_there else -1))
            else:
                self._db.execute(_ADD_FIRST, (place, packed, None) if was_there else (place, None, packed))

    def touches(self, span: Span) -> bool:
        """Return whether any row in `span` was different at the earlier offset."""
        if self._is_empty:
            return False
        within, bounds = _within(span)
        with _storage_errors():
            return any(self._db.execute(query.format(within) + " LIMIT 1", bounds).fetchall() for query in _PAST)

    def rows(self, now: Sequence[Row], span: Span) -> Iterator[Row]:
        """Yield the earlier rows in `span`, in order; `now` are all current rows in `span`, in order.

        Raise Conflict if `now` is not the result of the changes: then the log is not the history of these rows.
        """
        within, bounds = _within(span)
        with _storage_errors():
            past = [self._db.execute(query.format(within), bounds) for query in _PAST]
            placed = ((self._place(self._key_of(row)), _NOW, row, None) for row in now)
            del now  # `placed` drops the rows at its end, when the reader may still have to take the last of them
            for _, entries in groupby(merge(placed, *past, key=_place_of), key=_place_of):
                yield from self._of_then(list(entries))

    def _of_then(self, entries: list[tuple[bytes, int, Any, Any]]) -> list[Row]:
        """Return the earlier rows at one place, from its current rows and its recorded changes."""
        now = [row for _, kind, row, _ in entries if kind == _NOW]
        past = entries[len(now) :]
        if not past:
            return now
        if past[0][1] == _FIRST:
            _, _, packed, last = past[0]
            then = None if packed is None else decode_row(packed)
            # 0.0 equals -0.0, because SQLite does not store the sign of a zero.
            if now != ([] if last is None else [decode_row(last)]):
                raise self._disagreement(now[0] if now else decode_row(last or packed))
            return [] if then is None else [then]
        counted = Counter(map(encode_row, now))
        for _, _, packed, more in past:
            counted[packed] += more
            if counted[packed] < 0:
                raise self._disagreement(decode_row(packed))
        return [decode_row(packed) for packed, count in counted.items() for _ in range(count)]

    def _check_size(self) -> None:
        self._unmeasured = 0
        if int(str(self._db.pragma("page_count"))) * int(str(self._db.pragma("page_size"))) > MAX_BYTES:
            raise LimitExceeded(
                f"the changes of table {self._table.name!r} since this snapshot take more than {MAX_BYTES >> 20} MiB",
                hint="Take a newer snapshot, read it faster, or read fewer ranges at a time.",
            )

    def _disagreement(self, row: Row) -> Conflict:
        key = ", ".join(map(repr, self._key_of(row)))
        return Conflict(
            f"the row {key[:200]} of table {self._table.name!r} is not what its newest change in the log says",
            hint="The row was changed without capture. Take a new snapshot; `headwater pipeline verify` finds others.",
            resnapshot_reason=LOG_DISAGREES,
            table=self._table.name,
            key=key[:200],
        )


def _within(span: Span) -> tuple[str, tuple[bytes, ...]]:
    if span.end is None:
        return "place >= ?", (span.start,)
    return "place >= ? AND place < ?", (span.start, span.end)


def _packed(row: Row) -> bytes:
    if any(value is UNAVAILABLE for value in row):
        raise NotSupported(
            "the source does not send full before images, so earlier rows of this table are not available",
            hint="Make the source send full before images (REPLICA IDENTITY FULL), or take a new snapshot.",
            read_again=True,
        )
    return encode_row(row)


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except apsw.FullError as error:
        raise StorageFull("no space left for temporary files") from error
    except apsw.Error as error:
        raise Unavailable(f"temporary files cannot be used: {error}") from error
