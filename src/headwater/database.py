"""One served database as feeds, queries and ranges see it: its source, its log, and how far the log has caught up."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.sources.read import Look
from headwater.sources.source import Source

CATCH_UP_SECONDS = 0.25  # longest a caller waits for what was committed before its request


class Database(Protocol):
    """One open database."""

    @property
    def source(self) -> Source:
        """The database itself."""
        ...

    @property
    def log(self) -> LiveLog:
        """The changes of its rows."""
        ...

    @property
    def retention(self) -> Retention:
        """How much of the log is kept."""
        ...

    def catch_up(self, timeout: float) -> bool:
        """Wait until the log holds everything committed before this call; return whether it does."""
        ...

    def reach(self, offset: int, timeout: float) -> bool:
        """Wait until the log holds `offset`; return whether it does."""
        ...

    def look(self, timeout: float) -> tuple[Look, bool]:
        """Wait until the log holds the source's head; return the head, and whether the log holds it."""
        ...

    def glance(self) -> Look | None:
        """Return the source's head if that takes no wait and the log holds it; else None. Does not block."""
        ...


class DatabaseStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One database in numbers. None means not known yet, never zero."""

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
    slot_lag_bytes: int | None = None  # of its own log that the source keeps for us
    slot_safe_bytes: int | None = None  # how much more it may keep
    slot_confirmed_seconds: float | None = None  # since the slot was last advanced, while it has a backlog
    wal_status: str | None = None  # as PostgreSQL says it of a slot; or gone
    error: str | None = None  # why capture has stopped
    storage_full: bool = False  # whether the disk of the data folder has no space left


class Databases(Protocol):
    """The open databases, by name. Every method is thread-safe."""

    def database(self, name: str) -> Database:
        """Return the database `name`; NotFound if there is none."""
        ...

    def names(self) -> list[str]:
        """Return their names, sorted."""
        ...


class ManagedDatabases(Databases, Protocol):
    """The open databases, which callers may create and drop. Every method is thread-safe."""

    def get(self, name: str) -> Source:
        """Return the source of the database `name`; NotFound if there is none."""
        ...

    def create(self, name: str) -> bool:
        """Create an embedded database and open it; False if it was there."""
        ...

    def drop(self, name: str) -> bool:
        """Close an embedded database and delete it with its log; False if there was none."""
        ...

    def status(self) -> dict[str, DatabaseStatus]:
        """Return every database in numbers."""
        ...
