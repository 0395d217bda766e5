"""Api: everything the wire can ask for, gathered in one value that `app.py` builds."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.queries.databases import Databases
from headwater.queries.rows import Rows
from headwater.queries.schema import Schema
from headwater.queries.statement import Statement
from headwater.queries.stats import Stats
from headwater.queries.transactions import Transactions


@dataclass(frozen=True)
class Api:
    """The rooms behind the wire."""

    databases: Databases
    rows: Rows
    statement: Statement
    schema: Schema
    transactions: Transactions
    stats: Stats

    @classmethod
    def over(cls, databases: Databases) -> Api:
        """The whole API of `databases`."""
        transactions = Transactions(databases)
        return cls(
            databases,
            Rows(databases, transactions),
            Statement(databases, transactions),
            Schema(databases, transactions),
            transactions,
            Stats(databases),
        )

    def ready(self) -> bool:
        """Whether every database has its first capture position."""
        found = self.databases.status()
        return bool(found) and all(status.ready for status in found.values())
