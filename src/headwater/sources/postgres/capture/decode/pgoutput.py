"""The messages of pgoutput, protocol versions 1 to 4, decoded one by one. Pure.

Rows have a faster decoder per table: see `row_decoder`. This module decodes everything else that is used, and explains
the defect of a message that the fast decoder could not read. Inside a stream block (part of an unfinished transaction)
some messages carry the number of their subtransaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from headwater.sources.postgres.capture.decode.replication_frames import BadMessage


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """Base class of the decoded messages."""


class Begin(Decoded, frozen=True, gc=False):
    """The beginning of a transaction that was committed at `lsn`."""

    lsn: int
    commit_us: int
    xid: int


class RelationColumn(msgspec.Struct, frozen=True, gc=False):
    """A column as it is sent. `is_key`: the column is part of the replica identity."""

    name: str
    type: int
    typmod: int
    is_key: bool


class Relation(Decoded, frozen=True, gc=False):
    """The shape of the rows of `oid` from here on. `identity` is d(efault), n(othing), f(ull) or i(ndex)."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


class Type(Decoded, frozen=True, gc=False):
    """A type that is not built in; for a domain, the names are those of its base type."""

    oid: int
    schema: str
    name: str


class Binary(msgspec.Struct, frozen=True, gc=False):
    """A cell in the type's binary form."""

    data: bytes


class Unchanged:
    """An unchanged TOAST value, which the server did not send."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = Unchanged()
Cell = None | Unchanged | bytes | Binary  # bytes: the value as text
Cells = tuple[Cell, ...]


class Insert(Decoded, frozen=True, gc=False):
    """An inserted row of table `oid`."""

    oid: int
    new: Cells


class Update(Decoded, frozen=True, gc=False):
    """An updated row of table `oid`. `kind` of the old row: "" if not sent, K (its key only), O (all of it)."""

    oid: int
    kind: str
    old: Cells | None
    new: Cells


class Delete(Decoded, frozen=True, gc=False):
    """A deleted row of table `oid`; `kind` as in Update."""

    oid: int
    kind: str
    old: Cells


class Truncate(Decoded, frozen=True, gc=False):
    """A TRUNCATE of the tables with these oids."""

    oids: tuple[int, ...]


class Message(Decoded, frozen=True, gc=False):
    """A logical message, written by pg_logical_emit_message()."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class StreamStart(Decoded, frozen=True, gc=False):
    """The start of a block: the next messages belong to the unfinished transaction `xid`."""

    xid: int
    is_first: bool


class StreamCommit(Decoded, frozen=True, gc=False):
    """The commit of a transaction that was sent in blocks."""

    xid: int
    flags: int
    lsn: int
    end: int
    commit_us: int


class StreamAbort(Decoded, frozen=True, gc=False):
    """The rollback of `subxid` of `xid`; of the whole transaction if both are equal."""

    xid: int
    subxid: int


class _Reader:
    """The rest of a message. Missing bytes raise BadMessage."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 1) -> None:
        self.data, self.at = data, at

    def bad(self, why: str) -> NoReturn:
        raise BadMessage(f"a message {self.data[:1]!r} of {len(self.data)} bytes: {why} at byte {self.at}")

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            self.bad("it ends too early")
        found = self.data[self.at : end]
        self.at = end
        return found

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers, unpacked by `form`."""
        return form.unpack(self.take(form.size))

    def number(self, size: int) -> int:
        """Return the next `size` bytes as an unsigned number."""
        return int.from_bytes(self.take(size), "big")

    def name(self) -> str:
        """Return the next text, up to its terminating zero byte."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            self.bad("a text has no end")
        found = self.data[self.at : end].decode("utf-8", "surrogateescape")
        self.at = end + 1
        return found

    def cells(self) -> Cells:
        """Return the next row: its number of cells is read first."""
        return tuple([self._cell() for _ in range(self.number(2))])

    def _cell(self) -> Cell:
        kind = self.take(1)
        if kind == b"t":
            return self.take(self.number(4))
        if kind == b"n":
            return None
        if kind == b"u":
            return UNCHANGED
        if kind == b"b":
            return Binary(self.take(self.number(4)))
        return self.bad(f"{kind!r} is not a kind of value")

    def is_next(self, word: bytes) -> bool:
        """Return whether `word` is next; skip it if so."""
        found = self.data[self.at : self.at + 1] == word
        self.at += found
        return found

    def finish(self) -> None:
        """Raise BadMessage if bytes are left in the message."""
        if self.at != len(self.data):
            self.bad(f"{len(self.data) - self.at} bytes too many")


_BEGIN, _END, _COLUMN, _PAIR = map(struct.Struct, (">QqI", ">BQQq", ">Ii", ">II"))
_ABORTED = 16  # bytes that version 4 adds to a StreamAbort: LSN and time


def _relation(r: _Reader) -> Relation:
    oid, schema, name, identity = r.number(4), r.name() or "pg_catalog", r.name(), r.take(1).decode("latin-1")
    return Relation(oid, schema, name, identity, tuple([_column(r) for _ in range(r.number(2))]))


def _column(r: _Reader) -> RelationColumn:
    flags, name = r.number(1), r.name()
    type_, typmod = r.numbers(_COLUMN)
    return RelationColumn(name, type_, typmod, bool(flags & 1))


def _insert(r: _Reader) -> Insert:
    oid = r.number(4)
    if not r.is_next(b"N"):
        r.bad("an insert without a new row")
    return Insert(oid, r.cells())


def _old(r: _Reader) -> tuple[str, Cells | None]:
    for kind in ("K", "O"):
        if r.is_next(kind.encode()):
            return kind, r.cells()
    return "", None


def _update(r: _Reader) -> Update:
    oid, (kind, old) = r.number(4), _old(r)
    if not r.is_next(b"N"):
        r.bad("an update without a new row")
    return Update(oid, kind, old, r.cells())


def _delete(r: _Reader) -> Delete:
    oid, (kind, old) = r.number(4), _old(r)
    if old is None:
        r.bad("a delete without an old row")
    return Delete(oid, kind, old)


def _truncate(r: _Reader) -> Truncate:
    count, _options = r.number(4), r.take(1)
    return Truncate(tuple([r.number(4) for _ in range(count)]))


def _message(r: _Reader) -> Message:
    flags, lsn, prefix = r.number(1), r.number(8), r.name()
    return Message(bool(flags & 1), lsn, prefix, r.take(r.number(4)))


def _stream_abort(r: _Reader) -> StreamAbort:
    found = StreamAbort(*r.numbers(_PAIR))
    if r.at != len(r.data):
        r.take(_ABORTED)
    return found


_READERS: dict[int, Callable[[_Reader], Decoded]] = {
    ord("R"): _relation,
    ord("Y"): lambda r: Type(r.number(4), r.name() or "pg_catalog", r.name()),
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _message,
    ord("S"): lambda r: StreamStart(r.number(4), bool(r.number(1))),
    ord("c"): lambda r: StreamCommit(r.number(4), *r.numbers(_END)),
    ord("A"): _stream_abort,
}
_NUMBERED = b"RYIUDTM"  # messages that carry the number of their subtransaction inside a stream block


def decode_begin(data: bytes) -> Begin:
    """Decode a Begin; raise BadMessage for another length."""
    if len(data) != 1 + _BEGIN.size:
        _Reader(data).bad("its length is not that of a Begin")
    return Begin(*_BEGIN.unpack_from(data, 1))


def decode_commit(data: bytes) -> int:
    """Return the LSN where the server's WAL continues after a committed transaction."""
    if len(data) != 1 + _END.size:
        _Reader(data).bad("its length is not that of a Commit")
    end: int = _END.unpack_from(data, 1)[2]
    return end


def decode(data: bytes, *, in_stream: bool = False) -> Decoded:
    """Decode a message, or raise BadMessage. `in_stream`: it was received inside a stream block."""
    reader = _Reader(data)
    read = _READERS.get(data[0]) if data else None
    if read is None:
        reader.bad("its type is unknown")
    if in_stream and data[0] in _NUMBERED:
        reader.take(4)
    found = read(reader)
    reader.finish()
    return found
