"""Split points of a table: every key in one span, parts of equal bytes, and stable results when repeated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.model.table import Column, Table
from headwater.ranges.ranges import split as spans
from headwater.ranges.ranges.split import (
    Merge,
    Split,
    applied,
    bounds,
    measured,
    pieces,
    resized,
    sample_size,
    sizes,
    spans_of,
    split_into_spans,
    within,
)
from headwater.sources.read import Sample, SamplePoint

T = Table("t", (Column("k"),), ("k",))
POINTS = st.lists(
    st.builds(SamplePoint, st.binary(min_size=1, max_size=2), st.floats(0.1, 50), st.floats(0, 1000)), max_size=40
).map(lambda points: tuple(sorted(points, key=lambda point: point.place)))


def sample(*points: SamplePoint) -> Sample:
    return Sample(T, round(sum(p.rows for p in points)), round(sum(p.bytes for p in points)), points)


def even(count: int, each: float = 10.0, start: int = 0) -> list[SamplePoint]:
    return [SamplePoint((start + n).to_bytes(2), 1.0, each) for n in range(count)]


def covers(found: list[Span]) -> bool:
    edges = [(span.start, span.end) for span in found]
    joined = all(one[1] == other[0] for one, other in pairwise(edges))
    return joined and edges[0][0] == b"" and edges[-1][1] is None and all(s < (e or b"\xff" * 9) for s, e in edges)


@given(POINTS, st.integers(1, 5000))
def test_sample_is_split_into_nonempty_spans_that_cover_all_keys(points: tuple[SamplePoint, ...], target: int) -> None:
    found = split_into_spans(sample(*points), target)
    assert covers(found)
    assert len(found) <= pieces(round(sum(p.bytes for p in points)), target)
    if len(found) > 1:
        assert all(within(points, span) for span in found)
    measured = sizes(sample(*points), found)
    assert abs(sum(size.bytes for size in measured) - sum(p.bytes for p in points)) <= len(found)


@given(POINTS, st.integers(2, 8))
def test_span_has_at_most_its_share_of_bytes_and_one_heavy_row(points: tuple[SamplePoint, ...], count: int) -> None:
    total, heaviest = sum(p.bytes for p in points), max((p.bytes for p in points), default=0.0)
    twins = len(points) - len({p.place for p in points})  # rows of one key stay together
    for span in spans_of(bounds(points, count)):
        assert sum(p.bytes for p in within(points, span)) <= total / count + heaviest * (twins + 1) + 1e-6


def test_last_span_of_rows_of_equal_size_has_as_many_rows_as_the_others() -> None:
    found = sizes(sample(*even(1000)), split_into_spans(sample(*even(1000)), 1010))
    assert len(found) == 10 and {size.rows for size in found} == {100}


def test_sample_without_keys_is_split_into_one_span() -> None:
    assert split_into_spans(Sample(T, 0, 0), 10) == [Span.all()]
    assert split_into_spans(Sample(T, 10**6, 10**9), 10) == [Span.all()]
    assert sizes(Sample(T, 10**6, 10**9), [Span.all()]) == [(10**6, 10**9)]


def test_rows_after_a_heavy_row_are_one_range() -> None:
    found = split_into_spans(
        sample(SamplePoint(b"a", 1, 900), SamplePoint(b"b", 1, 1), SamplePoint(b"c", 1, 1), SamplePoint(b"d", 1, 98)),
        100,
    )
    assert found == [Span(b"", b"b"), Span(b"b", None)]


def test_split_never_makes_more_than_the_maximum_number_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces(2**60, 1) == spans.MOST_RANGES and pieces(0, 1) == 1
    assert sample_size(1) == 1_024 and sample_size(10**9) == 65_536
    monkeypatch.setattr(spans, "MOST_RANGES", 10)
    everything = sample(*even(1000))
    halves = spans_of([(100).to_bytes(2), (500).to_bytes(2)])
    after = resized(everything, halves, 1)
    assert len(applied([Range(n, 1, span) for n, span in enumerate(halves)], after, lambda: 9)) <= 10


# --- a second look -----------------------------------------------------------------------------------------------


def test_range_is_split_only_above_twice_its_target() -> None:
    halves = spans_of([(100).to_bytes(2)])
    assert resized(sample(*even(300)), halves, 1000) == []  # 1000 and 2000 bytes
    (step,) = resized(sample(*even(330)), halves, 1000)
    assert isinstance(step, Split) and step.number == 1 and len(step.bounds) == 2
    sized = sizes(sample(*even(330)), spans_of([(100).to_bytes(2), *step.bounds]))
    assert all(700 <= size.bytes <= 1000 for size in sized)


def test_neighbouring_ranges_are_merged_only_below_half_of_the_target_together() -> None:
    spans = spans_of([bytes([0, n]) for n in (30, 60, 90)])
    assert resized(sample(*even(120)), spans, 1200) == []  # 300 each: two are half of the target
    assert resized(sample(*even(120)), spans, 1400) == [Merge(0, 1), Merge(2, 3)]
    assert resized(sample(), spans, 1200) == [Merge(0, 3)]
    assert resized(sample(*even(1000, start=90)), spans, 10_000) == [Merge(0, 2)]


@given(POINTS, st.integers(1, 500), POINTS)
def test_repeated_resizing_of_ranges_ends(
    points: tuple[SamplePoint, ...], target: int, later: tuple[SamplePoint, ...]
) -> None:
    found = split_into_spans(sample(*points), target)
    ids = iter(range(1000, 10_000))
    ranges = [Range(n, 1, span) for n, span in enumerate(found)]
    for _ in range(6):
        steps = resized(sample(*later), [one.span for one in ranges], target)
        ranges = applied(ranges, steps, lambda: next(ids))
        assert covers([one.span for one in ranges])
        if not steps:
            break
    heaviest = max((p.bytes for p in later), default=0.0)
    assert not steps or heaviest > target / 4, "it splits and merges the same ranges for ever"


def test_ranges_are_measured_by_the_sampled_rows_inside_them() -> None:
    ranges = [Range(n, 1, span) for n, span in enumerate(spans_of([(10).to_bytes(2)]))]
    assert [(one.rows, one.bytes) for one in measured(sample(*even(30)), ranges)] == [(10, 100), (20, 200)]
