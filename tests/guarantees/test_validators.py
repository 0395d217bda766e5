"""Each validator passes a good history and catches a broken one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.guarantees.fold import raw_row
from tests.guarantees.validators import (
    Answered,
    Atomic,
    CompleteInTheLog,
    Constant,
    Durable,
    NeverRewritten,
    Ordered,
    Placed,
    placed,
)

from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Row, Table

T = Table("t", (Column("id", "i64"), Column("v", "str"), Column("mark", "str")), ("id",))
CREATED = Change(Op.SCHEMA_CHANGE, T, ddl="CREATE TABLE t")


def insert(key: int, mark: str, value: str = "v") -> Change:
    return Change(Op.INSERT, T, None, (key, value, mark))


def history(*transactions: tuple[Change, ...]) -> list[Transaction]:
    found, first = [], 1
    for place, changes in enumerate(transactions):
        found.append(Transaction(str(first), changes, first, ts=10 + place))
        first += len(changes)
    return found


GOOD = history(
    (CREATED,),
    (insert(1, "a"), insert(2, "a")),
    (Change(Op.UPDATE, T, (1, "v", "a"), (1, "w", "b")), Change(Op.DELETE, T, (2, "v", "a"), None)),
    (insert(2, "c"),),
)
TABLE: list[Row] = [(1, "w", "b"), (2, "v", "c")]


def test_durable_validator_accepts_a_log_with_every_acknowledged_write() -> None:
    durable = Durable()
    durable.note_acknowledged("a", 2)
    durable.note_refused("x")
    for _ in range(2):
        durable.note_found("a")
    durable.note_found("in flight at a kill")
    durable.check()
    assert durable.failures == []


def test_durable_validator_reports_lost_partial_and_resurrected_transactions() -> None:
    durable = Durable()
    durable.note_acknowledged("lost", 1)
    durable.note_acknowledged("half", 2)
    durable.note_refused("back")
    durable.note_found("half")
    durable.note_found("back")
    durable.check()
    assert [text.split()[1] for text in durable.failures] == ["lost", "half", "back"]


def atomic(parts: list[Transaction], **sizes: int) -> list[str]:
    validator = Atomic()
    for mark, size in sizes.items():
        validator.note_size(mark, size)
    validator.check(placed(parts))
    validator.check_parts(parts)
    return validator.failures


def test_atomic_validator_accepts_whole_contiguous_transactions() -> None:
    assert atomic(GOOD, a=2, b=1, c=1, never=7) == []
    big = Transaction("1", tuple(insert(n, "a") for n in range(5)), 1, ts=1)
    assert atomic([big.cut(0, 2), big.cut(2, 5)], a=5) == []


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (history((insert(1, "a"),)), "1 of its 2"),
        (history((insert(1, "a"),), (insert(2, "a"),)), "split over transactions"),
        (history((insert(1, "a"), insert(2, "b"), insert(3, "a"))), "stands inside a"),
        ([GOOD[1].cut(1, 2)], "inside transaction"),
        ([GOOD[1].cut(1, 2), *GOOD[2:]], "does not continue"),
        ([GOOD[0], GOOD[1].cut(2, 3)], "begins at change 1"),
    ],
)
def test_atomic_validator_reports_a_torn_transaction(parts: list[Transaction], named: str) -> None:
    assert any(named in text for text in atomic(parts, a=2)), atomic(parts, a=2)


def ordered(changes: list[Placed]) -> list[str]:
    validator = Ordered()
    validator.check(changes, first=1)
    return validator.failures


def test_ordered_validator_accepts_a_log_without_gaps() -> None:
    assert ordered(placed(GOOD)) == []


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (lambda log: log[1:], "begins with 2"),
        (lambda log: log[:2] + log[3:], "4 follows 2"),
        (lambda log: [*log, log[-1]], "6 follows 6"),
        (lambda log: [*log[:-1], msgspec.structs.replace(log[-1], ts=3)], "below"),
        (lambda log: [*log[:-1], msgspec.structs.replace(log[-1], ts=log[-2].ts)], "time of another"),
    ],
)
def test_ordered_validator_reports_gaps_repeats_and_decreasing_times(
    broken: Callable[[list[Placed]], list[Placed]], named: str
) -> None:
    assert any(named in text for text in ordered(broken(placed(GOOD))))


def test_never_rewritten_validator_accepts_a_growing_log() -> None:
    validator = NeverRewritten()
    for upto in (2, 4, 6):
        validator.note_reading(placed(GOOD)[:upto])
    validator.note_reading(placed(GOOD)[4:])
    assert validator.failures == []


def test_never_rewritten_validator_reports_a_reused_offset_and_a_shorter_log() -> None:
    reused, shorter = NeverRewritten(), NeverRewritten()
    for validator in (reused, shorter):
        validator.note_reading(placed(GOOD))
    reused.note_reading(placed([*GOOD[:-1], msgspec.structs.replace(GOOD[-1], changes=(insert(2, "d"),))]))
    shorter.note_reading(placed(GOOD)[:-1])
    assert "6 was" in reused.failures[0] and "ends now at 5" in shorter.failures[0]


def complete(changes: list[Placed], found: list[Row], *, backwards: bool = False) -> list[str]:
    validator = CompleteInTheLog()
    rows = [raw_row(row) for row in found]
    if backwards:
        validator.check_backwards(changes, lambda _: rows)
    else:
        validator.check(changes, ["t"], lambda _: rows)
    return validator.failures


def test_complete_log_validator_accepts_a_log_that_folds_to_the_tables() -> None:
    assert complete(placed(GOOD), TABLE) == []
    assert complete(placed(GOOD)[3:], TABLE, backwards=True) == []


MISSING, UNSEEN = TABLE[:1], [*TABLE, (3, "v", "unseen")]
OTHER_VALUE, OTHER_TYPE = [(1, "w", "b"), (2, "other", "c")], [(1, "w", "b"), (2, b"v", "c")]


@pytest.mark.parametrize("rows", [MISSING, UNSEEN, OTHER_VALUE, OTHER_TYPE])
def test_complete_log_validator_reports_tables_that_differ(rows: list[Row]) -> None:
    assert complete(placed(GOOD), rows)


@pytest.mark.parametrize("rows", [MISSING, OTHER_VALUE, OTHER_TYPE])
def test_complete_log_validator_reports_tables_that_differ_when_folding_backwards(rows: list[Row]) -> None:
    assert complete(placed(GOOD)[1:], rows, backwards=True)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_complete_log_validator_reports_any_lost_change(place: int) -> None:
    changes = placed(GOOD)
    assert complete(changes[:place] + changes[place + 1 :], TABLE)


def test_complete_log_validator_reports_a_table_missing_from_the_log() -> None:
    validator = CompleteInTheLog()
    validator.check(placed(GOOD), ["t", "u"], lambda _: [raw_row(row) for row in TABLE])
    assert "'u'" in validator.failures[0]


def test_answered_validator_reports_a_write_at_another_offset_or_missing() -> None:
    changes, answered = placed(GOOD), Answered()
    answered.check(changes, {"a": {"t": 3}, "b": {"t": 4}, "c": {"t": 6}})
    assert answered.failures == []
    answered.check(changes, {"a": {"t": 4}, "b": {"u": 4}, "c": {"t": 7}})
    assert [text.split()[1] for text in answered.failures] == ["a", "b", "c"]


def test_constant_validator_reports_a_sum_that_differs_at_a_transaction_end() -> None:
    table = Table("t", (Column("id", "i64"), Column("n", "i64")), ("id",))
    there = Change(Op.UPDATE, table, (1, 5), (1, 3))
    here = Change(Op.UPDATE, table, (2, 5), (2, 7))
    moved = Change(Op.UPDATE, table, (2, 7), (4, 7))
    held = {(1,): 5, (2,): 5}
    good, split = Constant(), Constant()
    good.check(placed(history((there, here), (moved,))), "t", "n", held)
    assert good.failures == []
    split.check(placed(history((there,), (here,))), "t", "n", held)
    assert len(split.failures) == 1
