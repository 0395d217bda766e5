"""Weights of the values of an answer."""

import sys

import pytest

from headwater.model.literal import Embedding, Json
from headwater.model.work.answer_limits import LEAST, extra_memory, extra_memory_of_utf8, weight

CELLS = [
    (None, LEAST),
    (1, LEAST),
    (True, LEAST),
    (1.5, LEAST),
    ("", LEAST),
    ("x" * LEAST, LEAST),
    ("x" * 1_000, 1_000),
    (b"x" * 1_000, 1_000),
    (Json("[" + "1," * 500 + "1]"), 1_003),
    (Embedding((0.5,) * 100), 800),
    (Embedding((0.5,)), LEAST),
]


@pytest.mark.parametrize(("value", "bytes"), CELLS, ids=[type(value).__name__ + str(size) for value, size in CELLS])
def test_value_weighs_its_bytes_and_at_least_the_minimum(value: object, bytes: int) -> None:
    assert weight((value,)) == bytes


def test_row_weighs_the_sum_of_its_values() -> None:
    assert weight(value for value, _ in CELLS) == sum(size for _, size in CELLS)


@pytest.mark.parametrize(
    "text", ["x" * 1_000, "x" * 999 + "é", "x" * 999 + "中", "中" * 1_000, "x" * 999 + "😀", "😀" * 9]
)
def test_memory_of_a_text_is_at_most_its_weight_plus_its_extra_memory(text: str) -> None:
    utf8 = text.encode()
    content = sys.getsizeof(text) - sys.getsizeof("")
    assert content <= weight((utf8,)) + extra_memory_of_utf8((utf8, None))
    assert content <= weight((text,)) + extra_memory((text, None, b"\xff", 1))
    assert text.isascii() == (extra_memory_of_utf8((utf8,)) == 0) == (extra_memory((text,)) == 0)
