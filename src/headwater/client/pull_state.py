"""Pulls of rows and changes: what to ask next, where it went on, and what a failure does to it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headwater.client.arrow_stream import Told
from headwater.client.protocol import ARROW_KIND, Repeat, Request, get_request, may_repeat, ranges_of
from headwater.client.responses import Range
from headwater.client.retry import Patience
from headwater.errors import HeadwaterError, InvalidRequest, StaleEpoch
from headwater.model.keys.key import Span


class Walk:
    """The way through the keys of a span, range by range.

    `place` is the first key that is not read yet. Among ranges that hold it the one of the highest epoch is
    right: a child or heir has a higher one than those it came from.
    """

    def __init__(self, span: Span, ranges: Sequence[Range] = ()) -> None:
        self._rest, self.place = span, span.start
        self._after: bytes | None = None  # the last key that was read in the rest
        self._ranges = list(ranges)
        self._guided = bool(ranges)
        self._present: Range | None = None
        self.done = False

    def next(self) -> dict[str, Any]:
        """The parameters of the next pull."""
        query: dict[str, Any] = {} if self._after is None else {"after": self._after}
        wanted = self._rest
        self._present = self._holding() if self._guided else None
        if self._present is not None:
            query |= {"range": self._present.id, "epoch": self._present.epoch}
            wanted = self._rest.intersect(self._present.span) or self._rest
            if wanted == self._present.span:
                return query
        start = {"start": wanted.start} if wanted.start else {}
        return query | start | ({} if wanted.end is None else {"end": wanted.end})

    def took(self, last_key: bytes) -> None:
        """Rows up to and with `last_key` are read."""
        self._after, self.place = last_key, last_key + b"\0"

    def finished(self) -> None:
        """The pull was answered whole."""
        end = None if self._present is None else self._present.span.end
        if end is None or (self._rest.end is not None and end >= self._rest.end):
            self.done = True
        else:
            self._rest, self._after, self.place = Span(end, self._rest.end), None, end

    def replace(self, ranges: Sequence[Range]) -> None:
        """The range just asked is no more; `ranges` hold its keys now."""
        new = {range.id for range in ranges}
        kept = [range for range in self._ranges if range.id not in new and range != self._present]
        self._ranges = [*kept, *ranges]

    def _holding(self) -> Range:
        holding = [range for range in self._ranges if range.span.contains(self.place)]
        if not holding:
            raise InvalidRequest(
                f"no range holds the key {self.place.hex()!r}", hint="Pass every range that overlaps the span."
            )
        return max(holding, key=lambda range: range.epoch)


class Pull(Protocol):
    """A pull that is repeated until it is whole. Drivers send `next`, tell what came, and wait when told."""

    def next(self) -> Request | None:
        """What to ask; None when everything was read."""
        ...

    def took(self, told: Told) -> None:
        """A batch came."""
        ...

    def finished(self) -> None:
        """The answer was whole."""
        ...

    def failed(self, error: HeadwaterError) -> float:
        """Seconds to wait before asking on; raises when that is of no use."""
        ...


class SnapshotPull:
    """Rows of a span as of one version."""

    def __init__(self, parts: Sequence[str], query: Mapping[str, Any], walk: Walk, patience: Patience) -> None:
        self._parts, self._query, self._walk, self._patience = parts, query, walk, patience

    def next(self) -> Request | None:
        if self._walk.done:
            return None
        return get_request(self._parts, {**self._query, **self._walk.next()}, ARROW_KIND)

    def took(self, told: Told) -> None:
        if place := _place(told, b"last_key"):
            self._walk.took(bytes.fromhex(place))
        self._patience.progress()

    def finished(self) -> None:
        self._walk.finished()
        self._patience.progress()

    def failed(self, error: HeadwaterError) -> float:
        if isinstance(error, StaleEpoch):
            self._walk.replace(ranges_of(error.extra.get("ranges", [])))
        elif not may_repeat(Repeat.ANY, error):
            raise error
        return self._patience.wait(error)


class LogPull:
    """Changes of a slice of the log. Once an answer told its shape, all that follow are asked for in it."""

    def __init__(self, parts: Sequence[str], query: Mapping[str, Any], patience: Patience) -> None:
        self._parts, self._patience = parts, patience
        self._query = {name: value for name, value in query.items() if value is not None}
        self._pins = "tables" not in query  # several tables come in a shape of their own
        self._done = query["after"] >= query["upto"]

    def next(self) -> Request | None:
        return None if self._done else get_request(self._parts, self._query, ARROW_KIND)

    def took(self, told: Told) -> None:
        if place := _place(told, b"upto"):
            self._query["after"] = int(place)
        if self._pins and b"version" in told.schema:
            self._query.setdefault("shape", int(told.schema[b"version"]))
        self._done = self._query["after"] >= self._query["upto"]
        self._patience.progress()

    def finished(self) -> None:
        self._done = True

    def failed(self, error: HeadwaterError) -> float:
        if self._done:
            return 0.0  # only the end mark is missing
        if not may_repeat(Repeat.ANY, error):
            raise error
        return self._patience.wait(error)


def _place(told: Told, name: bytes) -> str:
    """Where to go on after this batch; "" for an empty one that does not say."""
    place = told.metadata.get(name, b"").decode("ascii")
    if not place and told.batch.num_rows:
        raise HeadwaterError(f"a batch came without its {name.decode()!r}", hint="Is the server of another version?")
    return place
