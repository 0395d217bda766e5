"""Record batches with their metadata, read from the Arrow stream of a response.

The reader of pyarrow accepts the end of a file between two batches as the end of the stream, even without an end mark.
Here a stream without its end mark is an error.
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
_BATCH, _END = 3, -1  # kinds of messages: a record batch; -1 is ours, for the end mark


class ReceivedBatch(NamedTuple):
    """A record batch with its own metadata and that of its schema."""

    batch: pa.RecordBatch
    metadata: Mapping[bytes, bytes]
    schema: Mapping[bytes, bytes]


class ExactFile:
    """A file for pyarrow, over a function that reads exactly n bytes: a shorter read is an error."""

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
        """Do nothing: the connection owns the body."""


def read_batches(read: Callable[[int], bytes]) -> Iterator[ReceivedBatch]:
    """Yield the batches of a stream, first an empty one for its schema; Unavailable without an end mark."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(ExactFile(read)) as reader:
            yield from _batches(reader)
    except (pa.ArrowException, OSError) as error:
        raise broken(error) from None


def _batches(reader: pa.RecordBatchStreamReader) -> Iterator[ReceivedBatch]:
    schema = reader.schema.metadata or {}
    yield ReceivedBatch(_empty(reader.schema), {}, schema)
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield ReceivedBatch(batch, metadata or {}, schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)


class BatchParser:
    """An incremental `read_batches`, for asyncio: pieces of bytes in, completed batches out."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._message = io.BytesIO()
        self._reader: pa.RecordBatchStreamReader | None = None
        self.ended = False  # the end mark was received

    def take(self, piece: bytes) -> Iterator[ReceivedBatch]:
        """Yield the batches that `piece` completes, first an empty one for the schema; Unavailable if malformed."""
        import pyarrow as pa

        self._rest += piece
        try:
            while (header := _header(self._rest)) is not None and len(self._rest) >= header.size:
                self._message = io.BytesIO(self._rest[: header.size])
                del self._rest[: header.size]
                self.ended = header.kind == _END
                yield from self._read(header.kind)
        except (pa.ArrowException, OSError, struct.error, IndexError) as error:
            raise broken(error) from None

    def _read(self, kind: int) -> Iterator[ReceivedBatch]:
        import pyarrow as pa

        if self._reader is None:  # it reads the schema at once
            self._reader = pa.ipc.open_stream(ExactFile(lambda size: self._message.read(size)))
            yield ReceivedBatch(_empty(self._reader.schema), {}, self._reader.schema.metadata or {})
        elif kind == _BATCH:
            batch, metadata = self._reader.read_next_batch_with_custom_metadata()
            yield ReceivedBatch(batch, metadata or {}, self._reader.schema.metadata or {})


class Header(NamedTuple):
    """The header of an IPC message: its kind, and its size from the mark to the end of its body."""

    kind: int
    size: int


def _header(data: bytearray) -> Header | None:
    """Return the header at the start of `data`; None while it is incomplete."""
    if len(data) < _PREFIX.size:
        return None
    mark, length = _PREFIX.unpack_from(data)
    if mark != _MARK:
        raise broken("this is not an Arrow stream")
    if length == 0:
        return Header(_END, _PREFIX.size)
    if len(data) < _PREFIX.size + length:
        return None
    kind, body = _fields(data, _PREFIX.size)
    return Header(kind, _PREFIX.size + length + body)


def _fields(data: bytearray, base: int) -> tuple[int, int]:
    """Return kind and body length of the flatbuffer at `base`: fields 1 and 3 of its root table."""
    root = base + int(struct.unpack_from("<I", data, base)[0])
    offsets = root - int(struct.unpack_from("<i", data, root)[0])
    (size,) = struct.unpack_from("<H", data, offsets)
    kind, body = (struct.unpack_from("<H", data, offsets + at)[0] if at < size else 0 for at in (6, 10))
    return data[root + kind], int(struct.unpack_from("<q", data, root + body)[0]) if body else 0
