"""Deadlines for waits of tests, which end as soon as their condition holds.

A wait ends as soon as its condition holds, so a long deadline costs nothing where all is well; a short one fails on
a machine that is busy with something else.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from httpx._config import DEFAULT_TIMEOUT_CONFIG

from headwater.feeds import snapshot, subscription_requests
from headwater.feeds.deliver import poll, source_head
from headwater.feeds.groups import hub_batch
from headwater.feeds.query_feeds import answer_confirmation
from headwater.queries import answers, head_checks
from headwater.ranges.pull import table_status
from headwater.serve.grpc import changefeed
from headwater.serve.http.handlers import pulls, table_snapshots
from headwater.sources.postgres.capture import barriers
from headwater.sources.postgres.query import predicate_engine
from headwater.sources.postgres.schema import catalog
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.postgres.write import writes as postgres_writes
from headwater.sources.postgres.write.interactive_transaction import PostgresTx
from headwater.sources.sqlite.settings import SqliteConfig
from headwater.sources.sqlite.write import writes as sqlite_writes
from headwater.sources.sqlite.write.interactive_transaction import SqliteTx

T = TypeVar("T")

PATIENCE = 120.0  # seconds: nothing takes this long unless it is broken
KEY_LIFETIME = 5  # seconds: long enough to open a stream with a key on a busy machine, short enough to wait for
CATCH_UP_SECONDS = 5.0  # that a server in this process waits for its log
TX_SECONDS, TX_IDLE_SECONDS = 20.0, 5.0  # that an interactive transaction may take, where no other limit is configured

# How long interactive transactions may be open, and idle, where their expiry is not the subject.
TRANSACTIONS = {"tx_seconds": PATIENCE, "tx_idle_seconds": PATIENCE}

# What a server does when these run out is the subject of tests of their own, which set them; all others would fail when
# the machine is busy for that long.
LIMITS = [
    (module, "CATCH_UP_SECONDS")
    for module in (table_snapshots, changefeed, source_head, table_status, head_checks, pulls, subscription_requests)
]
LIMITS += [(answer_confirmation, "WAIT_SECONDS"), (barriers, "SECONDS"), (answers, "FLOOR_SECONDS")]
LIMITS += [(subscription_requests, "BEGIN_SECONDS"), (snapshot, "PAGE_SECONDS"), (poll, "SCAN_SECONDS")]
LIMITS += [(hub_batch, "LONGEST_SECONDS"), (predicate_engine, "SECONDS"), (catalog, "SETTLE_SECONDS")]


def lengthen_limits() -> None:
    """Raise the time limits of servers in this process, and the timeouts of httpx."""
    for module, name in LIMITS:
        assert getattr(module, name) <= CATCH_UP_SECONDS
        setattr(module, name, CATCH_UP_SECONDS)
    for name in ("connect", "read", "write", "pool"):
        setattr(DEFAULT_TIMEOUT_CONFIG, name, PATIENCE)
    setattr(sqlite_writes, "SqliteTx", _with_longer_limits(SqliteTx, SqliteConfig()))  # noqa: B010
    setattr(postgres_writes, "PostgresTx", _with_longer_limits(PostgresTx, PostgresConfig()))  # noqa: B010


def _with_longer_limits(create: Callable[..., T], config: SqliteConfig | PostgresConfig) -> Callable[..., T]:
    """Return `create`, which makes transactions, with TX_SECONDS and TX_IDLE_SECONDS instead of the default limits."""
    longer = {config.tx_seconds: TX_SECONDS}, {config.tx_idle_seconds: TX_IDLE_SECONDS}

    def create_longer(*args: Any, seconds: float, idle_seconds: float, **more: Any) -> T:
        limits = {"seconds": longer[0].get(seconds, seconds), "idle_seconds": longer[1].get(idle_seconds, idle_seconds)}
        return create(*args, **limits, **more)

    return create_longer


def wait_until(holds: Callable[[], object], what: str = "the condition") -> None:
    """Call `holds` repeatedly until it returns true; fail after PATIENCE."""
    deadline, pause = time.monotonic() + PATIENCE, 0.002
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come true in {PATIENCE:.0f} s"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)  # asking may cost more than what is waited for
