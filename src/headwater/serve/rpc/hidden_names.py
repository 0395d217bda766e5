"""Errors as a caller may see them: without names of databases and tables that are outside the caller's scopes."""

from __future__ import annotations

from headwater.database import ManagedDatabases
from headwater.errors import HeadwaterError, NotFound
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest

HOW = "`db` names it (--db on the command line, `namespace` in gRPC and the gateway)."


def told(error: HeadwaterError, who: Principal, databases: ManagedDatabases) -> HeadwaterError:
    """Return `error` as `who` may see it."""
    if error.names_tables and any(scope.tables for scope in who.scopes or ()):
        # A foreign key, or a trigger, names tables that the caller did not write to.
        return type(error)("the database refuses the change: a constraint or a trigger", hint="Nothing was kept.")
    if not isinstance(error, NotFound) or "database" not in error.extra:
        return error
    name = error.extra["database"]
    seen = [each for each in databases.names() if who.sees(each)]
    return NotFound(error.message, hint=f"{nearest(name, seen)} {HOW}", database=name)
