"""Shapes: table definitions stored once in a log file under a small number, interned when read."""

from __future__ import annotations

import apsw
import msgspec

from headwater.model.table import Table

SCHEMA = """
CREATE TABLE schema (
  number INTEGER PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, definition TEXT NOT NULL,
  UNIQUE (name, version, definition)
) STRICT;
"""
_REMEMBERED = 4096


class Shapes:
    """Maps tables to numbers (writer only) and numbers to tables (any thread)."""

    def __init__(self) -> None:
        # By identity: hashing a Table is slow. The table is kept, so that its identity is not given again.
        self._numbers: dict[int, tuple[Table, int]] = {}
        self._tables: dict[str, tuple[Table, ...]] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._interned: dict[int, Table] = {}

    def numbers(self, connection: apsw.Connection, tables: tuple[Table, ...]) -> str:
        """Return the numbers of `tables` as a block stores them; store unknown tables in the open transaction."""
        return ",".join(str(self._number(connection, table)) for table in tables)

    def _number(self, connection: apsw.Connection, table: Table) -> int:
        known = self._numbers.get(id(table))
        if known is None:
            if len(self._numbers) >= _REMEMBERED:
                self._numbers.clear()
            known = self._numbers[id(table)] = (table, _stored_number(connection, table))
        return known[1]

    def forget_numbers(self) -> None:
        """Forget all numbers after a rollback: the file may lack those that the transaction stored."""
        self._numbers.clear()

    def tables(self, connection: apsw.Connection, numbers: str) -> tuple[Table, ...]:
        """Return the tables of these numbers; LookupError if the file lacks one."""
        found = self._tables.get(numbers)
        if found is None:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            found = tuple(self._table(connection, int(number)) for number in numbers.split(","))
            self._tables[numbers] = found
        return found

    def names(self, connection: apsw.Connection, numbers: str) -> frozenset[str]:
        """Return the names of the tables of these numbers; LookupError if the file lacks one."""
        found = self._names.get(numbers)
        if found is None:
            if len(self._names) >= _REMEMBERED:
                self._names.clear()
            found = self._names[numbers] = frozenset(table.name for table in self.tables(connection, numbers))
        return found

    def find(self, connection: apsw.Connection, name: str, version: int) -> Table | None:
        """Return the table of that name and version that was stored last; None if there is none."""
        sql = "SELECT number FROM schema WHERE name = ? AND version = ? ORDER BY number DESC LIMIT 1"
        number = connection.execute(sql, (name, version)).get
        return None if number is None else self._table(connection, int(number))

    def _table(self, connection: apsw.Connection, number: int) -> Table:
        table = self._interned.get(number)
        if table is None:
            sql = "SELECT definition FROM schema WHERE number = ?"
            definition = connection.execute(sql, (number,)).get
            if definition is None:
                raise LookupError(f"schema {number} is missing")
            table = self._interned.setdefault(number, msgspec.json.decode(definition, type=Table))
        return table


def _stored_number(connection: apsw.Connection, table: Table) -> int:
    row = (table.name, table.version, msgspec.json.encode(table).decode())
    sql = "SELECT number FROM schema WHERE (name, version, definition) = (?, ?, ?)"
    number = connection.execute(sql, row).get
    if number is None:
        sql = "INSERT INTO schema (name, version, definition) VALUES (?, ?, ?) RETURNING number"
        number = connection.execute(sql, row).get
    return int(number)
