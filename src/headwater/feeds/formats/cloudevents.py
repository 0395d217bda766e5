"""cloudevents_json: CloudEvents 1.0 in structured mode, with the change as plain_json in `data`."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from hashlib import blake2b
from urllib.parse import quote

from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.images import Key, delivered_images
from headwater.feeds.formats.native import Native
from headwater.feeds.formats.values import LIT, PLAIN, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import UNAVAILABLE, Value, to_plain
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table


class _Plan:
    """The parts that all changes of one version of a table have in common."""

    def __init__(self, table: Table, shape: Shape) -> None:
        source = f"/headwater/{_quoted(shape.db)}/{_quoted(table.name)}"
        self.types = {op: b'","source":%b,"type":"headwater.change.%b"' % (name(source), op.word.encode()) for op in Op}
        self.key_of = table.key_of
        self.key = Key(table, LIT)


class CloudEvents(Encoder):
    """Writes the context attributes. Headwater's own are strings, because integers in CloudEvents have 32 bits."""

    def __init__(self, shape: Shape) -> None:
        self._id = b'{"specversion":"1.0","id":"' + _quoted(shape.db).encode() + b"/"
        self._data = Native(shape, PLAIN)
        self._plans = PerTable(lambda table: _Plan(table, shape))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        row = before if after is None else after
        parts = (
            self._id,
            b"%d" % offset,
            plan.types[op],
            b"" if row is None else _subject(plan, row),
            self._about(part.commit_ts_ms, offset),
            b',"hwtxn":',
            name(part.id),
            b',"data":',
            self._data.change(part, offset, change, op),
            b"}",
        )
        return b"".join(parts)

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        """The rows of a chunk share its offset, so the id also contains a hash of the key."""
        plan = self._plans(table)
        parts = (
            self._id,
            b"%d/%b" % (offset, blake2b(plan.key(row), digest_size=12).hexdigest().encode()),
            plan.types[Op.INSERT],
            _subject(plan, row),
            self._about(read_ms, offset),
            b',"hwsnapshot":true,"data":',
            self._data.row(table, row, offset, read_ms),
            b"}",
        )
        return b"".join(parts)

    def _about(self, ms: int, offset: int) -> bytes:
        fixed = b',"time":"%b.%03dZ","datacontenttype":"application/json","sequence":"%020d","hwoffset":"%d"'
        return fixed % (_time(ms // 1000), ms % 1000, offset, offset)


@functools.lru_cache(maxsize=64)  # many changes share a second
def _time(second: int) -> bytes:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()


def _quoted(text: str) -> str:
    return quote(clean(text), safe="")


def _subject(plan: _Plan, row: Row) -> bytes:
    """Return the subject field: the key as in a row's path, percent-encoded, with commas; b"" if that is empty."""
    key = plan.key_of(row)
    subject = "" if UNAVAILABLE in key else ",".join(map(_part, key))
    return b',"subject":"' + subject.encode() + b'"' if subject else b""


def _part(value: Value) -> str:
    found = to_plain(value)
    return quote(found if isinstance(found, str) else encode(found), safe="")
