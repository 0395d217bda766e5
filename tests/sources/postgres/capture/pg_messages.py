"""Messages of pgoutput, written by hand."""

import struct
from collections.abc import Mapping, Sequence

from headwater.sources.postgres.schema.relations import Relations
from headwater.sources.postgres.schema.shape_changes import Shapes
from headwater.sources.postgres.schema.table_facts import TableFact
from headwater.sources.postgres.types import TypeFact

Cell = bytes | None | str  # "u": unchanged
OID = 16400


class Quiet:
    """A catalogue in which every table has the given primary key."""

    def __init__(self, key: tuple[str, ...] = ("id",)) -> None:
        self.key = key

    def table(self, oid: int) -> TableFact | None:
        """See Catalogue."""
        return TableFact(self.key)

    def types(self) -> Mapping[int, TypeFact]:
        """See Catalogue."""
        return {}

    def settle(self, xid: int) -> None:
        """See Catalogue."""


def relations(**options: bool) -> Relations:
    """Return the relations of a stream that has sent nothing yet."""
    return Relations(Shapes(), Quiet(), **options)


def tupled(mark: bytes, cells: Sequence[Cell]) -> bytes:
    """Return the encoding of a row."""
    written = [_cell(cell) for cell in cells]
    return mark + struct.pack(">H", len(cells)) + b"".join(written)


def _cell(cell: Cell) -> bytes:
    if cell is None:
        return b"n"
    if isinstance(cell, str):
        return cell.encode()
    return b"t" + struct.pack(">I", len(cell)) + cell


def relation(
    columns: Mapping[str, int], *, oid: int = OID, name: str = "t", identity: bytes = b"d", xid: int = 0
) -> bytes:
    """Return a Relation message; the first column is the key."""
    written = [
        bytes([identity == b"f" or place == 0]) + column.encode() + b"\0" + struct.pack(">Ii", type_, -1)
        for place, (column, type_) in enumerate(columns.items())
    ]
    body = struct.pack(">I", oid) + b"public\0" + name.encode() + b"\0" + identity + struct.pack(">H", len(written))
    return b"R" + _xid(xid) + body + b"".join(written)


def row(kind: bytes, *rows: bytes, oid: int = OID, xid: int = 0) -> bytes:
    """Return an Insert, Update or Delete message with its rows."""
    return kind + _xid(xid) + struct.pack(">I", oid) + b"".join(rows)


def insert(*cells: Cell, oid: int = OID, xid: int = 0) -> bytes:
    """Return an Insert message."""
    return row(b"I", tupled(b"N", cells), oid=oid, xid=xid)


def _xid(xid: int) -> bytes:
    return struct.pack(">I", xid) if xid else b""


def begin(xid: int, lsn: int) -> bytes:
    """Return a Begin message."""
    return b"B" + struct.pack(">QqI", lsn, 0, xid)


def commit(lsn: int) -> bytes:
    """Return a Commit message whose record is ten bytes long."""
    return b"C" + struct.pack(">BQQq", 0, lsn, lsn + 10, 0)


def stream_start(xid: int, first: bool = True) -> bytes:
    """Return the start of a block of an unfinished transaction."""
    return b"S" + struct.pack(">IB", xid, first)


STREAM_STOP = b"E"


def stream_commit(xid: int, lsn: int) -> bytes:
    """Return the commit of a streamed transaction, ten bytes long."""
    return b"c" + struct.pack(">IBQQq", xid, 0, lsn, lsn + 10, 0)


def stream_abort(xid: int, subxid: int, more: bool = False) -> bytes:
    """Return the rollback of a streamed transaction or subtransaction."""
    return b"A" + struct.pack(">II", xid, subxid) + (struct.pack(">Qq", 5, 6) if more else b"")


def message(prefix: str, content: bytes, *, transactional: bool = True, xid: int = 0) -> bytes:
    """Return the message that pg_logical_emit_message sends."""
    head = struct.pack(">BQ", transactional, 77) + prefix.encode() + b"\0"
    return b"M" + _xid(xid) + head + struct.pack(">I", len(content)) + content


PREPARED = {
    "begin_prepare": b"b" + struct.pack(">QQqI", 10, 20, 30, 40) + b"gid\0",
    "prepare": b"P" + struct.pack(">BQQqI", 0, 10, 20, 30, 40) + b"gid\0",
    "commit_prepared": b"K" + struct.pack(">BQQqI", 0, 10, 20, 30, 40) + b"gid\0",
    "rollback_prepared": b"r" + struct.pack(">BQQqqI", 0, 10, 20, 29, 30, 40) + b"gid\0",
    "stream_prepare": b"p" + struct.pack(">BQQqI", 0, 10, 20, 30, 40) + b"gid\0",
}
