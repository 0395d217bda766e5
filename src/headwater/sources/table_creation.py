"""What changing the schema asks of every database."""

from __future__ import annotations

from headwater.errors import Conflict, Forbidden, InvalidRequest
from headwater.model.principal import OWNER
from headwater.model.table import Table


def check_numbered(table: Table) -> None:
    """InvalidRequest where the key cannot be numbered by the database though it should."""
    lone = table.lone_key
    if lone and lone.auto and lone.kind not in ("i64", "u64"):
        raise InvalidRequest(
            f"column {lone.name!r} of kind {lone.kind} cannot be numbered by the database",
            hint="Only i64 and u64 can have auto_increment.",
        )


def exists(table: Table) -> Conflict:
    """It is there, and nobody said that this is fine."""
    return Conflict(f"table {table.name!r} exists already", hint='Send "if_not_exists": true to accept it.')


def rows_only() -> Forbidden:
    """Return the error for a statement that is neither a query nor DML from a caller who is not an owner."""
    return Forbidden(
        "statements other than SELECT, INSERT, UPDATE and DELETE need the role owner",
        hint="Ask an owner to run it.",
        role=OWNER,
    )
