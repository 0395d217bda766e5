"""The status of each database, for `stats.snapshot`."""

from __future__ import annotations

from headwater.database import DatabaseStatus, ManagedDatabases
from headwater.errors import NotFound
from headwater.model.database_name import real_name
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest


class Stats:
    """Status of the databases that a caller may see."""

    def __init__(self, databases: ManagedDatabases) -> None:
        self._databases = databases

    def snapshot(self, principal: Principal, db: str | None = None) -> dict[str, DatabaseStatus]:
        """Return the status of every database in the caller's scopes; NotFound if `db` (default `main`) is none."""
        name = real_name(db)
        principal.check_any_scope(name)
        found = {each: status for each, status in self._databases.status().items() if principal.sees(each)}
        if name not in found:
            raise NotFound(f"there is no database {name!r}", hint=nearest(name, found))
        return found
