"""Where a table is cut: decisions about spans and sizes, from a sample of its rows. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from headwater.model.keys.key import Span
from headwater.ranges.ranges.range import Range, divided, united
from headwater.sources.read import Point, Sample

MOST_RANGES = 10_000  # of one table; beyond, they are larger than asked
POINTS_PER_RANGE = 64  # a bound is then off by an eighth of a range, mostly
FEWEST_POINTS, MOST_POINTS = 1_024, 65_536


class Size(NamedTuple):
    """An estimate."""

    rows: int
    bytes: int


class Split(NamedTuple):
    """Cut the range at this place in the list, at these keys."""

    number: int
    bounds: tuple[bytes, ...]


class Merge(NamedTuple):
    """Make one of the ranges from `number` to `last`, both included."""

    number: int
    last: int


def pieces(size: int, target: int) -> int:
    """Into how many ranges of about `target` bytes something of `size` bytes is cut."""
    return min(max(ceil(size / target), 1), MOST_RANGES)


def sample_size(count: int) -> int:
    """How many points tell where `count` ranges begin."""
    return min(max(count * POINTS_PER_RANGE, FEWEST_POINTS), MOST_POINTS)


def spans_of(bounds: Sequence[bytes]) -> list[Span]:
    """The spans between `bounds`, the open ones at both ends included."""
    edges = [b"", *bounds]
    return [Span(low, high) for low, high in pairwise(edges)] + [Span(edges[-1], None)]


def cut(sample: Sample, target: int) -> list[Span]:
    """Spans of about `target` bytes that hold every key once."""
    return spans_of(bounds(sample.points, pieces(sample.bytes, target)))


def bounds(points: Sequence[Point], count: int) -> list[bytes]:
    """At most `count - 1` keys, in order, that cut what `points` stand for into shares of equal bytes.

    Never the first key: nothing would lie before it.
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


def within(points: Sequence[Point], span: Span) -> Sequence[Point]:
    """The points inside `span`."""
    low = bisect_left(points, span.start, key=_place)
    return points[low : len(points) if span.end is None else bisect_left(points, span.end, key=_place)]


def sizes(sample: Sample, spans: Sequence[Span]) -> list[Size]:
    """How much each of `spans`, which hold every key once, holds."""
    if len(spans) == 1:
        return [Size(sample.rows, sample.bytes)]
    parts = [within(sample.points, span) for span in spans]
    return [Size(round(sum(p.rows for p in part)), round(sum(p.bytes for p in part))) for part in parts]


def resized(sample: Sample, spans: Sequence[Span], target: int) -> list[Split | Merge]:
    """What to do about ranges that grew beyond twice `target`, and neighbours that together are below its half."""
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
    """`ranges`, which hold every key once, with what they hold by `sample`."""
    found = sizes(sample, [one.span for one in ranges])
    return [replace(one, rows=size.rows, bytes=size.bytes) for one, size in zip(ranges, found, strict=True)]


def applied(ranges: Sequence[Range], steps: Sequence[Split | Merge], new_id: Callable[[], int]) -> list[Range]:
    """`ranges` after `steps`, which name each of them at most once, in order."""
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


def _place(point: Point) -> bytes:
    return point.place
