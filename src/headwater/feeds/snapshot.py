"""Initial snapshots: the rows of a subscription's tables, followed by changes without gap or repeat.

Each stretch of keys is read in a short read of its own. The offset of that read is stored before the rows are sent;
afterwards a change to a key is delivered only if it is newer than that offset. A reader that reconnects reads rows
again from the key it names. The offsets of stretches that were read before stay, so that the delete of a row is
delivered even if it happened between the two reads.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from headwater.database import Database
from headwater.errors import HeadwaterError, InvalidRequest, NotFound, Unavailable
from headwater.feeds.deliver.backpressure import LOG_GENERATION_CHANGED
from headwater.feeds.filters.filter import NewerThanSnapshot
from headwater.feeds.groups.log_reader import View
from headwater.feeds.subscription import END, SnapshotState
from headwater.model.change import Change, Op
from headwater.model.clock import wall_ms
from headwater.model.per_table import PerTable
from headwater.model.row_msgpack import decode_row, encode_row
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Chunk, Readable

FIRST_ROWS = 256  # rows in the first chunk, before the size of rows is known
PAGE_SECONDS = 0.25  # with a selective filter a page ends after this time, so that the reader sees progress
LOG_SECONDS = 5.0  # how long a check of the log waits until the log has caught up
SNAPSHOT_EXPIRED = "snapshot_expired"
SCHEMA_CHANGED = "schema_changed"
TRUNCATED = "truncated"


_ALTER = re.compile(r"\s*ALTER\s+TABLE\b(?!.*\bRENAME\s+TO\b)|--[^\n]*\Z", re.IGNORECASE | re.DOTALL)


class Lease(NamedTuple):
    """The limits in time and bytes up to which a snapshot may keep the log from evicting changes."""

    name: str
    seconds: float
    bytes: int


class Position(NamedTuple):
    """A cursor in one run of a snapshot: after the key `after` of the table number `table`."""

    run: int
    table: int
    after: Key | None

    def text(self) -> str:
        """Return the cursor as text for clients."""
        key = None if self.after is None else encode_row(self.after)
        packed = msgspec.msgpack.encode((self.run, self.table, key))
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the cursor that `text` encodes; raise InvalidRequest if it is malformed."""
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            run, table, key = msgspec.msgpack.decode(packed, type=tuple[int, int, bytes | None])
            return cls(run, table, None if key is None else decode_row(key))
        except (ValueError, ArithmeticError, binascii.Error, msgspec.MsgspecError, HeadwaterError):
            raise InvalidRequest(
                f"{text[:40]!r} is not a snapshot cursor",
                hint="Send the cursor of the last page unchanged.",
            ) from None


class SnapshotPage(NamedTuple):
    """A page of encoded rows, each with the cursor after it."""

    rows: list[tuple[str, bytes]]
    cursor: str  # after the page
    began: str  # before the page
    done: bool
    restarted: bool
    reason: str
    offset: int  # changes after this offset follow the snapshot; meaningful once done
    sent: int  # rows returned by this reader so far


def newer_than_snapshot(state: SnapshotState, source: Readable) -> NewerThanSnapshot:
    """Return a predicate that selects the changes to deliver after the snapshot `state`."""
    ends: dict[str, list[bytes]] = {}
    offsets: dict[str, list[int]] = {}
    for stretch in state.chunks:
        offsets.setdefault(stretch.table, []).append(stretch.offset)
        if stretch.end != END:
            ends.setdefault(stretch.table, []).append(stretch.end)
    order_of = PerTable(lambda table: source.order(table, table.key))

    def is_newer(offset: int, table: Table, row: Row | None) -> bool:
        read_at = offsets.get(table.name)
        if read_at is None:
            return True  # the table was created after the snapshot
        if row is None:  # a change of the table itself is delivered if it is newer than the oldest rows
            return offset > min(read_at)
        place = bisect_left(ends.get(table.name, []), order_of(table)(table.key_of(row)))
        return offset > read_at[min(place, len(read_at) - 1)]

    return is_newer


def _form(table: Table) -> tuple[str, ...]:
    """Return what must not change while a table is read: its version, and the order of its keys."""
    order = [f"{name} {table.columns[table.index[name]].collation}" for name in table.key]
    return (f"version {table.version}", *order)


def _keeps_rows(change: Change) -> bool:
    """Return whether a schema change certainly keeps the rows of its table."""
    return not change.resnapshot and (not change.ddl or _ALTER.match(change.ddl) is not None)


class SnapshotReader:
    """Reads one snapshot page by page. Blocks: call it in a thread, one call at a time. Saves its state by `save`."""

    def __init__(
        self,
        database: Database,
        view: View,
        state: SnapshotState,
        lease: Lease,
        *,
        save: Callable[[SnapshotState], None],
        cursor: str = "",
        rows: int | None = None,
        reason: str = "",
    ) -> None:
        self._database, self._view, self._lease, self._save = database, view, lease, save
        self.state = state
        self._order_of = PerTable(lambda table: database.source.order(table, table.key))
        self._rows = FIRST_ROWS if rows is None else rows
        self._count = 0
        self._restarted = reason  # why the snapshot was restarted, to be reported with the next page
        self._is_closed = False
        self._position = Position(state.run, 0, None)
        if cursor:
            self._seek(cursor)

    def _seek(self, cursor: str) -> None:
        """Continue after `cursor`; restart the snapshot for a cursor of an earlier run.

        A cursor that was never sent restarts it, too: the keys before that cursor have no offset yet.
        """
        found, state = Position.parse(cursor), self.state
        ahead = found.table > state.table or (found.table == state.table and state.after is None and found.after)
        if found.run != state.run or found.table < 0 or ahead:
            self._restarted = self._restarted or SNAPSHOT_EXPIRED
            self._position = Position(state.run, 0, None)
        else:
            self._position = found

    def page(self, limit: int, most: int) -> SnapshotPage:
        """Return at most `limit` rows and about `most` bytes; fewer or none if the filter drops most rows."""
        try:
            return self._page(limit, most)
        finally:
            if self._is_closed:
                self._database.log.release(self._lease.name)

    @property
    def cursor(self) -> str:
        """Return the cursor after the last row that was returned."""
        return self._position.text()

    def close(self) -> None:
        """Release the lease, also one that `page` acquires concurrently in another thread."""
        self._is_closed = True
        self._database.log.release(self._lease.name)

    def _page(self, limit: int, most: int) -> SnapshotPage:
        self._hold()
        began, until = self._position.text(), time.monotonic() + PAGE_SECONDS
        rows: list[tuple[str, bytes]] = []
        while not rows and not self._at_end and time.monotonic() < until:
            rows = self._chunk(min(limit, self._rows), most)
        self._count += len(rows)
        reason, self._restarted = self._restarted, ""
        return SnapshotPage(
            rows,
            self._position.text(),
            began,
            self._at_end,
            bool(reason),
            reason,
            self.state.lowest,
            self._count,
        )

    @property
    def _at_end(self) -> bool:
        return self._position.table >= len(self.state.tables)

    # --- the lease ---------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Acquire the lease of a new snapshot; restart a snapshot that lost its lease or its log generation."""
        log, state = self._database.log, self.state
        if state.generation != log.generation:
            self._begin(LOG_GENERATION_CHANGED if state.generation else "")
        elif not log.held(self._lease.name):
            self._begin(SNAPSHOT_EXPIRED)

    def _begin(self, reason: str) -> None:
        log = self._database.log
        now = wall_ms()
        fresh = self.state if not reason else self.state.restarted(now)
        self.state = replace(fresh, generation=log.generation, held=log.latest, lease_started_ms=now)
        self._save(self.state)
        until = now + int(self._lease.seconds * 1000)
        log.hold(self._lease.name, self.state.held, until_ms=until, max_bytes=self._lease.bytes)
        self._position = Position(self.state.run, 0, None)
        self._restarted = reason or self._restarted

    # --- rows --------------------------------------------------------------------------------------------------------

    def _chunk(self, limit: int, most: int) -> list[tuple[str, bytes]]:
        name, after = self.state.tables[self._position.table], self._position.after
        source = self._database.source
        if after is not None and self._has_other_form(source.describe().get(name)):
            self._begin(SCHEMA_CHANGED)
            return []
        try:
            chunk = source.chunk(name, after=after, span=None, limit=limit)
        except NotFound:  # the table was dropped: it has no rows, and a schema change reports the drop
            self._advance(None, None, self._database.log.latest)
            return []
        if self._has_other_form(chunk.table):
            self._begin(SCHEMA_CHANGED)
            return []
        if self._was_emptied(chunk):
            self._begin(TRUNCATED)
            return []
        before = self._position.text()
        encoded = self._encoded(chunk, self._known_part(chunk), before)
        if encoded:
            average = sum(len(data) for _, data in encoded) // len(encoded)
            self._rows = max(min(most // max(average, 1), 65_536), 1)
        return encoded

    def _has_other_form(self, table: Table | None) -> bool:
        """Return whether `table` was re-created, or has another key order, since its first rows were read."""
        if table is None:
            return False
        after = self._position.after
        if after is not None and len(after) != len(table.key):
            return True
        known, now = self.state.forms.get(table.name), _form(table)
        if known is None or known == now:
            return False
        return known[1:] != now[1:] or self._was_recreated(table)

    def _was_recreated(self, table: Table) -> bool:
        """Return whether `table` was dropped or rebuilt since the snapshot began; an added column does not count."""
        log = self._database.log
        log.wait_beyond(self._database.source.head() - 1, LOG_SECONDS)
        return any(
            change.op is Op.SCHEMA_CHANGE and change.table.name == table.name and not _keeps_rows(change)
            for part in log.scan(after=self.state.lowest)
            for change in part.changes
        )

    def _was_emptied(self, chunk: Chunk) -> bool:
        """Return whether a TRUNCATE happened between the reads of two stretches.

        The truncate does not tell which of the rows sent are left, so the snapshot must restart.
        """
        name, log = chunk.table.name, self._database.log
        read = [stretch.offset for stretch in self.state.chunks if stretch.table == name]
        if not read or max(read) >= chunk.offset:
            return False
        if log.latest < chunk.offset and not self._database.catch_up(LOG_SECONDS):
            raise Unavailable(
                f"the log is at offset {log.latest}, behind the rows read at {chunk.offset}", hint="Retry in a moment."
            )
        return any(
            change.op is Op.TRUNCATE and change.table.name == name
            for part in log.scan(after=max(read), upto=chunk.offset)
            for change in part.changes
        )

    def _known_part(self, chunk: Chunk) -> Sequence[Row]:
        """Return the rows to send, after moving the position and, for new rows, the state past them."""
        state, table = self.state, chunk.table
        frontier = (state.table, state.after_key)
        if self._position[1:] == frontier:
            self._read_on(chunk)
            return chunk.rows
        if self._position.table < state.table or state.after is None:  # this table was read completely before
            self._read_again(chunk)
            moved = self._position.table + (chunk.next_key is None)
            self._position = Position(state.run, moved, chunk.next_key)
            return chunk.rows
        edge = self._order_of(table)(frontier[1] or ())
        known = sum(self._order_of(table)(table.key_of(row)) <= edge for row in chunk.rows)
        if not known:  # the keys between the frontier and this chunk may not have been read
            self._position = Position(state.run, *frontier)
            return ()
        if known < len(chunk.rows) or chunk.next_key is None:
            self._read_on(chunk)  # the keys after the frontier are a new stretch
        else:
            self._read_again(chunk)
            self._position = Position(state.run, self._position.table, chunk.next_key)
        return chunk.rows

    def _read_again(self, chunk: Chunk) -> None:
        """Save the offset of rows that were read again: the reader has caught up only after that offset."""
        if chunk.offset > self.state.highest:
            self.state = replace(self.state, again=chunk.offset)
            self._save(self.state)

    def _read_on(self, chunk: Chunk) -> None:
        """Add `chunk`, which holds every row from the frontier to its end, as a new stretch."""
        table = chunk.table
        self.state = replace(self.state, forms={**self.state.forms, table.name: _form(table)})
        end = table.key_of(chunk.rows[-1]) if chunk.next_key is not None else None
        self._advance(None if end is None else self._order_of(table)(end), chunk.next_key, chunk.offset)

    def _advance(self, end: bytes | None, next_key: Key | None, offset: int) -> None:
        """Save a new stretch durably, before any of its rows is sent."""
        self.state = self.state.read(offset=offset, end=END if end is None else end, next_key=next_key)
        self._save(self.state)
        self._position = Position(self.state.run, self.state.table, self.state.after_key)

    def _encoded(self, chunk: Chunk, rows: Sequence[Row], before: str) -> list[tuple[str, bytes]]:
        table, read_ms, run = chunk.table, wall_ms(), self.state.run
        number = self.state.tables.index(table.name)
        passing = self._view.filter.rows(table, rows)
        found: list[tuple[str, bytes]] = []
        for row in passing:
            key = table.key_of(row)
            # Rows with a NULL in their key may share the key: a reader that resumes there reads the chunk again.
            cursor = before if None in key else Position(run, number, key).text()
            found.append((cursor, self._view.encoder.row(table, row, chunk.offset, read_ms)))
        if found:
            found[-1] = (self._position.text(), found[-1][1])
        return found
