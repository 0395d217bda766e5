"""The services that requests can use, in one value that `app.py` builds."""

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
    """The services behind the network interfaces; `feeds`, `queries` and `gate` are set when the server starts."""

    databases: ManagedDatabases
    rows: Rows
    statement: Statement
    schema: Schema
    transactions: Transactions
    stats: Stats
    feeds: Feeds | None = None
    queries: Queries | None = None
    gate: Gate | None = None
    run: Run = asyncio.to_thread  # runs a blocking function; a server has threads that databases share fairly

    @classmethod
    def over(cls, databases: ManagedDatabases) -> Api:
        """Build the API of `databases`."""
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
        """Return the feeds; Unavailable on a server without feeds."""
        if self.feeds is None:
            raise Unavailable("this server has no change feeds")
        return self.feeds

    def asking(self) -> Queries:
        """Return the queries; Unavailable on a server without queries."""
        if self.queries is None:
            raise Unavailable("this server has no queries")
        return self.queries

    @property
    def ranges(self) -> Ranges | None:
        """Return the ranges; None while the databases are closed, or on a server without ranges."""
        return getattr(self.databases, "ranges", None)

    def pulling(self) -> Ranges:
        """Return the ranges; Unavailable on a server without ranges."""
        if self.ranges is None:
            raise Unavailable("this server has no bulk reads")
        return self.ranges
