"""Databases: what the rooms above know of the databases of this server, by name."""

from __future__ import annotations

import re
from typing import Protocol

import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.source import Source

MAIN = "main"
ALIASES = {"": MAIN, "default": MAIN}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")  # also a file name, so nothing a file system dislikes


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
    error: str | None = None  # why capture stands still


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


def real_name(name: str | None) -> str:
    """The name itself, or what it is an alias of; no name is `main`."""
    return MAIN if name is None else ALIASES.get(name, name)


def check_new_name(name: str) -> str:
    """`name` if a database may be called so."""
    name = real_name(name)
    if not _NAME.match(name):
        raise InvalidRequest(
            f"{name!r} cannot name a database",
            hint="Use letters, digits and underscores, at most 63, and begin with a letter or underscore.",
        )
    return name
