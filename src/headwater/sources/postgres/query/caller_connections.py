"""Connections for SQL that callers send, and the checks before it runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from headwater.model.bounded_cache import BoundedCache
from headwater.model.principal import OWNER
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.query.analysis.statement_growth import check_text
from headwater.sources.postgres.query.analysis.volatile_calls import FOR_NOBODY, check_calls
from headwater.sources.postgres.query.statement_rules import check_allowed, check_length, typed
from headwater.sources.postgres.setup.logins import Logins
from headwater.sources.postgres.values import own_type
from headwater.sources.query import Args
from headwater.sources.request_checks import rows_only

MAX_CHECKED = 10_000  # allowed statements to remember
_OF_ROWS = frozenset({"select", "values", "table", "with", "insert", "update", "delete", "merge"})
_SIGNALS = re.compile("|".join(sorted(FOR_NOBODY)), re.IGNORECASE)


def _digest(role: str, sql: str, types: Sequence[tuple[str, int]]) -> bytes:
    """Return a short key that identifies a statement, whose text may be long."""
    text = repr((role, sql, types)).encode()  # lone surrogates are escaped
    return hashlib.blake2b(text, digest_size=32).digest()


class Callers:
    """The connection pools of a source by caller role. Thread-safe."""

    def __init__(self, logins: Logins, own: Pool, *, seconds: float) -> None:
        self.logins, self._seconds = logins, seconds
        made = {role: Pool(logins.server(role).connect, abandoned=own.abandoned) for role in logins.roles}
        self._pools = {OWNER: own, **made}
        self._own = own
        self._checked: BoundedCache[bytes, bool] = BoundedCache(MAX_CHECKED, MAX_CHECKED)  # by digest

    def pool(self, role: str) -> Pool:
        """Return the pool that runs SQL of callers in `role`."""
        return self._pools.get(role, self._own)

    def cancel_running(self) -> bool:
        """Cancel the running statements of all pools; return whether there were any."""
        return sum(pool.running.cancel() for pool in self._pools.values()) > 0

    def check(self, role: str, sql: str, args: Args) -> None:
        """Raise Forbidden if callers in `role` may not send `sql`, InvalidRequest if nobody may."""
        self.logins.check_sql(role)
        if not sql:
            return
        if role != OWNER:
            check_length(sql)
        if check_allowed(sql) not in _OF_ROWS:
            if role != OWNER:
                raise rows_only()
            return
        # Owners are trusted: the check only keeps them from signalling other sessions by mistake, so a text that
        # names none of those functions need not be parsed.
        if role != OWNER or _SIGNALS.search(sql):
            self._check_calls(role, sql, args)

    def _check_calls(self, role: str, sql: str, args: Args) -> None:
        named = sorted(args.items()) if isinstance(args, dict) else [("", value) for value in args]
        key = _digest(role, sql, [(name, own_type(value)) for name, value in named])
        if self._checked.get(key):
            return
        check_text(sql)

        def check(link: Link) -> None:
            text, types = typed(link, sql, args)
            check_calls(link, text, types, role)

        self.pool(role).probe(check, self._seconds)
        self._checked.put(key, True)

    def forget(self) -> None:
        """Check every statement again: the schema changed, and with it the effects of functions."""
        self._checked.clear()

    def renew(self) -> None:
        """Reconnect with the logins for callers, and check every statement again."""
        self.forget()
        for role in self.logins.roles:
            self._pools[role].renew()

    def close(self) -> None:
        """Close the connections with the logins for callers."""
        for role in self.logins.roles:
            self._pools[role].close()
