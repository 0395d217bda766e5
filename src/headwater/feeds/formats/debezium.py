"""debezium_json: the value of a Debezium change event, as its JSON converter writes it with schemas disabled.

`debezium_encoder` writes the same bytes with a compiled module where it was built.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.envelope import Plan
from headwater.feeds.formats.fast_rows import Made, UnsupportedRow
from headwater.feeds.formats.images import Key, delivered_images
from headwater.feeds.formats.values import PLAIN, clean, encode
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.per_table import PerTable
from headwater.model.table import Column, Row, Table

_OPS = (b"", b"c", b"u", b"d", b"", b"t")  # by number
_OF_TABLE = re.compile(r"\s*(CREATE|DROP)\s+(?:VIRTUAL\s+)?TABLE\b", re.IGNORECASE)


class _Images(msgspec.Struct, frozen=True, gc=False):
    before: Any
    after: Any


class _Shared(NamedTuple):
    """The bytes that all changes of one part to one table have in common."""

    part: Transaction
    plan: Plan
    form: bytes


class Debezium(Encoder):
    """Writes Debezium's envelope with the key inside, because streams have no separate message key."""

    def __init__(self, shape: Shape) -> None:
        self._db = shape.db
        self._before, self._after = shape.before, shape.after
        self.plan = PerTable(lambda table: Plan(table, shape))
        self._shared: _Shared | None = None  # the newest; any thread may replace it, as one object

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self.plan(change.table)
        if op is Op.SCHEMA_CHANGE:
            return self._schema_change(plan, part, offset, change)
        before, after = delivered_images(change, op)
        if plan.made is not None:
            try:
                return self._quick(plan, plan.made, part, offset, op, before, after)
            except (UnsupportedRow, UnicodeEncodeError):  # the encoder rejects text that is not UTF-8
                pass
        row = before if after is None else after
        first, second, third = plan.around(part)
        parts = (
            self._images(plan, before, after),
            b"%b%d%b%d" % (first, offset, second, offset),
            b'},"op":"%b%b%d}' % (_OPS[op], third, part.start + offset - part.first + 1),
            b"" if row is None else _key(plan.key, before, row),
            b"}",
        )
        return b"".join(parts)

    def _quick(
        self, plan: Plan, made: Made, part: Transaction, offset: int, op: Op, before: Row | None, after: Row | None
    ) -> bytes:
        """Return the same bytes with less work per value; raise UnsupportedRow where that is not possible."""
        row, place = before if after is None else after, plan.key_place
        if row is None or place is None:
            raise UnsupportedRow
        key = row[place]
        if (key.__class__ is not int and key.__class__ is not str) or (
            before is not None and (before[place].__class__ is not key.__class__ or before[place] != key)
        ):
            raise UnsupportedRow  # the update may have changed the key
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
        plan = self.plan(table)
        parts = (
            self._images(plan, None, row),
            b",",
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

    def _images(self, plan: Plan, before: Row | None, after: Row | None) -> bytes:
        old = plan.image(before, set()) if self._before and before is not None else b"null"
        new = plan.image(after, set()) if self._after and after is not None else b"null"
        return b'{"before":%b,"after":%b' % (old, new)

    def _schema_change(self, plan: Plan, part: Transaction, offset: int, change: Change) -> bytes:
        body = {
            "ts_ms": ts_ms(part.ts),
            "databaseName": clean(self._db),
            "schemaName": None,
            "ddl": clean(change.ddl or ""),
            "tableChanges": [_table_change(self._db, change)],
            "resnapshot": change.resnapshot,
        }
        first, second, _ = plan.around(part)
        return b"{%b%d%b%d}," % (first[1:], offset, second, offset) + encode(body)[1:]


def _form(plan: Plan, part: Transaction) -> bytes:
    """Return a format for the bytes after the images: offset, offset, op, position in the transaction, key."""
    first, second, third = (piece.replace(b"%", b"%%") for piece in plan.around(part))
    return first + b"%d" + second + b'%d},"op":"%b' + third + b"%d}%b%b}}"


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
