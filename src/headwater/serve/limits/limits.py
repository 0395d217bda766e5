"""Limits on the requests of each caller and each database; health requests are not limited."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from headwater.config import ServeConfig
from headwater.errors import HeadwaterError
from headwater.model.database_name import real_name
from headwater.model.principal import Principal
from headwater.model.work.work_context import CALLER, UNNAMED, WHOSE
from headwater.serve.api import Api
from headwater.serve.call import Scope
from headwater.serve.limits.connection_limits import ConnectionLimits
from headwater.serve.limits.rates import Buckets, place_of, too_often
from headwater.serve.limits.stream_limits import StreamCounts, client_of
from headwater.serve.limits.tenant_quotas import Tenants

MOST_RANGES = 10_000
_HINT = "Send requests less often, or raise serve.rate."
_ALL = ("db", "sub_id")  # cdc.list without both fields covers every database


class Limits:
    """The limits of one server; not thread-safe. Without a configured limit a request costs one lookup."""

    def __init__(self, config: ServeConfig, api: Api, streams: StreamCounts) -> None:
        self._api, self._streams = api, streams
        self._callers = None if config.rate is None else Buckets(config.rate, config.burst)
        self.tenants = Tenants(api.databases.quota)
        self._ranges: dict[int, str] = {}  # database of each range that was requested
        self.refused_callers = 0  # requests
        self.connections = ConnectionLimits(config.max_connections, config.max_connections_per_client)

    # --- per caller --------------------------------------------------------------------------------------------------

    def ask(self, who: Principal, address: str) -> None:
        """Count a request of `who`; LimitExceeded if they exceed their rate."""
        if self._callers is not None:
            self._take(identity(who, address), f"by {who.name!r}")

    def count_rejected_credential(self, address: str) -> None:
        """Count a request without a valid credential, by its address, to limit guesses."""
        if self._callers is not None:
            self._take(place_of(address), f"from {address}")

    def _take(self, key: object, subject: str) -> None:
        assert self._callers is not None
        if wait := self._callers.take(key):
            self.refused_callers += 1
            raise too_often(subject, self._callers.rate, wait, _HINT)

    # --- per database ------------------------------------------------------------------------------------------------

    def enter(self, who: Principal, db: str | None) -> None:
        """Count a request for `db`, and charge the work of this task to `db`; LimitExceeded if its rate is exceeded.

        A caller who may not see `db` is not counted here: the scope check rejects the request later.
        """
        if db is None or not who.sees(db):
            return
        tenant = self.tenants.get(db)
        if tenant is not None:
            WHOSE.set(db)
            CALLER.set(who.account)
            tenant.enter()

    def again(self, who: Principal, db: str, scope: Scope) -> None:
        """Count a request that is answered immediately, as `ask` and `enter` do; the caller may see `db`."""
        if self._callers is not None:
            self.ask(who, client_of(scope))
        tenant = self.tenants.get(db)
        if tenant is not None:
            tenant.enter()

    @contextmanager
    def count_stream(self, who: Principal, db: str | None, address: str) -> Iterator[None]:
        """Count a stream or waiting poll of `db` while it is open; LimitExceeded if there are too many."""
        tenant = self.tenants.get(db) if db is not None and who.sees(db) else None
        with self._streams.take(address):
            if tenant is None:
                yield
                return
            with tenant.count_stream():
                yield

    def of_path(self, who: Principal, values: dict[str, str]) -> str | None:
        """Return the database that the placeholders of a route name; None if they name none."""
        if "db" in values:
            return real_name(values["db"])
        if "sub_id" in values:
            return self._of_subscription(values["sub_id"])
        return self._of_query(who, values["query_id"]) if "query_id" in values else None

    def of_params(self, who: Principal, found: Any) -> str | None:
        """Return the database that the parameters of a method name; None if they name none."""
        names = found.__struct_fields__
        if ("tx" in names or "tx_id" in names) and (tx := found.tx or getattr(found, "tx_id", None)):
            return self._api.transactions.database_of(tx)
        if "sub_id" in names and found.sub_id is not None:
            return self._of_subscription(found.sub_id)
        if "query_id" in names and found.query_id is not None:
            return self._of_query(who, found.query_id)
        named = getattr(found, "into", None) or getattr(found, "table", None)
        if named is not None and hasattr(named, "db"):  # a table of the JSON form
            return real_name(named.db)
        if "db" not in names or (found.db is None and all(name in names for name in _ALL)):
            return None
        return real_name(found.db or getattr(found, "default_db", None))

    def of_message(self, request: object) -> str | None:
        """Return the database in `namespace` or `db` of a gRPC or gateway request; None without these fields."""
        for name in ("namespace", "db"):
            given = getattr(request, name, None)
            if isinstance(given, str):
                return real_name(given)
        return None

    async def of_call(self, request: object) -> str | None:
        """Return the database that a gRPC request names, directly or by a range id."""
        found, id = self.of_message(request), getattr(request, "range_id", 0)
        if found is not None or not id or self._api.ranges is None:
            return found
        if id not in self._ranges:
            owner = await self._api.run(self._api.ranges.owner, id)
            if owner is None:
                return None
            if len(self._ranges) >= MOST_RANGES:
                self._ranges.clear()
            self._ranges[id] = owner[0]  # never stale: range ids are not reused
        return self._ranges[id]

    def _of_subscription(self, id: str) -> str | None:
        return None if self._api.feeds is None else self._api.feeds.subscriptions.database_of(id)

    def _of_query(self, who: Principal, id: str) -> str | None:
        try:
            return self._api.asking().get(who, id).db
        except HeadwaterError:
            return None  # the handler reports the unknown query


def identity(who: Principal, address: str) -> Hashable:
    """Return the key of the caller's budget: the account, or the address of a caller without an account."""
    account = who.account
    return place_of(address) if account in UNNAMED else (account,)
