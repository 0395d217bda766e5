"""Sets of byte strings as intervals against explicit sets."""

from __future__ import annotations

import random

import pytest

from headwater.model.keys.key import encode_key
from headwater.queries.dependencies.intervals import EVERYTHING, NOTHING, Spans, union, where_true

POINTS = [b"", b"\0", b"a", b"a\0", b"a\0\0", b"ab", b"b", b"\xff", b"\xff\xff"]


def members(spans: Spans) -> set[bytes]:
    return {point for point in POINTS if spans.contains(point)}


def some(rng: random.Random) -> Spans:
    return Spans(tuple(sorted(rng.sample(POINTS, rng.randrange(5)))))


def test_unions_and_intersections_agree_with_explicit_sets() -> None:
    for seed in range(2_000):
        rng = random.Random(seed)
        one, two = some(rng), some(rng)
        assert members(union([one, two])) == members(one) | members(two), seed
        assert members(one.intersect(two)) == members(one) & members(two), seed
        assert members(one.complement()) == set(POINTS) - members(one), seed
        assert members(one) == {p for p in POINTS if any(span.contains(p) for span in one.spans())}, seed
        assert list(union([one, two]).edges) == sorted(set(union([one, two]).edges)), seed


def test_points_are_listed_only_for_finite_sets() -> None:
    assert Spans.of([b"b", b"a"]).points == {b"a", b"b"}
    assert Spans.of([]) == NOTHING and NOTHING.points == frozenset()
    assert EVERYTHING.points is None and Spans((b"a", b"b")).points is None
    assert NOTHING.complement() == EVERYTHING and EVERYTHING.complement() == NOTHING


@pytest.mark.parametrize("null", [encode_key((None,)), b"\x7f"])  # a database may sort NULL elsewhere
def test_null_is_true_only_for_tests_that_accept_null(null: bytes) -> None:
    low, high = b"\x10", b"\x90"
    for op in ("eq", "ne", "lt", "le", "gt", "ge", "in", "not_in"):
        assert not where_true(op, [low], null).contains(null), op
    for op in ("eq", "ne", "lt", "le", "gt", "ge", "in"):
        assert where_true(op, [None], null) == NOTHING, op
    assert where_true("not_in", [low, None], null) == NOTHING
    assert where_true("not_in", [], null) == EVERYTHING
    assert where_true("in", [low, None], null) == Spans.of([low])
    assert where_true("is", [None], null) == Spans.of([null])
    assert where_true("is_not", [low], null).contains(null) and not where_true("is_not", [None], null).contains(null)
    assert where_true("between", [None, high], null) == NOTHING
    assert where_true("not_between", [None, high], null) == where_true("gt", [high], null)
    assert where_true("between", [high, low], null) == NOTHING


def test_unknown_comparison_operator_raises_value_error() -> None:
    with pytest.raises(ValueError, match="unknown"):
        where_true("like", [b"a"], b"\x05")
