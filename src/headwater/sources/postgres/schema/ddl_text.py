"""DDL text of schema changes, synthesised from the shapes before and after: PostgreSQL's stream carries no statements.

The text describes the difference. It is not the statement that was run, and it is not meant to be run.
"""

from __future__ import annotations

import re

from headwater.model.table import Column, Table
from headwater.sources.postgres.connection import quoted as ident

_RENAMES = re.compile(r"\brename\s+to\b", re.IGNORECASE)


def ddl_text(old: Table | None, new: Table) -> str:
    """Return CREATE TABLE for a new table, ALTER TABLE for a changed one; never empty."""
    if old is None:
        keys = [f"PRIMARY KEY ({', '.join(map(ident, new.key))})"] if new.key else []
        return f"CREATE TABLE {new.name} ({', '.join([*map(_declared, new.columns), *keys])})"
    were, are = ({column.name: column for column in table.columns} for table in (old, new))
    parts = [f"DROP COLUMN {ident(name)}" for name in were if name not in are]
    parts += [f"ADD COLUMN {_declared(column)}" for name, column in are.items() if name not in were]
    for name, column in are.items():
        if name in were:
            parts += _altered(were[name], column)
    text = f"ALTER TABLE {new.name} {', '.join(parts)}"
    # Readers of the log recognise the end of a name by RENAME TO, which a column's name may contain.
    return f"-- the shape of {new.name} changed" if not parts or _RENAMES.search(text) else text


def _declared(column: Column) -> str:
    return f"{ident(column.name)} {column.declared or column.kind}{'' if column.nullable else ' NOT NULL'}"


def _altered(old: Column, new: Column) -> list[str]:
    parts = []
    if old.declared != new.declared:
        parts.append(f"ALTER COLUMN {ident(new.name)} TYPE {new.declared or new.kind}")
    if old.nullable != new.nullable:
        parts.append(f"ALTER COLUMN {ident(new.name)} {'DROP' if new.nullable else 'SET'} NOT NULL")
    return parts
