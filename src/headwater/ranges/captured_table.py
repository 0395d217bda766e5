"""Tables whose changes are in the log, found by name for a caller."""

from __future__ import annotations

from headwater.errors import NotFound, NotSupported
from headwater.model.principal import Principal
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.sources.read import Readable


def keyed_table(source: Readable, name: str, who: Principal, db: str) -> Table:
    """A captured table whose rows have keys; NotFound, NotSupported."""
    table = captured_table(source, name, who, db)
    if not table.key:
        raise NotSupported(
            f"table {name!r} has no primary key: nothing tells its rows apart",
            hint="Give it one, or, over NOT NULL columns, ALTER TABLE … REPLICA IDENTITY USING INDEX ….",
        )
    return table


def captured_table(source: Readable, name: str, who: Principal, db: str) -> Table:
    """The table whose changes are in the log; NotFound, with a name that `who` may hear, NotSupported."""
    tables = source.describe()
    table = tables.get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}", hint=nearest(name, who.seen(db, tables)))
    if name not in source.status()["tables"]:
        raise NotSupported(f"{name!r} is not captured: its changes are not known", hint="Read it by data.get or SQL.")
    return table
