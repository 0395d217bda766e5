"""Rules by which SQLite compares the values of a column: affinity and collation, and where they are unknown."""

from __future__ import annotations

from headwater.model.table import Column, Table
from headwater.sources.sqlite.connection import ident
from headwater.sources.sqlite.schema.table_shapes import PLAIN_COLLATIONS

_STRICT_TYPES = {"INT", "INTEGER", "REAL", "TEXT", "BLOB", "ANY"}


def affinity(column: Column) -> str:
    """Return the affinity of a column, by SQLite's rule for its declared type."""
    declared = column.declared.encode().upper()  # as bytes: SQLite folds only ASCII letters
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
    """Return the declaration of a column that compares like `column`: with its affinity and its collation."""
    collation = column.collation if column.collation in PLAIN_COLLATIONS else "BINARY"
    return f"{ident(column.name)} {affinity(column)} COLLATE {collation}"


def doubt(table: Table, column: Column) -> str:
    """Return why the exact comparison rules of `column` are unknown; "" if they are known."""
    if column.collation not in PLAIN_COLLATIONS:
        return f"is compared by {column.collation}, which only the application defines"
    if may_be_strict_any(table, column):
        return "is declared ANY, which means one thing in STRICT tables and another in others"
    return ""


def may_be_strict_any(table: Table, column: Column) -> bool:
    """Return whether `column` is declared ANY in a table that may be STRICT; the shape does not record STRICT."""
    declared = {c.declared.upper() for c in table.visible}
    return column.declared.upper() == "ANY" and declared <= _STRICT_TYPES
