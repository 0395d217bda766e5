"""Reads through ranges that are split and merged meanwhile: every row once, whatever fails."""

import random
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.arrow_stream import ReceivedBatch
from headwater.client.protocol import broken
from headwater.client.pull_state import LogPull, RangeScan, SnapshotPull
from headwater.client.retry import Backoff
from headwater.errors import Conflict, HeadwaterError, InvalidRequest, OffsetExpired, StaleEpoch, Unavailable
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range

keys = st.binary(min_size=1, max_size=2)
SCHEMA = pa.schema([("key", pa.binary())], metadata={"version": "4"})


def received_batch(values: list[bytes], **metadata: str) -> ReceivedBatch:
    """Return a batch of these values with this metadata, as the client receives it."""
    batch = pa.record_batch([pa.array(values, pa.binary())], schema=SCHEMA)
    return ReceivedBatch(batch, {name.encode(): text.encode() for name, text in metadata.items()}, SCHEMA.metadata)


class Cut:
    """A table split into ranges, as the server stores them."""

    def __init__(self, bounds: list[bytes]) -> None:
        edges = [b"", *sorted(bounds), None]
        spans = [Span(low or b"", high) for low, high in zip(edges, edges[1:], strict=False)]
        self.ranges = [Range(number, 1, span) for number, span in enumerate(spans)]
        self._next = len(spans)

    def split(self, at: bytes) -> None:
        found = next(r for r in self.ranges if r.span.contains(at))
        if found.span.start == at:
            return
        left = Range(found.id, found.epoch + 1, Span(found.span.start, at))
        right = Range(self._next, found.epoch + 1, Span(at, found.span.end))
        self._next += 1
        self._put([found], [left, right])

    def merge(self, place: int) -> None:
        if place + 1 >= len(self.ranges):
            return
        left, right = self.ranges[place : place + 2]
        whole = Range(left.id, max(left.epoch, right.epoch) + 1, Span(left.span.start, right.span.end))
        self._put([left, right], [whole])

    def _put(self, old: list[Range], new: list[Range]) -> None:
        self.ranges = sorted([r for r in self.ranges if r not in old] + new, key=lambda r: r.span.start)

    def span_of(self, known: list[Range], id: int, epoch: int) -> Span:
        """Return the span of a range; raise StaleEpoch with the ranges that hold its keys now."""
        for found in self.ranges:
            if (found.id, found.epoch) == (id, epoch):
                return found.span
        stale = next(r for r in known if (r.id, r.epoch) == (id, epoch))
        heirs = [r for r in self.ranges if r.span.overlaps(stale.span)]
        raise StaleEpoch("it was split", ranges=[wire(r) for r in heirs])


def wire(range: Range) -> dict[str, Any]:
    end = {} if range.span.end is None else {"end": range.span.end.hex()}
    return {"id": range.id, "epoch": range.epoch, "start": range.span.start.hex(), **end}


def asked_span(query: dict[str, Any], within: Span) -> Span:
    start, end = bytes.fromhex(query.get("start", "")), query.get("end")
    return within.intersect(Span(start, None if end is None else bytes.fromhex(end))) or Span(b"\0", b"\0")


@given(
    rows=st.sets(keys, max_size=30),
    bounds=st.sets(keys, max_size=5),
    edges=st.tuples(st.binary(max_size=2), st.none() | keys).filter(lambda e: e[1] is None or e[0] < e[1]),
    guided=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_walk_over_changing_ranges_reads_every_row_once_in_order(
    rows: set[bytes], bounds: set[bytes], edges: tuple[bytes, bytes | None], guided: bool, seed: int
) -> None:
    fate, cut, span = random.Random(seed), Cut(list(bounds)), Span(*edges)
    ever = list(cut.ranges)
    pull = SnapshotPull(
        ["pull"], {"version": "g.1"}, RangeScan(span, cut.ranges if guided else ()), Backoff(9e9, fate, lambda: 0.0)
    )
    got: list[bytes] = []

    def trouble() -> None:
        match fate.randrange(8):
            case 0:
                cut.split(fate.choice(sorted(rows or {b"x"})))
            case 1:
                cut.merge(fate.randrange(len(cut.ranges)))
            case 2:
                raise broken()
        ever.extend(cut.ranges)

    while (request := pull.next()) is not None:
        query = dict(parse_qsl(urlsplit(request.path).query))
        try:
            trouble()
            within = cut.span_of(ever, int(query["range"]), int(query["epoch"])) if guided else Span.all()
            found = asked_span(query, within)
            after = bytes.fromhex(query.get("after", ""))
            left = [key for key in sorted(rows) if found.contains(key) and key > after]
            while left:
                size = fate.randint(1, 4)
                page, left = left[:size], left[size:]
                pull.took(received_batch(page, last_key=page[-1].hex()))
                got += page
                if not fate.randrange(4):
                    raise broken()
            pull.finished()
        except HeadwaterError as error:
            pull.failed(error)
    assert got == [key for key in sorted(rows) if span.contains(key)]


def backoff() -> Backoff:
    return Backoff(9e9, random.Random(0), lambda: 0.0)


def test_range_is_requested_by_id_epoch_and_its_part_of_the_span() -> None:
    ranges = [Range(7, 2, Span(b"", b"m")), Range(8, 1, Span(b"m", None))]
    walk = RangeScan(Span(b"c", b"z"), ranges)
    assert walk.next() == {"range": 7, "epoch": 2, "start": b"c", "end": b"m"}
    walk.took(b"d")
    assert walk.next() == {"range": 7, "epoch": 2, "start": b"c", "end": b"m", "after": b"d"}
    walk.finished()
    assert walk.next() == {"range": 8, "epoch": 1, "start": b"m", "end": b"z"}
    walk.finished()
    assert walk.done


def test_whole_range_is_requested_without_bounds() -> None:
    assert RangeScan(Span.all(), [Range(1, 1, Span.all())]).next() == {"range": 1, "epoch": 1}
    assert RangeScan(Span.all()).next() == {}
    assert RangeScan(Span(b"a", b"b")).next() == {"start": b"a", "end": b"b"}


def test_newest_of_overlapping_ranges_is_requested() -> None:
    walk = RangeScan(Span.all(), [Range(1, 1, Span(b"", b"m")), Range(2, 1, Span(b"m", None))])
    assert walk.next()["range"] == 1
    walk.replace([Range(1, 3, Span(b"", b"p"))])  # it was merged with the beginning of the second
    walk.took(b"n")
    assert walk.next() == {"range": 1, "epoch": 3, "after": b"n"}
    walk.finished()
    assert walk.next() == {"range": 2, "epoch": 1, "start": b"p"}  # the rest of it: nothing is read twice


def test_ranges_with_a_gap_are_refused() -> None:
    walk = RangeScan(Span.all(), [Range(1, 1, Span(b"", b"m")), Range(2, 1, Span(b"n", None))])
    walk.next()
    walk.finished()
    with pytest.raises(InvalidRequest, match="no range holds"):
        walk.next()


def test_stale_epoch_without_new_ranges_ends_the_walk() -> None:
    pull = SnapshotPull(["pull"], {}, RangeScan(Span.all(), [Range(1, 1, Span.all())]), backoff())
    pull.next()
    pull.failed(StaleEpoch("gone", ranges=[]))
    with pytest.raises(InvalidRequest):
        pull.next()


@pytest.mark.parametrize("error", [OffsetExpired(1, 2, 3), Conflict("x", resnapshot_reason="schema_changed")])
def test_refusal_of_a_pull_is_raised_unchanged(error: HeadwaterError) -> None:
    for pull in (
        SnapshotPull(["pull"], {}, RangeScan(Span.all()), backoff()),
        LogPull(["pull"], {"after": 1, "upto": 2}, backoff()),
    ):
        with pytest.raises(type(error)) as raised:
            pull.failed(error)
        assert raised.value is error


def test_retried_log_pull_continues_after_its_offset_in_its_first_schema() -> None:
    pull = LogPull(["pull"], {"after": 10, "upto": 90, "shape": None}, backoff())
    first = pull.next()
    assert first is not None and "shape" not in first.path
    pull.took(received_batch([b"x"], upto="40"))
    pull.failed(Unavailable("cut", sent=True))
    second = pull.next()
    assert second is not None
    assert dict(parse_qsl(urlsplit(second.path).query)) == {"after": "40", "upto": "90", "shape": "4"}
    pull.took(received_batch([], upto="90"))
    assert pull.failed(Unavailable("cut", sent=True)) == 0.0
    assert pull.next() is None


def test_empty_log_slice_sends_no_request() -> None:
    assert LogPull(["pull"], {"after": 5, "upto": 5}, backoff()).next() is None


@pytest.mark.parametrize("name", ["last_key", "upto"])
def test_batch_without_its_end_position_is_refused(name: str) -> None:
    pull = (
        SnapshotPull(["pull"], {}, RangeScan(Span.all()), backoff())
        if name == "last_key"
        else LogPull(["pull"], {"after": 1, "upto": 2}, backoff())
    )
    pull.took(received_batch([]))
    with pytest.raises(HeadwaterError, match=name):
        pull.took(received_batch([b"x"]))


def test_empty_batches_are_skipped_unless_all_are_empty() -> None:
    empty, rows = received_batch([], upto="2"), received_batch([b"x"], upto="3")
    pull = LogPull(["pull"], {"after": 1, "upto": 3}, backoff())
    assert [list(pull.take(each)) for each in (empty, rows)] == [[], [rows.batch]]
    pull.finished()
    assert list(pull.rest()) == []
    pull = LogPull(["pull"], {"after": 1, "upto": 3}, backoff())
    assert list(pull.take(empty)) == [] and list(pull.rest()) == []
    pull.finished()
    assert list(pull.rest()) == [empty.batch]
