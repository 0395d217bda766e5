"""Cache of values computed once per version of a table, looked up without hashing the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headwater.model.table import Table

T = TypeVar("T")
MOST = 256  # table versions cached at a time


class PerTable(Generic[T]):
    """`per_table(table)` returns `make(table)`, cached for about MOST tables. Thread-safe: a race computes it twice."""

    def __init__(self, make: Callable[[Table], T]) -> None:
        self._make = make
        self._near: dict[int, tuple[Table, T]] = {}  # by identity; references the table, so that its id is not reused
        self._far: dict[Table, T] = {}  # by value: blocks read from disk have equal tables that are other objects

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
