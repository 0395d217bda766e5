"""Each validator of feeds reports its violation, and accepts a correct journal."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from tests.guarantees.feed_journal import (
    BEGIN,
    CAUGHT_UP,
    CHANGE,
    CHECKPOINT,
    LOADED,
    LOST,
    REACHED,
    RESTART,
    ROW,
    ROWS,
    ROWS_END,
    Entry,
)
from tests.guarantees.feed_oracle import Base, Expected, Spec, Truth
from tests.guarantees.feed_validators import (
    Arrived,
    AtomicFeed,
    Bounded,
    CheckpointTrue,
    Complete,
    FeedValidator,
    Filtered,
    Folded,
    Isolated,
    NeverRolledBack,
    OrderedFeed,
    Resumable,
    TrueImages,
    validate,
)

from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import parse_ts
from headwater.model.table import Column, Table

T = Table("t", (Column("id", "i64", "INTEGER"), Column("n", "i64", "INTEGER"), Column("mark", "str", "TEXT")), ("id",))
T2 = Table("t", (*T.columns, Column("more", "str", "TEXT")), ("id",), version=2)


def ts(ms: int) -> int:
    return parse_ts(f"{ms}.0")


def insert(*row: Any) -> Change:
    return Change(Op.INSERT, T, after=row)


def update(before: tuple[Any, ...], after: tuple[Any, ...]) -> Change:
    return Change(Op.UPDATE, T, before, after)


def delete(*row: Any) -> Change:
    return Change(Op.DELETE, T, before=row)


def parts(*transactions: tuple[Change, ...]) -> list[Transaction]:
    found, first = [], 1
    for place, changes in enumerate(transactions):
        found.append(Transaction(str(first), changes, first, ts(1000 + place), 1000 + place))
        first += len(changes)
    return found


HISTORY = parts(
    (Change(Op.SCHEMA_CHANGE, T, ddl="CREATE TABLE t"),),  # 1
    (insert(1, 5, "a"), insert(2, 50, "a")),  # 2 3
    (update((1, 5, "a"), (1, 40, "b")),),  # 4: comes in under n > 30
    (update((2, 50, "a"), (2, 3, "c")), update((1, 40, "b"), (9, 41, "c"))),  # 5 goes out, 6 moves
    (delete(2, 3, "c"), insert(2, 60, "d")),  # 7 8
)
TRUTH = Truth(HISTORY)
ALL = Expected(TRUTH, Spec())
SOME = Expected(TRUTH, Spec(condition="n > 30", tables=("t",)))


def change(expected: Expected, offset: int, **other: Any) -> Entry:
    return Entry(CHANGE, offset, deepcopy(expected.bodies[offset]) | other)


def journal(expected: Expected, *, start: int = 0, upto: int = 8) -> list[Entry]:
    """Return the journal of a reader that receives everything."""
    found = [Entry(BEGIN, start), *(change(expected, offset) for offset in expected.between(start, upto))]
    end = TRUTH.by_offset[upto].part.ts
    return [*found, Entry(CAUGHT_UP, upto), Entry(CHECKPOINT, upto, ts=end + 1), Entry(CHECKPOINT, upto, ts=end + 9)]


def failures(validator: FeedValidator, entries: list[Entry], expected: Expected = ALL) -> list[str]:
    validator.check(entries, expected)
    return validator.failures


def row(id: int, n: int, mark: str, offset: int) -> Entry:
    lits = {"id": {"t": "i64", "v": id}, "n": {"t": "i64", "v": n}, "mark": {"t": "str", "v": mark}}
    return Entry(ROW, offset, {"table": "t", "op": "insert", "pk": [lits["id"]], "after": lits, "offset": offset})


# What is true passes


def test_oracle_maps_filter_transitions_to_insert_update_and_delete() -> None:
    assert [(offset, body["op"]) for offset, body in SOME.bodies.items()] == [
        (1, "schema_change"), (3, "insert"), (4, "insert"), (5, "delete"), (6, "update"), (8, "insert")
    ]  # fmt: skip
    assert {key for _, key in SOME.state(6)} == {'[{"t": "i64", "v": 9}]'}
    assert "after" not in SOME.bodies[5] and "before" not in SOME.bodies[4]
    assert SOME.bodies[6]["pk_before"] == [{"t": "i64", "v": 1}]


def test_oracle_applies_columns_and_shards() -> None:
    by_columns = Expected(TRUTH, Spec(columns=("n",)))
    assert list(by_columns.bodies) == [1, 2, 3, 4, 5, 6, 7, 8] and set(by_columns.bodies[2]["after"]) == {"n"}
    only_mark = Truth(parts((insert(1, 5, "a"),), (update((1, 5, "a"), (1, 5, "b")),)))
    assert list(Expected(only_mark, Spec(columns=("n",))).bodies) == [1]
    shards = [Expected(TRUTH, Spec(shard=(index, 2))).state(8) for index in range(2)]
    assert not shards[0].keys() & shards[1].keys() and shards[0] | shards[1] == ALL.state(8)


@pytest.mark.parametrize("expected", [ALL, SOME])
def test_journal_with_every_change_passes(expected: Expected) -> None:
    assert validate(journal(expected), expected, {"never"}, 8, streams=True) == []


def test_repeated_changes_after_a_reconnect_at_an_earlier_offset_pass() -> None:
    entries = journal(ALL, upto=6)[:-2] + journal(ALL, start=3)
    assert validate(entries, ALL, set(), 8, streams=True) == []


def test_journal_of_a_snapshot_followed_by_its_changes_passes() -> None:
    # Key 1 was read at 4, key 2 at 5: of 6 only the half that is news comes.
    moved = change(ALL, 6)
    entries = [Entry(ROWS), row(1, 40, "b", 4), row(2, 3, "c", 5), Entry(ROWS_END, 4), moved]
    entries += [change(ALL, 7), change(ALL, 8), Entry(CAUGHT_UP, 8), *journal(ALL, start=8)]
    assert validate(entries, ALL, set(), 8, streams=True) == []


def test_delete_half_of_a_key_change_passes_only_during_snapshot_catch_up() -> None:
    half = {name: ALL.bodies[6][name] for name in ALL.bodies[6] if name not in ("after", "pk_before")}
    half |= {"op": "delete", "pk": ALL.bodies[6]["pk_before"]}
    entries = [Entry(ROWS), row(1, 40, "b", 4), row(9, 41, "c", 6), Entry(ROWS_END, 4), Entry(CHANGE, 6, half)]
    assert failures(TrueImages(), entries) == [] and failures(Filtered(), entries) == []
    assert failures(TrueImages(), [Entry(BEGIN, 5), Entry(CHANGE, 6, half)])


# Ordered


def test_ordered_validator_reports_an_earlier_or_repeated_offset() -> None:
    assert failures(OrderedFeed(), [Entry(BEGIN), change(ALL, 2), change(ALL, 1)])
    assert failures(OrderedFeed(), [Entry(BEGIN), change(ALL, 2), change(ALL, 2)])


def test_ordered_validator_reports_a_repeated_change_with_different_content() -> None:
    again = [Entry(BEGIN), change(ALL, 1), Entry(BEGIN), change(ALL, 1, ddl="another")]
    assert failures(OrderedFeed(), again)


def test_ordered_validator_reports_a_change_inside_a_snapshot() -> None:
    assert failures(OrderedFeed(), [Entry(ROWS), row(1, 40, "b", 4), change(ALL, 5)])


# Complete and Resumable


@pytest.mark.parametrize("place", range(2, 8))
def test_complete_validator_reports_any_skipped_change(place: int) -> None:
    entries = journal(ALL)
    del entries[place]
    assert failures(Complete(), entries)


@pytest.mark.parametrize("kind", [REACHED, CAUGHT_UP, CHECKPOINT])
def test_complete_validator_reports_progress_past_an_undelivered_change(kind: str) -> None:
    assert failures(Complete(), [Entry(BEGIN), change(ALL, 1), Entry(kind, 4)])


def test_complete_validator_accepts_changes_withheld_by_the_filter() -> None:
    assert failures(Complete(), [Entry(BEGIN), change(SOME, 1), change(SOME, 3), Entry(REACHED, 3)], SOME) == []


def test_complete_validator_reports_an_unannounced_generation() -> None:
    later = [Transaction("20", (insert(7, 7, "g"),), 20, ts(5000), 5000)]
    truth = Truth([*HISTORY, *later], [Base(19, {"t": []})])
    expected = Expected(truth, Spec())
    assert expected.state(19) == {}
    silent = [Entry(BEGIN, 7), change(expected, 8), change(expected, 20)]
    assert failures(Complete(), silent, expected)
    told = [Entry(BEGIN, 7), change(expected, 8), Entry(LOST), Entry(LOADED, 19, {"t": []}), Entry(BEGIN, 19)]
    told += [change(expected, 20), Entry(REACHED, 20)]
    assert failures(Complete(), told, expected) == failures(Folded(), told, expected) == []


def test_resumable_validator_reports_a_gap_after_a_reconnect() -> None:
    entries = [Entry(BEGIN), change(ALL, 1), change(ALL, 2), Entry(BEGIN, 2), change(ALL, 4)]
    assert failures(Resumable(), entries) and not failures(Complete(), entries)
    assert failures(Resumable(), [Entry(BEGIN), change(ALL, 1), Entry(BEGIN, 5), change(ALL, 6)])


def test_arrived_validator_reports_a_reader_that_never_reaches_the_end() -> None:
    validator = Arrived()
    validator.check([Entry(BEGIN), change(ALL, 1)], ALL, 8)
    assert validator.failures


# Atomic


@pytest.mark.parametrize("kind", [CHECKPOINT, REACHED])
def test_atomic_validator_reports_a_checkpoint_or_page_end_inside_a_transaction(kind: str) -> None:
    whole = Expected(TRUTH, Spec(atomic=True))
    assert failures(AtomicFeed(), [Entry(BEGIN), change(ALL, 1), change(ALL, 2), Entry(kind, 2)], whole)


def test_atomic_validator_reports_mixed_or_misnumbered_transactions() -> None:
    assert failures(AtomicFeed(), [Entry(BEGIN), change(ALL, 2), change(ALL, 4), change(ALL, 3)])
    for id, seq, last in (("2", 1, False), ("2", 0, True), ("3", 1, True)):
        txn = {"id": id, "seq": seq, "last": last}
        assert failures(AtomicFeed(), [Entry(BEGIN), change(ALL, 2), change(ALL, 3, txn=txn)])


def test_atomic_validator_reports_an_uncommitted_change() -> None:
    assert failures(AtomicFeed(), [Entry(BEGIN), Entry(CHANGE, 77, change(ALL, 3).body)])


def test_rolled_back_change_in_a_journal_is_reported() -> None:
    for entry in (change(ALL, 4), row(1, 40, "b", 4)):
        validator = NeverRolledBack()
        validator.check([entry], {"b"})
        assert validator.failures


# Filtered and True images


def test_filtered_validator_reports_changes_outside_the_filter_and_wrong_ops() -> None:
    assert failures(Filtered(), [Entry(BEGIN, 1), change(ALL, 2)], SOME)
    for offset in (4, 5):  # in the log both are updates
        assert failures(Filtered(), [Entry(BEGIN, 3), change(ALL, offset)], SOME)
    assert failures(Filtered(), [Entry(ROWS), row(1, 5, "a", 3)], SOME)
    moved = change(SOME, 6)
    del moved.body["pk_before"]
    assert failures(Filtered(), [Entry(BEGIN, 5), moved], SOME)


@pytest.mark.parametrize(
    "other",
    [{"after": {}}, {"before": {"id": {"t": "i64", "v": 2}}}, {"pk": [1]}, {"table": "u"}, {"lsn": 3}],
)
def test_true_images_validator_reports_any_wrong_field(other: dict[str, Any]) -> None:
    assert failures(TrueImages(), [Entry(BEGIN, 4), change(ALL, 5, **other)])


def test_true_images_validator_accepts_a_delivered_time_before_the_log_but_not_after() -> None:
    entry = change(ALL, 5, ts="999.0", txn={"id": "5", "seq": 0, "last": True})
    assert failures(TrueImages(), [Entry(BEGIN, 4), entry]) == []
    assert failures(TrueImages(), [Entry(BEGIN, 4), change(ALL, 5, ts="1004.0")])


def test_true_images_validator_reports_a_value_of_another_type() -> None:
    entry = change(ALL, 4)
    entry.body["after"]["n"] = {"t": "f64", "v": 40.0}
    assert failures(TrueImages(), [Entry(BEGIN, 3), entry])


def test_snapshot_rows_that_never_existed_are_reported() -> None:
    assert failures(TrueImages(), [Entry(ROWS), row(1, 41, "b", 4)])
    assert failures(Filtered(), [Entry(ROWS), row(7, 41, "b", 4)])
    found = [row(1, 40, "b", 4).body["after"]]
    assert failures(TrueImages(), [Entry(LOADED, 4, {"t": found})])
    assert not failures(TrueImages(), [Entry(LOADED, 4, {"t": [*found, row(2, 50, "a", 4).body["after"]]})])


# Checkpoint-true


def checkpoint(offset: int, ms: int) -> Entry:
    return Entry(CHECKPOINT, offset, ts=ts(ms))


BROKEN_CHECKPOINTS: dict[str, Callable[[], list[Entry]]] = {
    "a change as old as the checkpoint before it": lambda: [
        Entry(BEGIN), change(ALL, 1), change(ALL, 2), change(ALL, 3), checkpoint(3, 1002), change(ALL, 4)
    ],
    "also after a reconnect": lambda: [
        Entry(BEGIN), change(ALL, 1), checkpoint(3, 1002), Entry(BEGIN, 3), change(ALL, 4)
    ],
    "a checkpoint below a change": lambda: [Entry(BEGIN, 3), change(ALL, 4), checkpoint(4, 1001)],
    "a step back": lambda: [Entry(BEGIN, 8), checkpoint(8, 1009), checkpoint(8, 1008)],
    "a time that what follows in the log has": lambda: [Entry(BEGIN, 3), checkpoint(3, 1002)],
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN_CHECKPOINTS)
def test_broken_checkpoint_is_reported(what: str) -> None:
    assert failures(CheckpointTrue(), BROKEN_CHECKPOINTS[what]())


def test_missing_or_unchanging_checkpoints_at_the_end_are_reported() -> None:
    for end in ([], [checkpoint(8, 1009)], [checkpoint(8, 1009), checkpoint(8, 1009)]):
        validator = CheckpointTrue()
        validator.check_end([*journal(ALL)[:-2], *end], 8)
        assert validator.failures


# fold(feed) == table


@pytest.mark.parametrize("place", range(2, 9))
def test_fold_validator_reports_any_lost_change(place: int) -> None:
    entries = journal(ALL)
    del entries[place]
    assert failures(Folded(), entries)


def test_fold_validator_reports_a_before_image_that_differs_from_the_last_after_image() -> None:
    entries = journal(ALL)
    entries[4].body["before"]["n"] = {"t": "i64", "v": 6}
    assert failures(Folded(), entries)


def test_fold_validator_reports_missing_or_extra_snapshot_rows() -> None:
    for rows in ([], [row(1, 40, "b", 4)], [row(1, 40, "b", 4), row(2, 50, "a", 4), row(3, 1, "x", 4)]):
        assert failures(Folded(), [Entry(ROWS), *rows, Entry(ROWS_END, 4), Entry(CAUGHT_UP, 4)])
    good = [Entry(ROWS), row(3, 1, "x", 4), Entry(RESTART), row(1, 40, "b", 4), row(2, 50, "a", 4), Entry(ROWS_END, 4)]
    assert failures(Folded(), [*good, Entry(CAUGHT_UP, 4)]) == []


def test_fold_validator_accepts_added_columns() -> None:
    altered = [Transaction("9", (Change(Op.SCHEMA_CHANGE, T2, ddl="ALTER"),), 9, ts(2000), 2000)]
    changed = Change(Op.UPDATE, T2, (2, 60, "d", None), (2, 60, "d", "e"))
    truth = Truth([*HISTORY, *altered, Transaction("10", (changed,), 10, ts(2001), 2001)])
    expected = Expected(truth, Spec())
    entries = [Entry(BEGIN), *(change(expected, offset) for offset in expected.offsets), Entry(REACHED, 10)]
    assert failures(Folded(), entries, expected) == []
    del entries[-2]
    assert failures(Folded(), entries, expected)


# Bounded and Isolated


def test_fold_validator_accepts_a_reader_that_begins_after_a_resnapshot_request() -> None:
    anew = Change(Op.SCHEMA_CHANGE, T2, ddl="ALTER TABLE t", resnapshot=True)
    truth = Truth(
        [
            *HISTORY,
            Transaction("9", (anew,), 9, ts(1005), 1005),
            Transaction("10", (delete(9, 41, "c"),), 10, ts(1006), 1006),  # of a row that nobody was told of again
            Transaction("11", (Change(Op.TRUNCATE, T),), 11, ts(1007), 1007),
            Transaction("12", (insert(3, 1, "e"), update((3, 1, "e"), (3, 2, "e"))), 12, ts(1008), 1008),
        ]
    )
    expected = Expected(truth, Spec())
    told = [Entry(BEGIN, 9), *(change(expected, offset) for offset in (10, 11, 12, 13)), Entry(CAUGHT_UP, 13)]
    assert failures(Folded(), told, expected) == []
    assert failures(Folded(), [*told[:3], *told[4:]], expected) != []


def test_bounded_validator_reports_more_than_one_mebibyte_per_reader() -> None:
    for stalled, broken in ((30 << 20, False), (31 << 20, True)):
        validator = Bounded()
        validator.check(without=10 << 20, stalled=stalled, readers=16, noise=4 << 20)
        assert bool(validator.failures) is broken


def test_isolated_validator_reports_a_reader_that_saw_a_change_late_or_never() -> None:
    sent = {"a": 1.0, "b": 2.0}
    for seen, broken in (({"a": 1.1, "b": 2.9}, False), ({"a": 1.1}, True), ({"a": 1.1, "b": 9.0}, True)):
        validator = Isolated()
        validator.check("r", sent, seen)
        assert bool(validator.failures) is broken
