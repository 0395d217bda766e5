"""Images written at once: rows of plain values as structs, which the JSON encoder writes without Python work per value.

Only where the bytes are those that `Image` writes in plain JSON: names that need no escaping, and values that are None,
booleans, floats, texts, or integers that every JSON reader holds exactly. Anything else is Odd, and `Image` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.feeds.formats.values import clean
from headwater.model.literal import EXACT_JSON_INT
from headwater.model.table import Row, Table

_CLASSES = {"bool": "bool", "f64": "float", "str": "str", "any": "str"}  # what a column of that kind mostly holds
_LOW, _HIGH = -EXACT_JSON_INT, EXACT_JSON_INT
MOST = 64  # columns: the code is written out for each


class Odd(Exception):
    """Not for here."""


_odd = Odd()

Made = Callable[[Row], Any]


def quick(table: Table, names: Sequence[str]) -> Made | None:
    """From a row to what the encoder writes as the object of its columns `names`; None where it would not be right.
    A function of its own for each shape, because it runs for every row."""
    places = [table.index[name] for name in names]
    if not 0 < len(names) <= MOST:
        return None
    fields = [f"v{place}" for place in places]
    shown = dict(zip(fields, map(clean, names), strict=True))
    try:
        kind = msgspec.defstruct("Columns", [(field, Any) for field in fields], rename=shown, frozen=True, gc=False)
    except ValueError:
        return None  # a name that would have to be escaped
    lines = [f"def made(row):\n  {', '.join(f'v{place}' for place in range(len(table.columns)))}, = row"]
    lines += [_check(place, table.columns[place].kind) for place in places]
    lines.append(f"  return kind({', '.join(fields)})")
    scope: dict[str, Any] = {
        "kind": kind,
        "is_odd": _is_odd,
        "odd": _odd,
        "high": EXACT_JSON_INT,
        "low": -EXACT_JSON_INT,
    }
    exec(compile("\n".join(lines), "<made>", "exec"), scope)
    made: Made = scope["made"]
    return made


def _check(place: int, kind: str) -> str:
    """Only numbers and our own words are written into the code, never a name of the user's."""
    value = f"v{place}"
    if kind in _CLASSES:
        return f"  if {value}.__class__ is not {_CLASSES[kind]} and is_odd({value}): raise odd"
    return f"  if ({value}.__class__ is not int or not low <= {value} <= high) and is_odd({value}): raise odd"


def _is_odd(value: Any) -> bool:
    if type(value) is int:
        return not _LOW <= value <= _HIGH
    return value is not None and type(value) not in (bool, float, str)
