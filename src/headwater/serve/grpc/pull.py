"""headwater.v1.PullService: ranges of a table, pulled page by page as in JimDB."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from headwater.errors import (
    Conflict,
    Forbidden,
    HeadwaterError,
    InvalidRequest,
    NotFound,
    NotOwner,
    OffsetExpired,
    RequestTooLarge,
    StaleEpoch,
    Unauthorized,
)
from headwater.feeds.formats.images import Unknown
from headwater.model.change import Op
from headwater.model.clock import ts_text
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.model.principal import VIEWER, Principal
from headwater.ranges.pull.jobs import LOG_GENERATION_CHANGED, WAL_HORIZON_EXCEEDED
from headwater.ranges.pull.pages import KeyChange, PageLimits, Rows, check_log, log_page, rows_page
from headwater.ranges.ranges.lease import check_subscriber, durable_now
from headwater.ranges.ranges.ranges import RangeInTable, Ranges
from headwater.serve.api import Api
from headwater.serve.grpc.calls import Answer, Caller, Pour, Service
from headwater.serve.grpc.changefeed_messages import images
from headwater.serve.grpc.messages import headwater_v1, message
from headwater.serve.thread_bridge import Bridge

PAGE_ROWS = 2_000
PAGE_BYTES = 2 << 20  # clients receive messages of up to 4 MiB by default
MOST_WAIT_MS = 60_000
AS_STATUS = (Unauthorized, Forbidden, InvalidRequest)  # reported by the status; other errors are in the answer
LOST = (WAL_HORIZON_EXCEEDED, LOG_GENERATION_CHANGED)  # reasons that mean that the log was evicted


class OutOfBound(HeadwaterError, code="out_of_bound"):
    """A key outside the range of its request."""

    def __init__(self, key: bytes, of: Range) -> None:
        super().__init__(f"the key is outside range {of.id}", hint="Send keys of the range, or none.")
        self.key, self.of = key, of


class PullService(Service):
    """The pull service; versions, epochs and leases are those of `pull.*`."""

    service = "headwater.v1.PullService"

    def __init__(self, api: Api, bridge: Bridge) -> None:
        self._api, self._run = api, bridge.call
        self._image = images()

    def methods(self) -> Mapping[str, Answer | Pour]:
        return {
            "ListRanges": self._list,
            "CdcRegister": _with_error_field("CdcRegisterResponse", self._register),
            "CdcPullSnapshot": _with_error_field("CdcPullSnapshotResponse", self._snapshot),
            "CdcPullLog": _with_error_field("CdcPullLogResponse", self._log),
        }

    async def _list(self, caller: Caller, request: Any) -> Any:
        caller.who.need(VIEWER, "a pull")
        ranges, target = self._api.pulling(), _number(request.target_bytes, "target_bytes")
        found = await self._run(ranges.listed, caller.who, request.db or None, request.table, target or None)
        return headwater_v1("ListRangesResponse", ranges=[_range(one) for one in found.ranges])

    async def _register(self, who: Principal, request: Any) -> Any:
        check_subscriber(request.subscriber_name)
        return await self._run(self._registered, who, request)

    def _registered(self, who: Principal, request: Any) -> Any:
        ranges, one = self._api.pulling(), self._enter(who, request)
        name = request.subscriber_name
        found = ranges.register(who, one.db, one.table.name, name, range=one.range.id, epoch=one.range.epoch)
        return headwater_v1("CdcRegisterResponse", init_snapshot_version=found.version)

    def _enter(self, who: Principal, request: Any) -> RangeInTable:
        # Ranges have no replicas here, so an epoch with another configuration belongs to no range.
        epoch = request.range_epoch.version if not request.range_epoch.conf_ver else 0
        return self._api.pulling().enter(who, request.range_id, epoch)

    # --- rows ------------------------------------------------------------------------------------------------

    async def _snapshot(self, who: Principal, request: Any) -> Any:
        check_subscriber(request.subscriber_name)
        return await self._run(self._rows, who, request, _limits(request))

    def _rows(self, who: Principal, request: Any, limits: PageLimits) -> bytes:
        one = self._enter(who, request)
        span = _behind(_part(one.range, request), request.last_key, one.range)
        self._api.pulling().keep_up(who, one, request.subscriber_name)
        version = _number(request.current_snapshot_version, "current_snapshot_version")
        if span is None:
            found = Rows(one.table, [], True)
        else:
            try:
                found = rows_page(one.database, one.table, span, version, limits)
            except Conflict:  # truncated or altered since: the log continues, and the rows are read as of now
                _, version = durable_now(one.database)
                found = rows_page(one.database, one.table, span, version, limits)
        data = list(self._row_messages(found))
        return _encoded("CdcPullSnapshotResponse", current_snapshot_version=version, snapshot_data=data, end=found.end)

    def _row_messages(self, found: Rows) -> Iterator[Any]:
        kind, write = message("headwater.v1.CdcChangeData"), self._image(found.table)
        for key, row in found.rows:
            unknown: Unknown = set()
            yield kind(key=key, value=write(row, unknown), unavailable=sorted(unknown))

    # --- log -------------------------------------------------------------------------------------------------

    async def _log(self, who: Principal, request: Any) -> Any:
        check_subscriber(request.subscriber_name)
        limits, after = _limits(request), _number(request.last_log_index, "last_log_index")
        if request.wait_ms > MOST_WAIT_MS:
            raise InvalidRequest(f"wait_ms {request.wait_ms} is too long", hint=f"Wait at most {MOST_WAIT_MS}.")
        ranges: Ranges = self._api.pulling()
        one = await self._run(self._enter, who, request)
        seen = await ranges.describe(who, one.db, one.table.name, after=after, wait_ms=request.wait_ms, run=self._run)
        return await self._run(self._changes, who, request, limits, seen.latest)

    def _changes(self, who: Principal, request: Any, limits: PageLimits, upto: int) -> bytes:
        one, after = self._enter(who, request), request.last_log_index
        log = one.database.log
        if after > upto or after + 1 < log.generation_first:
            error = OffsetExpired(after, log.horizon, log.latest)
            error.extra["resnapshot_reason"] = LOG_GENERATION_CHANGED
            raise error
        check_log(log, after)
        found = log_page(one.database, one.table, _part(one.range, request), after, upto, limits)
        data = [self._change_message(each) for each in found.seen]
        return _encoded("CdcPullLogResponse", log_data=data, current_log_index=found.upto)

    def _change_message(self, seen: KeyChange) -> Any:
        unknown: Unknown = set()
        write = self._image(seen.table)
        return headwater_v1(
            "CdcChangeData",
            type=1 if seen.op is Op.DELETE else 0,
            key=seen.key,
            value=b"" if seen.after is None else write(seen.after, unknown),
            before_value=b"" if seen.before is None else write(seen.before, unknown),
            op=int(seen.op),
            offset=seen.offset,
            txn_id=seen.part.id,
            txn_last=seen.last,
            ts=ts_text(seen.part.ts),
            unavailable=sorted(unknown),
        )


# --- requests ------------------------------------------------------------------------------------------------


def _limits(request: Any) -> PageLimits:
    if request.limit > PAGE_ROWS:
        raise RequestTooLarge(f"limit {request.limit} is too large", hint=f"Send at most {PAGE_ROWS}.")
    return PageLimits(request.limit or PAGE_ROWS, PAGE_BYTES)


def _number(value: int, field: str) -> int:
    if value >= 2**63:
        raise InvalidRequest(f"{field} {value} is out of range", hint="Send a value that you received.")
    return value


def _part(one: Range, request: Any) -> Span:
    """Return the requested part of the range; OutOfBound if the request exceeds the range."""
    if not request.start_key and not request.end_key:
        return one.span
    start, end = max(request.start_key, one.span.start), request.end_key or one.span.end
    if request.start_key and not one.span.contains(request.start_key):
        raise OutOfBound(request.start_key, one)
    if end is not None and (end <= start or (one.span.end is not None and end > one.span.end)):
        raise OutOfBound(end, one)
    return Span(start, end)


def _behind(span: Span, last_key: bytes, one: Range) -> Span | None:
    """Return the part of `span` after `last_key`, None if it is empty; OutOfBound if the key is not in `span`."""
    if not last_key:
        return span
    if not span.contains(last_key):
        raise OutOfBound(last_key, one)
    return span.intersect(Span(last_key + b"\0"))


# --- answers -------------------------------------------------------------------------------------------------


def _encoded(name: str, **fields: Any) -> bytes:
    """Return a message as bytes, encoded in the calling thread, because a page of large rows takes time."""
    return bytes(headwater_v1(name, **fields).SerializeToString())


def _range(one: Range) -> Any:
    return headwater_v1(
        "Range",
        id=one.id,
        start_key=one.span.start,
        end_key=one.span.end or b"",
        range_epoch=headwater_v1("RangeEpoch", version=one.epoch),
        rows=one.rows,
        bytes=one.bytes,
    )


def _with_error_field(name: str, answer: Callable[[Principal, Any], Awaitable[Any]]) -> Answer:
    """Return `answer` with errors reported in the field `error` of its message."""

    async def answer_or_error(caller: Caller, request: Any) -> Any:
        caller.who.need(VIEWER, "a pull")
        try:
            return await answer(caller.who, request)
        except AS_STATUS:
            raise
        except HeadwaterError as error:
            return headwater_v1(name, error=cdc_error(error, request))

    return answer_or_error


def cdc_error(error: HeadwaterError, request: Any) -> Any:
    """Return an error as a CDCError message."""
    made = headwater_v1("CDCError", detail=f"{error.message}. {error.hint}" if error.hint else error.message)
    reason = str(error.extra.get("resnapshot_reason", WAL_HORIZON_EXCEEDED))
    if isinstance(error, StaleEpoch):
        made.stale_epoch.ranges.extend([_of_wire(one) for one in error.extra["ranges"]])
    elif isinstance(error, NotFound):
        made.range_not_found.range_id = request.range_id
    elif isinstance(error, OutOfBound):
        of = _range(error.of)
        made.out_of_bound.key, made.out_of_bound.range_id = error.key, of.id
        made.out_of_bound.start_key, made.out_of_bound.end_key = of.start_key, of.end_key
    elif isinstance(error, NotOwner):
        made.not_owner.subscriber_name = request.subscriber_name
    elif isinstance(error, OffsetExpired) and reason in LOST and "last_log_index" in request.DESCRIPTOR.fields_by_name:
        made.horizon_exceeded.earliest_log_index = error.extra["earliest_offset"]
        made.horizon_exceeded.latest_log_index = error.extra["latest_offset"]
        made.horizon_exceeded.reason = reason
    elif isinstance(error, OffsetExpired):
        made.snapshot_expired.reason = reason
    else:
        made.server_error.code, made.server_error.retryable = error.code, error.retryable
    return made


def _of_wire(one: dict[str, Any]) -> Any:
    end = bytes.fromhex(one["end"]) if "end" in one else None
    return _range(Range(one["id"], one["epoch"], Span(bytes.fromhex(one["start"]), end), one["rows"], one["bytes"]))
