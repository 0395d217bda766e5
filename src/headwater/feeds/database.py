"""What feeds know of a database: its source, its log, and how to bring the one up to the other."""

from __future__ import annotations

from typing import Protocol

from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.sources.source import Source

CATCH_UP_SECONDS = 0.25  # longest a caller waits for what was committed before it asked


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

    @property
    def retention(self) -> Retention:
        """How much of that is kept."""
        ...

    def catch_up(self, timeout: float) -> bool:
        """Wait until the log holds everything committed before this call; whether it does."""
        ...


class Databases(Protocol):
    """The databases that are open, by name."""

    def database(self, name: str) -> Database:
        """The one called `name`; NotFound if there is none."""
        ...

    def names(self) -> list[str]:
        """Their names, sorted."""
        ...
