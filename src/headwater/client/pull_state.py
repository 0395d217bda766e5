"""Pulls of rows and changes: the next request after each batch and each failure. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.client.arrow_stream import ReceivedBatch
from headwater.client.protocol import ARROW_KIND, Request, get_request, ranges_of
from headwater.client.responses import Described
from headwater.client.retry import Backoff
from headwater.client.transfer import Transfer
from headwater.errors import HeadwaterError, InvalidRequest, StaleEpoch
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range

if TYPE_CHECKING:
    import pyarrow as pa


class RangeScan:
    """The position of a scan of a span, range by range.

    `next_key` is the first key that is not read yet. Of the ranges that contain it, the range with the highest epoch
    is current: a range made by a split or a merge has a higher epoch than its origins.
    """

    def __init__(self, span: Span, ranges: Sequence[Range] = ()) -> None:
        self._rest, self.next_key = span, span.start
        self._after: bytes | None = None  # the last key that was read of the rest
        self._ranges = list(ranges)
        self._guided = bool(ranges)
        self._present: Range | None = None
        self.done = False

    def next(self) -> dict[str, Any]:
        """Return the parameters of the next pull."""
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
        """Note that the rows through `last_key` are read."""
        self._after, self.next_key = last_key, last_key + b"\0"

    def finished(self) -> None:
        """Note that the answer was complete."""
        end = None if self._present is None else self._present.span.end
        if end is None or (self._rest.end is not None and end >= self._rest.end):
            self.done = True
        else:
            self._rest, self._after, self.next_key = Span(end, self._rest.end), None, end

    def replace(self, ranges: Sequence[Range]) -> None:
        """Replace the current range, which was split or merged, by `ranges`, which hold its keys now."""
        new = {range.id for range in ranges}
        kept = [range for range in self._ranges if range.id not in new and range != self._present]
        self._ranges = [*kept, *ranges]

    def _holding(self) -> Range:
        holding = [range for range in self._ranges if range.span.contains(self.next_key)]
        if not holding:
            raise InvalidRequest(
                f"no range holds the key {self.next_key.hex()!r}", hint="Pass every range that overlaps the span."
            )
        return max(holding, key=lambda range: range.epoch)


class Pull(Transfer["pa.RecordBatch"]):
    """A transfer of record batches. Empty batches are left out, but if all are empty, one is yielded at the end."""

    is_arrow = True
    done = False
    _empty: pa.RecordBatch | None = None
    _has_rows = False

    def take(self, part: ReceivedBatch) -> Iterator[pa.RecordBatch]:
        self.took(part)
        if part.batch.num_rows:
            self._has_rows = True
            yield part.batch
        else:
            self._empty = part.batch

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self.done and not self._has_rows and self._empty is not None:
            yield self._empty

    def took(self, received: ReceivedBatch) -> None:
        """Note the position after a batch."""
        raise NotImplementedError


class SnapshotPull(Pull):
    """Rows of a span as of one version."""

    def __init__(self, parts: Sequence[str], query: Mapping[str, Any], scan: RangeScan, backoff: Backoff) -> None:
        super().__init__(parts, query, backoff)
        self._scan = scan

    def answered(self, found: Described) -> None:
        self._query["version"] = found.version

    def next(self) -> Request | None:
        return None if self.done else get_request(self._parts, {**self._query, **self._scan.next()}, ARROW_KIND)

    def took(self, received: ReceivedBatch) -> None:
        if key := _position(received, b"last_key"):
            self._scan.took(bytes.fromhex(key))
        self._backoff.progress()

    def finished(self) -> float:
        self._scan.finished()
        self.done = self._scan.done
        self._backoff.progress()
        return 0.0

    def failed(self, error: HeadwaterError) -> float:
        if not isinstance(error, StaleEpoch):
            return super().failed(error)
        self._scan.replace(ranges_of(error.extra.get("ranges", [])))
        return self._backoff.wait(error)


class LogPull(Pull):
    """Changes of an offset range of the log; later requests ask for the table shape of the first answer."""

    def __init__(self, parts: Sequence[str], query: Mapping[str, Any], backoff: Backoff) -> None:
        super().__init__(parts, query, backoff)
        self._pins = "tables" not in query  # changes of several tables have a shape of their own
        self.done = query["after"] >= query["upto"]

    def next(self) -> Request | None:
        return None if self.done else get_request(self._parts, self._query, ARROW_KIND)

    def took(self, received: ReceivedBatch) -> None:
        if offset := _position(received, b"upto"):
            self._query["after"] = int(offset)
        if self._pins and b"version" in received.schema:
            self._query.setdefault("shape", int(received.schema[b"version"]))
        self.done = self._query["after"] >= self._query["upto"]
        self._backoff.progress()

    def finished(self) -> float:
        self.done = True
        return 0.0

    def failed(self, error: HeadwaterError) -> float:
        return 0.0 if self.done else super().failed(error)  # when done, only the end mark is missing


def _position(received: ReceivedBatch, name: bytes) -> str:
    """Return the position to continue after; "" for an empty batch that has none."""
    position = received.metadata.get(name, b"").decode("ascii")
    if not position and received.batch.num_rows:
        raise HeadwaterError(f"a received batch has no {name.decode()!r}", hint="Is the server of another version?")
    return position
