"""debezium_json: the value of a Debezium change event, as its JSON converter writes it with schemas disabled.

`debezium_encoder` writes the same bytes with a compiled module where it was built.
"""

from __future__ import annotations

import re

from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.envelope import Plan
from headwater.feeds.formats.images import Key, delivered_images
from headwater.feeds.formats.values import clean, encode
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.per_table import PerTable
from headwater.model.table import Column, Row, Table

_OPS = (b"", b"c", b"u", b"d", b"", b"t")  # by number
_OF_TABLE = re.compile(r"\s*(CREATE|DROP)\s+(?:VIRTUAL\s+)?TABLE\b", re.IGNORECASE)


class Debezium(Encoder):
    """Writes Debezium's envelope with the key inside, because streams have no separate message key."""

    def __init__(self, shape: Shape) -> None:
        self._db = shape.db
        self._before, self._after = shape.before, shape.after
        self.plan = PerTable(lambda table: Plan(table, shape))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        plan = self.plan(change.table)
        if op is Op.SCHEMA_CHANGE:
            return self._schema_change(plan, part, offset, change)
        before, after = delivered_images(change, op)
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
