"""What is not there: told with what the caller probably meant, of what the caller may see. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import InvalidRequest, NotFound
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table


def no_row(table: Table) -> NotFound:
    """For a key of `table` without a row."""
    hint = f"Its key is {', '.join(table.key)}: check the value; the row may have been deleted."
    return NotFound(f"table {table.name!r} has no row with this key", hint=hint)


def no_table(error: InvalidRequest, principal: Principal, db: str, tables: Iterable[str]) -> InvalidRequest:
    """`error` of a statement that names a table which is not there, with those of `tables` that it may have meant."""
    return InvalidRequest(error.message, hint=nearest(error.missing_table, principal.seen(db, tables)))
