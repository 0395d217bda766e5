"""Changes and transactions: what a change is about, and how a transaction is cut."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.model.change import Change, Op, Transaction, image_bytes
from headwater.model.literal import Embedding, Json, decimal_text
from headwater.model.table import Column, Table

T = Table("t", (Column("id"), Column("n")), ("id",))


def changes(count: int) -> tuple[Change, ...]:
    return tuple(Change(Op.INSERT, T, after=(n, n)) for n in range(count))


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (Change(Op.INSERT, T, after=(1, 2)), (1, 2)),
        (Change(Op.UPDATE, T, before=(1, 2), after=(3, 4)), (3, 4)),
        (Change(Op.DELETE, T, before=(1, 2)), (1, 2)),
    ],
)
def test_change_row_and_key_are_the_after_image_or_the_before_image_of_a_delete(
    change: Change, row: tuple[int, int]
) -> None:
    assert change.row == row
    assert change.key == (row[0],)


def test_schema_change_has_no_row_and_no_key() -> None:
    change = Change(Op.SCHEMA_CHANGE, T, ddl="ALTER TABLE t ADD n")
    assert (change.row, change.key) == (None, None)


def test_numbers_and_words_of_ops_are_fixed() -> None:
    words = {"insert": 1, "update": 2, "delete": 3, "schema_change": 4, "truncate": 5}
    assert {op.word: op.value for op in Op} == words


@given(st.integers(1, 8), st.integers(1, 50), st.integers(0, 20), st.booleans(), st.data())
def test_cut_transaction_contains_exactly_the_requested_offsets_and_keeps_metadata(
    count: int, first: int, start: int, last: bool, data: st.DataObject
) -> None:
    whole = Transaction("x", changes(count), first=first, ts=7, commit_ts_ms=9, start=start, last=last, position="p")
    after = data.draw(st.integers(0, whole.upto - 1))
    upto = data.draw(st.integers(max(after + 1, first), whole.upto + 5))
    part = whole.cut(after, upto)
    offsets = range(part.first, part.upto + 1)
    assert list(offsets) == [n for n in range(first, whole.upto + 1) if after < n <= upto]
    assert part.changes == tuple(whole.changes[n - first] for n in offsets)
    assert part.start - whole.start == part.first - whole.first
    assert part.last == (last and part.upto == whole.upto)
    assert (part.id, part.ts, part.commit_ts_ms, part.position) == ("x", 7, 9, "p")


@given(st.integers(1, 8), st.integers(1, 50), st.data())
def test_cuts_before_and_after_an_offset_join_to_the_whole_transaction(
    count: int, first: int, data: st.DataObject
) -> None:
    whole = Transaction("x", changes(count), first=first)
    middle = data.draw(st.integers(first, whole.upto))
    left = whole.cut(0, middle)
    right = whole.cut(middle, whole.upto) if middle < whole.upto else None
    parts = [left, right] if right else [left]
    assert sum((part.changes for part in parts), ()) == whole.changes
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.start for part in parts] == [0, middle + 1 - first][: len(parts)]


def test_cut_covering_all_offsets_returns_the_same_transaction_object() -> None:
    whole = Transaction("x", changes(3), first=5)
    assert whole.cut(4, 7) is whole
    assert whole.cut(0, 99) is whole


def test_size_of_a_change_is_the_bytes_of_its_texts_blobs_documents_and_vectors() -> None:
    before, after = ("x" * 100, b"x" * 20, 1, None), (Json("[1, 2]"), Embedding((0.5,) * 4), 2.5, "")
    assert image_bytes([Change(Op.UPDATE, T, before, after)]) == 158
    assert image_bytes([Change(Op.SCHEMA_CHANGE, T)]) == 0


@pytest.mark.parametrize("text", ["1" * 9_990, "0." + "1" * 9_990, "1e9990", "1e-9990"])
def test_digits_of_decimals_count_as_bytes(text: str) -> None:
    images = [Change(Op.INSERT, T, None, (1, Decimal(text)))]
    assert len(decimal_text(Decimal(text))) <= image_bytes(images) <= 3 * len(decimal_text(Decimal(text)))
