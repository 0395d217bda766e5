"""The plan of a row decoder, and the careful decoder: slow and exact.

Before images: the whole row with REPLICA IDENTITY FULL. Otherwise the key, as sent or, if the update did not change the
key, from the new row; the other columns are UNAVAILABLE. An unchanged TOAST value is taken from the old row if that has
it; otherwise it is UNAVAILABLE.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec

from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.table import Row, Table
from headwater.sources.postgres.capture.decode.pgoutput import (
    Binary,
    Cell,
    Cells,
    Delete,
    Insert,
    Unchanged,
    Update,
    decode,
)
from headwater.sources.postgres.capture.decode.replication_frames import BadMessage
from headwater.sources.postgres.types import Convert

Decode = Callable[[bytes], Change]  # a whole message, without the xid of a stream block
Get = Callable[[int], tuple[int, memoryview]]  # PGconn.get_copy_data: the size of a frame, or the reason there is none
# Reads frames from the connection and appends their rows to the list, until another kind of frame is received, the
# list has so many changes, or so many bytes were read. Returns the frame it stopped at, and the bytes.
Take = Callable[[Get, dict[bytes, Decode], list[Change], int, int], tuple[int, memoryview, int]]

HEAD = 6  # bytes of a message that select its decoder: kind, oid of the table, and which row is first
FORM = 2  # version of Plan and Take: a compiled twin built for another version is not used
ERRORS = (ValueError, LookupError, ArithmeticError, struct.error)


class Plan(msgspec.Struct, frozen=True):
    """A decoder to make, for the `op` messages of a table in one shape whose first row is `sent`: `new` (the new row),
    `key` (the key of the old row) or `all` (the whole old row). `keys`: which columns of an old row are known when only
    its key is sent. `careful` reads the messages that the decoder cannot."""

    op: Op
    sent: str
    table: Table
    keys: tuple[bool, ...]
    converts: tuple[Convert, ...]
    careful: Decode

    @property
    def known(self) -> list[bool]:
        """Return which columns of the old row are known."""
        return [self.sent == "all" or is_key for is_key in self.keys]


class DiagnosticDecoder:
    """A slow decoder that explains the defect of a bad message, and keeps the text of values that do not convert."""

    def __init__(self, table: Table, keys: Sequence[bool], converts: Sequence[Convert]) -> None:
        self._table, self._keys, self._converts = table, keys, converts

    def __call__(self, message: bytes) -> Change:
        found = decode(message)
        if isinstance(found, Insert):
            return Change(Op.INSERT, self._table, None, self._image(found.new))
        if isinstance(found, Delete):
            return Change(Op.DELETE, self._table, self._old(found.kind, found.old), None)
        assert isinstance(found, Update)
        new = self._image(found.new)
        if found.old is None:
            return Change(Op.UPDATE, self._table, self._key_only(new), new)
        old = self._old(found.kind, found.old)
        filled = tuple([was if now is UNAVAILABLE else now for was, now in zip(old, new, strict=True)])
        return Change(Op.UPDATE, self._table, old, filled)

    def _old(self, kind: str, cells: Cells) -> Row:
        image = self._image(cells)
        return self._key_only(image) if kind == "K" else image

    def _key_only(self, row: Row) -> Row:
        return tuple([value if is_key else UNAVAILABLE for value, is_key in zip(row, self._keys, strict=True)])

    def _image(self, cells: Cells) -> Row:
        if len(cells) != len(self._converts):
            raise BadMessage(f"a row of {self._table.name!r} has {len(cells)} values, not {len(self._converts)}")
        return tuple(map(self._read, cells, self._converts))

    def _read(self, cell: Cell, convert: Convert) -> Value:
        if cell is None:
            return None
        if isinstance(cell, Unchanged):
            return UNAVAILABLE
        if isinstance(cell, Binary):
            raise BadMessage(f"a binary value in {self._table.name!r}: only text was requested")
        try:
            return convert(cell.decode())
        except ERRORS:
            return cell.decode("utf-8", "surrogateescape")  # the text as sent
