"""Databases: what the rooms above know of the databases of this server, by name."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headwater.sources.source import Source


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
    slot_confirmed_seconds: float | None = None  # since it was told to forget some, while there is something
    wal_status: str | None = None  # as PostgreSQL says it of a slot; or gone
    error: str | None = None  # why capture stands still
    storage_full: bool = False  # whether the disk of the data folder has no space left


class Databases(Protocol):
    """The databases that are open. Every method may be called from any thread."""

    def get(self, name: str) -> Source:
        """The source called `name`; NotFound if there is none."""
        ...

    def names(self) -> list[str]:
        """Their names, sorted."""
        ...

    def create(self, name: str) -> bool:
        """Create an embedded database and open it; False if it was there."""
        ...

    def drop(self, name: str) -> bool:
        """Close an embedded database and delete it with its log; False if there was none."""
        ...

    def status(self) -> dict[str, DatabaseStatus]:
        """Every database in numbers."""
        ...
