"""DDL text for readers that are restricted to tables: it is synthesised from the table itself, and names nothing else.

The statement as it was run may name other tables, their columns and constants: it defines a view that joins them, a
foreign key, or the rows that a new table was filled with.
"""

from __future__ import annotations

import re

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column, Table

CHANGED = "-- the table or a view that reads it changed"

_SKIPPED = r"(?>\s|--[^\n]*\n|/\*.*?\*/)"
_STATEMENT = re.compile(
    rf"{_SKIPPED}*+(CREATE|DROP|ALTER){_SKIPPED}++(?:VIRTUAL{_SKIPPED}++)?TABLE{_SKIPPED}++"
    rf"(?:IF{_SKIPPED}++(?:NOT{_SKIPPED}++)?EXISTS{_SKIPPED}++)?(?:\"?main\"?\s*+\.\s*+)?",
    re.IGNORECASE | re.DOTALL,
)
_RENAMES = re.compile(r"\bRENAME\s+TO\b", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.]+")
_IN_NAME = re.compile(r"[\w$.\"`\]]")


def with_table_ddl(change: Change) -> Change:
    """Return a schema change with the text of `table_ddl`; other changes as they are."""
    if change.op is not Op.SCHEMA_CHANGE:
        return change
    return msgspec.structs.replace(change, ddl=table_ddl(change))


def table_ddl(change: Change) -> str:
    """Return CREATE TABLE or DROP TABLE if the statement created, dropped or renamed the table, else a comment."""
    ddl, table = change.ddl or "", change.table
    found = _STATEMENT.match(ddl)
    if found is None or not _is_named(ddl[found.end() :], table.name):
        return CHANGED
    word = found[1].upper()
    if word == "CREATE":
        return _create(table)
    return f"DROP TABLE {_shown(table.name)}" if word == "DROP" or _RENAMES.search(ddl, found.end()) else CHANGED


def _is_named(rest: str, name: str) -> bool:
    """Return whether `rest` of a statement begins with the name of a table, in any form of quoting."""
    double = '"' + name.replace('"', '""') + '"'
    for form in (name, double, f"[{name}]", f"`{name}`", f"'{name}'"):
        if rest[: len(form)].lower() == form.lower() and not _IN_NAME.match(rest, len(form)):
            return True
    return False


def _create(table: Table) -> str:
    keys = [f"PRIMARY KEY ({', '.join(map(_quoted, table.primary_key))})"] if table.primary_key else []
    return f"CREATE TABLE {_shown(table.name)} ({', '.join([*map(_declared, table.visible), *keys])})"


def _declared(column: Column) -> str:
    return f"{_quoted(column.name)} {column.declared or column.kind}{'' if column.nullable else ' NOT NULL'}"


def _shown(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
