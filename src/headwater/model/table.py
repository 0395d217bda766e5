"""Table and Column: the shape of a captured table at one schema version."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property

import msgspec

from headwater.model.literal import Value

Row = tuple[Value, ...]  # values in the order of Table.columns
Key = tuple[Value, ...]  # values in the order of Table.key

KINDS = frozenset(
    {
        "bool",
        "i64",
        "u64",
        "f64",
        "dec",
        "str",
        "bytes",
        "json",
        "date",
        "time",
        "datetime",
        "uuid",
        "embedding",
    }
    | {"any"}  # the tag follows the value, as SQLite's storage classes do
)


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column. `declared` is the source's own type text; `kind` is what it means here."""

    name: str
    kind: str = "any"
    declared: str = ""
    nullable: bool = True
    generated: bool = False
    auto: bool = False  # the database numbers it when an insert leaves it out
    hidden: bool = False  # a row identity the user did not declare (SQLite's rowid)
    collation: str = "BINARY"


class Table(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A table as it was at `version`. `key` names the columns that tell rows apart."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    version: int = 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every column, the hidden identity included, in row order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def index(self) -> dict[str, int]:
        """Column name to place in a row."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def visible(self) -> tuple[Column, ...]:
        """The columns the user declared."""
        return tuple(column for column in self.columns if not column.hidden)

    @cached_property
    def primary_key(self) -> tuple[str, ...]:
        """The declared key; empty when rows are told apart by a hidden identity."""
        hidden = {column.name for column in self.columns if column.hidden}
        return () if hidden.intersection(self.key) else self.key

    @cached_property
    def key_places(self) -> tuple[int, ...]:
        """Where the key stands in a row."""
        return tuple(self.index[name] for name in self.key)

    @property
    def lone_key(self) -> Column | None:
        """The column that is the whole key."""
        return self.columns[self.key_places[0]] if len(self.key) == 1 else None

    @cached_property
    def key_of(self) -> Callable[[Row], Key]:
        """`table.key_of(row)` is the key of `row`; a cached function, because every change asks."""
        if len(self.key_places) == 1:
            (place,) = self.key_places
            return lambda row: (row[place],)
        return operator.itemgetter(*self.key_places) if self.key_places else lambda row: ()
