"""What queries know of a database: its source, its log, and how long the way from one to the other is."""

from __future__ import annotations

from typing import Protocol

from headwater.log.live.live_log import LiveLog
from headwater.sources.source import Look, Source


class Database(Protocol):
    """One open database."""

    @property
    def source(self) -> Source:
        """Where the rows are."""
        ...

    @property
    def log(self) -> LiveLog:
        """What happened to them."""
        ...

    def reach(self, offset: int, timeout: float) -> bool:
        """Wait until the log holds `offset`; whether it does."""
        ...

    def glance(self) -> Look | None:
        """Where the source stands, if that is seen at once and the log holds all of it. Does not block."""
        ...

    def look(self, timeout: float) -> tuple[Look, bool]:
        """Where the source stands, and whether the log came that far; waits for it to."""
        ...


class Databases(Protocol):
    """The databases that are open, by name."""

    def database(self, name: str) -> Database:
        """The one called `name`; NotFound if there is none."""
        ...

    def names(self) -> list[str]:
        """Their names, sorted."""
        ...
