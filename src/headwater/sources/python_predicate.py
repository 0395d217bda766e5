"""Predicates as Python expressions: the part common to all databases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.model.literal import Value
from headwater.model.table import Key, Row
from headwater.sources.read import Pin

Check = Callable[[Sequence[Row]], list[bool]]


class Unknown(Exception):
    """A row or an expression that Python cannot evaluate exactly, so that the database must."""


class PythonPredicate(msgspec.Struct, frozen=True):
    """A predicate as SQL and as Python: `true` holds where it is true, `false` where it is false, neither at NULL."""

    sql: str
    true: str
    false: str
    columns: frozenset[int] = frozenset()  # numbers of the columns that it reads
    column: str | None = None  # with `values`: the predicate is true only if this column equals one of them
    values: tuple[Value, ...] = ()


def joined(word: str, parts: Sequence[PythonPredicate]) -> PythonPredicate:
    """Return the parts joined by `word`, which is AND or OR."""
    other = "or" if word == "AND" else "and"
    return PythonPredicate(
        f"({f' {word} '.join(part.sql for part in parts)})",
        f"({f' {word.lower()} '.join(part.true for part in parts)})",
        f"({f' {other} '.join(part.false for part in parts)})",
        frozenset().union(*(part.columns for part in parts)),
    )


def negation(part: PythonPredicate) -> PythonPredicate:
    """Return `part` negated: true where `part` is false, and NULL where `part` is NULL."""
    return PythonPredicate(f"(NOT {part.sql})", part.false, part.true, part.columns)


def narrowest_pin(parts: Sequence[PythonPredicate], order: Callable[[str], Callable[[Key], bytes]]) -> Pin | None:
    """Return the pin with the fewest values; None if no part pins a column. `order` encodes the keys of a column."""
    pins = [(part.column, part.values) for part in parts if part.column is not None]
    if not pins:
        return None
    column, values = min(pins, key=lambda pin: len(pin[1]))
    place = order(column)
    return Pin(column, frozenset(place((value,)) for value in values))


def ask_at(places: Sequence[int], rows: Sequence[Row], found: list[bool], ask: Check) -> list[bool]:
    """Write the answers of `ask` for the rows at positions `places` into `found`; return `found`."""
    for place, holds in zip(places, ask([rows[place] for place in places]), strict=True):
        found[place] = holds
    return found


class Constants(dict[str, Any]):
    """Constants of a generated Python expression, by their names in it."""

    def name(self, value: Any) -> str:
        """Add a constant; return the new name that the expression has for it."""
        name = f"k{len(self)}"
        self[name] = value
        return name
