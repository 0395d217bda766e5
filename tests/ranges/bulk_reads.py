"""A captured database read as the bulk worker reads it, and Arrow answers as plain rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.capture.captured_database import Running

from headwater.model.keys.key import Span
from headwater.ranges.pull.arrow_pieces import BodyPiece, snapshot_pieces, tables_pieces
from headwater.ranges.pull.jobs import DatabaseLocation, LogJob, Selection, SnapshotJob, TablesJob
from headwater.ranges.pull.log_slices import log_pieces
from headwater.ranges.pull.slice_cache import Cache, Slice
from headwater.ranges.worker.open_databases import DurableLog
from headwater.sources.sqlite.read.bulk_reader import SqliteReader

Rows = list[dict[str, Any]]


def place_of(one: Running) -> DatabaseLocation:
    """Return the place of the database for the worker."""
    log = str(one.disk.path)
    return DatabaseLocation("app", one.source.bulk_address(), log, os.stat(log).st_ino, one.log.generation)


class Side:
    """One database, read as the worker process reads it."""

    def __init__(self, one: Running, folder: Path) -> None:
        self.one, self.place = one, place_of(one)
        self.reader = SqliteReader(one.source.path, inode=one.source.inode, generation=one.log.generation)
        self.log = DurableLog.open(one.disk.path, read_only=True)
        self.cache = Cache(folder, 100 << 20)

    def close(self) -> None:
        self.reader.close()
        self.log.close()

    def durable(self) -> int:
        """Wait until everything committed is in the log file; return its newest offset."""
        self.one.caught_up()
        self.one.log.flush()
        return self.one.log.durable

    def snapshot(self, offset: int, span: Span = Span(), table: str = "t", **pick: Any) -> Rows:  # noqa: B008
        job = SnapshotJob(self.place, table, offset, Selection(span, **pick))
        return rows_of(snapshot_pieces(self.reader, self.log, job, lambda: False))

    def changes(self, after: int, upto: int, shape: int | None = None, table: str = "t", **pick: Any) -> Rows:
        return rows_in(self.body(LogJob(self.place, table, after, upto, shape, Selection(**pick))))

    def body(self, job: LogJob) -> bytes:
        return bytes_of(log_pieces(self.reader, self.log, self.cache, job, lambda: False))

    def tables(self, after: int, upto: int, *names: str) -> Rows:
        return rows_of(tables_pieces(self.reader, self.log, TablesJob(self.place, names, after, upto), lambda: False))


@contextmanager
def reading(one: Running, folder: Path) -> Iterator[Side]:
    """Read `one` as the worker process does, with slices cached in `folder`."""
    side = Side(one, folder)
    try:
        yield side
    finally:
        side.close()


def bytes_of(pieces: Iterable[BodyPiece]) -> bytes:
    """Return the whole body."""
    found = b""
    for piece in pieces:
        if isinstance(piece.data, Slice):
            found += piece.data.read(0, piece.data.length)
            piece.data.close()
        else:
            found += piece.data
    return found


def rows_of(pieces: Iterable[BodyPiece]) -> Rows:
    """Return the rows of an answer; fail if it is incomplete."""
    return rows_in(bytes_of(pieces))


def rows_in(data: bytes) -> Rows:
    """Return the rows of a stream, with times as numbers."""
    assert data.endswith(b"\xff\xff\xff\xff\0\0\0\0"), "the end mark is missing"
    with pa.ipc.open_stream(data) as reader:
        table = reader.read_all()
    place = table.schema.get_field_index("_commit_timestamp")
    if place >= 0:
        table = table.set_column(place, "_commit_timestamp", table.column(place).cast(pa.int64()))
    return table.to_pylist()


def rows_and_metadata(data: bytes, name: bytes) -> list[tuple[int, bytes]]:
    """Return the number of rows and the metadata `name` of each batch."""
    found = []
    with pa.ipc.open_stream(data) as reader:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return found
            found.append((len(batch), metadata[name]))


ABOUT = ("_change_type", "_commit_version", "_commit_timestamp", "_offset", "_txn")


def folded(rows: Rows, changes: Rows, *key: str) -> Rows:
    """Return `rows` after `changes`: a preimage or delete removes its key, a postimage or insert sets it."""
    held = {tuple(row[name] for name in key): row for row in rows}
    assert len(held) == len(rows)
    for change in changes:
        row = {name: value for name, value in change.items() if name not in ABOUT}
        place = tuple(row[name] for name in key)
        if change["_change_type"] in ("delete", "update_preimage"):
            assert held.pop(place) == row, "images chain"
        else:
            assert place not in held
            held[place] = row
    return sorted(held.values(), key=repr)
