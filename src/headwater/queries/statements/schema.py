"""Create, drop, list and describe databases and tables."""

from __future__ import annotations

import msgspec

from headwater.database import ManagedDatabases
from headwater.errors import Conflict, InvalidRequest, NotFound
from headwater.model.database_name import MAIN, check_new_name, real_name
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.queries.etag.causality import Token
from headwater.queries.missing_names import found_table
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.queries.statements.transactions import Transactions


class SchemaChangeResult(msgspec.Struct, frozen=True):
    """The result of a schema change. `changed` is False if nothing had to be done."""

    changed: bool
    causality: Token | None = None


class Schema:
    """The schema API of every database of this server."""

    def __init__(self, databases: ManagedDatabases, transactions: Transactions) -> None:
        self._databases = databases
        self._transactions = transactions

    def create_database(self, principal: Principal, db: str) -> SchemaChangeResult:
        """Create an embedded database; Conflict if it exists already."""
        name = check_new_name(db)
        principal.check(name)
        if not self._databases.create(name):
            raise Conflict(f"database {name!r} exists already", hint="Use it, or choose another name.")
        return SchemaChangeResult(True)

    def drop_database(self, principal: Principal, db: str) -> SchemaChangeResult:
        """Roll back the transactions of an embedded database, and delete it with everything in it."""
        name = real_name(db)
        principal.check(name)
        if name == MAIN:
            raise InvalidRequest(f"database {MAIN!r} cannot be dropped", hint="Drop its tables instead.")
        self._transactions.abandon(name)
        if not self._databases.drop(name):
            raise NotFound(f"there is no database {name!r}", hint=nearest(name, self.list_databases(principal)))
        return SchemaChangeResult(True)

    def list_databases(self, principal: Principal) -> list[str]:
        """Return the names of the databases in the caller's scopes."""
        return [name for name in self._databases.names() if principal.sees(name)]

    def list_tables(self, principal: Principal, db: str | None = None) -> list[str]:
        """Return the names of the tables of one database in the caller's scopes."""
        name = real_name(db)
        principal.check_any_scope(name)
        mine = principal.tables(name)
        return sorted(table for table in self._databases.get(name).describe() if mine is None or table in mine)

    def describe_table(self, principal: Principal, db: str | None, table: str) -> Table:
        """Return the definition of one table; NotFound if there is none of that name."""
        name = real_name(db)
        principal.check(name, [table])
        return found_table(self._databases.get(name).describe(), table, principal, name)

    def create_table(
        self, principal: Principal, db: str | None, table: Table, *, if_not_exists: bool = False
    ) -> PendingAnswer[SchemaChangeResult]:
        """Create `table`, and its database if it does not exist."""
        name = real_name(db)
        principal.check(name)
        made = name not in self._databases.names() and self._databases.create(check_new_name(name))
        pending = self._transactions.write(
            principal,
            name,
            None,
            lambda _, session: session.create_table(table, if_not_exists=if_not_exists),
            SchemaChangeResult,
        )
        # Drop a database created for a table whose creation failed: a failed request must change nothing.
        if made and pending.future.exception() is not None and not self._databases.get(name).describe():
            self._databases.drop(name)
        return pending

    def drop_table(
        self, principal: Principal, db: str | None, table: str, *, if_exists: bool = False
    ) -> PendingAnswer[SchemaChangeResult]:
        """Drop `table` with its rows."""
        principal.check(real_name(db))
        return self._transactions.write(
            principal, db, None, lambda _, session: session.drop_table(table, if_exists=if_exists), SchemaChangeResult
        )
