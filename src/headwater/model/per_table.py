"""PerTable: something compiled once per shape of a table, found again without hashing the shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.model.table import Table

T = TypeVar("T")
MOST = 256  # shapes held at a time


class PerTable(Generic[T]):
    """`per_table(table)` is `make(table)`, made once. From any thread: at worst it is made twice."""

    def __init__(self, make: Callable[[Table], T]) -> None:
        self._make = make
        self._near: dict[int, tuple[Table, T]] = {}  # by identity; holds the table, so that no id is reused
        self._far: dict[Table, T] = {}  # by value: blocks read from disk bring equal shapes of their own

    def __call__(self, table: Table) -> T:
        found = self._near.get(id(table))
        return self._find(table) if found is None else found[1]

    def _find(self, table: Table) -> T:
        if len(self._near) >= MOST:
            self._near.clear()
        if len(self._far) >= MOST:
            self._far.clear()
        made = self._far.get(table)
        if made is None:
            made = self._far[table] = self._make(table)
        self._near[id(table)] = (table, made)
        return made
