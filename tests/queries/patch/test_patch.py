"""A patch, applied to the rows it was made from, gives the new rows byte for byte; other rows are refused."""

import json
import random
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.queries.patch.patch_application import apply, rows_hash

from headwater.errors import Conflict
from headwater.model.literal import U64, Date, Json
from headwater.queries.patch.patch import OBJECTS, PLAIN, ROWS, Answer, Form, diff
from headwater.queries.patch.steps import NoSteps, longest_rise, steps

COLUMNS = ({"name": "id"}, {"name": "v"})
KEYS = st.one_of(st.none(), st.integers(0, 12), st.sampled_from([1.0, 2.0, "1", b"1", True, 2**62]))
VALUES = st.sampled_from([None, 0, 0.0, -0.0, 1, 1.0, True, U64(1), "1", b"1", Decimal("1"), Decimal("1.0"), Json("1")])
LISTS = st.lists(st.tuples(KEYS, VALUES), max_size=14)


def answer(rows: list[tuple[Any, ...]], tag: str = '"p.2"', **options: Any) -> Answer:
    return Answer.of(tag, COLUMNS, rows, **{"key": (0,), **options})


def patch(old: list[tuple[Any, ...]], new: list[tuple[Any, ...]], **options: Any) -> dict[str, Any]:
    """Return the patch from `old` to `new` as a client reads it, after checking that applying it gives `new`."""
    base = answer(old, '"p.1"', **options)
    fresh = answer(new, like=base, **options)
    sent = msgspec.json.encode(diff(base, fresh))
    assert apply(sent, base.texts, options.get("form")) == [*fresh.texts]
    return dict(json.loads(sent))


def keys(steps: list[dict[str, Any]]) -> list[Any]:
    return [step["pk"][0]["v"] for step in steps]


def unique(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [*{row[0]: row for row in rows}.values()]


# --- the seed's shape ------------------------------------------------------------------------------------------------


def test_patch_json_lists_row_changes_with_key_order_etags_and_result_hash() -> None:
    base = answer([(1, "a"), (2, "b"), (3, "c")], '"p.1"')
    fresh = answer([(3, "c"), (1, "A"), (4, "d")], '"p.9"')
    sent = json.loads(msgspec.json.encode(diff(base, fresh)))
    assert sent == {
        "reset": False,
        "base_etag": '"p.1"',
        "base_source": "etag_cache",
        "columns": [{"name": "id"}, {"name": "v"}],
        "added": [{"pk": [lit(4)], "at": 1, "row": [lit(4), {"t": "str", "v": "d"}]}],
        "updated": [{"pk": [lit(1)], "at": 1, "row": [lit(1), {"t": "str", "v": "A"}]}],
        "removed": [{"pk": [lit(2)]}],
        "moved": [{"pk": [lit(3)], "from": 2, "to": 0}],
        "key": [0],
        "ordered": True,
        "etag": '"p.9"',
        "result_hash": rows_hash(fresh.texts),
    }


def lit(number: int) -> dict[str, Any]:
    return {"t": "i64", "v": number}


def test_patch_of_object_rows_has_objects_under_obj_and_keys_as_arrays() -> None:
    found = patch([(1, "a")], [(1, "b"), (2, "c")], form=OBJECTS)
    assert found["updated"] == [{"pk": [lit(1)], "at": 0, "obj": {"id": lit(1), "v": {"t": "str", "v": "b"}}}]
    assert keys(found["added"]) == [2]


def test_result_hash_covers_the_rows_exactly_as_encoded_in_the_response_body() -> None:
    held = answer([(1, "ä"), (2, 1.5)])
    body = msgspec.json.encode({"data": {"columns": COLUMNS, "rows": msgspec.Raw(held.rows_text)}})
    assert body.endswith(b',"rows":' + held.rows_text + b"}}")
    assert (
        held.rows_text == '[[{"t":"i64","v":1},{"t":"str","v":"ä"}],[{"t":"i64","v":2},{"t":"f64","v":1.5}]]'.encode()
    )
    assert held.hash == "sha256:d710c32a82045dd896bc76e671c632792f9b03bcacbeccbc1c8ed689cf05c4fd"


# --- one step at a time ----------------------------------------------------------------------------------------------


def test_patch_between_equal_rows_has_no_steps() -> None:
    found = patch([(1, "a"), (2, "b")], [(1, "a"), (2, "b")])
    assert not any(found[step] for step in ("added", "updated", "removed", "moved"))


@pytest.mark.parametrize(
    ("old", "new"),
    [(1, 1.0), (1, True), (1, U64(1)), (0.0, -0.0), (Decimal("1.0"), Decimal("1.00")), ("1", b"1"), (None, "null")],
)
def test_values_that_python_calls_equal_are_updates(old: Any, new: Any) -> None:
    assert keys(patch([(7, old)], [(7, new)])["updated"]) == [7]


def test_patch_treats_integer_and_float_keys_as_different_rows() -> None:
    found = patch([(1, "a")], [(1.0, "a")])
    assert len(found["removed"]) == len(found["added"]) == 1 and not found["updated"]


def test_patch_for_a_changed_key_removes_one_row_and_adds_one() -> None:
    found = patch([(1, "a"), (2, "b")], [(2, "b"), (5, "a")])
    assert keys(found["removed"]) == [1] and keys(found["added"]) == [5] and not found["moved"]


def test_row_that_changes_its_position_is_a_single_move() -> None:
    old = [(n, "x") for n in range(20)]
    assert len(patch(old, [old[17], *old[:17], *old[18:]])["moved"]) == 1
    assert len(patch(old, [*old[:2], *old[3:15], old[2], *old[15:]])["moved"]) == 1


def test_patch_for_a_sliding_window_has_no_moved_rows() -> None:
    old = [(n, "x") for n in range(50)]
    found = patch(old, [*old[1:], (50, "x")])
    assert keys(found["removed"]) == [0] and keys(found["added"]) == [50] and not found["moved"]


def test_four_edits_of_a_thousand_rows_are_a_small_patch() -> None:
    old: list[tuple[Any, ...]] = [(n, f"name {n}") for n in range(1000)]
    new = [row for row in old if row[0] != 300]
    new[100] = (100, "changed")
    new.insert(500, (5000, "added"))
    new.append((5001, "added"))
    base = answer(old, '"p.1"')
    sent = msgspec.json.encode(diff(base, answer(new, like=base)))
    assert len(sent) < 900 < 40_000 < len(base.rows_text)
    found = json.loads(sent)
    assert [len(found[step]) for step in ("added", "updated", "removed", "moved")] == [2, 1, 1, 0]


# --- where there is no patch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "options", "reason"),
    [
        ([(1, "a")], [(1, "b")], {"key": None}, "no_key"),
        ([(None, "a")], [(None, "a"), (None, "b")], {}, "no_key"),  # SQLite allows it in a primary key
        ([(1, "a"), (1, "b")], [(1, "a")], {}, "no_key"),
        ([(n, "x" * 9) for n in range(300)], [(n, "y" * 9) for n in range(300)], {}, "patch_larger"),
    ],
)
def test_answer_without_a_smaller_patch_is_a_reset_with_all_rows(old: Any, new: Any, options: Any, reason: str) -> None:
    found = patch(old, new, **options)
    assert found["reset"] is True and found["reset_reason"] == reason and "added" not in found
    assert len(found["full"]["rows"]) == len(new)


def test_patch_for_1500_shuffled_rows_is_a_reset_with_reason_reordered() -> None:
    rows = [(n, "x") for n in range(1500)]
    random.Random(5).shuffle(rows)
    assert patch([(n, "x") for n in range(1500)], rows)["reset_reason"] == "reordered"


def test_answer_with_changed_columns_is_a_reset() -> None:
    base = answer([(1, "a")], '"p.1"')
    renamed = Answer.of('"p.2"', ({"name": "id"}, {"name": "w"}), [(1, "a")], key=(0,))
    assert diff(base, renamed)["reset_reason"] == "columns_changed"
    assert "full" not in diff(base, renamed, include_full=False)
    twice = Answer.of('"p.2"', ({"name": "id"}, {"name": "id"}), [(1, 2)], key=(0,), form=OBJECTS)
    assert diff(twice, twice)["reset_reason"] == "no_key"


def test_applying_a_patch_to_rows_other_than_its_base_raises_conflict() -> None:
    base, fresh = answer([(1, "a"), (2, "b"), (3, "c")], '"p.1"'), answer([(1, "a"), (3, "c"), (2, "B")])
    sent = msgspec.json.encode(diff(base, fresh))
    for wrong in ([(1, "A"), (2, "b"), (3, "c")], [(1, "a"), (3, "c")], [(2, "b"), (1, "a"), (3, "c")], []):
        with pytest.raises(Conflict):
            apply(sent, answer(wrong).texts)


# --- all of it -------------------------------------------------------------------------------------------------------


@given(LISTS, LISTS, st.sampled_from([ROWS, OBJECTS, PLAIN]))
def test_patch_between_random_rows_gives_the_new_rows(old: Any, new: Any, form: Form) -> None:
    patch(old, new, form=form)
    found = patch(unique(old), unique(new), form=form)
    assert form is PLAIN or not found["reset"]


@given(LISTS, st.randoms(use_true_random=False))
def test_patch_between_random_orders_has_only_moves(rows: Any, rng: random.Random) -> None:
    old = unique(rows)
    new = rng.sample(old, len(old))
    found = patch(old, new)
    assert not found["added"] and not found["updated"] and not found["removed"]
    assert len(found["moved"]) <= len(old) - len(longest_rise([old.index(row) for row in new]))


@given(LISTS, LISTS, st.randoms(use_true_random=False))
def test_patch_of_an_unordered_answer_applies_to_rows_in_any_order(old: Any, new: Any, rng: random.Random) -> None:
    base, fresh = (answer(unique(rows), ordered=False) for rows in (old, new))
    found = diff(base, fresh)
    assert found["moved"] == [] and found["ordered"] is False
    held = rng.sample(base.texts, len(base.texts))
    assert sorted(apply(msgspec.json.encode(found), held)) == sorted(fresh.texts)


def test_patch_of_an_unordered_answer_appends_new_rows() -> None:
    base = answer([(3, "c"), (1, "a"), (2, "b")], '"p.1"', ordered=False)
    sent = msgspec.json.encode(diff(base, answer([(0, "z"), (2, "b"), (4, "d"), (3, "c")], ordered=False)))
    read = [json.loads(text)[0]["v"] for text in apply(sent, base.texts)]
    assert read == [3, 2, 0, 4]


def test_answers_with_duplicate_keys_have_no_patch_steps() -> None:
    for old, new in (([b"x", b"a", b"a"], [b"a", b"x"]), ([b"a", b"x"], [b"x", b"a", b"a", b"y"])):
        with pytest.raises(NoSteps, match="duplicate_keys"):
            steps(old, new, old.__getitem__, new.__getitem__)
    with pytest.raises(NoSteps, match="duplicate_keys"):
        steps([b"a", b"b"], [b"c", b"d"], lambda place: b"k", [b"c", b"d"].__getitem__)


@given(LISTS, LISTS)
def test_reused_texts_equal_newly_encoded_texts(old: Any, new: Any) -> None:
    base = answer(old)
    assert answer(new, like=base).texts == answer(new).texts


@given(st.lists(st.integers(0, 9), unique=True, max_size=8))
def test_longest_rise_is_a_longest_increasing_subsequence(numbers: list[int]) -> None:
    rise = longest_rise(numbers)
    assert rise == sorted(rise) and [n for n in numbers if n in set(rise)] == rise
    best = [1] * len(numbers)
    for at, number in enumerate(numbers):
        best[at] = 1 + max((best[k] for k in range(at) if numbers[k] < number), default=0)
    assert len(rise) == max(best, default=0)


def test_patch_has_every_kind_of_value_as_key_and_as_cell() -> None:
    kinds = [1, U64(1), "x", b"x", Decimal("1.50"), Date("2026-01-01"), UUID(int=1), Json('{"a":[1]}'), True, 2.5]
    old = [(f"k{n}", value) for n, value in enumerate(kinds)]
    patch(old, [(f"k{n}", None) for n in range(len(kinds))])
    patch([(value, 0) for value in kinds[1:]], [(value, 1) for value in kinds[:-1]])
