"""Changes by column: the compiled module returns what its Python source returns."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples
from tests.suite.uncompiled import is_compiled, uncompiled

from headwater.log.disk import block_columns
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Table

pytestmark = pytest.mark.skipif(not is_compiled(block_columns), reason="there was no C compiler at the installation")
columns, in_python = block_columns.columns, uncompiled(block_columns).columns

ONE, TWO, SAME = (Table(name, (Column("id"), Column("v")), ("id",)) for name in ("one", "two", "one"))
ROWS = st.none() | st.tuples(VALUES, VALUES) | st.tuples(st.integers(), st.text(max_size=3)) | st.just(())
CHANGES = st.builds(
    Change,
    st.sampled_from(Op),
    st.sampled_from([ONE, ONE, ONE, TWO, SAME]),
    ROWS,
    ROWS,
    st.none() | st.none() | st.just("DROP TABLE one"),
    st.sampled_from([False, False, False, True]),
)


@pytest.mark.slow
@examples(600)
@given(st.lists(CHANGES, min_size=1, max_size=12).map(tuple))
def test_compiled_and_python_columns_return_the_same(changes: tuple[Change, ...]) -> None:
    found, expected = columns(changes), in_python(changes)
    assert repr(found) == repr(expected)  # NaN is not equal to itself
    assert all(mine is theirs for mine, theirs in zip(found[2], expected[2], strict=True))


@pytest.mark.parametrize("value", [Decimal(1), UNAVAILABLE, type("Text", (str,), {})("x")])
@pytest.mark.parametrize("place", range(2))
def test_value_that_is_not_plain_is_detected_in_any_row_and_column(value: Any, place: int) -> None:
    for at in range(3):
        images: list[Any] = [(1, None), (2.5, b"x"), (True, "y")]
        images[at] = (value, 1) if place == 0 else (1, value)
        for changes in (
            tuple(Change(Op.INSERT, ONE, None, image) for image in images),
            tuple(Change(Op.DELETE, ONE, image) for image in images),
        ):
            assert columns(changes)[-1] is in_python(changes)[-1] is False


def test_columns_function_is_compiled() -> None:
    assert type(columns) is not type(in_python)
