"""Arrow streams that must be whole: record batches, and what stands beside them, out of the body of an answer.

The reader of pyarrow takes the end of a file between two batches for the end of the stream, end mark or not.
Here every byte that it asks for must come.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from headwater.client.protocol import broken

if TYPE_CHECKING:
    import pyarrow as pa

_PREFIX = struct.Struct("<II")  # the mark of a message, and the length of its metadata
_MARK = 0xFFFFFFFF
_BATCH, _END = 3, -1  # kinds of messages: a record batch, and ours for the end mark


class Told(NamedTuple):
    """A batch with its own metadata and that of its schema."""

    batch: pa.RecordBatch
    metadata: Mapping[bytes, bytes]
    schema: Mapping[bytes, bytes]


class Whole:
    """A file for pyarrow, over a function that reads exactly n bytes and fewer only at the end."""

    closed = False

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> bytes:
        piece = self._read(size)
        if len(piece) < size:
            raise broken()
        return piece

    def close(self) -> None:
        """The body belongs to its connection."""


def read_batches(read: Callable[[int], bytes]) -> Iterator[Told]:
    """The batches of a stream, first an empty one for its schema, up to its end mark; raises when it has none."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(Whole(read)) as reader:
            yield from _batches(reader)
    except (pa.ArrowException, OSError) as error:
        raise broken(error) from None


def _batches(reader: pa.RecordBatchStreamReader) -> Iterator[Told]:
    schema = reader.schema.metadata or {}
    yield Told(_empty(reader.schema), {}, schema)
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield Told(batch, metadata or {}, schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)


class Fed:
    """The same for who cannot wait inside a read: fed with pieces, it gives what they complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._message = io.BytesIO()
        self._reader: pa.RecordBatchStreamReader | None = None
        self.ended = False  # the end mark came

    def take(self, piece: bytes) -> Iterator[Told]:
        """The batches that `piece` completes."""
        import pyarrow as pa

        self._rest += piece
        try:
            while (header := _header(self._rest)) is not None and len(self._rest) >= header.size:
                self._message = io.BytesIO(self._rest[: header.size])
                del self._rest[: header.size]
                self.ended = header.kind == _END
                yield from self._told(header.kind)
        except (pa.ArrowException, OSError, struct.error, IndexError) as error:
            raise broken(error) from None

    def _told(self, kind: int) -> Iterator[Told]:
        import pyarrow as pa

        if self._reader is None:  # which takes the schema at once
            self._reader = pa.ipc.open_stream(Whole(lambda size: self._message.read(size)))
            yield Told(_empty(self._reader.schema), {}, self._reader.schema.metadata or {})
        elif kind == _BATCH:
            batch, metadata = self._reader.read_next_batch_with_custom_metadata()
            yield Told(batch, metadata or {}, self._reader.schema.metadata or {})


class Kept:
    """Lets rows through, and holds back an empty batch to show the schema by if there are none."""

    def __init__(self) -> None:
        self._empty: pa.RecordBatch | None = None
        self._some = False

    def rows(self, told: Told) -> Iterator[pa.RecordBatch]:
        """The batch, if there are rows in it."""
        if told.batch.num_rows:
            self._some = True
            yield told.batch
        else:
            self._empty = told.batch

    def rest(self) -> Iterator[pa.RecordBatch]:
        """At the end: an empty batch when there was no other."""
        if not self._some and self._empty is not None:
            yield self._empty


class Header(NamedTuple):
    """The head of a message of the IPC format: its kind, and its size from the mark to the end of its body."""

    kind: int
    size: int


def _header(data: bytearray) -> Header | None:
    """What begins at the start of `data`; None while too little of it is there."""
    if len(data) < _PREFIX.size:
        return None
    mark, length = _PREFIX.unpack_from(data)
    if mark != _MARK:
        raise broken("this is no Arrow stream")
    if length == 0:
        return Header(_END, _PREFIX.size)
    if len(data) < _PREFIX.size + length:
        return None
    kind, body = _fields(data, _PREFIX.size)
    return Header(kind, _PREFIX.size + length + body)


def _fields(data: bytearray, base: int) -> tuple[int, int]:
    """Kind and body length of the flatbuffer at `base`: fields 1 and 3 of its root table."""
    root = base + int(struct.unpack_from("<I", data, base)[0])
    places = root - int(struct.unpack_from("<i", data, root)[0])
    (size,) = struct.unpack_from("<H", data, places)
    kind, body = (struct.unpack_from("<H", data, places + at)[0] if at < size else 0 for at in (6, 10))
    return data[root + kind], int(struct.unpack_from("<q", data, root + body)[0]) if body else 0
