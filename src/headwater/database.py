"""The interface of a served database for feeds, queries and ranges: source, log, and waiting for the log."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headwater.config import QuotasConfig
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.sources.read import SourceHead
from headwater.sources.source import Source

CATCH_UP_SECONDS = 0.25  # longest wait of a caller for changes committed before its request


class Database(Protocol):
    """One open database."""

    @property
    def source(self) -> Source:
        """Return the source."""

    @property
    def log(self) -> LiveLog:
        """Return the log of changes."""

    @property
    def retention(self) -> Retention:
        """Return the retention limits of the log."""

    def catch_up(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the log holds all commits before this call; return whether it does."""

    def reach(self, offset: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the log holds `offset`; return whether it does."""

    def wait_for_head(self, timeout: float) -> tuple[SourceHead, bool]:
        """Wait up to `timeout` seconds until the log holds the source's head; return the head and whether it does."""

    def peek_head(self) -> SourceHead | None:
        """Return the source's head if it is known without waiting and the log holds it; else None."""


class DatabaseStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one database in numbers. None means not known yet, never zero."""

    ready: bool  # capture has its first position
    generation: str
    horizon: int
    latest: int
    log_bytes: int | None = None
    retention_changes: int | None = None
    lag_changes: int | None = None  # committed in the source, not yet in the log
    lag_seconds: float | None = None
    capture_rows: int | None = None  # rows waiting in the source's capture table
    writes: int | None = None  # transactions committed through the server since start
    slot_lag_bytes: int | None = None  # WAL that the source retains for our slot
    slot_safe_bytes: int | None = None  # how much more WAL the source may retain
    slot_confirmed_seconds: float | None = None  # since the slot was last advanced, while it has a backlog
    wal_status: str | None = None  # PostgreSQL's wal_status of the slot, or gone
    error: str | None = None  # why capture has stopped
    storage_full: bool = False  # whether the disk of the data folder has no space left


class Databases(Protocol):
    """The open databases, by name. Every method is thread-safe."""

    def database(self, name: str) -> Database:
        """Return the database `name`; NotFound if there is none, StorageFull or Unavailable if it is not open yet."""

    def names(self) -> list[str]:
        """Return the names of the databases, sorted."""


class ManagedDatabases(Databases, Protocol):
    """The open databases, which callers may create and drop. Every method is thread-safe."""

    def get(self, name: str) -> Source:
        """Return the source of the database `name`; NotFound if there is none."""

    def create(self, name: str) -> bool:
        """Create an embedded database and open it; return False if it exists."""

    def drop(self, name: str) -> bool:
        """Close and delete an embedded database and its log; return False if there is none. NotSupported for others."""

    def stop_statements(self) -> None:
        """Cancel the running statements of callers, because the server stops."""

    def quota(self, name: str) -> QuotasConfig | None:
        """Return the quotas of the database `name`; None if it is not open."""

    def status(self) -> dict[str, DatabaseStatus]:
        """Return the status of every database, also of those that are not open yet."""
