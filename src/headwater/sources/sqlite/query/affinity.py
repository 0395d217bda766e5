"""By which rules SQLite compares the values of a column: affinity and collation, and where they are not known."""

from __future__ import annotations

from headwater.model.table import Column, Table
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.schema.table_shapes import PLAIN_COLLATIONS

_STRICT_TYPES = {"INT", "INTEGER", "REAL", "TEXT", "BLOB", "ANY"}


def affinity(column: Column) -> str:
    """The affinity of a column, by SQLite's rule over its declared type."""
    declared = column.declared.encode().upper()  # of bytes: only ASCII letters fold
    if column.hidden or b"INT" in declared:
        return "INTEGER"
    if any(part in declared for part in (b"CHAR", b"CLOB", b"TEXT")):
        return "TEXT"
    if b"BLOB" in declared or not declared:
        return "BLOB"
    if any(part in declared for part in (b"REAL", b"FLOA", b"DOUB")):
        return "REAL"
    return "NUMERIC"


def declaration(column: Column) -> str:
    """A column that compares as `column` does: its affinity and its collation decide every comparison."""
    collation = column.collation if column.collation in PLAIN_COLLATIONS else "BINARY"
    return f"{ident(column.name)} {affinity(column)} COLLATE {collation}"


def doubt(table: Table, column: Column) -> str:
    """Why comparisons with `column` are not known exactly; "" if they are."""
    if column.collation not in PLAIN_COLLATIONS:
        return f"is compared by {column.collation}, which only its application knows"
    if may_be_strict_any(table, column):
        return "is declared ANY, which means one thing in STRICT tables and another in others"
    return ""


def may_be_strict_any(table: Table, column: Column) -> bool:
    """Whether `column` is declared ANY in a table that may be STRICT: the shape does not tell."""
    declared = {c.declared.upper() for c in table.visible}
    return column.declared.upper() == "ANY" and declared <= _STRICT_TYPES
