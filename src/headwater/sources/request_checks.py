"""Checks of requests common to all databases, and their errors."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import Conflict, Forbidden, InvalidRequest
from headwater.model.principal import OWNER
from headwater.model.table import Column, Table

MAX_PREDICATE = 10_000  # characters


def check_numbered(table: Table) -> None:
    """Raise InvalidRequest for a key with auto_increment that has another kind than i64 or u64."""
    lone = table.lone_key
    if lone and lone.auto and lone.kind not in ("i64", "u64"):
        raise InvalidRequest(
            f"column {lone.name!r} of kind {lone.kind} cannot be numbered by the database",
            hint="Only i64 and u64 can have auto_increment.",
        )


def exists(table: Table) -> Conflict:
    """Return the error for a table that already exists, if `if_not_exists` was not sent."""
    return Conflict(f"table {table.name!r} exists already", hint='Send "if_not_exists": true to accept it.')


def rows_only() -> Forbidden:
    """Return the error for a statement other than a query or DML from a caller who is not an owner."""
    return Forbidden(
        "statements other than SELECT, INSERT, UPDATE and DELETE need the role owner",
        hint="Ask an owner to run it.",
        role=OWNER,
    )


def no_column(table: Table, name: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error for a column that `table` does not have."""
    return InvalidRequest(f"table {table.name!r} has no column {name!r}", hint=f"Its columns are {', '.join(known)}.")


def column_of(table: Table, name: str) -> Column:
    """Return the column called `name`; InvalidRequest if there is none."""
    place = table.index.get(name)
    if place is None:
        raise no_column(table, name, table.names)
    return table.columns[place]


def check_predicate(where: str) -> None:
    """Raise InvalidRequest for a predicate that is too long, empty, or holds a NUL character."""
    if len(where) > MAX_PREDICATE:
        raise InvalidRequest(
            f"the predicate is longer than {MAX_PREDICATE} characters",
            hint="Use a coarser filter, or split it over several feeds.",
        )
    if "\0" in where or not where.strip():
        raise InvalidRequest("the predicate is empty or holds a NUL character", hint="Write one like total > 100.")
