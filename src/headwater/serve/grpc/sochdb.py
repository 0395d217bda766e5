"""sochdb.v1.SubscriptionService: change feeds for SochDB's clients."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.errors import HeadwaterError, InvalidRequest, NotFound, NotSupported, OffsetExpired, Unavailable
from headwater.feeds.deliver.end_reason import STOPPING
from headwater.feeds.deliver.stream import PAGE, Stream
from headwater.feeds.deliver.stream_request import ReaderPosition, Transport
from headwater.feeds.formats.sochdb import EVENT, WATCH
from headwater.feeds.groups.group import PIECE
from headwater.feeds.subscriptions.registry import may_see
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.model import kv_table
from headwater.model.change import Op
from headwater.model.database_name import real_name
from headwater.model.keys.key import encode_key
from headwater.model.principal import VIEWER, Principal
from headwater.serve.api import Api
from headwater.serve.gateway.sochdb_refusals import in_sequences, overrun
from headwater.serve.grpc.calls import Answer, Caller, Pour, Service
from headwater.serve.grpc.messages import LARGE, message, sochdb_v1
from headwater.serve.thread_bridge import Bridge

OPS = {1: ("insert",), 2: ("update",), 3: ("delete", "truncate"), 4: ("schema_change",)}
ROW_OPS = [word for number in (1, 2, 3) for word in OPS[number]]
WORDS = frozenset(op.word for op in Op)
FIELDS = {"where": "where_predicate", "ops": "operations", "table": "tables"}  # of Subscribe; WatchKey has no filters
MOST_NAMES = 1_000  # tables, or operations, of one subscription
SIZE = 4  # bytes of the length before each message


def frame(id: int | str, word: str, data: bytes) -> bytes:
    """Return the message of a change with its length before it; b"" for control events, which the status reports."""
    return len(data).to_bytes(SIZE, "big") + data if word in WORDS else b""


def messages(piece: bytes) -> list[bytes]:
    """Return the messages in `piece`, the joined results of `frame`."""
    found, at = [], 0
    while at < len(piece):
        end = at + SIZE + int.from_bytes(piece[at : at + SIZE], "big")
        found.append(piece[at + SIZE : end])
        at = end
    return found


SMALL = 2 * PIECE  # bytes of a piece; a larger one has a large row
small_messages = functools.lru_cache(maxsize=8)(messages)  # streams at the same position receive the same piece

EVENTS = Transport("grpc", frame, format=EVENT)


@dataclass(eq=False)
class OpenSubscription:
    """A subscription, which exists while its stream is open."""

    id: str
    owner: str
    namespace: str  # as requested
    db: str
    tables: tuple[str, ...]
    start: int
    created_us: int
    stream: Stream
    cancelled: bool = False

    def is_for(self, who: Principal) -> bool:
        """Return whether `who` may list and cancel this subscription."""
        mine = who.tables(self.db)
        fits = mine is None or (bool(self.tables) and mine.issuperset(self.tables))
        return fits and may_see(who, self.owner)


class SubscriptionService(Service):
    """Change streams without a stored subscription; ListSubscriptions returns those that are open on this server."""

    service = "sochdb.v1.SubscriptionService"

    def __init__(self, api: Api, bridge: Bridge) -> None:
        self._api, self._bridge = api, bridge
        self._open_subscriptions: dict[str, OpenSubscription] = {}
        self._numbers = itertools.count(1)

    def methods(self) -> Mapping[str, Answer | Pour]:
        return {
            "Subscribe": self._subscribe,
            "WatchKey": self._watch,
            "ListSubscriptions": self._list,
            "CancelSubscription": self._cancel,
        }

    # --- streams -------------------------------------------------------------------------------------------------

    async def _subscribe(self, caller: Caller, request: Any) -> AsyncIterator[bytes]:
        who, db, start = caller.who, real_name(request.namespace), request.start_sequence
        for names in (request.tables, request.operations):
            if len(names) > MOST_NAMES:
                hint = "Name fewer, or none for all."
                raise InvalidRequest(
                    f"{len(names)} tables or operations are named; the limit is {MOST_NAMES}", hint=hint
                )
        tables = tuple(dict.fromkeys(request.tables))  # kept while the stream is open
        params = SubscribeTable(
            db=db,
            tables=list(tables) or None,
            ops=_ops(request.operations),
            where=request.where_predicate or None,
        )
        stream = await self._open(caller, params, EVENTS, start)
        stream.page = min(request.batch_size or PAGE, PAGE)
        id, now = f"sub-{next(self._numbers)}", time.time_ns() // 1000
        subscription = OpenSubscription(id, who.name, request.namespace or db, db, tables, start, now, stream)
        self._open_subscriptions[id] = subscription
        del request, params
        try:
            async for some in _pieces(caller, stream, self._bridge):
                for each in some:
                    if subscription.cancelled:
                        return
                    yield each
                    del each  # the next one may follow much later
                del some
            if not subscription.cancelled:
                raise _why(stream, db)
        finally:
            self._open_subscriptions.pop(id, None)
            self._api.feeding().close_stream(stream)

    async def _watch(self, caller: Caller, request: Any) -> AsyncIterator[bytes]:
        db, table, key = real_name(request.namespace), request.table, request.key
        everywhere = bool(key) and not table  # one key, in any table
        raw = not everywhere and table == kv_table.TABLE and await self._holds_pairs(caller.who, db)
        opening = EVENTS if everywhere else Transport("grpc", frame, format=WATCH, key=_watched_key(key, raw=raw))
        params = SubscribeTable(db=db, table=table or None, ops=ROW_OPS)
        stream = await self._open(caller, params, opening)
        try:
            async for some in _pieces(caller, stream, self._bridge):
                for each in await self._of_key(some, key) if everywhere else some:
                    yield each
                    del each
                del some
            raise _why(stream, db)
        finally:
            self._api.feeding().close_stream(stream)

    async def _of_key(self, events: list[bytes], key: bytes) -> list[bytes]:
        """Return the events of `key` as messages for its watcher; many bytes are encoded in a thread."""
        if sum(map(len, events)) <= LARGE:
            return _all_seen(events, key)
        return await self._bridge.call(_all_seen, events, key)

    async def _holds_pairs(self, who: Principal, db: str) -> bool:
        """Return whether `kv` is a key-value table or does not exist; it may be another table of the user."""
        who.need(VIEWER, "a stream")
        who.check(db, [kv_table.TABLE])
        table = (await self._bridge.call(self._api.databases.get(db).describe)).get(kv_table.TABLE)
        return table is None or kv_table.holds_pairs(table)

    async def _open(self, caller: Caller, params: SubscribeTable, opening: Transport, start: int = 0) -> Stream:
        """Open a stream of changes from the sequence `start` on; 0 is now."""
        caller.who.need(VIEWER, "a stream")
        begin = ReaderPosition(start - 1) if start else ReaderPosition()
        try:
            return await self._api.feeding().open_changes(caller.who, params, opening, begin)
        except InvalidRequest as error:
            refused = in_sequences(error, start, FIELDS)
            # A predicate that cannot be evaluated exactly is rejected as invalid: the method itself is supported.
            kind = InvalidRequest if isinstance(error, NotSupported) else type(error)
            raise kind(refused.message, hint=refused.hint) from None

    # --- open subscriptions --------------------------------------------------------------------------------------

    async def _list(self, caller: Caller, request: Any) -> Any:
        who = caller.who
        who.need(VIEWER, "listing subscriptions")
        found = [subscription for subscription in self._open_subscriptions.values() if subscription.is_for(who)]
        if request.namespace:
            db = real_name(request.namespace)
            who.check_any_scope(db)
            self._api.databases.get(db)
            found = [subscription for subscription in found if subscription.db == db]
        return await self._bridge.call(_listed, found)

    async def _cancel(self, caller: Caller, request: Any) -> Any:
        caller.who.need(VIEWER, "cancelling a subscription")
        subscription = self._open_subscriptions.get(request.subscription_id)
        if subscription is None or not subscription.is_for(caller.who):
            error = f"Subscription '{request.subscription_id}' not found"
            return sochdb_v1("CancelSubscriptionResponse", success=False, error=error)
        subscription.cancelled = True
        del self._open_subscriptions[subscription.id]
        subscription.stream.leave()
        return sochdb_v1("CancelSubscriptionResponse", success=True)


# --- requests ------------------------------------------------------------------------------------------------------


def _ops(numbers: Any) -> list[str] | None:
    odd = sorted(set(numbers) - OPS.keys())
    if odd:
        hint = "Name OPERATION_INSERT, _UPDATE, _DELETE or _SCHEMA_CHANGE, or none for all."
        raise InvalidRequest(f"there is no operation {odd[0]}", hint=hint)
    return [word for number in sorted(set(numbers)) for word in OPS[number]] or None


def _watched_key(key: bytes, *, raw: bool) -> bytes | None:
    """Return the encoded key to watch: `key`, which is encoded first if `raw`; None, every key, if it is empty."""
    return (encode_key((key,)) if raw else key) if key else None


# --- answers -------------------------------------------------------------------------------------------------------


def _listed(found: list[OpenSubscription]) -> bytes:
    listed = sochdb_v1("ListSubscriptionsResponse", subscriptions=[_info(subscription) for subscription in found])
    return bytes(listed.SerializeToString())


def _info(subscription: OpenSubscription) -> Any:
    return sochdb_v1(
        "SubscriptionInfo",
        subscription_id=subscription.id,
        namespace=subscription.namespace,
        tables=subscription.tables,
        start_sequence=subscription.start,
        current_sequence=max(subscription.start, subscription.stream.delivered),
        created_at_us=subscription.created_us,
    )


def _all_seen(events: list[bytes], key: bytes) -> list[bytes]:
    return [found for event in events if (found := _seen(event, key))]


def _seen(event: bytes, key: bytes) -> bytes:
    """Return the message about `event` for a watcher of `key` in every table; empty if it concerns another key."""
    found = message("sochdb.v1.SubscribeEvent").FromString(event)
    fields = {name: getattr(found, name) for name in ("sequence", "timestamp_us", "unavailable")}
    is_all = not found.key and bool(found.ddl)  # a table was emptied
    if found.before_key == key:  # the row moved to another key, so this key was deleted
        return bytes(
            sochdb_v1("WatchKeyEvent", **fields, operation=3, before_value=found.before_value).SerializeToString()
        )
    if found.key != key and not is_all:
        return b""
    moved = bool(found.before_key)
    before = b"" if moved else found.before_value
    fields |= {"operation": 1 if moved else found.operation, "after_value": found.after_value, "before_value": before}
    return bytes(sochdb_v1("WatchKeyEvent", **fields).SerializeToString())


async def _pieces(caller: Caller, stream: Stream, bridge: Bridge) -> AsyncIterator[list[bytes]]:
    """Yield the messages of `stream` until it ends; a large piece is split in a thread."""
    await caller.context.send_initial_metadata(())  # from here on no event is missed
    while True:
        piece = stream.ready()
        if piece is None:
            piece = await stream.next()
            if piece is None:
                return
        elif not piece:
            await stream.news()
            continue
        yield small_messages(piece) if len(piece) <= SMALL else await bridge.call(messages, piece)


def _why(stream: Stream, db: str) -> HeadwaterError:
    """Return the error of a stream that ended without being cancelled."""
    ending = stream.ending
    assert ending is not None
    if ending.error is not None:
        return ending.error
    if ending.code == OffsetExpired.code:
        return overrun(stream)
    if ending.code == STOPPING:
        return Unavailable(ending.message, hint="Reconnect in a moment.")
    return NotFound(f"the database {db!r} was dropped")
