"""Sets of byte strings as half-open intervals, and the set for which each test of a condition is true."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from headwater.model.keys.key import Span, encode_key

_LOWEST_NULL = encode_key((None,))  # no value of any kind has bytes below it


class Spans(msgspec.Struct, frozen=True):
    """A set of byte strings, given by its sorted edges: a member has an odd number of edges at or below it."""

    edges: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, points: Iterable[bytes]) -> Spans:
        """Return the set of exactly these byte strings."""
        return union(cls((point, _next(point))) for point in points)

    def contains(self, data: bytes) -> bool:
        """Return whether `data` is in the set."""
        return bool(bisect_right(self.edges, data) & 1)

    def complement(self) -> Spans:
        """Return the set of all byte strings that are not in this one."""
        edges = self.edges
        return Spans(edges[1:]) if edges[:1] == (b"",) else Spans((b"", *edges))

    def intersect(self, other: Spans) -> Spans:
        """Return the intersection with `other`."""
        return union((self.complement(), other.complement())).complement()

    def spans(self) -> Iterator[Span]:
        """Yield the intervals of the set, in order and disjoint."""
        for place in range(0, len(self.edges), 2):
            yield Span(*self.edges[place : place + 2])

    @property
    def points(self) -> frozenset[bytes] | None:
        """Return the members of the set, None if there are infinitely many."""
        starts, ends = self.edges[::2], self.edges[1::2]
        return frozenset(starts) if ends == tuple(map(_next, starts)) else None


NOTHING, EVERYTHING = Spans(), Spans((b"",))


def union(sets: Iterable[Spans]) -> Spans:
    """Return the union of the sets."""
    steps: dict[bytes, int] = {}
    for one in sets:
        for place, edge in enumerate(one.edges):
            steps[edge] = steps.get(edge, 0) + (-1 if place & 1 else 1)
    depth, edges = 0, []
    for edge in sorted(steps):
        before, depth = depth, depth + steps[edge]
        if (before > 0) != (depth > 0):
            edges.append(edge)
    return Spans(tuple(edges))


def where_true(op: str, operands: Sequence[bytes | None], null: bytes) -> Spans:
    """Return the bytes of the values for which a test is true; `null` are the bytes of NULL, None is a NULL operand."""
    known = [operand for operand in operands if operand is not None]
    if op == "is" or op == "is_not":
        found = Spans.of(known or [null])
        return found if op == "is" else found.complement()
    if op == "in":
        return Spans.of(known)
    if op == "not_in" and not operands:
        return EVERYTHING  # even NULL is not in an empty list
    if op == "not_between":
        low, high = operands  # with a NULL on one side the test can still be true on the other
        below, above = where_true("lt", [low], null), where_true("gt", [high], null)
        return union((below, above))
    if len(known) < len(operands):
        return NOTHING
    not_null = Spans((_next(null),)) if null == _LOWEST_NULL else Spans.of([null]).complement()
    return _compared(op, known).intersect(not_null)


def _compared(op: str, operands: Sequence[bytes]) -> Spans:
    first, last = operands[0], operands[-1]
    match op:
        case "eq":
            return Spans.of(operands)
        case "ne" | "not_in":
            return Spans.of(operands).complement()
        case "lt":
            return Spans((first,)).complement()
        case "le":
            return Spans((_next(first),)).complement()
        case "gt":
            return Spans((_next(first),))
        case "ge":
            return Spans((first,))
        case "between":
            return Spans((first,)).intersect(Spans((_next(last),)).complement())
        case _:
            raise ValueError(f"unknown test {op!r}")


def _next(data: bytes) -> bytes:
    """Return the smallest byte string greater than `data`."""
    return data + b"\0"
