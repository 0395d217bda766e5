"""The rows of a table, or of a span of it, as of one offset: chunks of current rows, with later changes undone.

source.chunk (at its own offset V ≥ offset) ──┐
log (offset, V], scanned once ──> Undo ───────┴──> rows at `offset`, in key order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headwater.errors import Conflict, InvalidRequest, NotFound, NotSupported, OffsetExpired, Unavailable
from headwater.log.log import Log
from headwater.model.change import Change, Op
from headwater.model.keys.key import Span
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.ranges.pull.undo import EVERYTHING, Undo
from headwater.sources.read import Chunk, Reader

CHUNK_ROWS = 10_000
PIECE_BYTES = 4 << 20
CHECK_EVERY = 256  # changes between two checks whether the reader left
LOG_SECONDS = 30.0  # how long a chunk waits for the log to reach its offset

Gone = Callable[[], bool]
Piece = tuple[Table, Sequence[Row]]


class PastLog(Log, Protocol):
    """A log whose growth can be waited for."""

    def wait_beyond(self, offset: int, timeout: float | None = None) -> bool:
        """Block until `latest` is above `offset` or `timeout` ends; return whether it is above."""


def read_as_of(
    source: Reader,
    log: PastLog,
    table: Table,
    offset: int,
    *,
    span: Span = EVERYTHING,
    chunk_rows: int = CHUNK_ROWS,
    gone: Gone = lambda: False,
) -> Iterator[Piece]:
    """Yield the rows of `table` in `span` as of `offset`, in key order, up to `chunk_rows` or about 4 MiB at a time.

    Raise, as early as possible, OffsetExpired if later changes were trimmed, Conflict if the table was altered since
    or the log is not its history, and Unavailable soon after the reader is `gone`. Blocks: do
    not call it in an event loop. Between two pieces, nothing is open at the source and no rows are kept.
    """
    return _PastTable(source, log, table, offset, span, gone).pieces(chunk_rows)


def shape_of(source: Reader, name: str) -> Table:
    """Return a captured table; NotFound if it does not exist, NotSupported if it is not captured."""
    table = source.describe().get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}")
    if name not in source.status()["tables"]:
        raise NotSupported(f"table {name!r} is not captured: earlier rows are not available", hint="Read current rows.")
    return table


class _PastTable:
    """One table as of one offset, and the offset up to which changes were undone."""

    def __init__(self, source: Reader, log: PastLog, table: Table, offset: int, span: Span, gone: Gone) -> None:
        head = source.head()
        if offset > head:
            raise InvalidRequest(f"offset {offset} does not exist yet; the newest is {head}")
        self._source, self._log, self._table, self._offset, self._span = source, log, table, offset, span
        self._generation, self._gone = log.generation, gone
        self._key: Key | None = None  # of the last row read
        self._start: bytes | None = span.start  # where the next chunk begins; None at the end
        self._undone = offset  # changes in (offset, undone] are in `_undo`
        self._place: Callable[[Key], bytes] = source.order(table, table.key)
        self._is_ours = PerTable(lambda shape: _is_same(shape, table))
        self._undo = Undo(table, self._place, span)
        try:
            self._undo_upto(head)
        except BaseException:
            self._undo.close()
            raise

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Yield all rows, at most `limit` at a time."""
        try:
            while self._start is not None:
                # `pop` leaves the rows to the reader alone, who may take long for them.
                chunk, span = self._next_chunk(self._start, limit)
                if self._undo.touches(span):
                    yield from self._cut(self._undo.rows(chunk.pop().rows, span), limit)
                elif chunk[0].rows:
                    yield self._table, chunk.pop().rows
        finally:
            self._undo.close()

    def _next_chunk(self, start: bytes, limit: int) -> tuple[list[Chunk], Span]:
        """Return the chunk from `start`, and the part of the span that it covers."""
        chunk = self._source.chunk(self._table.name, after=self._key, span=self._span, limit=limit)
        if not _is_same(chunk.table, self._table):
            raise self._reshaped()
        self._undo_upto(chunk.offset)
        self._key = chunk.next_key
        # The smallest bytes after the place of the key, but not before the start of the span.
        self._start = None if self._key is None else max(self._place(self._key) + b"\0", start)
        return [chunk], Span(start, self._span.end if self._start is None else self._start)

    def _cut(self, rows: Iterator[Row], limit: int) -> Iterator[Piece]:
        """Yield `rows` in pieces; rows that share a key (it contains NULLs) stay in one piece."""
        piece: list[Row] = []
        weight = 0
        key_of = self._table.key_of
        for row in rows:
            if len(piece) >= limit or weight >= PIECE_BYTES:
                key = key_of(row)
                if None not in key or key != key_of(piece[-1]):
                    yield self._table, _taken(piece)
                    weight = 0
            piece.append(row)
            weight += sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if piece:
            yield self._table, _taken(piece)

    def _undo_upto(self, offset: int) -> None:
        """Add the changes up to `offset` to the undo, after a wait for the log if necessary."""
        if self._gone():
            raise _left()
        self._source.wake()
        reached = self._log.wait_beyond(offset - 1, LOG_SECONDS)
        if self._log.generation != self._generation:
            raise OffsetExpired(self._offset, self._log.horizon, self._log.latest)
        if not reached:
            raise Unavailable(f"the log did not reach offset {offset} in {LOG_SECONDS:.0f} s", hint="Retry.")
        if offset > self._undone:
            self._undo.add_all(self._changes(offset))
            self._undone = offset

    def _changes(self, upto: int) -> Iterator[Change]:
        name = self._table.name
        for part in self._log.scan(after=self._undone, upto=upto):
            for number, change in enumerate(part.changes):
                if number % CHECK_EVERY == 0 and self._gone():
                    raise _left()
                if change.table.name != name:
                    continue
                if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE) or not self._is_ours(change.table):
                    raise self._reshaped()
                yield change

    def _reshaped(self) -> Conflict:
        return Conflict(
            f"table {self._table.name!r} was altered, emptied or replaced after offset {self._offset}",
            hint="Take a new snapshot and follow the changes after its offset.",
            resnapshot_reason="schema_changed",
        )


def _left() -> Unavailable:
    return Unavailable("the reader of this snapshot left")


def _taken(rows: list[Row]) -> Sequence[Row]:
    """Return the rows and empty the list."""
    taken = tuple(rows)
    rows.clear()
    return taken


def _is_same(one: Table, other: Table) -> bool:
    return one.columns == other.columns and one.key == other.key
