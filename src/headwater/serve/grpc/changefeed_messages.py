"""Events and errors of change feeds, encoded as the messages of changefeed.proto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.errors import HeadwaterError, LimitExceeded, NotFound, OffsetExpired, StaleEpoch
from headwater.feeds.formats.images import Image, Unknown, image_columns
from headwater.feeds.formats.sochdb import varint
from headwater.feeds.formats.values import PLAIN
from headwater.feeds.options import Shape
from headwater.model.clock import MAX_COUNTER, Timestamp, parse_ts, ts_ms
from headwater.model.per_table import PerTable
from headwater.ranges.changefeed.changefeed import CaughtUp, Checkpoint, Event
from headwater.ranges.changefeed.watched_spans import KeyChanged, SpanDeleted, TableChanged, WatchedSpan
from headwater.ranges.pull.jobs import LOG_GENERATION_CHANGED, SCHEMA_CHANGED, WAL_HORIZON_EXCEEDED
from headwater.serve.grpc.messages import headwater_v1

EXPIRED = {
    WAL_HORIZON_EXCEEDED: "BASE_TOO_OLD",
    LOG_GENERATION_CHANGED: "GENERATION_CHANGED",
    SCHEMA_CHANGED: "HISTORY_CHANGED",
}
_EVENTS = b"\x0a"  # the tag of `events` in a ChangeFeedResponse


class CheckpointBytes(bytes):
    """An encoded checkpoint."""


class EventEncoder:
    """Encodes events; with `with_diff` also the previous row. Thread-safe: a large row is encoded in a thread."""

    def __init__(self, image: PerTable[Image], with_diff: bool) -> None:
        self._image, self._with_diff = image, with_diff
        self._kinds: dict[type, Callable[[Any], Any]] = {
            KeyChanged: self._value,
            SpanDeleted: _delete_range,
            TableChanged: _schema_change,
            Checkpoint: _checkpoint,
            CaughtUp: lambda steady: headwater_v1(
                "ChangeFeedEvent", steady_state=headwater_v1("SteadyState", **steady._asdict())
            ),
        }

    def __call__(self, event: Event) -> bytes:
        """Return the event, encoded as `encoded` does."""
        data = encoded(self._kinds[type(event)](event))
        return CheckpointBytes(data) if type(event) is Checkpoint else data

    def _value(self, put: KeyChanged) -> Any:
        unknown: Unknown = set()
        write = self._image(put.table)
        fields: dict[str, Any] = {}
        if put.after is not None:
            fields["value"] = write(put.after, unknown)
        if put.before is not None and self._with_diff:
            fields["prev_value"] = write(put.before, unknown)
        value = headwater_v1(
            "Value",
            table=put.table.name,
            key=put.key,
            ts=timestamp(put.part.ts),
            offset=put.offset,
            txn_id=put.part.id,
            unavailable=sorted(unknown),
            **fields,
        )
        return headwater_v1("ChangeFeedEvent", value=value)


def images() -> PerTable[Image]:
    """Return the encoders of rows, one per table: plain JSON, as in pulls."""
    return PerTable(lambda table: Image(table, image_columns(table, Shape("")), PLAIN))


def encoded(event: Any) -> bytes:
    """Return a ChangeFeedEvent as an element of a ChangeFeedResponse."""
    data = event.SerializeToString()
    return b"".join((_EVENTS, varint(len(data)), data))


def timestamp(ts: Timestamp) -> Any:
    """Return a hybrid timestamp as a message."""
    return headwater_v1("Timestamp", ms=ts_ms(ts), counter=ts & MAX_COUNTER)


def _delete_range(emptied: SpanDeleted) -> Any:
    part = emptied.part
    content = headwater_v1(
        "DeleteRange", span=_span(emptied.watched), ts=timestamp(part.ts), offset=emptied.offset, txn_id=part.id
    )
    return headwater_v1("ChangeFeedEvent", delete_range=content)


def _schema_change(reshaped: TableChanged) -> Any:
    content = headwater_v1(
        "SchemaChange",
        table=reshaped.table.name,
        ddl=reshaped.ddl,
        version=reshaped.table.version,
        ts=timestamp(reshaped.part.ts),
        offset=reshaped.offset,
    )
    return headwater_v1("ChangeFeedEvent", schema_change=content)


def _checkpoint(checkpoint: Checkpoint) -> Any:
    watched, ts, offset, generation = checkpoint
    content = headwater_v1("Checkpoint", ts=timestamp(ts), offset=offset, generation=generation)
    if watched is not None:
        content.span.CopyFrom(_span(watched))
    return headwater_v1("ChangeFeedEvent", checkpoint=content)


def _span(watched: WatchedSpan) -> Any:
    return headwater_v1("KeySpan", table=watched.table, start_key=watched.span.start, end_key=watched.span.end or b"")


def failure(error: HeadwaterError) -> Any:
    """Return the event that reports why a stream ends."""
    words = f"{error.message}. {error.hint}" if error.hint else error.message
    content = headwater_v1("Error", reason=_reason(error), message=words, retryable=error.retryable)
    if "threshold" in error.extra:
        content.threshold.CopyFrom(timestamp(parse_ts(error.extra["threshold"])))
    if isinstance(error, StaleEpoch):
        content.spans.extend([_heir(error.extra["table"], one) for one in error.extra["ranges"]])
    return headwater_v1("ChangeFeedEvent", error=content)


def _reason(error: HeadwaterError) -> str:
    if "reason" in error.extra:
        return str(error.extra["reason"])
    if isinstance(error, OffsetExpired):
        return EXPIRED.get(error.extra.get("resnapshot_reason", ""), "BASE_TOO_OLD")
    if isinstance(error, StaleEpoch):
        return "RANGE_SPLIT" if len(error.extra["ranges"]) > 1 else "RANGE_MERGED"
    if isinstance(error, LimitExceeded):
        return "CATCHUP_LIMIT"
    if error.retryable:
        return "UNAVAILABLE"
    return "REMOVED" if isinstance(error, NotFound) else "INTERNAL"


def _heir(table: str, one: dict[str, Any]) -> Any:
    end = bytes.fromhex(one.get("end", ""))
    return headwater_v1(
        "KeySpan",
        table=table,
        start_key=bytes.fromhex(one["start"]),
        end_key=end,
        range_id=one["id"],
        range_epoch=one["epoch"],
    )
