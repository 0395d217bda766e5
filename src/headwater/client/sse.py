"""Server-sent events: pieces of bytes to frames, and a feed that knows where to go on. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headwater.client.protocol import EVENT_STREAM, Repeat, Request, broken, error_of, get_request, lost, may_repeat
from headwater.client.retry import Patience
from headwater.errors import HeadwaterError
from headwater.model.change import Op

OPS = frozenset(op.word for op in Op)
# These change what the rows before them mean, so they are told unasked.
ALWAYS = frozenset({"snapshot_end", "snapshot_restart"})


class Frame(NamedTuple):
    """One event: an op, or a word of control, with its JSON. `word` is empty where only an id was told."""

    id: str
    word: str
    data: bytes


class Splitter:
    """From pieces of a text/event-stream to frames."""

    def __init__(self) -> None:
        self._rest = b""
        self.farewell = False  # the last word was `retry`: the server stops, and expects us back

    def take(self, piece: bytes) -> list[Frame]:
        """The frames that `piece` completes."""
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


class Feed:
    """One stream of changes over as many connections as it takes."""

    def __init__(
        self, parts: Sequence[str], query: Mapping[str, Any], patience: Patience, control: Collection[str] = ()
    ) -> None:
        self._parts, self._query, self._patience = parts, dict(query), patience
        self._control = ALWAYS.union(control)
        self._upto: int | None = query.get("upto")
        self.last_id = ""
        self._done = False

    def next(self) -> Request | None:
        """What to ask; None when everything up to `upto` came."""
        if self._done:
            return None
        self._splitter, self._pieces, self._frames = Splitter(), 0, 0
        if self.last_id:
            self._query.pop("from_offset", None)  # it would win over the id
        return get_request(self._parts, self._query, EVENT_STREAM, self.last_id)

    def take(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The changes that `piece` completes, and what else was asked for; an end that is told is raised."""
        frames = self._splitter.take(piece)
        if frames or self._pieces:  # the opening by itself is no progress: a server that fails says it too
            self._patience.progress()
        self._pieces += 1
        for frame in frames:
            self.last_id = frame.id
            self._frames += bool(frame.word)
            if (told := self._told(frame)) is not None:
                yield told

    def finished(self) -> float:
        """The body ended as a whole one does; seconds to wait before `next`.

        Without a last word from the server that is the end, if nothing was left to send: a proxy may end a
        body too, so that is asked once more.
        """
        reached = self.last_id.isdigit() and self._upto is not None and int(self.last_id) >= self._upto
        self._done = reached or (self._upto is not None and not self._frames and not self._splitter.farewell)
        return 0.0 if self._done else self._patience.wait(broken("the server ended the stream"))

    def failed(self, error: HeadwaterError) -> float:
        """Seconds to wait before asking on; raises when that is of no use."""
        if not may_repeat(Repeat.ANY, error):
            raise error
        return self._patience.wait(error)

    def _told(self, frame: Frame) -> dict[str, Any] | None:
        if not frame.word:
            return None
        data: dict[str, Any] = msgspec.json.decode(frame.data)
        if frame.word in OPS:
            return data
        if frame.word == "resnapshot":
            raise lost(data)
        if frame.word == "failed":
            raise error_of(data["code"], data["message"], data.get("details") or {})
        return {"event": frame.word, "id": frame.id, "data": data} if frame.word in self._control else None


class Following:
    """Sorts what a feed that began with a snapshot tells into rows and changes."""

    def __init__(self) -> None:
        self.restart = ""  # why the rows must be read anew by another feed

    def sort(self, told: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """("row", row), ("change", change), or ("resnapshot", reason): forget everything before."""
        if told.get("event") == "snapshot_restart":
            yield "resnapshot", told["data"]["reason"]
        elif "event" in told:
            return
        elif told.get("snapshot"):
            yield "row", told["after"]
        else:
            yield "change", told
            if told.get("resnapshot"):
                self.restart = "schema_changed"
