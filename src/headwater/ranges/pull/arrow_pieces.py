"""Arrow bytes of rows as of an offset, and of the changes of several tables, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, compress
from typing import Any, NamedTuple

import msgspec

from headwater.errors import InvalidRequest, NotFound, Unavailable
from headwater.log.log import Log
from headwater.model import arrow
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, to_plain
from headwater.model.per_table import PerTable
from headwater.model.suggestion import nearest
from headwater.model.table import Row, Table
from headwater.model.table_ddl import with_table_ddl
from headwater.ranges.pull.jobs import WAL_HORIZON_EXCEEDED, SnapshotJob, TablesJob, changes_gone
from headwater.ranges.pull.slice_cache import Slice
from headwater.ranges.pull.snapshot import PastLog, Piece, read_as_of, shape_of
from headwater.ranges.pull.table_changes import BATCH_BYTES, TransactionEnds, condition_of, holding
from headwater.sources.read import BulkReader, Condition, Reader

TABLES_ROWS = 4_096  # changes in one batch of several tables

Gone = Callable[[], bool]


class BodyPiece(NamedTuple):
    """A part of the body and its number of rows. The sender closes a slice."""

    data: bytes | Slice
    rows: int


def columns_of(table: Table, names: Collection[str] | None) -> frozenset[str] | None:
    """Return the columns with these names in the database or in Arrow; InvalidRequest if one does not exist."""
    if names is None:
        return None
    own = {arrow.column_name(table, column): column.name for column in table.columns}
    for name in names:
        if name not in own and name not in table.index:
            raise InvalidRequest(f"`columns`: table {table.name!r} has no column {name!r}", hint=nearest(name, own))
    return frozenset(name if name in table.index else own[name] for name in names)


def snapshot_pieces(reader: BulkReader, log: PastLog, job: SnapshotJob, left: Gone) -> Iterator[BodyPiece]:
    """Yield an Arrow stream of rows as of `job.offset`; each batch's metadata has the last key that it covers."""
    table = shape_of(reader, job.table)
    columns = columns_of(table, job.pick.columns)
    condition = condition_of(reader, table, job.pick)
    place = reader.order(table, table.key)
    stream = arrow.ArrowStream(arrow.schema(table, columns))
    rows_each = reader.chunk_rows
    chunks = read_as_of(reader, log, table, job.offset, span=job.pick.span, chunk_rows=rows_each, gone=left)

    def encoded(chunk: Piece) -> BodyPiece:
        rows = chunk[1]
        last = place(table.key_of(rows[-1])).hex()
        kept = rows if condition is None else _passing(condition, list(rows), left)
        batch = arrow.rows_batch(table, kept, columns)
        return BodyPiece(stream.batch(batch, {"last_key": last}), len(kept))

    yield from _whole_stream(stream, map(encoded, chunks))


def _whole_stream(stream: arrow.ArrowStream, batches: Iterator[BodyPiece]) -> Iterator[BodyPiece]:
    """Yield the stream of `batches`. A map does not keep a batch or its rows while the reader takes the last piece."""
    pieces = chain(batches, [BodyPiece(stream.end(), 0)])
    yield _joined(stream.start(), next(pieces))
    yield from pieces


def _joined(start: bytes, piece: BodyPiece) -> BodyPiece:
    assert isinstance(piece.data, bytes)
    return BodyPiece(start + piece.data, piece.rows)


def _passing(condition: Condition, rows: list[Row], left: Gone) -> list[Row]:
    return list(compress(rows, holding(condition, rows, left)))


def check_kept(log: Log, after: int, upto: int) -> None:
    """Raise OffsetExpired or InvalidRequest unless the log has all of (after, upto]."""
    horizon, latest = log.horizon, log.latest
    if after + 1 < horizon:
        raise changes_gone(after, horizon, latest, WAL_HORIZON_EXCEEDED)
    if upto > latest:
        raise InvalidRequest(f"offset {upto} is not in the log yet; the newest there is {latest}")


# --- several tables --------------------------------------------------------------------------------------


def tables_pieces(reader: Reader, log: Log, job: TablesJob, left: Gone) -> Iterator[BodyPiece]:
    """Yield an Arrow stream of changes of several tables and their schemas: a row each, with images as JSON."""
    known = reader.describe()
    for name in job.tables:
        if name not in known:
            raise NotFound(f"there is no table {name!r}", hint="See schema.list_tables.")
    check_kept(log, job.after, job.upto)
    return _tables(log, job, left)


def _tables(log: Log, job: TablesJob, left: Gone) -> Iterator[BodyPiece]:
    import pyarrow as pa

    texts = [pa.field(name, pa.string()) for name in ("_table", "_key", "before", "after")]
    stream = arrow.ArrowStream(pa.schema([*texts, *arrow.about_fields()]))

    def encoded(gathered: tuple[arrow.Images, int]) -> BodyPiece:
        images, upto = gathered
        cells = list(zip(*images.rows, strict=True)) if images.rows else [()] * len(texts)
        columns = [pa.array(column, pa.string()) for column in cells]
        batch = pa.record_batch([*columns, *arrow.about_columns(images)], schema=stream.schema)
        return BodyPiece(stream.batch(batch, {"upto": str(upto)}), len(images.rows))

    return _whole_stream(stream, map(encoded, _gathered(log, job, left)))


def _gathered(log: Log, job: TablesJob, left: Gone) -> Iterator[tuple[arrow.Images, int]]:
    wanted, ends, writer = frozenset(job.tables), TransactionEnds(log), PerTable(_Writer)
    images = arrow.Images()
    weight = 0
    for part in log.scan(after=job.after, upto=job.upto) if job.after < job.upto else ():
        if left():
            raise Unavailable("the reader of these changes left")
        for offset, change in enumerate(part.changes, part.first):
            if wanted and change.table.name not in wanted:
                continue
            row = writer(change.table).cells(with_table_ddl(change) if job.hides_ddl else change)
            images.add(row, change.op.word, ends.of(part), offset, part)
            weight += sum(map(len, filter(None, row)))
            if (len(images.rows) >= TABLES_ROWS or weight >= BATCH_BYTES) and offset < job.upto:
                yield images.taken(), offset
                weight = 0
    yield images.taken(), job.upto


class _Writer:
    """Encodes changes of one table version as texts: its name, the key, both images."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._name = arrow.clean(table.name)
        self._names = [
            (place, arrow.clean(column.name)) for place, column in enumerate(table.columns) if not column.hidden
        ]

    def cells(self, change: Change) -> tuple[str | None, ...]:
        """Return table name, key, before image and after image as texts, None for what the change lacks."""
        if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
            details = {"ddl": change.ddl, "resnapshot": change.resnapshot, "version": change.table.version}
            return self._name, None, None, _json(details) if change.op is Op.SCHEMA_CHANGE else None
        key = [None if value is UNAVAILABLE else to_plain(value) for value in change.key or ()]
        return self._name, _json(key), self._image(change.before), self._image(change.after)

    def _image(self, row: Row | None) -> str | None:
        if row is None:
            return None
        return _json({name: to_plain(row[place]) for place, name in self._names if row[place] is not UNAVAILABLE})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
