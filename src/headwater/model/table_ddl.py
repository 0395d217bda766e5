"""DDL text for readers that are restricted to tables: synthesised from the table's definition, it names nothing else.

The statement as it was run may name other tables, their columns and constants: it defines a view that joins them, a
foreign key, or the rows that a new table was filled with.
"""

from __future__ import annotations

import re
from itertools import dropwhile, pairwise

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column

CHANGED = "-- the table or a view that reads it changed"

_SKIPPED = r"(?>\s|--[^\n]*\n|/\*.*?\*/)"
_STATEMENT = re.compile(
    rf"(?:;|{_SKIPPED})*+(CREATE|DROP|ALTER){_SKIPPED}++(?:VIRTUAL{_SKIPPED}++)?TABLE{_SKIPPED}++"
    rf"(?:IF{_SKIPPED}++(?:NOT{_SKIPPED}++)?EXISTS{_SKIPPED}++)?(?:\"?main\"?\s*+\.\s*+)?",
    re.IGNORECASE | re.DOTALL,
)
_RENAMES = re.compile(rf"\bRENAME{_SKIPPED}++TO\b", re.IGNORECASE | re.DOTALL)
# Tokens of SQLite, where every character beyond ASCII belongs to a name.
_TOKEN = re.compile(
    r"""(?P<skipped>[ \t\n\f\r]+|--[^\n]*|/\*.*?(?:\*/|\Z))"""
    r"""|"[^"]*(?:""[^"]*)*"|`[^`]*(?:``[^`]*)*`|'[^']*(?:''[^']*)*'|\[[^\]]*\]|[A-Za-z0-9_$\x80-\U0010ffff]+|.""",
    re.DOTALL,
)
_PLAIN = re.compile(r"[\w.]+")
_IN_NAME = re.compile(r"[\w$.\"`\]]")


def with_table_ddl(change: Change) -> Change:
    """Return a schema change with the text of `table_ddl`; other changes as they are."""
    if change.op is not Op.SCHEMA_CHANGE:
        return change
    return msgspec.structs.replace(change, ddl=table_ddl(change))


def table_ddl(change: Change) -> str:
    """Return CREATE TABLE if the statement created the table, DROP TABLE if it dropped or renamed it, or a comment."""
    ddl, table = change.ddl or "", change.table
    found = _STATEMENT.match(ddl)
    if found is None or not _is_named(ddl[found.end() :], table.name):
        return CHANGED
    word = found[1].upper()
    if word == "CREATE":
        keys = [f"PRIMARY KEY ({', '.join(map(_quoted, table.primary_key))})"] if table.primary_key else []
        return f"CREATE TABLE {_shown(table.name)} ({', '.join([*map(_declared, table.visible), *keys])})"
    return f"DROP TABLE {_shown(table.name)}" if word == "DROP" or _RENAMES.search(ddl, found.end()) else CHANGED


def ended_names(ddl: str) -> list[str] | None:
    """Return the table names, in lower case, that a statement of SQLite drops or renames; None if not clear.

    A rename has two, old and new; other statements have none. Comments and semicolons before it do not count.
    """
    found = (each[0] for each in _TOKEN.finditer(ddl) if each["skipped"] is None)
    tokens = list(dropwhile(lambda token: token == ";", found))
    words = [token.upper() for token in tokens]
    renames = words[:2] == ["ALTER", "TABLE"] and ("RENAME", "TO") in pairwise(words)
    if words[:2] != ["DROP", "TABLE"] and not renames:
        return []
    place = 4 if words[:4] == ["DROP", "TABLE", "IF", "EXISTS"] else 2
    if words[place + 1 : place + 2] == ["."]:
        place += 2
    names, rest = tokens[place : place + 1], words[place + 1 :]
    if words[0] == "ALTER":
        if rest[:1] in (["ADD"], ["DROP"], ["ALTER"]) or (rest[:1] == ["RENAME"] and rest[1:2] != ["TO"]):
            return []  # a column
        names, rest = [*names, *tokens[place + 3 : place + 4]], rest[3:] if rest[:2] == ["RENAME", "TO"] else ["?"]
    return [_unquoted(each).lower() for each in names] if rest in ([], [";"]) else None


def _unquoted(name: str) -> str:
    mark = name[0]
    if mark == "[":
        return name[1:-1]
    return name[1:-1].replace(mark * 2, mark) if mark in "\"`'" else name


def _is_named(rest: str, name: str) -> bool:
    """Return whether `rest` of a statement begins with the name of a table, in any form of quoting."""
    double = '"' + name.replace('"', '""') + '"'
    for form in (name, double, f"[{name}]", f"`{name}`", f"'{name}'"):
        if rest[: len(form)].lower() == form.lower() and not _IN_NAME.match(rest, len(form)):
            return True
    return False


def _declared(column: Column) -> str:
    return f"{_quoted(column.name)} {column.declared or column.kind}{'' if column.nullable else ' NOT NULL'}"


def _shown(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'
