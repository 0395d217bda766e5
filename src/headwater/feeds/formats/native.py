"""Headwater's own formats: objects_json, in which every value has a type tag, and plain_json."""

from __future__ import annotations

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
from headwater.feeds.formats.values import Form, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import COUNTER_BITS, MAX_COUNTER
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table

SCHEMA_CHANGE = Op.SCHEMA_CHANGE


class Plan:
    """The parts that all changes of one version of a table have in common, and its invalidations too."""

    def __init__(self, table: Table, shape: Shape, form: Form) -> None:
        self.named = b',"db":' + name(shape.db) + b',"table":' + name(table.name)
        self.heads = {op: self.named + b',"op":"%b"' % op.word.encode() for op in Op}
        self.image = Image(table, image_columns(table, shape), form)
        self.pk = Key(table, form) if table.primary_key else None
        self.identity = identity_of(table, form)
        self.schema = b',"schema":%d' % table.version


class Native(Encoder):
    """Writes the base fields of a change in their fixed order, then Headwater's additional fields."""

    def __init__(self, shape: Shape, form: Form) -> None:
        self._before, self._after = shape.before, shape.after
        self._plans = PerTable(lambda table: Plan(table, shape, form))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        # Written for speed: one join, and one condition for each rare field.
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        row = before if after is None else after
        unknown: Unknown = set()
        number, place = encode(offset), offset - part.first
        pk = b"" if plan.pk is None or row is None else plan.pk(row)
        parts = (
            b'{"seq":',
            number,
            plan.heads[op],
            b',"pk":' + pk if pk else b"",
            b',"before":' + plan.image(before, unknown) if self._before and before is not None else b"",
            b',"after":' + plan.image(after, unknown) if self._after and after is not None else b"",
            b',"commit_ts_ms":',
            encode(part.commit_ts_ms),
            b',"lsn":',
            number,
            b"" if before is None or after is None else pk_before(plan, before, pk),
            b',"offset":',
            number,
            b',"ts":"%d.%d","txn":{"id":' % (part.ts >> COUNTER_BITS, part.ts & MAX_COUNTER),
            name(part.id),
            b',"seq":',
            encode(part.start + place),
            b',"last":true}' if part.last and place + 1 == len(part.changes) else b',"last":false}',
            plan.schema,
            b"" if op is not SCHEMA_CHANGE else _ddl(change),
            b"" if plan.identity is None or row is None else identity(plan.identity, before, row),
            unavailable(unknown) if unknown else b"",
            b"}",
        )
        return b"".join(parts)

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        plan = self._plans(table)
        unknown: Unknown = set()
        number = encode(offset)
        parts = (
            b'{"seq":',
            number,
            plan.heads[Op.INSERT],
            b"" if plan.pk is None else b',"pk":' + plan.pk(row),
            b',"after":' + plan.image(row, unknown) if self._after else b"",
            b',"commit_ts_ms":',
            encode(read_ms),
            b',"lsn":',
            number,
            b',"snapshot":true,"offset":',
            number,
            plan.schema,
            b"" if plan.identity is None else identity(plan.identity, None, row),
            unavailable(unknown),
            b"}",
        )
        return b"".join(parts)


def pk_before(plan: Plan, before: Row | None, now: bytes) -> bytes:
    """Return the field with the primary key before an update; b"" if it is `now`, or not known."""
    moved = b"" if plan.pk is None else plan.pk.moved(before, now)
    return b',"pk_before":' + moved if moved else b""


def _ddl(change: Change) -> bytes:
    return b',"ddl":' + name(change.ddl or "") + b',"resnapshot":' + encode(change.resnapshot)
