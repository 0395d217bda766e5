"""Errors for missing rows and tables, with suggestions limited to names that the caller may see."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import InvalidRequest, NotFound
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table


def no_row(table: Table) -> NotFound:
    """Return the error for a key of `table` that has no row."""
    hint = f"Check the value of the key ({', '.join(table.key)}); the row may have been deleted."
    return NotFound(f"table {table.name!r} has no row with this key", hint=hint)


def no_table(error: InvalidRequest, principal: Principal, db: str, tables: Iterable[str]) -> InvalidRequest:
    """Return `error`, raised for a missing table, with a hint that suggests a similar name among `tables`."""
    return InvalidRequest(error.message, hint=nearest(error.missing_table, principal.seen(db, tables)))
