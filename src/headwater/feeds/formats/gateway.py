"""The events of the JSON gateway, as SochDB defines them: numeric sequence, time and transaction, plain JSON rows.

For the key-value table, key and values are the texts that were put, not a row.
"""

from __future__ import annotations

import base64

from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.images import (
    Image,
    Key,
    Unknown,
    delivered_images,
    identity,
    identity_of,
    image_columns,
    unavailable,
)
from headwater.feeds.formats.sochdb import txn_id
from headwater.feeds.formats.values import PLAIN, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.kv_table import KEY, VALUE, holds_pairs
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table

GATEWAY = "gateway"  # subscribers cannot select this format


class _Plan:
    """The parts that all changes of one version of a table have in common."""

    def __init__(self, table: Table, shape: Shape) -> None:
        self.heads = {op: b',"table":%b,"operation":"%b"' % (name(table.name), op.word.encode()) for op in Op}
        self.image = Image(table, image_columns(table, shape), PLAIN)
        self.key = Key(table, PLAIN) if table.primary_key else None
        self.identity = identity_of(table, PLAIN)
        self.pairs = (table.index[KEY], table.index[VALUE]) if holds_pairs(table) else None


class Gateway(Encoder):
    """Writes one object per change."""

    def __init__(self, shape: Shape) -> None:
        self._before, self._after = shape.before, shape.after
        self._plans = PerTable(lambda table: _Plan(table, shape))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        head = b'{"sequence":%d,"timestamp_us":%d,"txn_id":%d' % (offset, part.commit_ts_us, txn_id(part))
        ddl = b',"ddl":' + name(change.ddl or "") if op is Op.SCHEMA_CHANGE else b""
        return head + plan.heads[op] + self._rows(plan, before, after) + ddl + b"}"

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        plan = self._plans(table)
        head = b'{"sequence":%d,"timestamp_us":%d,"txn_id":0' % (offset, read_ms * 1000)
        return head + plan.heads[Op.INSERT] + self._rows(plan, None, row) + b',"snapshot":true}'

    def _rows(self, plan: _Plan, before: Row | None, after: Row | None) -> bytes:
        row = before if after is None else after
        if row is None:
            return b""
        before_shown, after_shown = before if self._before else None, after if self._after else None
        if plan.pairs is not None:
            return _pair(plan.pairs, before_shown, after_shown, before, row)
        unknown: Unknown = set()
        parts = []
        if plan.key is not None:
            key = plan.key(row)
            moved = plan.key.moved(before, key) if before is not None and after is not None else b""
            parts += [b',"key":', key, b',"key_before":' + moved if moved else b""]
        if before_shown is not None:
            parts += [b',"before":', plan.image(before_shown, unknown)]
        if after_shown is not None:
            parts += [b',"after":', plan.image(after_shown, unknown)]
        if plan.identity is not None:
            parts.append(identity(plan.identity, before, row))
        return b"".join([*parts, unavailable(unknown)])


def _pair(places: tuple[int, int], before: Row | None, after: Row | None, old: Row | None, row: Row) -> bytes:
    key, value = places
    found = text_field("key", row[key])
    if old is not None and old[key] != row[key]:
        found += text_field("key_before", old[key])
    if before is not None:
        found += text_field("before", before[value])
    return found if after is None else found + text_field("after", after[value])


def text_field(field: str, value: object) -> bytes:
    """Return one field of an object: UTF-8 bytes as text, other bytes as base64 in `<field>_base64`."""
    if not isinstance(value, bytes):
        return b""  # the source did not send the value
    try:
        return b',"%b":%b' % (field.encode(), encode(value.decode()))
    except UnicodeDecodeError:
        return b',"%b_base64":"%b"' % (field.encode(), base64.b64encode(value))
