"""The fast path for images writes the same bytes as the writer of single values."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples

from headwater.feeds.formats import envelope
from headwater.feeds.formats.debezium import Debezium
from headwater.feeds.formats.fast_rows import MOST, UnsupportedRow, quick
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Row, Table

KINDS = ("i64", "str", "f64", "bool", "any", "dec")
NAMES = ("id", "a%db", "ü", "100%", "b", "%b")
WIDE = Table("t%d", tuple(map(Column, NAMES, KINDS)), ("id",))
BY_TEXT = Table("t", WIDE.columns, ("a%db",))
PAIRED = Table("t", WIDE.columns, ("id", "b"))
QUOTED = Table('q"', (Column('a"', "i64"), *WIDE.columns[1:]), ('a"',))
PLAIN = (
    st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9) | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1]),
    st.text(max_size=5) | st.just("\udc80") | st.just('"\\\n\u2028'),
    st.floats(),
    st.booleans(),
    st.none() | st.text(max_size=3),
    st.none(),
)
VALUE = [st.one_of(plain, plain, plain, st.none(), VALUES) for plain in PLAIN]


@pytest.mark.slow
@examples(800)
@given(
    st.tuples(*VALUE),
    st.tuples(*VALUE),
    st.booleans(),
    st.sampled_from([WIDE, BY_TEXT, PAIRED, QUOTED]),
    st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE]),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([(), ("id",), ("b", "ü", "gone")]),
)
def test_fast_path_writes_the_same_debezium_bytes(
    old: Row, new: Row, is_kept: bool, table: Table, op: Op, images: tuple[bool, bool], columns: tuple[str, ...]
) -> None:
    new = tuple(old[at] if is_kept and at in table.key_places else value for at, value in enumerate(new))
    shape = Shape("m%n", "debezium_json", *images, columns)
    changes = (Change(Op.UPDATE, table, old, new), Change(Op.INSERT, table, None, new))
    parts = [Transaction("x%d", changes, 7, 5 << 16, 9, 3), Transaction("4611686018427387904", changes, 9, 6 << 16, 9)]
    writer, slow = Debezium(shape), Debezium(shape)
    for part in (*parts, parts[0]):
        for place, change in enumerate(changes):
            given_as = Op.INSERT if change.op is Op.INSERT else op
            found = writer.change(part, part.first + place, change, given_as)
            with mock.patch.object(envelope, "quick", lambda *_: None):
                assert found == slow.change(part, part.first + place, change, given_as)


@pytest.mark.parametrize("value", [b"x", UNAVAILABLE, 2**53 + 1, -(2**53) - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_values_raise_odd(kind: str, value: Any) -> None:
    made = quick(Table("t", (Column("a", kind), Column("b"))), ["a"])
    assert made is not None
    with pytest.raises(UnsupportedRow):
        made((value, None))


def test_unsupported_columns_have_no_fast_path() -> None:
    many = tuple(Column(f"c{place}") for place in range(MOST + 1))
    assert quick(Table("t", many), [column.name for column in many]) is None
    assert quick(Table("t", many), []) is None
    assert quick(Table("t", (Column('"'),)), ['"']) is None
