"""Which history of which server a log was made from: kept as a note with the log, brought up to its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Table
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of
from headwater.sources.postgres.capture.decode.truncations import recalled
from headwater.sources.postgres.capture.replication_buffer import Point, Shapes
from headwater.sources.postgres.capture.slot.publication import Publication
from headwater.sources.postgres.capture.slot.slot import Known
from headwater.sources.postgres.schema.shape_changes import displaced, is_end

NOTE = "postgres"
FIRST = "postgres_first"  # the shapes that a generation began with: no change in its log has them

_NOBODY: Mapping[str, int] = {}


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


def brought_up(point: Point, parts: Iterable[Transaction], owners: Mapping[str, int] = _NOBODY) -> Point:
    """`point` after the transactions that the log has after it. `owners`: whose the names were when somebody looked."""
    offset, position, xid, truncated = point.offset, point.position, point.xid, point.truncated
    shapes = _Shapes(point.shapes)
    for part in parts:
        for change in part.changes:
            if change.op is Op.TRUNCATE:
                truncated = recalled(truncated, change.table.name, int(part.id))
            shapes.take(change)
        if part.last:
            offset, position, xid = part.upto, lsn_of(part.position), part.id
    return Point(offset, position, shapes.found(owners), xid, truncated)


class _Shapes:
    """Shapes that go on by the changes of a log, which do not say whose a name is: only that it went on as another."""

    def __init__(self, start: Shapes) -> None:
        self._start, self._displaced = start, start.displaced
        self._tables, self._oids, self._versions = dict(start.tables), dict(start.oids), dict(start.versions)
        self._ended: dict[str, int] = {}  # names that ended, and whose they were
        self._renamed: dict[str, int] = {}  # names that are about to begin, and whose they are
        self._over: set[str] = set()

    def take(self, change: Change) -> None:
        """The next."""
        name, ddl = change.table.name, change.ddl or ""
        if is_end(change):
            self._tables.pop(name, None)
            self._over.add(name)
            oid, became = self._oids.pop(name, 0), ddl.removeprefix(f"ALTER TABLE {name} RENAME TO ")
            if oid and became != ddl:
                self._renamed[became] = oid
            elif oid:
                self._ended[name] = oid
        elif self._tables.get(name) is not change.table:
            if name in self._ended:
                self._displaced = displaced(self._displaced, self._ended.pop(name))
            if name in self._renamed:
                self._oids[name] = self._renamed.pop(name)
            self._tables[name] = change.table
            self._versions[name] = max(change.table.version, self._versions.get(name, 0))

    def found(self, owners: Mapping[str, int]) -> Shapes:
        """So far."""
        taken = {*self._oids.values(), *self._displaced}
        known = self._tables.keys() - self._over  # who had a name that ended may not be who has it
        owners = {name: oid for name, oid in owners.items() if name in known and oid not in taken}
        return msgspec.structs.replace(
            self._start,
            tables=self._tables,
            oids={**owners, **self._oids},
            versions=self._versions,
            displaced=self._displaced,
        )
