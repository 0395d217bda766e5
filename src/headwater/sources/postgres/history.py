"""Which history of which server a log was made from: kept as a note with the log, brought up to its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headwater.model.change import Op, Transaction
from headwater.model.table import Table
from headwater.sources.postgres.frames import lsn_of
from headwater.sources.postgres.held import Point, Shapes
from headwater.sources.postgres.publication import Publication
from headwater.sources.postgres.reshaping import is_end
from headwater.sources.postgres.slot import Known
from headwater.sources.postgres.truncations import recalled

NOTE = "postgres"
FIRST = "postgres_first"  # the shapes that a generation began with: no change in its log has them


class History(msgspec.Struct, frozen=True):
    """`point` is an end of a transaction in the log, not always the newest; `confirmed` the furthest LSN that the
    server may have been told; `publication` what it sends."""

    generation: str
    system: str
    timeline: int
    database: str
    confirmed: int
    point: Point
    publication: Publication | None = None  # None: not known

    def known(self, point: Point) -> Known:
        """What a server is judged by, where our log ends at `point`."""
        return Known(self.system, self.timeline, self.database, point.position, self.confirmed)


def load(text: str) -> History | None:
    """From the note; None if there is none that can be read."""
    try:
        return msgspec.json.decode(text, type=History) if text else None
    except msgspec.MsgspecError:
        return None


def save(history: History) -> str:
    """For the note."""
    return msgspec.json.encode(history).decode()


def save_first(shapes: Shapes) -> str:
    """For the note FIRST."""
    return msgspec.json.encode(list(shapes.tables.values())).decode()


def first_shape(text: str, name: str, version: int) -> Table | None:
    """From that note; None if it is not there."""
    tables = msgspec.json.decode(text, type=list[Table]) if text else []
    return next((table for table in tables if (table.name, table.version) == (name, version)), None)


def brought_up(point: Point, parts: Iterable[Transaction]) -> Point:
    """`point` after the transactions that the log has after it."""
    offset, position, xid, truncated = point.offset, point.position, point.xid, point.truncated
    tables, oids = dict(point.shapes.tables), dict(point.shapes.oids)
    versions = dict(point.shapes.versions)
    for part in parts:
        for change in part.changes:
            name = change.table.name
            if change.op is Op.TRUNCATE:
                truncated = recalled(truncated, name, int(part.id))
            if is_end(change):
                tables.pop(name, None)
                oids.pop(name, None)
            elif tables.get(name) is not change.table:
                tables[name] = change.table
                versions[name] = max(change.table.version, versions.get(name, 0))
        if part.last:
            offset, position, xid = part.upto, lsn_of(part.position), part.id
    return Point(offset, position, Shapes(tables, oids, versions), xid, truncated)
