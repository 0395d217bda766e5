"""Row decoding in Python: the twin of `row_decoder_compiled`.

A message that it cannot read (a text that is not UTF-8, a value that does not convert, a broken message) is read again
by `DiagnosticDecoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.table import Row
from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD
from headwater.sources.postgres.capture.decode.row_plan import ERRORS, HEAD, Decode, Get, Plan
from headwater.sources.postgres.types import TRUTH, Convert

_END = DATA_HEAD + HEAD
_TEXT = ord("t")  # mark of a value with a text
_NO_TEXT = {ord("n"): None, ord("u"): UNAVAILABLE}  # values by their mark
_OLD_MARKS = {"key": b"K", "all": b"O"}  # marks of rows
_READ: dict[str, Callable[[bytes], Value]] = {  # of kinds that need no text
    "i64": int,
    "f64": float,
    "str": bytes.decode,
    "bool": TRUTH.__getitem__,
}


def take(
    get: Get, rows: dict[bytes, Decode], changes: list[Change], most: int, most_bytes: int
) -> tuple[int, memoryview, int]:
    """Read row frames into `changes` until another frame or a limit; return that frame and the bytes read: see Take."""
    taken = 0
    while True:
        size, frame = get(1)
        if size < _END or frame[0] != DATA or len(changes) >= most or taken >= most_bytes:
            return size, frame, taken
        message = bytes(frame[DATA_HEAD:])
        decode = rows.get(message[:HEAD])
        if decode is None:
            return size, frame, taken
        changes.append(decode(message))
        taken += size - DATA_HEAD


class Decoder:
    """Decodes the messages of its plan."""

    def __init__(self, plan: Plan) -> None:
        self._op, self._table, self._careful = plan.op, plan.table, plan.careful
        self._known, self._old_mark = plan.known, _OLD_MARKS.get(plan.sent)
        self._width = len(plan.converts).to_bytes(2, "big")
        pairs = zip(plan.table.columns, plan.converts, strict=True)
        self._reads = [_READ.get(column.kind) or _of_text(convert) for column, convert in pairs]

    def __call__(self, message: bytes) -> Change:
        try:
            return self._change(message)
        except ERRORS:
            return self._careful(message)

    def _change(self, message: bytes) -> Change:
        at, old = 5, None
        if self._old_mark is not None:
            sent, at = self._cells(message, at, self._old_mark)
            old = self._known_of([_value(*each) for each in zip(sent, self._reads, strict=True)])
        if self._op is Op.DELETE:
            new = None
        else:
            cells, at = self._cells(message, at, b"N")
            if old is None:
                new = tuple([_value(*each) for each in zip(cells, self._reads, strict=True)])
            else:  # most values of an update are the old ones
                new = tuple(
                    [
                        was if cell is UNAVAILABLE or (is_known and cell == text) else _value(cell, read)
                        for cell, text, was, is_known, read in zip(
                            cells, sent, old, self._known, self._reads, strict=True
                        )
                    ]
                )
        if at != len(message):
            raise ValueError
        if self._op is Op.UPDATE and old is None and new is not None:
            old = self._known_of(new)
        return Change(self._op, self._table, old, new)

    def _cells(self, message: bytes, at: int, mark: bytes) -> tuple[list[Any], int]:
        """Return the cells of the row at `at` (texts, None and UNAVAILABLE), and the end of the row."""
        if message[at : at + 3] != mark + self._width:
            raise ValueError
        at += 3
        cells: list[Any] = []
        for _ in self._reads:
            kind = message[at]
            at += 1
            if kind == _TEXT:
                start = at + 4
                at = start + int.from_bytes(message[at:start], "big")
                cells.append(message[start:at])
            elif kind in _NO_TEXT:
                cells.append(_NO_TEXT[kind])
            else:
                raise ValueError
        return cells, at

    def _known_of(self, row: Iterable[Value]) -> Row:
        """Return the row with UNAVAILABLE in place of the columns that are not known of an old row."""
        return tuple([value if is_known else UNAVAILABLE for value, is_known in zip(row, self._known, strict=True)])


def _value(cell: Any, read: Callable[[bytes], Value]) -> Value:
    return read(cell) if cell.__class__ is bytes else cell


def _of_text(convert: Convert) -> Callable[[bytes], Value]:
    return lambda cell: convert(cell.decode())
