"""Rendering of conditions and row statements into SQLite's SQL, with quoted names and bound values."""

from __future__ import annotations

from headwater.model.literal import Value
from headwater.model.predicate import Col, Expr
from headwater.model.table import Table
from headwater.sources.query_text import OPERATORS, Expressions
from headwater.sources.request_checks import no_column
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.types import DECLARED, Stored, to_stored


class SqliteExpressions(Expressions):
    """Renderer of expressions in SQLite's dialect."""

    database, declared = "SQLite", DECLARED
    operators = {**OPERATORS, "is": "IS", "ilike": "LIKE"}  # SQLite's LIKE ignores ASCII case already


class Renderer(SqliteExpressions):
    """Renderer that collects bindings while it writes text. One per statement."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.bindings: list[Stored] = []

    def value(self, value: Value) -> str:
        """Bind `value` and return its placeholder."""
        self.bindings.append(to_stored(value))
        return "?"

    def col(self, col: Col) -> str:
        """Return a quoted column of the table."""
        return self.column(col.name)

    def column(self, name: str) -> str:
        """Return a quoted column of the table; InvalidRequest if there is none."""
        if name not in self.table.index:
            raise no_column(self.table, name, [column.name for column in self.table.visible])
        return ident(name)

    def limited(self, rowid: str | None, expr: Expr | None, limit: int | None) -> str:
        """Return a WHERE that selects at most `limit` rows, the first in key order."""
        if limit is None:
            return self.where(expr)
        keys = [rowid] if rowid else [ident(name) for name in self.table.key]
        tuple_ = ", ".join(keys)
        inner = f"SELECT {tuple_} FROM {ident(self.table.name)}{self.where(expr)} ORDER BY {order_by(self.table)}"
        left = tuple_ if len(keys) == 1 else f"({tuple_})"
        return f" WHERE {left} IN ({inner} LIMIT {int(limit)})"


def order_by(table: Table) -> str:
    """Return the key columns for ORDER BY."""
    return ", ".join(ident(name) for name in table.key)


def column_list(table: Table) -> str:
    """Return every column, the hidden identity included."""
    return ", ".join(ident(name) for name in table.names)


def insert_into(table: Table, names: tuple[str, ...], returning: bool) -> str:
    """Return the INSERT of one row; with `returning` it returns the stored row."""
    text = Renderer(table)
    columns = ", ".join(map(text.column, names))
    values = f"({columns}) VALUES ({', '.join('?' * len(names))})" if names else "DEFAULT VALUES"
    return f"INSERT INTO {ident(table.name)} {values}" + (f" RETURNING {column_list(table)}" if returning else "")


def create_table(table: Table) -> str:
    """Return CREATE TABLE for the kinds; a single integer key becomes the rowid, which SQLite numbers itself."""
    lone = table.lone_key
    numbered = lone.name if lone and (lone.kind == "i64" or lone.auto) else None
    parts = [
        f"{ident(column.name)} INTEGER PRIMARY KEY"
        if column.name == numbered
        else f"{ident(column.name)} {DECLARED[column.kind]}" + ("" if column.nullable else " NOT NULL")
        for column in table.columns
    ]
    if table.key and not numbered:
        parts.append(f"PRIMARY KEY ({', '.join(map(ident, table.key))})")
    return f"CREATE TABLE {ident(table.name)} ({', '.join(parts)})"
