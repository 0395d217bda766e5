"""Changes of one table as Arrow bytes, in slices of the log; whole slices are served from the cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from headwater.errors import NotSupported, OffsetExpired
from headwater.log.log import Log
from headwater.model import arrow
from headwater.model.table import Table
from headwater.ranges.pull.arrow_pieces import BodyPiece, Gone, check_kept, columns_of
from headwater.ranges.pull.jobs import LZ4, LogJob, changes_gone, stop_message
from headwater.ranges.pull.slice_cache import Cache, Slice, SliceName, Stop
from headwater.ranges.pull.table_changes import ChangeCollector
from headwater.sources.read import BulkReader

if TYPE_CHECKING:
    import pyarrow as pa

SLICE = 16_384  # offsets; a slice begins after a multiple of it
CHECKED_FIRST = 8  # slices checked before the first byte is sent: later an error cannot be sent as a status
OPENING_BYTES = 32 << 20  # about the most bytes made before the first byte is sent


def log_pieces(reader: BulkReader, log: Log, cache: Cache, job: LogJob, left: Gone) -> Iterator[BodyPiece]:
    """Yield an Arrow stream of one table's changes; each batch's metadata has the offset up to which it is complete."""
    target = reader.shape(job.table, job.shape)
    if job.shape is None and job.table not in reader.status()["tables"]:
        raise NotSupported(f"table {job.table!r} is not captured", hint="Read it with data.get or SQL.")
    check_kept(log, job.after, job.upto)
    return _LogAnswer(reader, log, cache, job, target, left).pieces()


class _LogAnswer:
    def __init__(self, reader: BulkReader, log: Log, cache: Cache, job: LogJob, target: Table, left: Gone) -> None:
        self._reader, self._log, self._cache, self._job = reader, log, cache, job
        self._target, self._left = target, left
        self._columns = columns_of(target, job.pick.columns)
        self._stream = arrow.ArrowStream(arrow.changes_schema(target, self._columns), job.compression)
        self._whole = arrow.ArrowStream(arrow.changes_schema(target), LZ4)
        self._as_kept = self._columns is None and job.compression == LZ4
        self._gatherer = ChangeCollector(reader, log, target, job.pick, left)
        self._horizon, self._latest = log.horizon, log.latest
        self._held: dict[int, Slice] = {}  # checked and not yet sent, by the offset after which a slice begins

    def pieces(self) -> Iterator[BodyPiece]:
        try:
            lows = range(self._job.after - self._job.after % SLICE, self._job.upto, SLICE)
            self._check_first(lows[:CHECKED_FIRST])
            first = self._fresh(*self._bounds(lows[0])) if lows and lows[0] not in self._held else iter(())
            yield self._opening(first)
            yield from first
            for low in lows if lows and lows[0] in self._held else lows[1:]:
                yield from self._slice(low)
            yield BodyPiece(self._stream.end(), 0)
        finally:
            for held in self._held.values():
                held.close()

    def _check_first(self, lows: range) -> None:
        """Raise for a change that no reader may pass, before anything is sent."""
        for low in lows:
            if (found := self._kept(low)) is not None:
                self._held[low] = found
                self._check(found.stops)

    def _opening(self, first: Iterator[BodyPiece]) -> BodyPiece:
        """Return the first piece: it has several batches, so that errors in them are raised before anything is sent."""
        data, rows = [self._stream.start()], 0
        for piece in first:
            assert isinstance(piece.data, bytes)
            data.append(piece.data)
            rows += piece.rows
            if sum(map(len, data)) >= OPENING_BYTES:
                break
        return BodyPiece(b"".join(data), rows)

    def _bounds(self, low: int) -> tuple[int, int]:
        return max(low, self._job.after), min(low + SLICE, self._job.upto)

    def _slice(self, low: int) -> Iterator[BodyPiece]:
        found = self._held.pop(low, None) or self._kept(low)
        if found is None:
            yield from self._fresh(*self._bounds(low))
            return
        self._check(found.stops)
        if self._as_kept and self._bounds(low) == (low, low + SLICE):
            yield BodyPiece(found, found.rows)
            return
        with closing(found):
            yield from self._cut(found, *self._bounds(low))

    def _kept(self, low: int) -> Slice | None:
        """Return the slice from the cache, after adding it if necessary; None if it cannot be cached."""
        can_be_kept = self._job.pick.is_all and low + SLICE <= self._latest
        if not can_be_kept:
            return None
        name = SliceName(self._job.place.db, self._job.place.generation, self._target, low)
        return self._cache.get(name) or (self._cache.get(name, is_new=True) if self._keep(name) else None)

    def _keep(self, name: SliceName) -> bool:
        if name.after + 1 < self._horizon or (writing := self._cache.begin(name)) is None:
            return False
        gatherer = ChangeCollector(self._reader, self._log, self._target, self._job.pick, self._left)
        try:
            for images, upto in gatherer.batches(name.after, name.after + SLICE):
                data = self._whole.batch(arrow.images_batch(self._target, images), {"upto": str(upto)})
                if not writing.add(data, len(images.rows)):
                    writing.drop()
                    return False
            writing.done(gatherer.stops)
        except (OSError, OffsetExpired):
            writing.drop()  # no disk space, or the log was trimmed: the slice is served uncached, as far as possible
            return False
        except BaseException:
            writing.drop()
            raise
        return True

    def _fresh(self, after: int, upto: int) -> Iterator[BodyPiece]:
        return map(self._encoded, self._gatherer.batches(after, upto))

    def _encoded(self, gathered: tuple[arrow.Images, int]) -> BodyPiece:
        self._check(self._gatherer.stops)
        images, reached = gathered
        batch = arrow.images_batch(self._target, images, self._columns)
        return BodyPiece(self._stream.batch(batch, {"upto": str(reached)}), len(images.rows))

    def _cut(self, kept: Slice, after: int, upto: int) -> Iterator[BodyPiece]:
        """Yield the part of a cached slice in (after, upto], with the requested columns, one batch at a time."""
        import pyarrow as pa

        misfits = len(self._target.columns)
        with pa.ipc.open_stream(_SliceStream(self._whole.start(), kept)) as stream:
            while after < upto:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
                reached = min(int(metadata[b"upto"]), upto)
                if after < reached:
                    if self._columns is not None and batch[misfits].null_count < len(batch):
                        # The cached column of misfits includes columns not requested.
                        yield from self._fresh(after, reached)
                    else:
                        part = [_between(batch, after, reached)]
                        del batch  # the reader may take long
                        yield self._chosen(part.pop(), reached)
                    after = reached

    def _chosen(self, part: pa.RecordBatch, reached: int) -> BodyPiece:
        import pyarrow as pa

        schema = self._stream.schema
        part = pa.record_batch([part[name] for name in schema.names], schema=schema)
        return BodyPiece(self._stream.batch(part, {"upto": str(reached)}), len(part))

    def _check(self, stops: list[Stop]) -> None:
        for offset, reason in stops:
            if self._job.after < offset <= self._job.upto:
                message = stop_message(self._job.table, offset, reason)
                raise changes_gone(self._job.after, self._horizon, self._latest, reason, message)


class _SliceStream:
    """An Arrow stream of a schema and the batches of a slice, as a file for pyarrow, which reads message by message."""

    closed = False

    def __init__(self, start: bytes, kept: Slice) -> None:
        self._start, self._kept, self._place = start, kept, 0

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes."""
        if self._start:
            data, self._start = self._start[:size], self._start[size:]
        else:
            data = self._kept.read(self._place, size)
            self._place += len(data)
        return data


def _between(batch: pa.RecordBatch, after: int, upto: int) -> pa.RecordBatch:
    """Return the rows with offsets in (after, upto]; rows are in order of offset."""
    offsets = batch[batch.num_columns - 2]
    low = bisect_right(offsets, after, key=_number)
    return batch.slice(low, bisect_right(offsets, upto, low, key=_number) - low)


def _number(scalar: Any) -> int:
    return int(scalar.as_py())
