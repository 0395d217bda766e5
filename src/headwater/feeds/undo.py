"""Undo: the rows a table had before some changes, found by key order; it lies on disk once it is large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any

import apsw

from headwater.errors import NotSupported, StorageFull, Unavailable
from headwater.model.change import Change
from headwater.model.literal import UNAVAILABLE
from headwater.model.pack import decode_row, encode_row
from headwater.model.table import Key, Row

CACHE_KIB = 8 << 10

# `first`: the row that stood at a place before its first change, NULL if there was none.
# `twin`: keys with NULLs are equal to nothing, so rows share them: how many more of each row there were.
_SCHEMA = f"""
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -{CACHE_KIB};
CREATE TABLE first (place BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID;
CREATE TABLE twin (place BLOB, row BLOB, more INTEGER, PRIMARY KEY (place, row)) WITHOUT ROWID;
"""
_ADD_FIRST = "INSERT OR IGNORE INTO first VALUES (?, ?)"
_ADD_TWIN = "INSERT INTO twin VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET more = more + excluded.more"
_NOW, _FIRST, _TWIN = range(3)
_PAST = (
    f"SELECT place, {_FIRST}, row, 0 FROM first WHERE {{}} ORDER BY place",
    f"SELECT place, {_TWIN}, row, more FROM twin WHERE {{}} ORDER BY place",
)
_place_of = itemgetter(0)


class Undo:
    """Told the changes after an offset, in order, it turns rows of later into those of then.

    A place is a key written so that bytes have the order of the rows. Not for two threads.
    """

    def __init__(self, key_of: Callable[[Row], Key], place: Callable[[Key], bytes]) -> None:
        self._key_of, self._place = key_of, place
        with _storage_errors():
            self._db = apsw.Connection("")  # private and temporary: SQLite removes it
            self._db.execute(_SCHEMA).fetchall()

    def close(self) -> None:
        """Give the space back."""
        self._db.close()

    def add_all(self, changes: Iterable[Change]) -> None:
        """Take the next changes, all of this table."""
        with _storage_errors():
            self._db.execute("BEGIN")
            for change in changes:
                self._add(change)
            self._db.execute("COMMIT")

    def _add(self, change: Change) -> None:
        # Where the key stays, the before image comes first and the after image is ignored.
        for image, more in ((change.before, 1), (change.after, -1)):
            if image is None:
                continue
            key = self._key_of(image)
            if None in key:
                self._db.execute(_ADD_TWIN, (self._place(key), _packed(image), more))
            else:
                self._db.execute(_ADD_FIRST, (self._place(key), _packed(image) if more > 0 else None))

    def rows(self, now: Iterable[Row], *, after: bytes, upto: bytes | None) -> Iterator[Row]:
        """The rows of then at places in (after, upto], in order; `now` are all those of now, in order."""
        within = "place > ?" if upto is None else "place > ? AND place <= ?"
        bounds = (after,) if upto is None else (after, upto)
        queries = [query.format(within) for query in _PAST]
        with _storage_errors():
            if not any(self._db.execute(query + " LIMIT 1", bounds).fetchall() for query in queries):
                yield from now
                return
            past = [self._db.execute(query, bounds) for query in queries]
            placed = ((self._place(self._key_of(row)), _NOW, row, 0) for row in now)
            for _, entries in groupby(merge(placed, *past, key=_place_of), key=_place_of):
                yield from _of_then(list(entries))


def _of_then(entries: list[tuple[bytes, int, Any, int]]) -> list[Row]:
    """The rows that stood at one place: what is there now, and what is known of its past."""
    now = [row for _, kind, row, _ in entries if kind == _NOW]
    past = entries[len(now) :]
    if not past:
        return now
    if past[0][1] == _FIRST:
        packed = past[0][2]
        return [] if packed is None else [decode_row(packed)]
    then = Counter(map(encode_row, now))
    then.update({packed: more for _, _, packed, more in past})
    return [decode_row(packed) for packed, count in then.items() for _ in range(count)]


def _packed(row: Row) -> bytes:
    if any(value is UNAVAILABLE for value in row):
        raise NotSupported(
            "the source does not send whole rows before a change, so this table's past cannot be told",
            hint="Let the source send full before images, or take a snapshot of now.",
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
