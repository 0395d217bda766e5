"""Api: everything the wire can ask for, gathered in one value that `app.py` builds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headwater.database import DatabaseStatus, ManagedDatabases
from headwater.errors import Unavailable
from headwater.feeds.feeds import Feeds
from headwater.queries.queries import Queries
from headwater.queries.rows.rows import Rows
from headwater.queries.statements.schema import Schema
from headwater.queries.statements.sql import Statement
from headwater.queries.statements.transactions import Transactions
from headwater.queries.stats import Stats
from headwater.ranges.ranges.ranges import Ranges, Run
from headwater.serve.auth.gate import Gate

STARTING = "starting"


def _unready(status: DatabaseStatus) -> str:
    """Return the code of the error that stopped capture, or STARTING; "" if capture runs, even if it is idle."""
    if status.error is not None:
        return status.error.partition(":")[0]
    return "" if status.ready else STARTING


@dataclass
class Api:
    """The rooms behind the wire. Feeds and the gate join it when the server starts: they live in its loop."""

    databases: ManagedDatabases
    rows: Rows
    statement: Statement
    schema: Schema
    transactions: Transactions
    stats: Stats
    feeds: Feeds | None = None
    queries: Queries | None = None
    gate: Gate | None = None
    run: Run = asyncio.to_thread  # what blocks; a server has threads for it, which databases share in turn

    @classmethod
    def over(cls, databases: ManagedDatabases) -> Api:
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

    def readiness(self) -> tuple[dict[str, str], bool]:
        """Return each database with the reason why it is not ready ("" if it is), and whether a disk is full."""
        found = self.databases.status()
        is_full = any(status.storage_full for status in found.values())
        return {name: _unready(status) for name, status in found.items()}, is_full

    def feeding(self) -> Feeds:
        """The feeds; Unavailable on a server without."""
        if self.feeds is None:
            raise Unavailable("no feeds are served here")
        return self.feeds

    def asking(self) -> Queries:
        """The queries; Unavailable on a server without."""
        if self.queries is None:
            raise Unavailable("no queries are served here")
        return self.queries

    @property
    def ranges(self) -> Ranges | None:
        """The ranges, once the databases are open, if they have any."""
        return getattr(self.databases, "ranges", None)

    def pulling(self) -> Ranges:
        """The ranges; Unavailable on a server without."""
        if self.ranges is None:
            raise Unavailable("no bulk reads are served here")
        return self.ranges
