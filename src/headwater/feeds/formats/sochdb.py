"""SochDB's events as protobuf messages, encoded by hand with the fields in numeric order.

The formats of gRPC; subscribers cannot select them. Images are plain JSON; for the table `kv`, keys and values are the
bytes that were put. Field numbers from 100 on are Headwater's own. A TRUNCATE is a delete without a key: of all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from headwater.errors import HeadwaterError
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.images import Image, Unknown, delivered_images, image_columns
from headwater.feeds.formats.values import PLAIN, clean
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.keys.key import encode_key
from headwater.model.kv_table import KEY, VALUE, holds_pairs
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Readable

EVENT, WATCH = "sochdb_event", "sochdb_watch"
NUMBERS = {Op.INSERT: 1, Op.UPDATE: 2, Op.DELETE: 3, Op.SCHEMA_CHANGE: 4, Op.TRUNCATE: 3}
_SMALL = [bytes((number,)) for number in range(128)]
_BEFORE_KEY, _UNAVAILABLE, _RESNAPSHOT = b"\xa2\x06", b"\xaa\x06", b"\xb0\x06\x01"  # 100, 101: bytes; 102: true

Write = Callable[[Row, Unknown], bytes]


def varint(number: int) -> bytes:
    """Return the non-negative `number` as a protobuf varint."""
    if number < 128:
        return _SMALL[number]
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(tag: bytes, data: bytes) -> bytes:
    """Return a field of bytes; b"" if `data` is empty."""
    return tag + varint(len(data)) + data if data else b""


def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, clean(text).encode())


def _number(tag: bytes, number: int) -> bytes:
    return tag + varint(number) if number > 0 else b""


def _left_out(unknown: Unknown) -> bytes:
    return b"".join(_text(_UNAVAILABLE, name) for name in sorted(unknown))


class _Plan:
    """The parts that all changes of one version of a table have in common."""

    def __init__(self, table: Table, shape: Shape, source: Readable | None) -> None:
        self.named = _text(b"\x22", table.name)
        self.ops = {op: _SMALL[number] for op, number in NUMBERS.items()}
        if holds_pairs(table):
            self.key: Callable[[Row], bytes] = _raw(table, KEY)
            value = _raw(table, VALUE)
            self.image: Write = lambda row, unknown: value(row)
        else:
            self.key = _keys(table, source)
            self.image = Image(table, image_columns(table, shape), PLAIN)


def _raw(table: Table, column: str) -> Callable[[Row], bytes]:
    place = table.index[column]

    def write(row: Row) -> bytes:
        found = row[place]
        return found if isinstance(found, bytes) else str(found).encode("utf-8", "surrogateescape")

    return write


def _keys(table: Table, source: Readable | None) -> Callable[[Row], bytes]:
    """Return the writer of a row's key as bytes; b"" for a row without a key or a key without a byte encoding."""
    key_of = table.key_of
    order: Callable[[Key], bytes] = encode_key
    if source is not None:
        # Where only the database knows the order, `encode_key` is unique, too.
        with contextlib.suppress(HeadwaterError):
            order = source.order(table, table.key)

    def write(row: Row) -> bytes:
        try:
            return order(key_of(row))
        except HeadwaterError:
            return b""

    return write


def txn_id(part: Transaction) -> int:
    """Return the database's number of the transaction, else the offset of its first change, which is unique."""
    if part.id.isdecimal() and part.id.isascii() and len(part.id) < 20:
        return int(part.id)
    return part.first - part.start


class Events(Encoder):
    """Writes changes as SochDB's SubscribeEvent."""

    def __init__(self, shape: Shape, source: Readable | None) -> None:
        self._plans = PerTable(lambda table: _Plan(table, shape, source))
        # The facts of the newest part and the fields made of them; the part itself would keep all its rows in memory.
        self._last: tuple[tuple[object, ...], bytes] = (), b""

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        row = before if after is None else after
        last, unknown = self._last, set[str]()
        facts = part.commit_ts_ms, part.commit_us_rest, part.id, part.first - part.start
        if last[0] != facts:
            common = _number(b"\x10", part.commit_ts_us) + _number(b"\x18", txn_id(part))
            last = self._last = facts, common
        key = b"" if row is None else plan.key(row)
        parts = (
            b"\x08" + varint(offset),
            last[1],
            plan.named,
            _field(b"\x2a", key),
            b"\x30" + plan.ops[op],
            b"" if after is None else _field(b"\x3a", plan.image(after, unknown)),
            b"" if before is None else _field(b"\x42", plan.image(before, unknown)),
            b"" if row is not None else _ddl(change, op),
            b"" if before is None or after is None else _moved(plan.key(before), key),
            _left_out(unknown) if unknown else b"",
            _RESNAPSHOT if change.resnapshot else b"",
        )
        return b"".join(parts)

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        part = Transaction("", (), first=offset, commit_ts_ms=read_ms)
        return self.change(part, offset, Change(Op.INSERT, table, after=row), Op.INSERT)


class WatchKeyEvents(Events):
    """Writes changes as SochDB's WatchKeyEvent, which has no table, key or DDL."""

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        unknown: Unknown = set()
        parts = (
            b"\x08" + varint(offset),
            _number(b"\x10", part.commit_ts_us),
            b"\x18" + plan.ops[op],
            b"" if after is None else _field(b"\x22", plan.image(after, unknown)),
            b"" if before is None else _field(b"\x2a", plan.image(before, unknown)),
            _left_out(unknown) if unknown else b"",
        )
        return b"".join(parts)


def _moved(old: bytes, new: bytes) -> bytes:
    return b"" if old == new else _field(_BEFORE_KEY, old)


def _ddl(change: Change, op: Op) -> bytes:
    if op is Op.TRUNCATE:
        return _text(b"\x4a", f"TRUNCATE TABLE {change.table.name}")
    return _text(b"\x4a", change.ddl or "")
