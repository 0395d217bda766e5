"""Weights of the values of an answer."""

import pytest

from headwater.model.literal import Embedding, Json
from headwater.model.work.answer_limits import LEAST, weight

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
