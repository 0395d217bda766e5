"""Limits: how much each caller and each database may ask of the server. Health is asked for without."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from headwater.config import QuotasConfig, ServeConfig
from headwater.errors import HeadwaterError
from headwater.model.database_name import real_name
from headwater.model.principal import Principal
from headwater.model.work.work_context import CALLER, UNNAMED, WHOSE
from headwater.serve.api import Api
from headwater.serve.call import Scope
from headwater.serve.limits.connection_limits import Crowd
from headwater.serve.limits.rates import Buckets, place_of, too_often
from headwater.serve.limits.stream_limits import Places, client_of
from headwater.serve.limits.tenant_quotas import Limited, Tenants

MOST_RANGES = 10_000
_HINT = "Ask less often, or raise serve.rate."
_ALL = ("db", "sub_id")  # of cdc.list: without both it is of every database


class Limits:
    """In the loop that serves. Where no limit is set nothing is looked up but a counter."""

    def __init__(self, config: ServeConfig, api: Api, places: Places) -> None:
        self._api, self._places = api, places
        self._callers = None if config.rate is None else Buckets(config.rate, config.burst)
        databases = api.databases
        self.tenants = Tenants(databases.quota if isinstance(databases, Limited) else lambda _: QuotasConfig())
        self._ranges: dict[int, str] = {}  # databases of ranges that were asked for
        self.refused_callers = 0  # requests
        self.crowd = Crowd(config.max_connections, config.max_connections_per_client)

    # --- who asks ----------------------------------------------------------------------------------------------------

    def ask(self, who: Principal, address: str) -> None:
        """One request of `who`; LimitExceeded if they asked too often."""
        if self._callers is not None:
            self._take(identity(who, address), f"by {who.name!r}")

    def ask_in_vain(self, address: str) -> None:
        """One request with a credential that does not hold: guesses count by where they come from."""
        if self._callers is not None:
            self._take(place_of(address), f"from {address}")

    def _take(self, key: object, told: str) -> None:
        assert self._callers is not None
        if wait := self._callers.take(key):
            self.refused_callers += 1
            raise too_often(told, self._callers.rate, wait, _HINT)

    # --- for which database ------------------------------------------------------------------------------------------

    def enter(self, who: Principal, db: str | None) -> None:
        """One request for `db`, of which it is from now on; LimitExceeded if there were too many.

        Who has no business there takes nothing of it. They are refused later, in the words of the scopes.
        """
        if db is None or not who.sees(db):
            return
        tenant = self.tenants.get(db)
        if tenant is not None:
            WHOSE.set(db)
            CALLER.set(who.account)
            tenant.enter()

    def again(self, who: Principal, db: str, scope: Scope) -> None:
        """As `ask` and `enter`, in short, of a request that is answered at once to one who sees `db`."""
        if self._callers is not None:
            self.ask(who, client_of(scope))
        tenant = self.tenants.get(db)
        if tenant is not None:
            tenant.enter()

    @contextmanager
    def stay(self, who: Principal, db: str | None, address: str) -> Iterator[None]:
        """One stream or waiting poll of `db`, as long as it lasts; LimitExceeded if there are too many."""
        tenant = self.tenants.get(db) if db is not None and who.sees(db) else None
        with self._places.take(address):
            if tenant is None:
                yield
                return
            with tenant.stay():
                yield

    def of_path(self, who: Principal, values: dict[str, str]) -> str | None:
        """The database that a route is asked about, if it is about one."""
        if "db" in values:
            return real_name(values["db"])
        if "sub_id" in values:
            return self._of_subscription(values["sub_id"])
        return self._of_query(who, values["query_id"]) if "query_id" in values else None

    def of_params(self, who: Principal, found: Any) -> str | None:
        """Return the database that the parameters of a method name, if they name one."""
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

    def of_message(self, asked: object) -> str | None:
        """The database that a call of gRPC names, if it does."""
        for name in ("namespace", "db"):
            given = getattr(asked, name, None)
            if isinstance(given, str):
                return real_name(given)
        return None

    async def of_call(self, asked: object) -> str | None:
        """The database that a call of gRPC is about: the one it names, or that of the range it names."""
        found, id = self.of_message(asked), getattr(asked, "range_id", 0)
        if found is not None or not id or self._api.ranges is None:
            return found
        if id not in self._ranges:
            owner = await self._api.run(self._api.ranges.owner, id)
            if owner is None:
                return None
            if len(self._ranges) >= MOST_RANGES:
                self._ranges.clear()
            self._ranges[id] = owner[0]  # for good: another range has another id
        return self._ranges[id]

    def _of_subscription(self, id: str) -> str | None:
        return None if self._api.feeds is None else self._api.feeds.subscriptions.database_of(id)

    def _of_query(self, who: Principal, id: str) -> str | None:
        try:
            return self._api.asking().get(who, id).db
        except HeadwaterError:
            return None  # whoever answers will say it


def identity(who: Principal, address: str) -> Hashable:
    """Return whose budget it is: that of the account, or of the address where the caller has no account of its own."""
    account = who.account
    return place_of(address) if account in UNNAMED else (account,)
