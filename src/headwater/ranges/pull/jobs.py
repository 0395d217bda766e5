"""Jobs: what the bulk worker is asked for, how it answers, and both as bytes. Pure."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from headwater import errors
from headwater.errors import HeadwaterError, NotFound, OffsetExpired
from headwater.model.keys.key import Span
from headwater.sources.read import BulkAddress

SCHEMA_CHANGED, TRUNCATED, TABLE_DROPPED = "schema_changed", "truncated", "table_dropped"
LZ4 = "lz4"  # how slices are kept: a third of the bytes, and nothing to do here for readers that take it so
WAL_HORIZON_EXCEEDED, LOG_GENERATION_CHANGED = "wal_horizon_exceeded", "log_generation_changed"

HEAD = struct.Struct(">BII")  # of an answer's frame: kind, rows in it, length
PIECE, END, FAILURE = range(3)  # kinds of frames: bytes of the body, that it is whole, why it is not
MAX_JOB = 1 << 20  # bytes
_LENGTH = struct.Struct(">I")


class Place(msgspec.Struct, frozen=True):
    """Where a database and its log are, and which: a file of another inode or history is another database."""

    db: str
    source: BulkAddress
    log: str
    log_inode: int
    generation: str


class Pick(msgspec.Struct, frozen=True):
    """Which rows, and which columns of them; the key always."""

    span: Span = Span()
    columns: tuple[str, ...] | None = None
    where: str | None = None

    @property
    def is_all(self) -> bool:
        """Whether every row passes."""
        return self.span == Span() and self.where is None


class SnapshotJob(msgspec.Struct, frozen=True, tag="snapshot"):
    """Rows of a table as they were at `offset`."""

    place: Place
    table: str
    offset: int
    pick: Pick = Pick()
    caller: str = ""


class LogJob(msgspec.Struct, frozen=True, tag="log"):
    """Changes of a table in (after, upto], fitted to its version `shape`, or to the present one."""

    place: Place
    table: str
    after: int
    upto: int
    shape: int | None = None
    pick: Pick = Pick()
    compression: str | None = None
    caller: str = ""


class TablesJob(msgspec.Struct, frozen=True, tag="tables"):
    """Changes of several tables, of all where none is named, in (after, upto]; rows as JSON."""

    place: Place
    tables: tuple[str, ...]
    after: int
    upto: int
    caller: str = ""


Job = SnapshotJob | LogJob | TablesJob


class Done(msgspec.Struct, frozen=True):
    """What a job that ended says of the cache of slices."""

    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0


class Failed(msgspec.Struct, frozen=True):
    """An error on its way between two processes."""

    code: str
    message: str
    hint: str
    extra: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def encode_job(job: Job) -> bytes:
    """`job` with its length; NotFound when it names what cannot be named."""
    try:
        data = _encoder.encode(job)
    except UnicodeEncodeError:
        raise NotFound("there is no table of a name that is not UTF-8", hint="Names are sent as UTF-8.") from None
    return _LENGTH.pack(len(data)) + data


def job_length(head: bytes) -> int:
    """How long the job behind these four bytes is."""
    (length,) = _LENGTH.unpack(head)
    return int(length)


def decode_job(data: bytes) -> Job:
    """The job in the bytes behind the length."""
    return _jobs.decode(data)


def encode_end(done: Done) -> bytes:
    """The frame that says that the body is whole."""
    data = _encoder.encode(done)
    return HEAD.pack(END, 0, len(data)) + data


def decode_end(data: bytes) -> Done:
    """What that frame says."""
    return msgspec.msgpack.decode(data, type=Done)


def encode_failure(error: HeadwaterError) -> bytes:
    """The frame that says why there is no body, or not all of it."""
    data = _encoder.encode(failed_of(error))
    return HEAD.pack(FAILURE, 0, len(data)) + data


def decode_failure(data: bytes) -> HeadwaterError:
    """The error as it was raised."""
    return error_in(msgspec.msgpack.decode(data, type=Failed))


def failed_of(error: HeadwaterError) -> Failed:
    """An error, to be sent."""
    return Failed(error.code, error.message, error.hint, error.extra)


def error_in(failed: Failed) -> HeadwaterError:
    """The error that was sent."""
    kind = _BY_CODE.get(failed.code, HeadwaterError)
    error = kind.__new__(kind)
    HeadwaterError.__init__(error, failed.message, hint=failed.hint, **failed.extra)
    return error


def _kinds() -> dict[str, type[HeadwaterError]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)]
    return {kind.code: kind for kind in found}


_BY_CODE = _kinds()


def gone(after: int, horizon: int, latest: int, reason: str, message: str = "") -> OffsetExpired:
    """The changes after `after` cannot be had, or not be applied; `reason` says why."""
    error = OffsetExpired(after, horizon, latest)
    error.extra["resnapshot_reason"] = reason
    if message:
        error.message = message
        error.args = (message,)
    return error
