"""What a row decoder is made from, and the careful way to decode a row: slow and exact.

Before images: the whole row with REPLICA IDENTITY FULL. Else the key, sent or, when the update left it alone, taken
from the new row; the other columns are UNAVAILABLE. An unchanged large value (TOAST) is taken from the old row where
that has it; else it is UNAVAILABLE.
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
Get = Callable[[int], tuple[int, memoryview]]  # PGconn.get_copy_data: the size of a frame, or why there is none
# Takes frames from the connection and adds the rows among them to the list, until another kind of frame comes, the
# list has so many changes, or so many bytes were taken. Gives the frame it stopped at, and the bytes.
Take = Callable[[Get, dict[bytes, Decode], list[Change], int, int], tuple[int, memoryview, int]]

HEAD = 6  # bytes of a message that tell who decodes it: its kind, the table's oid, and which row comes first
FORM = 2  # of Plan and Take: a compiled twin that was built for another one is not used
ERRORS = (ValueError, LookupError, ArithmeticError, struct.error)


class Plan(msgspec.Struct, frozen=True):
    """A decoder to be made: for the messages of one table in one shape that do `op`, and in which comes first what is
    `sent`: `new` (the new row), `key` (what identifies the old one) or `all` (of the old one). `keys`: which columns
    are known of an old row that is not whole. What the decoder cannot read, it gives to `careful`."""

    op: Op
    sent: str
    table: Table
    keys: tuple[bool, ...]
    converts: tuple[Convert, ...]
    careful: Decode

    @property
    def known(self) -> list[bool]:
        """Which columns of the old row are known."""
        return [self.sent == "all" or is_key for is_key in self.keys]


class Careful:
    """Value by value: gives the change, or says what is wrong with the message."""

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
            raise BadMessage(f"a binary value in {self._table.name!r}: only text was asked for")
        try:
            return convert(cell.decode())
        except ERRORS:
            return cell.decode("utf-8", "surrogateescape")  # the text itself, whatever it is
