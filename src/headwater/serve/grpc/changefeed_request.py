"""Requests of change feeds: their spans and base, checked against the database."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headwater.database import Database
from headwater.errors import InvalidRequest, RequestTooLarge, StaleEpoch
from headwater.feeds.filters.row_filter import Rule
from headwater.feeds.options import Options
from headwater.feeds.subscriptions.subscribe_table import MOST_SPANS, checked_spans
from headwater.model import json_decoder
from headwater.model.clock import MAX_COUNTER, MAX_MS, Timestamp, ts_of_ms
from headwater.model.keys.key import Span
from headwater.model.principal import Principal
from headwater.ranges.captured_table import keyed_table
from headwater.ranges.changefeed.changefeed import FeedStart
from headwater.ranges.changefeed.watched_spans import WatchedSpan
from headwater.ranges.ranges.ranges import Ranges
from headwater.serve.http.query_string import plain_spans

LEAST_MS, MOST_MS = 100, 3_600_000  # limits of the time between two checkpoints
MAX_KEYS = 64 << 10  # bytes of the `keys` of one span
_keys = json_decoder.decoder(dict[str, Any])
SPAN_MS = 5  # minimum interval per span: every checkpoint is sent once per span


class RangeEpoch(NamedTuple):
    """A range that the feed watches until it is split, merged or moved."""

    id: int
    epoch: int


def base_of(request: Any) -> FeedStart:
    """Return the position after which the feed begins; InvalidRequest if the request has no valid position."""
    generation = request.generation
    if request.WhichOneof("start") is None or request.skip_catchup:
        if generation and request.WhichOneof("start") is None:
            raise InvalidRequest("the request has a generation, but no base", hint="Send the checkpoint's ts as base.")
        return FeedStart()
    if request.HasField("base"):
        return FeedStart(ts=_ts(request.base), generation=generation)
    if request.base_offset >= 2**63:
        raise InvalidRequest(
            f"base_offset {request.base_offset} is out of range", hint="Send an offset that you received."
        )
    return FeedStart(offset=request.base_offset, generation=generation)


def _ts(given: Any) -> Timestamp:
    if given.ms > MAX_MS or given.counter > MAX_COUNTER:
        raise InvalidRequest(
            f"{given.ms}.{given.counter} is not a timestamp",
            hint=f"Send milliseconds since 1970 and a counter of at most {MAX_COUNTER}, as you received them.",
        )
    return ts_of_ms(given.ms) | int(given.counter)


def interval_of(request: Any, usual: float) -> float:
    """Return the requested seconds between two checkpoints, or else `usual`; InvalidRequest if out of range."""
    wanted = request.checkpoint_interval_ms
    if not wanted:
        return usual
    if not LEAST_MS <= wanted <= MOST_MS:
        raise InvalidRequest(f"checkpoint_interval_ms {wanted} is out of range", hint=f"Send {LEAST_MS} to {MOST_MS}.")
    return float(wanted) / 1000


def least_interval(spans: int) -> float:
    """Return the minimum seconds between two checkpoints of that many spans."""
    return max(LEAST_MS, SPAN_MS * spans) / 1000


def spans_of(
    who: Principal, name: str, database: Database, ranges: Ranges, request: Any
) -> tuple[list[WatchedSpan], list[RangeEpoch]]:
    """Return the distinct spans, and the ranges among them; raise an error for a span that `who` may not watch."""
    if len(request.spans) > MOST_SPANS:
        raise InvalidRequest(f"{len(request.spans)} spans are requested", hint=f"Send at most {MOST_SPANS}.")
    watched, range_epochs = [], []
    for place, each in enumerate(request.spans):
        try:
            if each.range_id:
                watched.append(_of_range(who, name, ranges, each))
                range_epochs.append(RangeEpoch(each.range_id, each.range_epoch))
            else:
                watched.append(WatchedSpan(each.table, _span(who, name, database, each)))
        except InvalidRequest as error:
            raise type(error)(f"spans[{place}]: {error.message}", hint=error.hint) from None
    return list(dict.fromkeys(watched)), list(dict.fromkeys(range_epochs))


def tables_of(request: Any) -> list[str] | None:
    """Return the tables that the spans name; None without spans, which is the whole database."""
    return sorted({each.table for each in request.spans if each.table}) if request.spans else None


def enter(who: Principal, ranges: Ranges, range_epoch: RangeEpoch) -> tuple[str, str, Span]:
    """Return database, table and keys of a range; StaleEpoch, with the table, if the range has changed."""
    try:
        found = ranges.enter(who, *range_epoch)
    except StaleEpoch as error:
        owner = ranges.owner(range_epoch.id)
        error.extra["table"] = "" if owner is None else owner[1]
        raise
    return found.db, found.table.name, found.range.span


def _of_range(who: Principal, name: str, ranges: Ranges, each: Any) -> WatchedSpan:
    if each.keys:
        raise InvalidRequest(
            "`keys` and `range_id` exclude each other", hint="Narrow a range by start_key and end_key."
        )
    db, table, span = enter(who, ranges, RangeEpoch(each.range_id, each.range_epoch))
    if db != name or each.table not in ("", table):
        raise InvalidRequest(
            f"range {each.range_id} belongs to table {table!r} of {db!r}", hint="Send this db, and this table or none."
        )
    if not each.start_key and not each.end_key:
        return WatchedSpan(table, span)
    part = span.intersect(_between(each))
    if part != Span(max(each.start_key, span.start), each.end_key or span.end):
        raise InvalidRequest(f"the keys are outside range {each.range_id}", hint="Send keys of the range, or none.")
    return WatchedSpan(table, part)


def _span(who: Principal, name: str, database: Database, each: Any) -> Span:
    if not each.table:
        raise InvalidRequest(
            "the span has no table", hint="Send the table; without a span the feed covers the database."
        )
    if each.range_epoch:
        raise InvalidRequest("the span has a range_epoch, but no range_id", hint="Send both, or none.")
    table = keyed_table(database.source, each.table, who, name)
    if not (each.keys or each.start_key or each.end_key):
        return Span()
    database.source.order(table, table.key)  # rejected here if its keys have no order
    if not each.keys:
        return _between(each)
    if each.start_key or each.end_key:
        raise InvalidRequest("`keys` and start_key or end_key exclude each other", hint="Send one of them.")
    keys = each.keys.encode()
    if len(keys) > MAX_KEYS:
        raise RequestTooLarge(f"`keys` is larger than {MAX_KEYS} bytes", hint="Send start_key and end_key.")
    try:
        body = _keys.decode(keys)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise InvalidRequest("`keys` is not a JSON object", hint='Send such as {"prefix": [1]}.') from None
    options = Options(db=name, tables=(table.name,), spans=checked_spans(plain_spans([body])))
    (span,) = Rule(options, table, database.source).interest.spans or (Span(),)
    return span


def _between(each: Any) -> Span:
    if each.end_key and each.end_key <= each.start_key:
        raise InvalidRequest("end_key is not above start_key", hint="Send as end_key the first key after the span.")
    return Span(each.start_key, each.end_key or None)
