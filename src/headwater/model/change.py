"""Changes of rows and tables, and the transactions that committed them."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from headwater.model.literal import LENGTHS
from headwater.model.table import Key, Row, Table


class Op(enum.IntEnum):
    """The kind of a change. The numbers are stored: never renumber."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    SCHEMA_CHANGE = 4
    TRUNCATE = 5

    @property
    def word(self) -> str:
        """Return the name on the wire."""
        return _WORDS[self]


_WORDS = ("", *(op.name.lower() for op in Op))  # by number, because it is needed for every change


class Change(msgspec.Struct, frozen=True, gc=False):
    """One committed change of a row, or of a table's definition.

    `table` is the definition that the images have. For SCHEMA_CHANGE it is the new definition; `ddl` is the statement
    (empty if another process ran it), and `resnapshot` means that rows may have changed without row changes.
    """

    op: Op
    table: Table
    before: Row | None = None
    after: Row | None = None
    ddl: str | None = None
    resnapshot: bool = False

    @property
    def row(self) -> Row | None:
        """Return the after image, else the before image."""
        return self.after if self.after is not None else self.before

    @property
    def key(self) -> Key | None:
        """Return the key after the change (before it, for a delete)."""
        row = self.row
        return None if row is None else self.table.key_of(row)


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """The changes of one commit in order, or a contiguous part of them.

    A part has `start` > 0 or `last` False: a transaction larger than a block is passed on in parts, so that it is
    never in memory as a whole. Offsets are `first`, `first + 1`, …; `ts` is the hybrid timestamp that capture assigned,
    `commit_ts_ms` the source's own time.
    """

    id: str
    changes: tuple[Change, ...]
    first: int = 0
    ts: int = 0
    commit_ts_ms: int = 0
    start: int = 0
    last: bool = True
    position: str = ""
    commit_us_rest: int = 0  # microseconds beyond `commit_ts_ms`, below 1,000

    @property
    def commit_ts_us(self) -> int:
        """Return the source's time of the commit in microseconds."""
        return 1000 * self.commit_ts_ms + self.commit_us_rest

    @property
    def upto(self) -> int:
        """Return the offset of the last change in this part."""
        return self.first + len(self.changes) - 1

    def cut(self, after: int, upto: int) -> Transaction:
        """Return the changes with offsets in (after, upto]; that range must overlap the offsets of this transaction."""
        low = max(after + 1 - self.first, 0)
        high = min(upto + 1 - self.first, len(self.changes))
        if low == 0 and high == len(self.changes):
            return self
        return msgspec.structs.replace(
            self,
            changes=self.changes[low:high],
            first=self.first + low,
            start=self.start + low,
            last=self.last and high == len(self.changes),
        )


_length_of = LENGTHS.get


def image_bytes(changes: Iterable[Change]) -> int:
    """Return the approximate bytes of the texts, blobs, documents and vectors in the images of `changes`."""
    rows = [row for change in changes for row in (change.before, change.after) if row is not None]
    return sum([length(value) for row in rows for value in row if (length := _length_of(type(value)))])
