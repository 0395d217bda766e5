"""Row messages to changes: a decoder written for each shape of a table, because this runs for every row.

The written code reads a value's mark and length in one step and converts in place. What it cannot read (a text that is
not UTF-8, a value that does not convert, a broken message) is read again by `_Careful`, which is slow and exact: it
gives the same change, or says what is wrong.

Before images: the whole row with REPLICA IDENTITY FULL. Else the key, sent or, when the update left it alone, taken
from the new row; the other columns are UNAVAILABLE. An unchanged large value (TOAST) is taken from the old row where
that has it; else it is UNAVAILABLE.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Sequence
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.table import Row, Table
from headwater.sources.postgres.frames import BadMessage
from headwater.sources.postgres.pgoutput import Binary, Cell, Cells, Delete, Insert, Unchanged, Update, decode
from headwater.sources.postgres.types import TRUTH, Convert

Decode = Callable[[bytes], Change]  # a whole message, without the xid of a stream block
HEAD = 6  # bytes of a message that tell who decodes it: its kind, the table's oid, and which row comes first

_INLINE = {  # what is faster without a call; the others go by their converter
    "i64": "int({})",
    "f64": "float({})",
    "str": "{}.decode()",
    "bool": "truth[{}]",
}
_ERRORS = (ValueError, LookupError, ArithmeticError, struct.error)


class RowDecoders:
    """For the rows of one table in one shape. `keys`: which columns are known of an old row that is not whole."""

    def __init__(self, oid: int, table: Table, keys: Sequence[bool], converts: Sequence[Convert]) -> None:
        self.table = table
        self._oid, self._keys = oid.to_bytes(4, "big"), keys
        self._scope: dict[str, Any] = {
            "head": struct.Struct(">BI").unpack_from,
            "Change": Change,
            "table": table,
            "unavailable": UNAVAILABLE,
            "truth": TRUTH,
            "errors": _ERRORS,
            "again": _Careful(table, keys, converts),
            **{op.word: op for op in Op},
            **{f"convert{place}": convert for place, convert in enumerate(converts)},
        }
        self.made: dict[bytes, Decode] = {}  # by the first HEAD bytes of a message

    def of(self, head: bytes) -> Decode | None:
        """What decodes messages that begin so; None if there are none. Written when it is asked for: that takes
        milliseconds, and few tables see all kinds of changes."""
        name = _FUNCTIONS.get((head[:1], head[5:]))
        if name is None or head[1:5] != self._oid:
            return None
        if head not in self.made:
            exec(compile(_source(name, self.table, self._keys), f"<{name}>", "exec"), self._scope)
            self.made[head] = self._scope[name]
        return self.made[head]


_FUNCTIONS = {
    (b"I", b"N"): "insert_new",
    (b"U", b"N"): "update_new",
    (b"U", b"K"): "update_key",
    (b"U", b"O"): "update_all",
    (b"D", b"K"): "delete_key",
    (b"D", b"O"): "delete_all",
}


def _source(name: str, table: Table, keys: Sequence[bool]) -> str:
    """A function. Only numbers and our own words are written into it, never a name of the user's."""
    op, _, sent = name.partition("_")
    kinds = [column.kind for column in table.columns]
    width = len(kinds)
    known = {place for place in range(width) if keys[place] or sent == "all"}  # of the old row
    lines: list[str] = []
    if sent == "new":
        before, shared = _row("n", known, width) if op == "update" else "None", set[int]()
    else:
        lines += _begins(b"K" if sent == "key" else b"O", width)
        for place, kind in enumerate(kinds):
            lines += _value(f"o{place}", _old(place, kind)) if place in known else _value("_", "pass")
        before, shared = _row("o", known, width), known
    if op == "delete":
        return _function(name, [*lines, f"change = Change(delete, table, {before}, None)"])
    lines += _begins(b"N", width)
    for place, kind in enumerate(kinds):
        if place in shared:
            lines += _value(f"n{place}", _new(place, kind), f"o{place}")
        else:
            lines += _value(f"n{place}", f"n{place} = {_converted(place, kind, 'data[a:at]')}")
    return _function(name, [*lines, f"change = Change({op}, table, {before}, {_row('n', range(width), width)})"])


def _begins(mark: bytes, width: int) -> list[str]:
    """The mark of a row, and how many values it has."""
    return [f"if data[at : at + 3] != {mark + width.to_bytes(2, 'big')!r}: raise ValueError", "at += 3"]


def _function(name: str, lines: list[str]) -> str:
    whole = [
        f"def {name}(message):",
        "  try:",
        r"    data = message + b'\0\0\0\0'",  # the mark and length of a value are read together, also where it has none
        "    at = 5",
        *("    " + line for line in lines),
        "    if at != len(message): raise ValueError",
        "    return change",
        "  except errors: return again(message)",
    ]
    return "\n".join(whole)


def _value(variable: str, convert: str, unchanged: str = "unavailable") -> list[str]:
    """Read the value at `at`."""
    return [
        "mark, size = head(data, at)",
        f"if mark == {ord('t')}:",
        "  a = at + 5; at = a + size",
        f"  {convert}",
        f"elif mark == {ord('n')}: at += 1; {variable} = {_text(variable)}None",
        f"elif mark == {ord('u')}: at += 1; {variable} = {_text(variable)}{unchanged}",
        "else: raise ValueError",
    ]


def _text(variable: str) -> str:
    """The text of an old value is kept beside it."""
    return f"t{variable[1:]} = " if variable.startswith("o") else ""


def _converted(place: int, kind: str, text: str) -> str:
    return _INLINE.get(kind, f"convert{place}({{}}.decode())").format(text)


def _old(place: int, kind: str) -> str:
    return f"t{place} = data[a:at]; o{place} = {_converted(place, kind, f't{place}')}"


def _new(place: int, kind: str) -> str:
    """Most values of an update are the old ones."""
    return f"text = data[a:at]; n{place} = o{place} if text == t{place} else {_converted(place, kind, 'text')}"


def _row(name: str, known: Container[int], width: int) -> str:
    """A tuple of the variables of the columns `known`, and UNAVAILABLE for the others."""
    parts = [f"{name}{place}" if place in known else "unavailable" for place in range(width)]
    return f"({''.join(part + ',' for part in parts)})"


class _Careful:
    """The same, value by value."""

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
        except _ERRORS:
            return cell.decode("utf-8", "surrogateescape")  # the text itself, whatever it is
