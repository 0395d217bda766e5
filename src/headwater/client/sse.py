"""Server-sent events: the parser, and feeds that resume after the last event id. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headwater.client.protocol import EVENT_STREAM, Request, broken, error_of, get_request, offset_expired
from headwater.client.retry import Backoff
from headwater.client.transfer import Transfer
from headwater.errors import HeadwaterError, InvalidRequest, OffsetExpired
from headwater.model.change import Op
from headwater.model.control_events import ROW_EVENTS, ControlEvent
from headwater.model.formats import SNAPSHOT_FORMATS

OPS = frozenset(op.word for op in Op)


class Frame(NamedTuple):
    """One event: the name of an op or of a control event, with its JSON. `word` is empty where only an id was sent."""

    id: str
    word: str
    data: bytes


class EventParser:
    """An incremental parser of a text/event-stream: pieces of bytes in, completed frames out."""

    def __init__(self) -> None:
        self._rest = b""
        self.farewell = False  # `retry` came last: the server stops, and expects a new connection

    def take(self, piece: bytes) -> list[Frame]:
        """Return the frames that `piece` completes."""
        *blocks, self._rest = (self._rest + piece).split(b"\n\n")
        return [frame for frame in map(self._frame, blocks) if frame is not None]

    def _frame(self, block: bytes) -> Frame | None:
        fields: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            fields[name] = value.removeprefix(b" ")
        self.farewell = b"retry" in fields and b"data" not in fields and b"id" not in fields
        if b"id" not in fields:
            return None
        return Frame(fields[b"id"].decode(), fields.get(b"event", b"").decode(), fields.get(b"data", b""))


class Feed(Transfer[dict[str, Any]]):
    """A transfer of the changes of one stream, over as many connections as needed."""

    def __init__(
        self, parts: Sequence[str], query: Mapping[str, Any], backoff: Backoff, control: Collection[str] = ()
    ) -> None:
        super().__init__(parts, query, backoff)
        self._control = ROW_EVENTS.union(control)
        self._upto: int | None = query.get("upto")
        self.last_id = ""
        self._done = False

    def next(self) -> Request | None:
        if self._done:
            return None
        self._parser, self._pieces, self._events = EventParser(), 0, 0
        if self.last_id:
            self._query.pop("from_offset", None)  # it would win over the id
        return get_request(self._parts, self._query, EVENT_STREAM, self.last_id)

    def take(self, part: bytes) -> Iterator[dict[str, Any]]:
        frames = self._parser.take(part)
        if frames or self._pieces:  # the first piece alone is no progress: a server that is about to fail sends it, too
            self._backoff.progress()
        self._pieces += 1
        for frame in frames:
            self.last_id = frame.id
            self._events += bool(frame.word)
            if (event := self._event(frame)) is not None:
                yield event

    def finished(self) -> float:
        """Return the seconds to wait before `next`.

        With `upto`, a body without an event and without the server's farewell is the end. Other bodies may have been
        ended by a proxy, so the rest is requested again.
        """
        reached = self.last_id.isdigit() and self._upto is not None and int(self.last_id) >= self._upto
        self._done = reached or (self._upto is not None and not self._events and not self._parser.farewell)
        return 0.0 if self._done else self._backoff.wait(broken("the server ended the stream"))

    def _event(self, frame: Frame) -> dict[str, Any] | None:
        if not frame.word:
            return None
        data: dict[str, Any] = msgspec.json.decode(frame.data)
        if frame.word in OPS:
            return data
        if frame.word == ControlEvent.RESNAPSHOT:
            raise offset_expired(data)
        if frame.word == ControlEvent.FAILED:
            raise error_of(data["code"], data["message"], data.get("details") or {})
        return {"event": frame.word, "id": frame.id, "data": data} if frame.word in self._control else None


class Follow(Transfer[tuple[str, Any]]):
    """A transfer of rows, then changes, from a feed with a snapshot; a resnapshot begins a new feed."""

    def __init__(self, open_feed: Callable[[], Feed], filters: Mapping[str, Any], backoff: Backoff) -> None:
        super().__init__((), {}, backoff)
        self._open_feed, self._filters = open_feed, filters
        self._feed: Feed | None = None
        self._reshaped = False
        self._reason = ""  # of a resnapshot that is not reported yet

    def next(self) -> Request | None:
        if self._feed is None:
            check_follow(self._filters)
            self._feed, self._reshaped = self._open_feed(), False
        return self._feed.next()

    def take(self, part: bytes) -> Iterator[tuple[str, Any]]:
        assert self._feed is not None
        for event in self._feed.take(part):
            self._backoff.progress()
            if event.get("event") == ControlEvent.SNAPSHOT_RESTART:
                yield "resnapshot", event["data"]["reason"]
            elif event.get("snapshot"):
                yield "row", event["after"]
            elif "event" not in event:
                yield "change", event
                if event.get("resnapshot"):
                    self._reshaped = True
                    raise offset_expired({"reason": "schema_changed"})

    def finished(self) -> float:
        assert self._feed is not None
        return self._feed.finished()

    def failed(self, error: HeadwaterError) -> float:
        assert self._feed is not None
        if not isinstance(error, OffsetExpired):
            return self._feed.failed(error)
        self._feed, self._reason = None, error.extra.get("resnapshot_reason") or error.code
        return 0.0 if self._reshaped else self._backoff.wait(error)

    def rest(self) -> Iterator[tuple[str, Any]]:
        if self._reason:
            yield "resnapshot", self._reason
            self._reason = ""


def check_follow(filters: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a filter that `follow` sets itself, and for a format that it cannot read."""
    taken = {"start", "from_offset", "ts", "upto", "control"}.intersection(filters)
    if taken:
        raise InvalidRequest(f"follow takes no {sorted(taken)[0]!r}", hint="It begins with a snapshot and never ends.")
    if filters.get("format", SNAPSHOT_FORMATS[0]) not in SNAPSHOT_FORMATS:
        raise InvalidRequest("follow cannot read this format", hint=f"Set format to one of {SNAPSHOT_FORMATS}.")
