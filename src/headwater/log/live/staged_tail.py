"""The newest transactions of a log in memory, contiguous, cheap to read from any offset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from headwater.log.transaction_parts import estimated_bytes, first_begin, last_at, within
from headwater.model.change import Transaction


class Tail:
    """Transactions and parts with ascending, gapless offsets. Not thread-safe: the owner locks it."""

    def __init__(self) -> None:
        self._parts: list[Transaction] = []
        self._firsts: list[int] = []  # of each part, for bisection
        self._weights: list[int] = []
        self.weight = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def first(self) -> int:
        """Return the oldest offset held; the tail must not be empty."""
        return self._firsts[0]

    @property
    def newest(self) -> Transaction:
        """Return the newest part; the tail must not be empty."""
        return self._parts[-1]

    @property
    def changes(self) -> int:
        """Return the number of changes held."""
        return self._parts[-1].upto - self._firsts[0] + 1 if self._parts else 0

    def extend(self, parts: Iterable[Transaction]) -> None:
        """Add the parts that follow the newest one."""
        for part in parts:
            weight = estimated_bytes(part)
            self._parts.append(part)
            self._firsts.append(part.first)
            self._weights.append(weight)
            self.weight += weight

    def cut(self, after: int, upto: int) -> list[Transaction]:
        """Return the changes in (after, upto]; `after + 1` must be held or beyond the newest."""
        low = max(bisect_right(self._firsts, after + 1) - 1, 0)
        return within(self._parts[low : bisect_right(self._firsts, upto)], after, upto)

    def forget(self, *, upto: int, changes: int, weight: int) -> None:
        """Drop the oldest parts down to `changes` and `weight`, but not the newest, nor any that ends above `upto`."""
        count, held, place = self.changes, self.weight, 0
        while place < len(self._parts) - 1 and self._parts[place].upto <= upto:
            if count <= changes and held <= weight:
                break
            count -= len(self._parts[place].changes)
            held -= self._weights[place]
            place += 1
        del self._parts[:place], self._firsts[:place], self._weights[:place]
        self.weight = held

    def drop_after(self, offset: int) -> None:
        """Drop every part that begins after `offset`."""
        place = bisect_right(self._firsts, offset)
        self.weight -= sum(self._weights[place:])
        del self._parts[place:], self._firsts[place:], self._weights[place:]

    def offset_at(self, ts: int) -> int | None:
        """Return the last offset held with a time at or below `ts`; None if all have later times."""
        place = bisect_right(self._parts, ts, key=lambda part: part.ts)
        return last_at(self._parts[place - 1 : place], ts) if place else None

    def first_whole(self, offset: int) -> int | None:
        """Return the first offset held at or above `offset` where a transaction begins; None if there is none."""
        return first_begin(self._parts[max(bisect_right(self._firsts, offset) - 1, 0) :], offset)
