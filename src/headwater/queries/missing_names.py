"""Errors for missing rows and tables, with suggestions limited to names that the caller may see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headwater.errors import InvalidRequest, NotFound
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Row, Table


def found_row(table: Table, row: Row | None) -> Row:
    """Return `row`; raise NotFound if `table` has none with the requested key."""
    if row is None:
        hint = f"Check the value of the key ({', '.join(table.key)}); the row may have been deleted."
        raise NotFound(f"table {table.name!r} has no row with this key", hint=hint)
    return row


def found_table(tables: Mapping[str, Table], name: str, principal: Principal, db: str) -> Table:
    """Return the table `name` of `tables`; NotFound suggests a similar name that the caller may see."""
    if name not in tables:
        raise NotFound(f"there is no table {name!r}", hint=nearest(name, principal.seen(db, tables)))
    return tables[name]


def no_table(error: InvalidRequest, principal: Principal, db: str, tables: Iterable[str]) -> InvalidRequest:
    """Return `error`, raised for a missing table, with a hint that suggests a similar name among `tables`."""
    return InvalidRequest(error.message, hint=nearest(error.missing_table, principal.seen(db, tables)))
