"""Definitions of tables and columns at one schema version."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property

import msgspec

from headwater.model.literal import TAGS, Value

Row = tuple[Value, ...]  # values in the order of Table.columns
Key = tuple[Value, ...]  # values in the order of Table.key

# `any`: the tag follows the value, as SQLite's storage classes do.
KINDS = frozenset({*TAGS, "any"}) - {"null", "unavailable"}


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column. `declared` is the source's type text; `kind` is the type of its values in Headwater."""

    name: str
    kind: str = "any"
    declared: str = ""
    nullable: bool = True
    generated: bool = False
    auto: bool = False  # the database assigns a number if an insert omits it
    hidden: bool = False  # a row identity the user did not declare (SQLite's rowid)
    collation: str = "BINARY"


class Table(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A table at schema `version`. `key` are the columns that identify a row."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    version: int = 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all columns, the hidden identity included, in row order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the index in a row by column name."""
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def visible(self) -> tuple[Column, ...]:
        """Return the columns that the user declared."""
        return tuple(column for column in self.columns if not column.hidden)

    @cached_property
    def primary_key(self) -> tuple[str, ...]:
        """Return the declared key; empty if rows are identified by a hidden column."""
        hidden = {column.name for column in self.columns if column.hidden}
        return () if hidden.intersection(self.key) else self.key

    @cached_property
    def key_places(self) -> tuple[int, ...]:
        """Return the indexes of the key columns in a row."""
        return tuple(self.index[name] for name in self.key)

    @property
    def lone_key(self) -> Column | None:
        """Return the only key column; None if the key has none or several."""
        return self.columns[self.key_places[0]] if len(self.key) == 1 else None

    @cached_property
    def key_of(self) -> Callable[[Row], Key]:
        """Return the function from a row to its key; cached, because it is called for every change."""
        if len(self.key_places) == 1:
            (place,) = self.key_places
            return lambda row: (row[place],)
        return operator.itemgetter(*self.key_places) if self.key_places else lambda row: ()
