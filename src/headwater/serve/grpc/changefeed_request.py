"""What a change feed is asked for: spans and base of a request, checked against the database as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headwater.database import Database
from headwater.errors import InvalidRequest, StaleEpoch
from headwater.feeds.filters.row_filter import Rule
from headwater.feeds.options import Options
from headwater.feeds.subscriptions.subscribe_table import MOST_SPANS, checked_spans
from headwater.model.clock import MAX_COUNTER, MAX_MS, Timestamp, ts_of_ms
from headwater.model.keys.key import Span
from headwater.model.principal import Principal
from headwater.ranges.captured_table import keyed_table
from headwater.ranges.changefeed.changefeed import Base
from headwater.ranges.changefeed.watched_spans import Watched
from headwater.ranges.ranges.ranges import Ranges
from headwater.serve.http.query_string import plain_spans
from headwater.serve.limits.request_body import check_exponents

LEAST_MS, MOST_MS = 100, 3_600_000  # between two checkpoints
SPAN_MS = 5  # of the interval for each span: every checkpoint is sent once per span


class Held(NamedTuple):
    """A range that is watched as long as it is one."""

    id: int
    epoch: int


def base_of(asked: Any) -> Base:
    """Where to begin."""
    generation = asked.generation
    if asked.WhichOneof("start") is None or asked.skip_catchup:
        if generation and asked.WhichOneof("start") is None:
            raise InvalidRequest("a generation alone is no base", hint="Send the checkpoint's ts as base, too.")
        return Base()
    if asked.HasField("base"):
        return Base(ts=_ts(asked.base), generation=generation)
    if asked.base_offset >= 2**63:
        raise InvalidRequest(
            f"base_offset {asked.base_offset} was never given out", hint="Send back what you were told."
        )
    return Base(offset=asked.base_offset, generation=generation)


def _ts(given: Any) -> Timestamp:
    if given.ms > MAX_MS or given.counter > MAX_COUNTER:
        raise InvalidRequest(
            f"{given.ms}.{given.counter} is not a timestamp",
            hint=f"Send milliseconds since 1970 and a counter of at most {MAX_COUNTER}, as they were told.",
        )
    return ts_of_ms(given.ms) | int(given.counter)


def interval_of(asked: Any, usual: float) -> float:
    """Seconds between two checkpoints."""
    wanted = asked.checkpoint_interval_ms
    if not wanted:
        return usual
    if not LEAST_MS <= wanted <= MOST_MS:
        raise InvalidRequest(f"checkpoint_interval_ms {wanted} is not granted", hint=f"Send {LEAST_MS} to {MOST_MS}.")
    return float(wanted) / 1000


def least_interval(spans: int) -> float:
    """Return the least seconds between two checkpoints about that many spans."""
    return max(LEAST_MS, SPAN_MS * spans) / 1000


def spans_of(
    who: Principal, name: str, database: Database, ranges: Ranges, asked: Any
) -> tuple[list[Watched], list[Held]]:
    """Return the spans without repeats, and which of them are ranges. The caller may see the tables."""
    if len(asked.spans) > MOST_SPANS:
        raise InvalidRequest(f"{len(asked.spans)} spans are asked for", hint=f"Ask for at most {MOST_SPANS}.")
    watched, held = [], []
    for place, each in enumerate(asked.spans):
        try:
            if each.range_id:
                watched.append(_of_range(who, name, ranges, each))
                held.append(Held(each.range_id, each.range_epoch))
            else:
                watched.append(Watched(each.table, _span(who, name, database, each)))
        except InvalidRequest as error:
            raise type(error)(f"spans[{place}]: {error.message}", hint=error.hint) from None
    return list(dict.fromkeys(watched)), list(dict.fromkeys(held))


def tables_of(asked: Any) -> list[str] | None:
    """The tables that are named; None for the whole database."""
    return sorted({each.table for each in asked.spans if each.table}) if asked.spans else None


def enter(who: Principal, ranges: Ranges, held: Held) -> tuple[str, str, Span]:
    """Database, table and keys of a range; StaleEpoch, with the table, when it is no more what it was."""
    try:
        found = ranges.enter(who, *held)
    except StaleEpoch as error:
        owner = ranges.owner(held.id)
        error.extra["table"] = "" if owner is None else owner[1]
        raise
    return found.db, found.table.name, found.range.span


def _of_range(who: Principal, name: str, ranges: Ranges, each: Any) -> Watched:
    if each.keys:
        raise InvalidRequest(
            "`keys` and `range_id` exclude each other", hint="Narrow a range by start_key and end_key."
        )
    db, table, span = enter(who, ranges, Held(each.range_id, each.range_epoch))
    if db != name or each.table not in ("", table):
        raise InvalidRequest(
            f"range {each.range_id} is one of table {table!r} of {db!r}", hint="Name it so, or not at all."
        )
    if not each.start_key and not each.end_key:
        return Watched(table, span)
    part = span.intersect(_between(each))
    if part != Span(max(each.start_key, span.start), each.end_key or span.end):
        raise InvalidRequest(f"these keys do not lie in range {each.range_id}", hint="Send keys of the range, or none.")
    return Watched(table, part)


def _span(who: Principal, name: str, database: Database, each: Any) -> Span:
    if not each.table:
        raise InvalidRequest("no table is named", hint="Name it; no span at all means the whole database.")
    if each.range_epoch:
        raise InvalidRequest("a range_epoch without a range_id", hint="Send both, or none.")
    table = keyed_table(database.source, each.table, who, name)
    if not (each.keys or each.start_key or each.end_key):
        return Span()
    database.source.order(table, table.key)  # refused here where its keys have no order
    if not each.keys:
        return _between(each)
    if each.start_key or each.end_key:
        raise InvalidRequest("`keys` and start_key or end_key exclude each other", hint="Send one of them.")
    check_exponents(each.keys.encode() if isinstance(each.keys, str) else each.keys)
    try:
        body = msgspec.json.decode(each.keys, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise InvalidRequest("`keys` is not a JSON object", hint='Send such as {"prefix": [1]}.') from None
    options = Options(db=name, tables=(table.name,), spans=checked_spans(plain_spans([body])))
    (span,) = Rule(options, table, database.source).interest.spans or (Span(),)
    return span


def _between(each: Any) -> Span:
    if each.end_key and each.end_key <= each.start_key:
        raise InvalidRequest("end_key does not lie behind start_key", hint="end_key is the first key not watched.")
    return Span(each.start_key, each.end_key or None)
