"""Change and Transaction: what happened to one row, and what happened in one commit."""

from __future__ import annotations

import enum

import msgspec

from headwater.model.table import Key, Row, Table


class Op(enum.IntEnum):
    """What a change did. The numbers are stored: never renumber."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    SCHEMA_CHANGE = 4
    TRUNCATE = 5

    @property
    def word(self) -> str:
        """The name on the wire."""
        return _WORDS[self]


_WORDS = ("", *(op.name.lower() for op in Op))  # by number: asked for with every change


class Change(msgspec.Struct, frozen=True, gc=False):
    """One committed row mutation, or one change of a table's shape.

    `table` is the shape the images are written in. For SCHEMA_CHANGE it is the new shape; `ddl` says what
    was run (empty when another process ran it) and `resnapshot` that rows may have changed unseen.
    """

    op: Op
    table: Table
    before: Row | None = None
    after: Row | None = None
    ddl: str | None = None
    resnapshot: bool = False

    @property
    def row(self) -> Row | None:
        """The newest image there is."""
        return self.after if self.after is not None else self.before

    @property
    def key(self) -> Key | None:
        """The key after the change (before it, for a delete)."""
        row = self.row
        return None if row is None else self.table.key_of(row)


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """The changes of one commit in order, or a contiguous part of them.

    A part has `start` > 0 or `last` False: a transaction larger than a block is handed on in parts, so that
    nobody ever holds a million rows. Offsets are `first`, `first + 1`, …; `ts` is the hybrid time given once
    by capture, `commit_ts_ms` the source's own.
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
        """The source's own time of the commit in microseconds."""
        return 1000 * self.commit_ts_ms + self.commit_us_rest

    @property
    def upto(self) -> int:
        """Offset of the last change here."""
        return self.first + len(self.changes) - 1

    def cut(self, after: int, upto: int) -> Transaction:
        """The part of this with offsets in (after, upto]; both must lie inside or beyond it."""
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


def text_bytes(change: Change) -> int:
    """Return the length of the texts and blobs of both images."""
    rows = (row for row in (change.before, change.after) if row is not None)
    return sum([len(value) for row in rows for value in row if isinstance(value, (str, bytes))])
