"""The rows of a table, or of a span of it, as they were at one offset: chunks of now, undone what came after.

source.chunk (at its own offset V ≥ offset) ──┐
log (offset, V], scanned once ──> Undo ───────┴──> rows at `offset`, in key order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headwater.errors import Conflict, InvalidRequest, NotFound, NotSupported, OffsetExpired, Unavailable
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import Span
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.ranges.pull.undo import EVERYTHING, Undo
from headwater.sources.read import Chunk, Reader

CHUNK_ROWS = 10_000
PIECE_BYTES = 16 << 20
GLANCE = 256  # changes between two looks whether anybody still waits
LOG_SECONDS = 30.0  # how long a chunk waits for the log to hold what it saw

Gone = Callable[[], bool]
Piece = tuple[Table, Sequence[Row]]


class Past(Protocol):
    """What undoing needs of a log."""

    @property
    def generation(self) -> str:
        """See Log."""
        ...

    @property
    def horizon(self) -> int:
        """See Log."""
        ...

    @property
    def latest(self) -> int:
        """See Log."""
        ...

    def wait_beyond(self, offset: int, timeout: float | None = None) -> bool:
        """Sleep until `latest` passes `offset` or `timeout` ends; whether it passed."""
        ...

    def scan(self, *, after: int, upto: int | None = None) -> Iterator[Transaction]:
        """See Log."""
        ...


def read_as_of(
    source: Reader,
    log: Past,
    table: str,
    offset: int,
    *,
    span: Span = EVERYTHING,
    chunk_rows: int = CHUNK_ROWS,
    gone: Gone = lambda: False,
) -> Iterator[Piece]:
    """The rows of `table` in `span` at `offset`, in key order, at most `chunk_rows` and about 16 MiB at a time.

    Refused at once where it can be known, and on the way where it turns out: OffsetExpired when the changes
    since are not all retained, Conflict when the table's shape changed since or the log is not its history,
    NotFound, NotSupported. It blocks: not for an event loop. Nothing is open at the source between two chunks.
    Unavailable soon after the reader is `gone`.
    """
    shape = shape_of(source, table)
    return read_table_as_of(source, log, shape, offset, span=span, chunk_rows=chunk_rows, gone=gone)


def read_table_as_of(
    source: Reader,
    log: Past,
    table: Table,
    offset: int,
    *,
    span: Span = EVERYTHING,
    chunk_rows: int = CHUNK_ROWS,
    gone: Gone = lambda: False,
) -> Iterator[Piece]:
    """As `read_as_of`, of a table that is in just this shape."""
    return _Past(source, log, table, offset, span, gone).pieces(chunk_rows)


def shape_of(source: Reader, name: str) -> Table:
    """The table whose past can be read; NotFound, NotSupported."""
    table = source.describe().get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}")
    if name not in source.status()["tables"]:
        raise NotSupported(f"{name!r} is not captured: its past is not known", hint="Read it as it is now.")
    return table


class _Past:
    """One table at one offset, and how far the log was undone."""

    def __init__(self, source: Reader, log: Past, table: Table, offset: int, span: Span, gone: Gone) -> None:
        head = source.head()
        if offset > head:
            raise InvalidRequest(f"offset {offset} does not exist yet; the newest is {head}")
        self._source, self._log, self._table, self._offset, self._span = source, log, table, offset, span
        self._generation, self._gone = log.generation, gone
        self._undone = offset  # changes in (offset, undone] are in `_undo`
        self._place: Callable[[Key], bytes] = source.order(table, table.key)
        self._is_ours = PerTable(self._check_shape)
        self._undo = Undo(table, self._place, span)
        try:
            self._undo_upto(head)
        except BaseException:
            self._undo.close()
            raise

    def pieces(self, limit: int) -> Iterator[Piece]:
        """Every row, at most `limit` at a time."""
        try:
            for chunk, span in self._chunks(limit):
                if not self._undo.touches(span):
                    if chunk.rows:
                        yield self._table, chunk.rows
                else:
                    yield from self._cut(self._undo.rows(chunk.rows, span), limit)
        finally:
            self._undo.close()

    def _chunks(self, limit: int) -> Iterator[tuple[Chunk, Span]]:
        """The chunks, each with the part of the span that it is all of."""
        key: Key | None = None
        start = self._span.start
        while True:
            chunk = self._source.chunk(self._table.name, after=key, span=self._span, limit=limit)
            if not _is_same(chunk.table, self._table):
                raise self._reshaped()
            self._undo_upto(chunk.offset)
            if chunk.next_key is None:
                yield chunk, Span(start, self._span.end)
                return
            key = chunk.next_key
            # The first bytes behind its place; before the span there is nothing to be had.
            end = max(self._place(key) + b"\0", start)
            yield chunk, Span(start, end)
            start = end

    def _cut(self, rows: Iterator[Row], limit: int) -> Iterator[Piece]:
        """`rows` in pieces; those that share a key, which holds NULLs then, stay in one."""
        piece: list[Row] = []
        weight = 0
        key_of = self._table.key_of
        for row in rows:
            if len(piece) >= limit or weight >= PIECE_BYTES:
                key = key_of(row)
                if None not in key or key != key_of(piece[-1]):
                    yield self._table, piece
                    piece, weight = [], 0
            piece.append(row)
            weight += _weight(row)
        if piece:
            yield self._table, piece

    def _undo_upto(self, offset: int) -> None:
        """Take in the log up to `offset`, waiting for it if need be."""
        if self._gone():
            raise _left()
        self._source.wake()
        reached = self._log.wait_beyond(offset - 1, LOG_SECONDS)
        if self._log.generation != self._generation:
            raise OffsetExpired(self._offset, self._log.horizon, self._log.latest)
        if not reached:
            raise Unavailable(f"the log did not reach offset {offset} in {LOG_SECONDS:.0f} s", hint="Try again.")
        if offset > self._undone:
            self._undo.add_all(self._changes(offset))
            self._undone = offset

    def _changes(self, upto: int) -> Iterator[Change]:
        name = self._table.name
        for part in self._log.scan(after=self._undone, upto=upto):
            for number, change in enumerate(part.changes):
                if number % GLANCE == 0 and self._gone():
                    raise _left()
                if change.table.name != name:
                    continue
                if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE) or not self._is_ours(change.table):
                    raise self._reshaped()
                yield change

    def _check_shape(self, table: Table) -> bool:
        return _is_same(table, self._table)

    def _reshaped(self) -> Conflict:
        return Conflict(
            f"table {self._table.name!r} was altered, emptied or replaced after offset {self._offset}",
            hint="Take a snapshot of now and follow from the offset it carries.",
            resnapshot_reason="schema_changed",
        )


def _left() -> Unavailable:
    return Unavailable("the reader of this snapshot left")


def _weight(row: Row) -> int:
    return sum(len(value) for value in row if isinstance(value, (str, bytes)))


def _is_same(one: Table, other: Table) -> bool:
    return one.columns == other.columns and one.key == other.key
