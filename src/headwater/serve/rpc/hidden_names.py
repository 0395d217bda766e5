"""Errors without the names of databases and tables that are outside the caller's scopes."""

from __future__ import annotations

from headwater.database import ManagedDatabases
from headwater.errors import HeadwaterError, NotFound
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest

HOW = "Set the database with `db` (--db on the command line, `namespace` in gRPC and the gateway)."


def without_hidden_names(error: HeadwaterError, who: Principal, databases: ManagedDatabases) -> HeadwaterError:
    """Return `error` without names that `who` may not see."""
    if error.names_tables and any(scope.tables for scope in who.scopes or ()):
        # The reason may name tables that the caller did not write to, or show their values.
        return type(error)("a constraint, trigger, rule or value stops the statement", hint="Nothing was written.")
    if not isinstance(error, NotFound) or "database" not in error.extra:
        return error
    name = error.extra["database"]
    seen = [each for each in databases.names() if who.sees(each)]
    return NotFound(error.message, hint=f"{nearest(name, seen)} {HOW}", database=name)
