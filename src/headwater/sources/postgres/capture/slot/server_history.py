"""The server history that a log was captured from: a note with the log, replayed up to the log's end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Table
from headwater.sources.postgres.capture.decode.replication_frames import lsn_of
from headwater.sources.postgres.capture.decode.truncations import recalled
from headwater.sources.postgres.capture.replication_buffer import TransactionEnd
from headwater.sources.postgres.capture.slot.publication import Publication
from headwater.sources.postgres.capture.slot.slot import LogOrigin
from headwater.sources.postgres.schema.shape_changes import Shapes, displaced, is_end

NOTE = "postgres"
FIRST = "postgres_first"  # the table shapes at the start of a generation: no change in its log carries them


class History(msgspec.Struct, frozen=True):
    """The origin of a log. `point` is the end of a transaction in the log, not always the newest; `confirmed` is the
    highest LSN that the server may have received as confirmed; `publication` selects the changes it sends."""

    generation: str
    system: str
    timeline: int
    database: str
    confirmed: int
    point: TransactionEnd
    publication: Publication | None = None  # None: unknown

    def known(self, point: TransactionEnd) -> LogOrigin:
        """Return the facts by which `judge` checks a server, if our log ends at `point`."""
        return LogOrigin(self.system, self.timeline, self.database, point.position, self.confirmed)


def load(text: str) -> History | None:
    """Return the history stored in the note NOTE; None if the text is empty or unreadable."""
    try:
        return msgspec.json.decode(text, type=History) if text else None
    except msgspec.MsgspecError:
        return None


def save(history: History) -> str:
    """Return `history` as text for the note NOTE."""
    return msgspec.json.encode(history).decode()


def save_first(shapes: Shapes) -> str:
    """Return the text of the note FIRST."""
    return msgspec.json.encode(list(shapes.tables.values())).decode()


def first_shape(text: str, name: str, version: int) -> Table | None:
    """Return a table's shape from the note FIRST; None if the note lacks it."""
    tables = msgspec.json.decode(text, type=list[Table]) if text else []
    return next((table for table in tables if (table.name, table.version) == (name, version)), None)


def brought_up(point: TransactionEnd, parts: Iterable[Transaction], owners: Mapping[str, int] = {}) -> TransactionEnd:
    """Return `point` after the log's later transactions, `parts`. `owners`: oid by table name, as last read."""
    offset, position, xid, truncated = point.offset, point.position, point.xid, point.truncated
    shapes = _Shapes(point.shapes)
    for part in parts:
        for change in part.changes:
            if change.op is Op.TRUNCATE:
                truncated = recalled(truncated, change.table.name, int(part.id))
            shapes.take(change)
        if part.last:
            offset, position, xid = part.upto, lsn_of(part.position), part.id
    return TransactionEnd(offset, position, shapes.found(owners), xid, truncated)


class _Shapes:
    """Table shapes replayed from a log, whose changes carry no oid: they show only that a name became another table."""

    def __init__(self, start: Shapes) -> None:
        self._start, self._displaced = start, start.displaced
        self._tables, self._oids, self._versions = dict(start.tables), dict(start.oids), dict(start.versions)
        self._ended: dict[str, int] = {}  # names that ended, with the oid that had each
        self._renamed: dict[str, int] = {}  # names that are about to begin, with the oid that will have each
        self._over: set[str] = set()

    def take(self, change: Change) -> None:
        """Apply the next change of the log to the shapes."""
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
        """Return the shapes after the changes so far; `owners` supplies the oids of the other known names."""
        taken = {*self._oids.values(), *self._displaced}
        known = self._tables.keys() - self._over  # a name that ended may belong to another table now
        owners = {name: oid for name, oid in owners.items() if name in known and oid not in taken}
        return msgspec.structs.replace(
            self._start,
            tables=self._tables,
            oids={**owners, **self._oids},
            versions=self._versions,
            displaced=self._displaced,
        )
