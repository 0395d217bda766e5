"""debezium_json: the value of a Debezium change event, as its JSON converter writes it with schemas disabled."""

from __future__ import annotations

import re

from headwater import __version__
from headwater.feeds.formats.images import Image, Key, delivered, shown
from headwater.feeds.formats.values import PLAIN, Form, clean, encode, name
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_ms
from headwater.model.literal import Unavailable
from headwater.model.pertable import PerTable
from headwater.model.table import Column, Row, Table

_OPS = {Op.INSERT: b"c", Op.UPDATE: b"u", Op.DELETE: b"d", Op.TRUNCATE: b"t"}
_FORM: Form = {**PLAIN, Unavailable: lambda value: b'"__debezium_unavailable_value"'}  # Debezium's own placeholder
_OF_TABLE = re.compile(r"\s*(CREATE|DROP)\s+(?:VIRTUAL\s+)?TABLE\b", re.IGNORECASE)


class _Plan:
    """What is the same in all changes of one shape of a table."""

    def __init__(self, table: Table, shape: Shape) -> None:
        db = name(shape.db)
        self.image = Image(table, shown(table, shape), _FORM)
        self.key = Key(table, _FORM, named=True)
        source = b'"source":{"version":%b,"connector":"headwater","name":%b,"ts_ms":'
        self.source = source % (name(__version__), db)
        self.db = b'","db":' + db + b',"sequence":"'
        self.table = b'","table":' + name(table.name) + b',"txId":'


class Debezium:
    """Writes Debezium's envelope, with the key in it, because there is no other place for it on our streams."""

    def __init__(self, shape: Shape) -> None:
        self._db = shape.db
        self._before, self._after = shape.before, shape.after
        self._plans = PerTable(lambda table: _Plan(table, shape))

    def change(self, part: Transaction, offset: int, change: Change, op: Op) -> bytes:
        """See Encoder."""
        plan = self._plans(change.table)
        if op is Op.SCHEMA_CHANGE:
            return self._schema_change(plan, part, offset, change)
        before, after = delivered(change, op)
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


def _source(plan: _Plan, part: Transaction, offset: int) -> bytes:
    """Where a change comes from; `sequence` is the last offset before its transaction, and its own."""
    parts = (
        plan.source,
        b'%d,"snapshot":"false' % part.commit_ts_ms,
        plan.db,
        b'[\\"%d\\",\\"%d\\"]' % (part.first - part.start - 1, offset),
        plan.table,
        name(part.id),
        b',"lsn":%d}' % offset,
    )
    return b"".join(parts)


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
