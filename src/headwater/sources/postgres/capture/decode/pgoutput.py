"""The messages of pgoutput, protocol versions 1 to 4, decoded one by one. Pure.

Rows have a faster decoder per table: see `row_decoder`. This module decodes everything else, and explains the defect of
a message that the fast decoder could not read. Inside a stream block (part of an unfinished transaction) some messages
carry the number of their subtransaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from headwater.sources.postgres.capture.decode.replication_frames import BadMessage


class Begin(msgspec.Struct, frozen=True, gc=False):
    """The begin of a transaction that was committed at `lsn`."""

    lsn: int
    commit_us: int
    xid: int


class Commit(msgspec.Struct, frozen=True, gc=False):
    """The end of a transaction. `end` is the LSN where the server's WAL continues after it."""

    flags: int
    lsn: int
    end: int
    commit_us: int


class Origin(msgspec.Struct, frozen=True, gc=False):
    """The origin of a transaction that was replicated from another server."""

    lsn: int
    name: str


class RelationColumn(msgspec.Struct, frozen=True, gc=False):
    """A column as it is sent. `is_key`: the column is part of the replica identity."""

    name: str
    type: int
    typmod: int
    is_key: bool


class Relation(msgspec.Struct, frozen=True, gc=False):
    """The shape of the rows of `oid` from here on. `identity` is d(efault), n(othing), f(ull) or i(ndex)."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]
    xid: int = 0


class Type(msgspec.Struct, frozen=True, gc=False):
    """A type that is not built in; for a domain, the names are those of its base type."""

    oid: int
    schema: str
    name: str
    xid: int = 0


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


class Insert(msgspec.Struct, frozen=True, gc=False):
    """A new row."""

    oid: int
    new: Cells
    xid: int = 0


class Update(msgspec.Struct, frozen=True, gc=False):
    """A changed row. `kind` of the old row: "" if not sent, K (its key only), O (all of it)."""

    oid: int
    kind: str
    old: Cells | None
    new: Cells
    xid: int = 0


class Delete(msgspec.Struct, frozen=True, gc=False):
    """A deleted row; `kind` as in Update."""

    oid: int
    kind: str
    old: Cells
    xid: int = 0


class Truncate(msgspec.Struct, frozen=True, gc=False):
    """Truncated tables."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int = 0


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message written by pg_logical_emit_message."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes
    xid: int = 0


class StreamStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a block: the next messages belong to the unfinished transaction `xid`."""

    xid: int
    is_first: bool


class StreamStop(msgspec.Struct, frozen=True, gc=False):
    """The end of a block."""


class StreamCommit(msgspec.Struct, frozen=True, gc=False):
    """The commit of a transaction that was sent in blocks."""

    xid: int
    flags: int
    lsn: int
    end: int
    commit_us: int


class StreamAbort(msgspec.Struct, frozen=True, gc=False):
    """The rollback of `subxid` of `xid`; of the whole transaction if both are equal. Version 4 adds the last two."""

    xid: int
    subxid: int
    lsn: int = 0
    abort_us: int = 0


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A two-phase step; `word`: begin_prepare, prepare, commit_prepared, rollback_prepared or stream_prepare."""

    word: str
    flags: int
    lsn: int  # of the prepare; of the commit for commit_prepared
    end: int
    us: int
    xid: int
    gid: str


Decoded = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | Message
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | Prepared
)


class _Reader:
    """The rest of a message. Missing bytes raise BadMessage."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes, at: int = 1) -> None:
        self.data, self.at = data, at

    def bad(self, why: str) -> NoReturn:
        raise BadMessage(f"a message {self.data[:1]!r} of {len(self.data)} bytes: {why} at byte {self.at}")

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        end = self.at + size
        if size < 0 or end > len(self.data):
            self.bad("it ends too early")
        found = self.data[self.at : end]
        self.at = end
        return found

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        """Return the next numbers."""
        return form.unpack(self.take(form.size))

    def number(self, size: int) -> int:
        """Return the next unsigned number."""
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
        """Return the next row."""
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
        return self.bad(f"{kind!r} is no kind of value")

    def is_next(self, word: bytes) -> bool:
        """Return whether `word` is next; skip it if so."""
        found = self.data[self.at : self.at + 1] == word
        self.at += found
        return found

    def finish(self) -> None:
        """Raise BadMessage if bytes are left."""
        if self.at != len(self.data):
            self.bad(f"{len(self.data) - self.at} bytes too many")


_BEGIN, _END, _PREPARED = struct.Struct(">QqI"), struct.Struct(">BQQq"), struct.Struct(">BQQqI")
_BEGIN_PREPARE, _ROLLBACK = struct.Struct(">QQqI"), struct.Struct(">BQQqqI")
_COLUMN, _PAIR, _ABORTED = struct.Struct(">Ii"), struct.Struct(">II"), struct.Struct(">Qq")


def _relation(r: _Reader, xid: int) -> Relation:
    oid, schema, name, identity = r.number(4), r.name() or "pg_catalog", r.name(), r.take(1).decode("latin-1")
    return Relation(oid, schema, name, identity, tuple([_column(r) for _ in range(r.number(2))]), xid)


def _column(r: _Reader) -> RelationColumn:
    flags, name = r.number(1), r.name()
    type_, typmod = r.numbers(_COLUMN)
    return RelationColumn(name, type_, typmod, bool(flags & 1))


def _insert(r: _Reader, xid: int) -> Insert:
    oid = r.number(4)
    if not r.is_next(b"N"):
        r.bad("an insert without a new row")
    return Insert(oid, r.cells(), xid)


def _old(r: _Reader) -> tuple[str, Cells | None]:
    for kind in ("K", "O"):
        if r.is_next(kind.encode()):
            return kind, r.cells()
    return "", None


def _update(r: _Reader, xid: int) -> Update:
    oid, (kind, old) = r.number(4), _old(r)
    if not r.is_next(b"N"):
        r.bad("an update without a new row")
    return Update(oid, kind, old, r.cells(), xid)


def _delete(r: _Reader, xid: int) -> Delete:
    oid, (kind, old) = r.number(4), _old(r)
    if old is None:
        r.bad("a delete without an old row")
    return Delete(oid, kind, old, xid)


def _truncate(r: _Reader, xid: int) -> Truncate:
    count, options = r.number(4), r.number(1)
    return Truncate(tuple([r.number(4) for _ in range(count)]), bool(options & 1), bool(options & 2), xid)


def _message(r: _Reader, xid: int) -> Message:
    flags, lsn, prefix = r.number(1), r.number(8), r.name()
    return Message(bool(flags & 1), lsn, prefix, r.take(r.number(4)), xid)


def _stream_abort(r: _Reader) -> StreamAbort:
    xids = r.numbers(_PAIR)
    return StreamAbort(*xids) if r.at == len(r.data) else StreamAbort(*xids, *r.numbers(_ABORTED))


def _prepared(word: str) -> Callable[[_Reader], Prepared]:
    def read(r: _Reader) -> Prepared:
        flags, lsn, end, us, xid = r.numbers(_PREPARED)
        return Prepared(word, flags, lsn, end, us, xid, r.name())

    return read


def _begin_prepare(r: _Reader) -> Prepared:
    lsn, end, us, xid = r.numbers(_BEGIN_PREPARE)
    return Prepared("begin_prepare", 0, lsn, end, us, xid, r.name())


def _rollback_prepared(r: _Reader) -> Prepared:
    flags, lsn, end, _, us, xid = r.numbers(_ROLLBACK)
    return Prepared("rollback_prepared", flags, lsn, end, us, xid, r.name())


_WITH_XID: dict[int, Callable[[_Reader, int], Decoded]] = {
    ord("R"): _relation,
    ord("Y"): lambda r, xid: Type(r.number(4), r.name() or "pg_catalog", r.name(), xid),
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _message,
}
_PLAIN: dict[int, Callable[[_Reader], Decoded]] = {
    ord("B"): lambda r: Begin(*r.numbers(_BEGIN)),
    ord("C"): lambda r: Commit(*r.numbers(_END)),
    ord("O"): lambda r: Origin(r.number(8), r.name()),
    ord("S"): lambda r: StreamStart(r.number(4), bool(r.number(1))),
    ord("E"): lambda r: StreamStop(),
    ord("c"): lambda r: StreamCommit(r.number(4), *r.numbers(_END)),
    ord("A"): _stream_abort,
    ord("b"): _begin_prepare,
    ord("P"): _prepared("prepare"),
    ord("K"): _prepared("commit_prepared"),
    ord("r"): _rollback_prepared,
    ord("p"): _prepared("stream_prepare"),
}


def decode_begin(data: bytes) -> Begin:
    """Decode a Begin faster than `decode` does: every transaction has one."""
    if len(data) != 1 + _BEGIN.size:
        _Reader(data).bad("it has not the length of a begin")
    return Begin(*_BEGIN.unpack_from(data, 1))


def decode_commit(data: bytes) -> Commit:
    """Decode a Commit faster than `decode` does: every transaction has one."""
    if len(data) != 1 + _END.size:
        _Reader(data).bad("it has not the length of a commit")
    return Commit(*_END.unpack_from(data, 1))


def decode(data: bytes, *, in_stream: bool = False) -> Decoded:
    """Decode a message, or raise BadMessage. `in_stream`: it was received between StreamStart and StreamStop."""
    reader = _Reader(data)
    kind = data[0] if data else -1
    found: Decoded
    if kind in _WITH_XID:
        found = _WITH_XID[kind](reader, reader.number(4) if in_stream else 0)
    elif kind in _PLAIN:
        found = _PLAIN[kind](reader)
    else:
        reader.bad("no such message is known")
    reader.finish()
    return found
