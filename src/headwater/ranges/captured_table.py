"""Lookup of captured tables, those whose changes are in the log, for a caller."""

from __future__ import annotations

from headwater.errors import NotFound, NotSupported
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.sources.read import Readable


def keyed_table(source: Readable, name: str, who: Principal, db: str) -> Table:
    """Return a captured table that has a key; NotFound if it does not exist, NotSupported if it has no key."""
    table = captured_table(source, name, who, db)
    if not table.key:
        raise NotSupported(
            f"table {name!r} has no primary key, so its rows cannot be identified",
            hint="Add a primary key, or, over NOT NULL columns, ALTER TABLE … REPLICA IDENTITY USING INDEX ….",
        )
    return table


def captured_table(source: Readable, name: str, who: Principal, db: str) -> Table:
    """Return a captured table; NotFound suggests only names that `who` may see, NotSupported if it is not captured."""
    tables = source.describe()
    table = tables.get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}", hint=nearest(name, who.seen(db, tables)))
    if name not in source.status()["tables"]:
        raise NotSupported(f"table {name!r} is not captured", hint="Read it with data.get or SQL.")
    return table
