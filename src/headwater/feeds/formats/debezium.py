"""debezium_json: the value of a Debezium change event, as its JSON converter writes it with schemas disabled."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from headwater import __version__
from headwater.feeds.formats.images import Image, Key, delivered, shown
from headwater.feeds.formats.quick import Made, Odd, quick
from headwater.feeds.formats.values import PLAIN, Form, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.literal import Unavailable
from headwater.model.pertable import PerTable
from headwater.model.table import Column, Row, Table

_OPS = (b"", b"c", b"u", b"d", b"", b"t")  # by number
_FORM: Form = {**PLAIN, Unavailable: lambda value: b'"__debezium_unavailable_value"'}  # Debezium's own placeholder
_OF_TABLE = re.compile(r"\s*(CREATE|DROP)\s+(?:VIRTUAL\s+)?TABLE\b", re.IGNORECASE)


class _Plan:
    """What is the same in all changes of one shape of a table."""

    def __init__(self, table: Table, shape: Shape) -> None:
        db = name(shape.db)
        names = shown(table, shape)
        self.image = Image(table, names, _FORM)
        self.made = quick(table, names)
        self.key = Key(table, _FORM, named=True)
        self.key_place = table.key_places[0] if len(table.key) == 1 else None
        self.key_whole = b',"key":{%b:' % name(table.key[0]) if len(table.key) == 1 else b""
        source = b'"source":{"version":%b,"connector":"headwater","name":%b,"ts_ms":'
        self.source = source % (name(__version__), db)
        self.db = b'","db":' + db + b',"sequence":"'
        self.table = b'","table":' + name(table.name) + b',"txId":'


class _Images(msgspec.Struct, frozen=True, gc=False):
    before: Any
    after: Any


class _Shared(NamedTuple):
    """What the changes of one part to one table have in common."""

    part: Transaction
    plan: _Plan
    form: bytes


class Debezium:
    """Writes Debezium's envelope, with the key in it, because there is no other place for it on our streams."""

    def __init__(self, shape: Shape) -> None:
        self._db = shape.db
        self._before, self._after = shape.before, shape.after
        self._plans = PerTable(lambda table: _Plan(table, shape))
        self._shared: _Shared | None = None  # the newest; replaced whole, from any thread

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        """See Encoder."""
        plan = self._plans(change.table)
        if op is Op.SCHEMA_CHANGE:
            return self._schema_change(plan, part, offset, change)
        before, after = delivered(change, op)
        if plan.made is not None:
            try:
                return self._quick(plan, plan.made, part, offset, op, before, after)
            except (Odd, UnicodeEncodeError):  # text that is not UTF-8 is found by the encoder
                pass
        row = before if after is None else after
        parts = (
            self._images(plan, before, after),
            _source(plan, part, offset),
            b',"op":"%b","ts_ms":%d' % (_OPS[op], ts_ms(part.ts)),
            b',"transaction":{"id":',
            name(part.id),
            b',"total_order":%d}' % (part.start + offset - part.first + 1),
            b"" if row is None else _key(plan.key, before, row),
            b"}",
        )
        return b"".join(parts)

    def _quick(
        self, plan: _Plan, made: Made, part: Transaction, offset: int, op: Op, before: Row | None, after: Row | None
    ) -> bytes:
        """The same bytes, with little work per value; or Odd."""
        row, place = before if after is None else after, plan.key_place
        if row is None or place is None:
            raise Odd
        key = row[place]
        if (key.__class__ is not int and key.__class__ is not str) or (
            before is not None and (before[place].__class__ is not key.__class__ or before[place] != key)
        ):
            raise Odd  # it may be another one by now
        images = encode(
            _Images(
                made(before) if self._before and before is not None else None,
                made(after) if self._after and after is not None else None,
            )
        )
        shared = self._shared
        if shared is None or shared.part is not part or shared.plan is not plan:
            self._shared = shared = _Shared(part, plan, _form(plan, part))
        written = PLAIN[key.__class__](key)
        rest = shared.form % (offset, offset, _OPS[op], part.start + offset - part.first + 1, plan.key_whole, written)
        return images[:-1] + rest

    def row(self, table: Table, row: Row, offset: int, read_ms: int) -> bytes:
        """See Encoder."""
        plan = self._plans(table)
        parts = (
            self._images(plan, None, row),
            plan.source,
            b'%d,"snapshot":"true' % read_ms,
            plan.db,
            b'[null,\\"%d\\"]' % offset,
            plan.table,
            b'null,"lsn":%d},"op":"r","ts_ms":%d,"transaction":null' % (offset, read_ms),
            _key(plan.key, None, row),
            b"}",
        )
        return b"".join(parts)

    def _images(self, plan: _Plan, before: Row | None, after: Row | None) -> bytes:
        old = plan.image(before, set()) if self._before and before is not None else b"null"
        new = plan.image(after, set()) if self._after and after is not None else b"null"
        return b'{"before":%b,"after":%b,' % (old, new)

    def _schema_change(self, plan: _Plan, part: Transaction, offset: int, change: Change) -> bytes:
        body = {
            "ts_ms": ts_ms(part.ts),
            "databaseName": clean(self._db),
            "schemaName": None,
            "ddl": clean(change.ddl or ""),
            "tableChanges": [_table_change(self._db, change)],
            "resnapshot": change.resnapshot,
        }
        return b"{" + _source(plan, part, offset) + b"," + encode(body)[1:]


def _form(plan: _Plan, part: Transaction) -> bytes:
    """What follows the images; left open are the offset, twice, the op, the place in the transaction and the key."""
    first, second = (piece.replace(b"%", b"%%") for piece in _around(plan, part))
    when, id = b'"ts_ms":%d' % ts_ms(part.ts), name(part.id).replace(b"%", b"%%")
    rest = b'%d},"op":"%b",' + when + b',"transaction":{"id":' + id + b',"total_order":%d}%b%b}}'
    return b"," + first + b"%d" + second + rest


def _source(plan: _Plan, part: Transaction, offset: int) -> bytes:
    """Where a change comes from; `sequence` is the last offset before its transaction, and its own."""
    first, second = _around(plan, part)
    return b"%b%d%b%d}" % (first, offset, second, offset)


def _around(plan: _Plan, part: Transaction) -> tuple[bytes, bytes]:
    """What stands before and between the two places of the offset."""
    first = b'%d,"snapshot":"false%b[\\"%d\\",\\"' % (part.commit_ts_ms, plan.db, part.first - part.start - 1)
    return plan.source + first, b'\\"]%b%b,"lsn":' % (plan.table, name(part.id))


def _key(key: Key, before: Row | None, row: Row) -> bytes:
    now = key(row)
    moved = key.moved(before, now)
    return b',"key":' + now + (b',"key_before":' + moved if moved else b"")


def _table_change(db: str, change: Change) -> dict[str, object]:
    found = _OF_TABLE.match(change.ddl or "")
    table = change.table
    return {
        "type": found[1].upper() if found else "ALTER",
        "id": f"{_quoted(db)}.{_quoted(table.name)}",
        "table": {
            "primaryKeyColumnNames": [clean(column) for column in table.primary_key],
            "columns": [_column(place, column) for place, column in enumerate(table.visible, 1)],
        },
    }


def _quoted(text: str) -> str:
    return '"' + clean(text).replace('"', '""') + '"'


def _column(place: int, column: Column) -> dict[str, object]:
    type = clean(column.declared) or column.kind
    return {
        "name": clean(column.name),
        "typeName": type,
        "typeExpression": type,
        "position": place,
        "optional": column.nullable,
        "autoIncremented": column.auto,
        "generated": column.generated,
    }
