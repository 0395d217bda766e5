"""Relevance of changes by its definition, decided by SQLite: a second, slow implementation to compare the real one
with.
"""

from __future__ import annotations

from typing import Any

import apsw

from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, Analysis, AnyOf, Comparison, Condition, Dependency, Param
from headwater.model.literal import Unavailable, Value
from headwater.model.table import Row, Table
from headwater.sources.sqlite.query.affinity import declaration
from headwater.sources.sqlite.types import to_stored

_SQL = {
    "eq": "{c} = ?1",
    "ne": "{c} <> ?1",
    "lt": "{c} < ?1",
    "le": "{c} <= ?1",
    "gt": "{c} > ?1",
    "ge": "{c} >= ?1",
    "is": "{c} IS ?1",
    "is_not": "{c} IS NOT ?1",
    "between": "{c} BETWEEN ?1 AND ?2",
    "not_between": "{c} NOT BETWEEN ?1 AND ?2",
}


class Judge:
    """Decides comparisons with its own SQLite, in a table of one column of the same affinity and collation."""

    def __init__(self) -> None:
        self._db = apsw.Connection(":memory:")
        self._tables: dict[str, str] = {}
        self._known: dict[tuple[Any, ...], bool] = {}

    def matters(self, change: Change, analysis: Analysis, args: dict[str, Value]) -> int | None:
        """Return the number of the first dependency that the change is relevant to; None if there is none."""
        for place, dependency in enumerate(analysis.dependencies):
            if self._matters_to(change, dependency, args):
                return place
        return None

    def _matters_to(self, change: Change, dependency: Dependency, args: dict[str, Value]) -> bool:
        if change.table.name != dependency.table:
            return False
        if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
            return True
        images = [row for row in (change.before, change.after) if row is not None]
        if not any(self.holds(dependency.condition, change.table, row, args) for row in images):
            return False
        if len(images) < 2:
            return True
        names = change.table.names if dependency.columns is None else dependency.columns
        return any(name not in change.table.index or _differs(images, change.table.index[name]) for name in names)

    def holds(self, condition: Condition, table: Table, row: Row, args: dict[str, Value]) -> bool:
        """Return whether a condition is true of a row, or cannot be decided."""
        if isinstance(condition, AllOf):
            return all(self.holds(part, table, row, args) for part in condition.parts)
        if isinstance(condition, AnyOf):
            return any(self.holds(part, table, row, args) for part in condition.parts)
        return self._test(condition, table, row, args)

    def _test(self, test: Comparison, table: Table, row: Row, args: dict[str, Value]) -> bool:
        if test.column not in table.index:
            return True
        value = row[table.index[test.column]]
        if isinstance(value, Unavailable):
            return True
        operands = [args[one.name] if isinstance(one, Param) else one.value for one in test.operands]
        column = table.columns[table.index[test.column]]
        bound = [to_stored(one) for one in operands]
        key = (declaration(column), test.op, repr(bound), repr(value))
        if key not in self._known:
            self._known[key] = self._ask(declaration(column), column.name, test.op, bound, to_stored(value))
        return self._known[key]

    def _ask(self, declared: str, name: str, op: str, operands: list[Any], value: Any) -> bool:
        table = self._tables.get(declared)
        if table is None:
            table = self._tables[declared] = f"o{len(self._tables)}"
            self._db.execute(f"CREATE TABLE {table}({declared})")
        text = _SQL.get(op)
        if text is None:
            marks = ", ".join(f"?{place + 1}" for place in range(len(operands)))
            text = f"{{c}} {'IN' if op == 'in' else 'NOT IN'} ({marks})"
        self._db.execute(f"DELETE FROM {table}")
        self._db.execute(f"INSERT INTO {table} VALUES (?)", (value,))
        found = self._db.execute(f"SELECT {text.format(c=chr(34) + name + chr(34))} FROM {table}", operands).fetchall()
        return found[0][0] == 1


def _differs(images: list[Row], place: int) -> bool:
    before, after = images[0][place], images[1][place]
    return isinstance(before, Unavailable) or isinstance(after, Unavailable) or repr(before) != repr(after)
