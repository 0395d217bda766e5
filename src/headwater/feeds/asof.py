"""A whole table as it was at one offset: chunks of now, each with everything undone that came after.

source.chunk (at its own offset V ≥ offset) ──┐
log (offset, V], scanned once ──> Undo ───────┴──> rows at `offset`, in key order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.errors import Conflict, InvalidRequest, NotFound, NotSupported, OffsetExpired, Unavailable
from headwater.feeds.pertable import PerTable
from headwater.feeds.undo import Undo
from headwater.log.live import LiveLog
from headwater.model.change import Change, Op
from headwater.model.table import Key, Row, Table
from headwater.sources.source import Source

CHUNK_ROWS = 10_000
PIECE_BYTES = 16 << 20
GLANCE = 256  # changes between two looks whether anybody still waits
LOG_SECONDS = 30.0  # how long a chunk waits for the log to hold what it saw

Gone = Callable[[], bool]


def read_as_of(
    source: Source, log: LiveLog, table: str, offset: int, *, chunk_rows: int = CHUNK_ROWS, gone: Gone = lambda: False
) -> Iterator[tuple[Table, list[Row]]]:
    """The rows of `table` at `offset`, in key order, at most `chunk_rows` and about 16 MiB at a time.

    Refused at once where it can be known, and on the way where it turns out: OffsetExpired when the changes
    since are not all retained, Conflict when the table's shape changed since, NotFound, NotSupported. It
    blocks: not for an event loop. Nothing is open at the source between two chunks. Unavailable soon after
    the reader is `gone`.
    """
    past = _Past(source, log, shape_of(source, table), offset, gone)
    return past.chunks(chunk_rows)


def shape_of(source: Source, name: str) -> Table:
    """The table whose past can be read; NotFound, NotSupported."""
    table = source.describe().get(name)
    if table is None:
        raise NotFound(f"there is no table {name!r}")
    if name not in source.status()["tables"]:
        raise NotSupported(f"{name!r} is not captured: its past is not known", hint="Read it as it is now.")
    return table


class _Past:
    """One table at one offset, and how far the log was undone."""

    def __init__(self, source: Source, log: LiveLog, table: Table, offset: int, gone: Gone) -> None:
        head = source.head()
        if offset > head:
            raise InvalidRequest(f"offset {offset} does not exist yet; the newest is {head}")
        self._source, self._log, self._table, self._offset = source, log, table, offset
        self._generation, self._gone = log.generation, gone
        self._undone = offset  # changes in (offset, undone] are in `_undo`
        self._place: Callable[[Key], bytes] = source.order(table, table.key)
        self._is_ours = PerTable(self._check_shape)
        self._undo = Undo(table.key_of, self._place)
        try:
            self._undo_upto(head)
        except BaseException:
            self._undo.close()
            raise

    def chunks(self, limit: int) -> Iterator[tuple[Table, list[Row]]]:
        """Every row, at most `limit` at a time."""
        try:
            piece: list[Row] = []
            weight = 0
            for row in self._rows(limit):
                piece.append(row)
                weight += _weight(row)
                if len(piece) == limit or weight >= PIECE_BYTES:
                    yield self._table, piece
                    piece, weight = [], 0
            if piece:
                yield self._table, piece
        finally:
            self._undo.close()

    def _rows(self, limit: int) -> Iterator[Row]:
        key: Key | None = None
        after = b""
        while True:
            chunk = self._source.chunk(self._table.name, after=key, span=None, limit=limit)
            if not _is_same(chunk.table, self._table):
                raise self._reshaped()
            self._undo_upto(chunk.offset)
            key = chunk.next_key
            upto = None if key is None else self._place(key)
            yield from self._undo.rows(chunk.rows, after=after, upto=upto)
            if upto is None:
                return
            after = upto

    def _undo_upto(self, offset: int) -> None:
        """Take in the log up to `offset`, waiting for it if need be."""
        self._source.wake()
        reached = self._log.wait_beyond(offset - 1, LOG_SECONDS)
        if self._log.generation != self._generation:
            raise OffsetExpired(self._offset, self._log.horizon, self._log.latest)
        if not reached:
            raise Unavailable(f"the log did not reach offset {offset} in {LOG_SECONDS:.0f} s", hint="Try again.")
        self._undo.add_all(self._changes(offset))
        self._undone = offset

    def _changes(self, upto: int) -> Iterator[Change]:
        for part in self._log.scan(after=self._undone, upto=upto):
            for number, change in enumerate(part.changes):
                if number % GLANCE == 0 and self._gone():
                    raise Unavailable("the reader of this snapshot left")
                if change.table.name != self._table.name:
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


def _weight(row: Row) -> int:
    return sum(len(value) for value in row if isinstance(value, (str, bytes)))


def _is_same(one: Table, other: Table) -> bool:
    return one.columns == other.columns and one.key == other.key
