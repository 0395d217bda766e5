"""cockroach_wrapped_json: CockroachDB's wrapped envelope with key, topic and commit time."""

from __future__ import annotations

from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.images import Image, Key, Unknown, delivered_images, image_columns, unavailable
from headwater.feeds.formats.values import PLAIN, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import COUNTER_BITS, MAX_COUNTER, Timestamp, ts_of_ms
from headwater.model.per_table import PerTable
from headwater.model.table import Row, Table


class _Plan:
    """The parts that all changes of one version of a table have in common."""

    def __init__(self, table: Table, shape: Shape) -> None:
        self.image = Image(table, image_columns(table, shape), PLAIN)
        self.key = Key(table, PLAIN)
        self.topic = b'"topic":' + name(table.name)


class Cockroach(Encoder):
    """Writes the wrapped envelope. `after` is null for deletes only: without after images the field is left out."""

    def __init__(self, shape: Shape) -> None:
        self._before, self._after = shape.before, shape.after
        self._plans = PerTable(lambda table: _Plan(table, shape))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self._plans(change.table)
        before, after = delivered_images(change, op)
        if before is None and after is None:
            return b"{" + _other(change, op) + plan.topic + _updated(part.ts)
        return self._row(plan, before, after, part.ts)

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        return self._row(self._plans(table), None, row, ts_of_ms(read_ms))

    def _row(self, plan: _Plan, before: Row | None, after: Row | None, ts: Timestamp) -> bytes:
        unknown: Unknown = set()
        row = before if after is None else after
        assert row is not None
        key = plan.key(row)
        moved = plan.key.moved(before, key)
        parts = (
            b"{",
            self._images(plan, before, after, unknown),
            b'"key":',
            key,
            b',"key_before":' + moved if moved else b"",
            b",",
            plan.topic,
            unavailable(unknown),
            _updated(ts),
        )
        return b"".join(parts)

    def _images(self, plan: _Plan, before: Row | None, after: Row | None, unknown: Unknown) -> bytes:
        new = old = b""
        if after is None:
            new = b'"after":null,'
        elif self._after:
            new = b'"after":' + plan.image(after, unknown) + b","
        if self._before:
            old = b'"before":' + (b"null" if before is None else plan.image(before, unknown)) + b","
        return new + old


def _other(change: Change, op: Op) -> bytes:
    """Return the fields of a truncate or a schema change, which CockroachDB's envelope does not define."""
    if op is Op.TRUNCATE:
        return b'"truncate":true,'
    found = {"ddl": clean(change.ddl or ""), "resnapshot": change.resnapshot, "schema": change.table.version}
    return b'"schema_change":' + encode(found) + b","


def _updated(ts: Timestamp) -> bytes:
    """Return the timestamp in CockroachDB's notation: nanoseconds, a dot, ten digits of counter."""
    return b',"updated":"%d000000.%010d"}' % (ts >> COUNTER_BITS, ts & MAX_COUNTER)
