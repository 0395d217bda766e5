"""The numbers of `stats.snapshot`, computed from the status of each database."""

from __future__ import annotations

from typing import Any

from headwater.errors import NotFound
from headwater.model.database import real_name
from headwater.model.principal import Principal
from headwater.queries.databases import Databases, DatabaseStatus
from headwater.queries.kinds import nearest

NO_LIMIT = 2**63 - 1  # retention without a count


class Stats:
    """Numbers about the databases."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases

    def snapshot(self, principal: Principal, db: str | None = None) -> dict[str, Any]:
        """`cdc` speaks of one database (`main` unless named), `databases` of all."""
        found = self._databases.status()
        name = real_name(db)
        if name not in found:
            raise NotFound(f"there is no database {name!r}", hint=nearest(name, found))
        return {"cdc": cdc(found[name]), "databases": found}


def cdc(status: DatabaseStatus) -> dict[str, int]:
    """The 17 numbers of a change feed that has no subscriptions yet."""
    limit = NO_LIMIT if status.retention_changes is None else status.retention_changes
    retained = status.latest - status.horizon + 1
    return {
        "active_subscriptions": 0,
        "table_subscriptions": 0,
        "query_subscriptions": 0,
        "total_lag": 0,
        "max_lag": 0,
        "resnapshot_subscriptions": 0,
        "paused_subscriptions": 0,
        "pressured_subscriptions": 0,
        "throttle_recommended_subscriptions": 0,
        "earliest_offset": status.horizon if retained else 0,
        "latest_offset": status.latest,
        "retained_events": retained,
        "retention_limit": limit,
        "dropped_events_total": status.horizon - 1,
        "warn_lag": max(limit // 2, 1),
        "throttle_lag": -(-3 * limit // 4),
        "min_remaining_until_resnapshot": limit,
    }
