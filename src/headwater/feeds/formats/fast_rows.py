"""A fast path for row images: plain values as msgspec structs, which the JSON encoder writes without Python code.

It applies only where the bytes equal those that `Image` writes in plain JSON: column names without escapes, and values
that are None, booleans, floats, texts, or integers that every JSON reader represents exactly. Any other value raises
UnsupportedRow, and `Image` writes the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.feeds.formats.values import clean
from headwater.model.literal import EXACT_JSON_INT
from headwater.model.table import Row, Table

_CLASSES = {"bool": "bool", "f64": "float", "str": "str", "any": "str"}  # the usual class of values by column kind
_LOW, _HIGH = -EXACT_JSON_INT, EXACT_JSON_INT
MOST = 64  # columns: the generated code has a line for each


class UnsupportedRow(Exception):
    """The fast path cannot write this row."""


_odd = UnsupportedRow()

Made = Callable[[Row], Any]


def quick(table: Table, names: Sequence[str]) -> Made | None:
    """Return a function from a row to a struct of its columns `names`; None where the bytes would differ.

    The function is generated for each table version, because it runs for every row.
    """
    places = [table.index[name] for name in names]
    if not 0 < len(names) <= MOST:
        return None
    fields = [f"v{place}" for place in places]
    shown = dict(zip(fields, map(clean, names), strict=True))
    try:
        kind = msgspec.defstruct("Columns", [(field, Any) for field in fields], rename=shown, frozen=True, gc=False)
    except ValueError:
        return None  # a column name needs escaping
    lines = [f"def made(row):\n  {', '.join(f'v{place}' for place in range(len(table.columns)))}, = row"]
    lines += [_check(place, table.columns[place].kind) for place in places]
    lines.append(f"  return kind({', '.join(fields)})")
    scope: dict[str, Any] = {"kind": kind, "is_odd": _is_odd, "odd": _odd, "high": _HIGH, "low": _LOW}
    exec(compile("\n".join(lines), "<made>", "exec"), scope)
    made: Made = scope["made"]
    return made


def _check(place: int, kind: str) -> str:
    """Return the line that checks one value. It contains only numbers and fixed words, never a column name."""
    value = f"v{place}"
    if kind in _CLASSES:
        return f"  if {value}.__class__ is not {_CLASSES[kind]} and is_odd({value}): raise odd"
    return f"  if ({value}.__class__ is not int or not low <= {value} <= high) and is_odd({value}): raise odd"


def _is_odd(value: Any) -> bool:
    if type(value) is int:
        return not _LOW <= value <= _HIGH
    return value is not None and type(value) not in (bool, float, str)
