"""Transactions in parts: small ones are flushed together, a large one part by part."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.log.memory_log import MemoryLog

from headwater.capture.capture import GATHER, Capture
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table

TABLE = Table("t", (Column("id", "i64"),), ("id",))


class Parts:
    """A source with one transaction for each of `sizes`, which has that many parts of two changes."""

    name = "parts"

    def __init__(self, *sizes: int) -> None:
        self.given: list[Transaction] = []
        offset = 1
        for number, size in enumerate(sizes):
            for place in range(size):
                changes = tuple(Change(Op.INSERT, TABLE, None, (offset + step,)) for step in range(2))
                last = place == size - 1
                self.given.append(Transaction(str(number), changes, offset, start=2 * place, last=last))
                offset += 2
        self.acknowledged = 0

    def prove(self, **_: Any) -> str:
        return ""

    def follow(self, *, after: int) -> Iterator[Transaction]:
        return (part for part in self.given if part.first > after)

    def acknowledge(self, upto: int) -> None:
        self.acknowledged = upto

    def wait(self, timeout: float) -> None:
        pass

    wake = wait


class Counting(MemoryLog):
    """A log that records how many changes each append made durable."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def append(self, parts: Any, **options: Any) -> int:
        before, latest = self.latest, super().append(parts, **options)
        self.steps.append(latest - before)
        return latest


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ((1, 2, 3), [12]),
        ((GATHER, GATHER, 1), [4 * GATHER + 2]),
        ((1, GATHER + 1, 2), [2 * GATHER + 4, 4]),  # what is staged goes first, in the same step
        ((GATHER + 1, GATHER + 1), [2 * GATHER + 2, 2 * GATHER + 2]),
    ],
)
def test_small_transactions_are_flushed_together_and_a_large_one_part_by_part(
    sizes: tuple[int, ...], steps: list[int]
) -> None:
    source, wrapped = Parts(*sizes), Counting()
    log = LiveLog(wrapped)
    capture = Capture(source, log, retention=Retention(), flush_seconds=60)  # type: ignore[arg-type]
    capture._pass()
    log.flush()
    assert wrapped.steps == steps
    assert [change for part in log.read(after=0) for change in part.changes] == [
        change for part in source.given for change in part.changes
    ]
    assert all(one.ts == other.ts for one in log.read(after=0) for other in log.read(after=0) if one.id == other.id)
