"""Row decoding in Python: a decoder is generated for each shape of a table, because it runs for every row.

The generated code reads a value's mark and length in one step and converts in place. A message that it cannot read
(a text that is not UTF-8, a value that does not convert, a broken message) is read again by `DiagnosticDecoder`.
Its compiled twin is `row_decoder_compiled`.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE
from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD
from headwater.sources.postgres.capture.decode.row_plan import ERRORS, HEAD, Decode, Get, Plan
from headwater.sources.postgres.types import TRUTH

_END = DATA_HEAD + HEAD
_INLINE = {  # conversions that are faster inline; other kinds use their converter
    "i64": "int({})",
    "f64": "float({})",
    "str": "{}.decode()",
    "bool": "truth[{}]",
}


def take(
    get: Get, rows: dict[bytes, Decode], changes: list[Change], most: int, most_bytes: int
) -> tuple[int, memoryview, int]:
    """See Take."""
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


def write(plan: Plan) -> Decode:
    """Generate a decoder, which takes milliseconds."""
    scope: dict[str, Any] = {
        "head": struct.Struct(">BI").unpack_from,
        "Change": Change,
        "op": plan.op,
        "table": plan.table,
        "unavailable": UNAVAILABLE,
        "truth": TRUTH,
        "errors": ERRORS,
        "careful": plan.careful,
        **{f"convert{place}": convert for place, convert in enumerate(plan.converts)},
    }
    name = f"{plan.op.word}_{plan.sent}"
    exec(compile(_source(name, plan), f"<{name}>", "exec"), scope)
    made: Decode = scope[name]
    return made


def _source(name: str, plan: Plan) -> str:
    """Return the source of a function, made only of numbers and our own words, never of a user's name."""
    kinds = [column.kind for column in plan.table.columns]
    width = len(kinds)
    known = {place for place, is_known in enumerate(plan.known) if is_known}
    lines: list[str] = []
    if plan.sent == "new":
        before, shared = _row("n", known, width) if plan.op is Op.UPDATE else "None", set[int]()
    else:
        lines += _begins(b"K" if plan.sent == "key" else b"O", width)
        for place, kind in enumerate(kinds):
            lines += _value(f"o{place}", _old(place, kind)) if place in known else _value("_", "pass")
        before, shared = _row("o", known, width), known
    if plan.op is Op.DELETE:
        return _function(name, [*lines, f"change = Change(op, table, {before}, None)"])
    lines += _begins(b"N", width)
    for place, kind in enumerate(kinds):
        if place in shared:
            lines += _value(f"n{place}", _new(place, kind), f"o{place}")
        else:
            lines += _value(f"n{place}", f"n{place} = {_converted(place, kind, 'data[a:at]')}")
    return _function(name, [*lines, f"change = Change(op, table, {before}, {_row('n', range(width), width)})"])


def _begins(mark: bytes, width: int) -> list[str]:
    """Return lines that check the mark of a row and its number of values."""
    return [f"if data[at : at + 3] != {mark + width.to_bytes(2, 'big')!r}: raise ValueError", "at += 3"]


def _function(name: str, lines: list[str]) -> str:
    whole = [
        f"def {name}(message):",
        "  try:",
        r"    data = message + b'\0\0\0\0'",  # a value's mark and length are read together, even without a length
        "    at = 5",
        *("    " + line for line in lines),
        "    if at != len(message): raise ValueError",
        "    return change",
        "  except errors: return careful(message)",
    ]
    return "\n".join(whole)


def _value(variable: str, convert: str, unchanged: str = "unavailable") -> list[str]:
    """Return lines that read the value at `at`."""
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
    """Return the assignment that also keeps the text of an old value; "" for other variables."""
    return f"t{variable[1:]} = " if variable.startswith("o") else ""


def _converted(place: int, kind: str, text: str) -> str:
    return _INLINE.get(kind, f"convert{place}({{}}.decode())").format(text)


def _old(place: int, kind: str) -> str:
    return f"t{place} = data[a:at]; o{place} = {_converted(place, kind, f't{place}')}"


def _new(place: int, kind: str) -> str:
    """Return the line that reuses the old value if the text is equal, as for most values of an update."""
    return f"text = data[a:at]; n{place} = o{place} if text == t{place} else {_converted(place, kind, 'text')}"


def _row(name: str, known: Container[int], width: int) -> str:
    """Return a tuple of the variables of the columns `known`, with UNAVAILABLE for the others."""
    parts = [f"{name}{place}" if place in known else "unavailable" for place in range(width)]
    return f"({''.join(part + ',' for part in parts)})"
