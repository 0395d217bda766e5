"""Jobs of the bulk worker, its answers, and the encoding of both."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from headwater.errors import CLASSES, HeadwaterError, NotFound, OffsetExpired
from headwater.model.keys.key import Span
from headwater.sources.read import BulkAddress

SCHEMA_CHANGED, TRUNCATED, TABLE_DROPPED = "schema_changed", "truncated", "table_dropped"
LZ4 = "lz4"  # compression of cached slices: a third of the bytes, sent unchanged to readers that accept it
WAL_HORIZON_EXCEEDED, LOG_GENERATION_CHANGED = "wal_horizon_exceeded", "log_generation_changed"

HEAD = struct.Struct(">BII")  # head of a frame of an answer: kind, number of rows, length
PIECE, END, FAILURE = range(3)  # kinds of frames: a part of the body, its end, an error
MAX_JOB = 1 << 20  # bytes
JOB_HEAD = 4  # bytes of the length before a job


class DatabaseLocation(msgspec.Struct, frozen=True):
    """The location and identity of a database and its log: another inode or generation is another database."""

    db: str
    source: BulkAddress
    log: str
    log_inode: int
    generation: str


class Selection(msgspec.Struct, frozen=True):
    """The selected rows and columns; key columns are always included."""

    span: Span = Span()
    columns: tuple[str, ...] | None = None
    where: str | None = None
    is_restricted: bool = False  # the caller is restricted to tables: `where` may call no functions of users

    @property
    def is_all(self) -> bool:
        """Return whether every row is selected."""
        return self.span == Span() and self.where is None


class SnapshotJob(msgspec.Struct, frozen=True, tag="snapshot"):
    """Read rows of a table as of `offset`."""

    place: DatabaseLocation
    table: str
    offset: int
    pick: Selection = Selection()
    caller: str = ""


class LogJob(msgspec.Struct, frozen=True, tag="log"):
    """Read changes of a table in (after, upto], converted to its version `shape`, or to the current one."""

    place: DatabaseLocation
    table: str
    after: int
    upto: int
    shape: int | None = None
    pick: Selection = Selection()
    compression: str | None = None
    caller: str = ""


class TablesJob(msgspec.Struct, frozen=True, tag="tables"):
    """Read changes of several tables, of all if none is named, in (after, upto]; rows as JSON."""

    place: DatabaseLocation
    tables: tuple[str, ...]
    after: int
    upto: int
    caller: str = ""
    hides_ddl: bool = False  # the caller is restricted to tables: no statement is shown as it was run


Job = SnapshotJob | LogJob | TablesJob


class CacheCounters(msgspec.Struct, frozen=True):
    """Counters of the slice cache, sent at the end of a job."""

    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0


class Failed(msgspec.Struct, frozen=True):
    """An error in the form that is sent between processes."""

    code: str
    message: str
    hint: str
    extra: dict[str, Any]


_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def encode_job(job: Job) -> bytes:
    """Return `job` as bytes after its length; NotFound if it has a table name that is not valid Unicode."""
    try:
        data = _encoder.encode(job)
    except UnicodeEncodeError:
        raise NotFound("there is no table with a name that is not UTF-8", hint="Send names as UTF-8.") from None
    return len(data).to_bytes(JOB_HEAD, "big") + data


def decode_job(data: bytes) -> Job:
    """Return the job in the bytes after the length."""
    return _jobs.decode(data)


def encode_end(done: CacheCounters | HeadwaterError) -> bytes:
    """Return the frame that ends an answer: a complete body by its counters, any other by its error."""
    kind, value = (FAILURE, failed_of(done)) if isinstance(done, HeadwaterError) else (END, done)
    data = _encoder.encode(value)
    return HEAD.pack(kind, 0, len(data)) + data


def failed_of(error: HeadwaterError) -> Failed:
    """Return an error in the form that is sent."""
    return Failed(error.code, error.message, error.hint, error.extra)


def error_in(failed: Failed) -> HeadwaterError:
    """Return the error that was sent."""
    kind = CLASSES.get(failed.code, HeadwaterError)
    error = kind.__new__(kind)
    HeadwaterError.__init__(error, failed.message, hint=failed.hint, **failed.extra)
    return error


def stop_message(table: str, offset: int, reason: str) -> str:
    """Return the message for a change at `offset` that readers of `table` cannot apply."""
    words = {TRUNCATED: "emptied", TABLE_DROPPED: "dropped or renamed"}.get(reason, "altered or rewritten")
    return f"table {table!r} was {words} at offset {offset}, without row changes"


def changes_gone(after: int, horizon: int, latest: int, reason: str, message: str = "") -> OffsetExpired:
    """Return the error for changes after `after` that are trimmed, or cannot be applied, for `reason`."""
    error = OffsetExpired(after, horizon, latest)
    error.extra["resnapshot_reason"] = reason
    if message:
        error.message = message
        error.args = (message,)
    return error
