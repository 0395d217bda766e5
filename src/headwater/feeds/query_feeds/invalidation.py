"""Encoders of invalidations: the offset from which on a query result may differ, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from headwater.feeds.formats.images import Key, Unknown, delivered_images, identity, identity_of, unavailable
from headwater.feeds.formats.native import Plan, pk_before
from headwater.feeds.formats.values import LIT, PLAIN, Form, clean, encode, name
from headwater.feeds.options import Shape
from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.feeds.query_feeds.relevant_changes import RelevantChanges
from headwater.model import formats
from headwater.model.change import Op
from headwater.model.clock import COUNTER_BITS, MAX_COUNTER
from headwater.model.per_table import PerTable
from headwater.model.table_ddl import table_ddl

BRIEF = "brief"  # the shape of query.subscribe; nobody can ask for it by name


class Invalidations(Protocol):
    """Encodes invalidations of one database in one shape. Thread-safe."""

    def write(self, instance: QueryInstance, found: RelevantChanges, op: Op | None) -> bytes:
        """Return one compact JSON object. `op` selects the images of the last change; None: no images."""


class Native(Invalidations):
    """objects_json and plain_json: the fields of a change in their order, then Headwater's own fields."""

    def __init__(self, shape: Shape, form: Form) -> None:
        self._before, self._after = shape.before, shape.after
        self._ddl = table_ddl if shape.hides_ddl else lambda change: change.ddl or ""
        self._plans = PerTable(lambda table: Plan(table, shape, form))
        self._keys = PerTable(lambda table: identity_of(table, form) or Key(table, form))

    def write(self, instance: QueryInstance, found: RelevantChanges, op: Op | None) -> bytes:
        part, offset, change, _ = found.last
        plan = self._plans(change.table)
        before, after = (None, None) if op is None else delivered_images(change, op)
        unknown: Unknown = set()
        number, at = encode(offset), offset - part.first
        tag = encode(instance.tag(offset))
        row = change.row
        moved_from = None if change.after is None else change.before  # the row that an update replaced
        pk = b"" if plan.pk is None or row is None else plan.pk(row)
        parts = (
            b'{"seq":',
            number,
            plan.named,
            b',"op":"invalidate"',
            b',"pk":' + pk if pk else b"",
            b',"before":' + plan.image(before, unknown) if self._before and before is not None else b"",
            b',"after":' + plan.image(after, unknown) if self._after and after is not None else b"",
            b',"query_id":' + name(instance.query_id) + b',"etag":' + tag,
            b',"commit_ts_ms":%d,"lsn":%b' % (part.commit_ts_ms, number),
            pk_before(plan, moved_from, pk) if pk else b"",
            b',"offset":%b,"ts":"%d.%d"' % (number, part.ts >> COUNTER_BITS, part.ts & MAX_COUNTER),
            b',"txn":{"id":' + name(part.id) + b',"seq":%d,"last":' % (part.start + at),
            b"true}" if part.last and at + 1 == len(part.changes) else b"false}",
            plan.schema,
            b',"new_etag":' + tag,
            self._changed_keys(found),
            b',"reason":' + _reason(instance, found),
            b',"ddl":' + name(self._ddl(change)) if change.op is Op.SCHEMA_CHANGE else b"",
            b"" if plan.identity is None or row is None else identity(plan.identity, moved_from, row),
            unavailable(unknown) if unknown else b"",
            b"}",
        )
        return b"".join(parts)

    def _changed_keys(self, found: RelevantChanges) -> bytes:
        tables = (
            name(table) + b":[" + b",".join(self._keys(shape).write(key) for shape, key in keys.values()) + b"]"
            for table, keys in found.keys.items()
        )
        cut = b',"changed_keys_cut":true' if found.is_cut else b""
        return b',"changed_keys":{' + b",".join(tables) + b"}" + cut


class _QuerySubscribeEvents(Invalidations):
    """The events of query.subscribe."""

    def write(self, instance: QueryInstance, found: RelevantChanges, op: Op | None) -> bytes:
        offset, tag = found.last.offset, instance.tag(found.last.offset)
        table = clean(found.last.change.table.name)
        return encode({"query_id": instance.query_id, "etag": tag, "new_etag": tag, "table": table, "offset": offset})


class CloudEvents(Invalidations):
    """cloudevents_json: CloudEvents 1.0 in structured mode, with the invalidation as plain_json in `data`."""

    def __init__(self, shape: Shape) -> None:
        self._db = shape.db
        self._data = Native(shape, PLAIN)

    def write(self, instance: QueryInstance, found: RelevantChanges, op: Op | None) -> bytes:
        part, offset, _, _ = found.last
        head = {
            "specversion": "1.0",
            "id": f"{self._db}/{instance.query_id}/{instance.tag(offset)}",
            "source": f"/headwater/{self._db}/q/{instance.query_id}",
            "type": "headwater.invalidate",
            "time": _time(part.commit_ts_ms),
            "datacontenttype": "application/json",
            "sequence": f"{offset:020d}",
            "hwoffset": str(offset),
            "hwtxn": clean(part.id),
        }
        return encode(head)[:-1] + b',"data":' + self._data.write(instance, found, op) + b"}"


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms // 1000, UTC):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def _reason(instance: QueryInstance, found: RelevantChanges) -> bytes:
    why = instance.reason(found.last.change, found.last.dependency)
    columns = None if why.columns is None else [clean(column) for column in why.columns]
    return encode({"table": clean(why.table), "columns": columns, "condition": clean(why.condition)})


MAKERS: dict[str, Callable[[Shape], Invalidations]] = {
    formats.OBJECTS: lambda shape: Native(shape, LIT),
    formats.PLAIN: lambda shape: Native(shape, PLAIN),
    formats.CLOUDEVENTS: CloudEvents,
    BRIEF: lambda shape: _QuerySubscribeEvents(),
}


def invalidations(shape: Shape) -> Invalidations:
    """Return the encoder of invalidations in `shape`, whose format must be one of MAKERS."""
    return MAKERS[shape.format](shape)
