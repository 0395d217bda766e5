"""What ranges know of a database: its source, its log, and how to bring the one up to the other."""

from __future__ import annotations

from typing import Protocol

from headwater.errors import NotFound, NotSupported
from headwater.log.live.live_log import LiveLog
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.sources.source import Source


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


def told_apart(source: Source, name: str, who: Principal, db: str) -> Table:
    """A captured table whose rows have keys; NotFound, NotSupported."""
    table = captured(source, name, who, db)
    if not table.key:
        raise NotSupported(
            f"table {name!r} has no primary key: nothing tells its rows apart",
            hint="Give it one, or, over NOT NULL columns, ALTER TABLE … REPLICA IDENTITY USING INDEX ….",
        )
    return table


def captured(source: Source, name: str, who: Principal, db: str) -> Table:
    """The table whose changes are in the log; NotFound, with a name that `who` may hear, NotSupported."""
    tables = source.describe()
    table = tables.get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}", hint=nearest(name, who.seen(db, tables)))
    if name not in source.status()["tables"]:
        raise NotSupported(f"{name!r} is not captured: its changes are not known", hint="Read it by data.get or SQL.")
    return table
