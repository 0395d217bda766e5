"""A source with the methods that filters use, and random tables, filters and histories."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from tests.sources.memory_source import MemorySource

from headwater.errors import InvalidRequest
from headwater.feeds.options import Options, Shard
from headwater.model.change import Change, Op
from headwater.model.literal import to_lit
from headwater.model.table import Column, Key, Row, Table
from headwater.sources.read import Pin


class FilterSource(MemorySource):
    """Compares as SQLite does; of SQL it knows `column = value`, `column IN (value, …)` and `column > value`."""

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        found = super().order(table, columns)
        found(("",) * len(columns))  # an unknown collation is refused at once
        return found

    def condition(self, table: Table, where: str) -> Comparison:
        return Comparison(self, table, where)


class Comparison:
    def __init__(self, source: FilterSource, table: Table, where: str) -> None:
        found = re.fullmatch(r"(\w+) (=|IN|>) (.+)", where)
        if found is None or found[1] not in table.index:
            raise InvalidRequest(f"{where!r} cannot be read")
        self._name, self._operator, given = found.groups()
        self._place = table.index[self._name]
        self._order = source.order(table, [self._name])
        value = ast.literal_eval(given)
        self._values = frozenset(self._order((one,)) for one in (value if isinstance(value, tuple) else [value]))

    @property
    def pin(self) -> Pin | None:
        return None if self._operator == ">" else Pin(self._name, self._values)

    calls: tuple[str, ...] = ()

    @property
    def is_cheap(self) -> bool:
        return True

    def holds(self, rows: Sequence[Row]) -> list[bool]:
        return [self._is_true(row[self._place]) for row in rows]

    def _is_true(self, value: Any) -> bool:
        if value is None:
            return False
        written = self._order((value,))
        return written > min(self._values) if self._operator == ">" else written in self._values


# --- tables ----------------------------------------------------------------------------------------------

NUMBERED = Table("numbered", (Column("note"), Column("id"), Column("size")), ("id",))
NAMED = Table("named", (Column("id", "str", collation="NOCASE"), Column("note"), Column("size")), ("id",))
PAIRED = Table(
    "paired",
    (Column("size"), Column("b"), Column("note", collation="NOCASE"), Column("a", collation="NOCASE")),
    ("a", "b"),
)
BARE = Table("bare", (Column("rowid", "i64", hidden=True), Column("note"), Column("size")), ("rowid",))
TABLES = (NUMBERED, NAMED, PAIRED, BARE)
SOURCE = FilterSource("main", *TABLES)

NUMBERS = st.sampled_from([-2, -1, -0.0, 0, 0.5, 1, 1.0, 2, 2.0, 3, 7])
WORDS = st.sampled_from(["", "a", "A", "b", "B", "ab", "AB", "b ", "\0"])
ANY = st.one_of(NUMBERS, WORDS, st.sampled_from([b"", b"a"]))
OF_COLUMN = {("named", "id"): WORDS, ("bare", "rowid"): st.integers(1, 6), ("numbered", "id"): NUMBERS}
OPS = st.lists(st.sampled_from(["insert", "update", "delete", "schema_change", "truncate"]), max_size=3, unique=True)


def values(table: Table, column: str) -> st.SearchStrategy[Any]:
    """Return a strategy for values of `column`; keys are not null."""
    found = OF_COLUMN.get((table.name, column), ANY)
    return found if column in table.key else st.one_of(st.none(), found)


def keys(table: Table, width: int | None = None) -> st.SearchStrategy[Key]:
    return st.tuples(*(values(table, name) for name in table.key[:width]))


def rows(table: Table) -> st.SearchStrategy[Row]:
    return st.tuples(*(values(table, name) for name in table.names))


def place_of(table: Table, row: Row) -> bytes:
    return SOURCE.order(table, table.key)(table.key_of(row))


def at(key: Key) -> list[Any]:
    return [to_lit(value) for value in key]


# --- filters ---------------------------------------------------------------------------------------------


@st.composite
def key_parts(draw: st.DrawFn, table: Table) -> dict[str, Any]:
    kind = draw(st.sampled_from(["pk", "pk_range", "spans", "both"]))
    if kind == "pk":
        return {"pk": at(draw(keys(table)))}
    parts: dict[str, Any] = {}
    if kind != "spans" and len(table.key) == 1:
        low, high = sorted(draw(st.tuples(keys(table), keys(table))), key=SOURCE.order(table, table.key))
        bounds = {"lower_bound": to_lit(low[0]), "upper_bound": to_lit(high[0])}
        parts["pk_range"] = {name: bounds[name] for name in draw(st.sampled_from(BOUNDS))}
    if kind != "pk_range" or not parts:
        parts["spans"] = draw(st.lists(spans(table), max_size=3))
    return parts


BOUNDS = (["lower_bound"], ["upper_bound"], ["lower_bound", "upper_bound"])


@st.composite
def spans(draw: st.DrawFn, table: Table) -> dict[str, Any]:
    width = draw(st.integers(0, len(table.key)))
    if draw(st.booleans()):
        return {"prefix": at(draw(keys(table, width)))}
    order = SOURCE.order(table, table.key[:width])
    low, high = sorted(draw(st.tuples(keys(table, width), keys(table, width))), key=order)
    bounds = {"lower_bound": at(low), "upper_bound": at(high)}
    return {name: bounds[name] for name in draw(st.sampled_from(BOUNDS))}


@st.composite
def conditions(draw: st.DrawFn, table: Table) -> str:
    name = draw(st.sampled_from([column.name for column in table.visible]))
    value = values(table, name).filter(lambda found: found is not None)
    operator = draw(st.sampled_from(["=", "IN", ">"]))
    given = tuple(draw(st.lists(value, max_size=3))) if operator == "IN" else draw(value)
    return f"{name} {operator} {given!r}"


@st.composite
def row_filters(draw: st.DrawFn, table: Table) -> dict[str, Any]:
    """Draw options that filter rows: none, one or several together."""
    parts: dict[str, Any] = {}
    if table.primary_key and draw(st.booleans()):
        parts |= draw(key_parts(table))
    if draw(st.integers(0, 3)) == 0:
        of = draw(st.integers(1, 3))
        parts["shard"] = Shard(draw(st.integers(0, of - 1)), of)
    if draw(st.booleans()):
        parts["where"] = draw(conditions(table))
    return parts


@st.composite
def filters(draw: st.DrawFn, table: Table) -> Options:
    """Draw options for `table`; without a row filter perhaps for every table."""
    parts = draw(row_filters(table))
    parts["ops"] = tuple(draw(OPS))
    if draw(st.integers(0, 2)) == 0:
        parts["columns"] = tuple(draw(st.lists(st.sampled_from(table.names), min_size=1, max_size=2, unique=True)))
    everywhere = not parts.keys() & {"pk", "pk_range", "spans", "where"} and draw(st.booleans())
    return Options(db="main", tables=() if everywhere else (table.name,), **parts)


# --- changes ---------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn, table: Table, most: int = 12) -> tuple[list[Change], dict[bytes, Row]]:
    """Draw changes of an initially empty table, with changed and swapped keys; return them and the final rows."""
    held: dict[bytes, Row] = {}
    made: list[Change] = []

    def put(before: Row | None, after: Row | None) -> None:
        if before is not None:
            del held[place_of(table, before)]
        if after is not None:
            held[place_of(table, after)] = after
        op = Op.INSERT if before is None else Op.DELETE if after is None else Op.UPDATE
        made.append(Change(op, table, before, after))

    for _ in range(draw(st.integers(0, most))):
        step = draw(st.sampled_from(["write", "write", "move", "delete", "swap"]))
        new = draw(rows(table))
        at_new = held.get(place_of(table, new))
        if step == "write" or not held:
            put(at_new, new)
            continue
        old = held[draw(st.sampled_from(sorted(held)))]
        if step == "delete":
            put(old, None)
        elif at_new is None or at_new is old:
            put(old, new)
        elif step == "swap":
            swap(table, old, at_new, put)
    return made, held


def swap(table: Table, one: Row, other: Row, put: Callable[[Row | None, Row | None], None]) -> None:
    """Swap the keys of two rows by way of an unused key."""
    free = ("zz", 99)[: len(table.key)] if table is not BARE else (99,)
    put(one, keyed(table, one, free))
    put(other, keyed(table, other, table.key_of(one)))
    put(keyed(table, one, free), keyed(table, one, table.key_of(other)))


def keyed(table: Table, row: Row, key: Key) -> Row:
    found = list(row)
    for place, value in zip(table.key_places, key, strict=True):
        found[place] = value
    return tuple(found)
