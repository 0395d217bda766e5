"""Split points of a table, and sizes of its ranges, computed from a sample of its rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.sources.read import Sample, SamplePoint

MOST_RANGES = 10_000  # of one table; a table that would have more has larger ranges than requested
POINTS_PER_RANGE = 64  # with these, a bound is mostly off by at most an eighth of a range
FEWEST_POINTS, MOST_POINTS = 1_024, 65_536


class Size(NamedTuple):
    """The estimated size of a range."""

    rows: int
    bytes: int


class Split(NamedTuple):
    """A step: split the range at index `number` at these keys."""

    number: int
    bounds: tuple[bytes, ...]


class Merge(NamedTuple):
    """A step: merge the ranges from index `number` to `last`, both included."""

    number: int
    last: int


def pieces(size: int, target: int) -> int:
    """Return the number of ranges of about `target` bytes for `size` bytes."""
    return min(max(ceil(size / target), 1), MOST_RANGES)


def sample_size(count: int) -> int:
    """Return how many sample points are needed to find the bounds of `count` ranges."""
    return min(max(count * POINTS_PER_RANGE, FEWEST_POINTS), MOST_POINTS)


def spans_of(bounds: Sequence[bytes]) -> list[Span]:
    """Return the spans between `bounds`, including the open ones at both ends."""
    edges = [b"", *bounds]
    return [Span(low, high) for low, high in pairwise(edges)] + [Span(edges[-1], None)]


def split_into_spans(sample: Sample, target: int) -> list[Span]:
    """Return spans of about `target` bytes that contain every key once."""
    return spans_of(bounds(sample.points, pieces(sample.bytes, target)))


def bounds(points: Sequence[SamplePoint], count: int) -> list[bytes]:
    """Return at most `count - 1` keys, in order, that split the sampled rows into parts of equal bytes.

    The first key is never one of them: the range before it would be empty.
    """
    share = sum(point.bytes for point in points) / count
    found: list[bytes] = []
    passed, due = 0.0, share
    for before, point in pairwise(points):
        passed += before.bytes
        if passed >= due and point.place > (found or [points[0].place])[-1]:
            found.append(point.place)
            due = share * (passed // share + 1) if share else 0.0  # a heavy row may fill several shares
    return found[: count - 1]


def within(points: Sequence[SamplePoint], span: Span) -> Sequence[SamplePoint]:
    """Return the points inside `span`."""
    place = attrgetter("place")
    low = bisect_left(points, span.start, key=place)
    return points[low : len(points) if span.end is None else bisect_left(points, span.end, key=place)]


def sizes(sample: Sample, spans: Sequence[Span]) -> list[Size]:
    """Return the size of each of `spans`, which contain every key once."""
    if len(spans) == 1:
        return [Size(sample.rows, sample.bytes)]
    parts = [within(sample.points, span) for span in spans]
    return [Size(round(sum(p.rows for p in part)), round(sum(p.bytes for p in part))) for part in parts]


def resized(sample: Sample, spans: Sequence[Span], target: int) -> list[Split | Merge]:
    """Return steps that split ranges above twice `target`, and merge neighbours that together are below its half."""
    steps: list[Split | Merge] = []
    measured = sizes(sample, spans)
    number = 0
    while number < len(spans):
        size = measured[number].bytes
        last = number
        while last + 1 < len(spans) and size + measured[last + 1].bytes < target / 2:
            last += 1
            size += measured[last].bytes
        if last > number:
            steps.append(Merge(number, last))
        elif size > 2 * target and (found := bounds(within(sample.points, spans[number]), pieces(size, target))):
            steps.append(Split(number, tuple(found)))
        number = last + 1
    room = MOST_RANGES - len(spans)
    return [step for step in steps if isinstance(step, Merge) or (room := room - len(step.bounds)) >= 0]


def measured(sample: Sample, ranges: Sequence[Range]) -> list[Range]:
    """Return `ranges`, which contain every key once, with their sizes by `sample`."""
    found = sizes(sample, [one.span for one in ranges])
    return [replace(one, rows=size.rows, bytes=size.bytes) for one, size in zip(ranges, found, strict=True)]


def applied(ranges: Sequence[Range], steps: Sequence[Split | Merge], new_id: Callable[[], int]) -> list[Range]:
    """Return `ranges` after `steps`, which are in order and refer to each range at most once."""
    found: list[Range] = []
    number = 0
    for step in steps:
        found += ranges[number : step.number]
        if isinstance(step, Split):
            found += divided(ranges[step.number], step.bounds, new_id)
            number = step.number + 1
        else:
            found.append(united(ranges[step.number : step.last + 1]))
            number = step.last + 1
    return [*found, *ranges[number:]]


def divided(one: Range, bounds: Sequence[bytes], new_id: Callable[[], int]) -> list[Range]:
    """Split `one` at `bounds`: the first part keeps its id, and all parts have the next epoch."""
    edges = [one.span.start, *bounds]
    spans = [Span(low, high) for low, high in zip(edges, [*bounds, one.span.end], strict=True)]
    first, *rest = [Range(one.id, one.epoch + 1, span) for span in spans]
    return [first, *(replace(part, id=new_id()) for part in rest)]


def united(ranges: Sequence[Range]) -> Range:
    """Merge neighbours: the result has the id of the first and an epoch above those of all."""
    first, last = ranges[0], ranges[-1]
    epoch = max(one.epoch for one in ranges) + 1
    return Range(first.id, epoch, Span(first.span.start, last.span.end))
