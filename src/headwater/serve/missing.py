"""A database that is not there: told with those that are, as far as the caller may know of them."""

from __future__ import annotations

from headwater.errors import HeadwaterError, NotFound
from headwater.model.hint import nearest
from headwater.model.principal import Principal
from headwater.queries.databases import Databases

HOW = "`db` names it (--db on the command line, `namespace` in gRPC and the gateway)."


def told(error: HeadwaterError, who: Principal, databases: Databases) -> HeadwaterError:
    """`error` for the ears of `who`: another where it is about a database that is not there."""
    if not isinstance(error, NotFound) or "database" not in error.extra:
        return error
    name = error.extra["database"]
    seen = [each for each in databases.names() if who.sees(each)]
    return NotFound(error.message, hint=f"{nearest(name, seen)} {HOW}", database=name)
