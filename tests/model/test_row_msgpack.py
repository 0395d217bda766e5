"""Rows in msgpack: every value round-trips, and bytes are equal exactly if types and forms of the values are equal."""

from decimal import Decimal
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES, same
from tests.suite.examples import examples

from headwater.model.literal import U64, UNAVAILABLE, Date, DateTime, Embedding, Json, Time
from headwater.model.row_msgpack import decode_row, encode_row, pack_row

ROWS = st.lists(VALUES, max_size=5).map(tuple)


@given(ROWS)
@examples(300)
def test_row_round_trips_through_msgpack(row: tuple[Any, ...]) -> None:
    back = decode_row(encode_row(row))
    assert len(back) == len(row)
    assert all(map(same, back, row))


@given(ROWS, ROWS)
def test_rows_have_equal_bytes_exactly_if_types_and_forms_of_values_are_equal(
    a: tuple[Any, ...], b: tuple[Any, ...]
) -> None:
    alike = len(a) == len(b) and all(map(same, a, b))
    assert (encode_row(a) == encode_row(b)) == alike


def test_none_is_packed_to_none() -> None:
    assert pack_row(None) is None


ONE_OF_EACH = (U64(1), Decimal("1.50"), Json("{}"), Embedding((1.0,), "m"), Date("2026-01-18"), Time("12:00"))
ONE_OF_EACH += (
    DateTime("2026-01-18 12:00"),
    UUID(int=1),
    UNAVAILABLE,
    "a\udcff",
    None,
    True,
    -1,
    1.5,
    "x",
    b"\0",
)
PINNED = """
    dc0010 d7010000000000000001 d602312e3530 d5037b7d c70e0401000000000000000000f03f016d
    c70a05323032362d30312d3138 c7050631323a3030 d807323032362d30312d31382031323a3030
    d80800000000000000000000000000000001 c70009 d50a61ff c0 c3 ff cb3ff8000000000000 a178 c40100
"""


def test_row_msgpack_matches_pinned_bytes_and_decodes_them() -> None:
    # Written by the first version: a failure here means that logs on disk become unreadable.
    assert encode_row(ONE_OF_EACH) == bytes.fromhex(PINNED)
    assert decode_row(bytes.fromhex(PINNED)) == ONE_OF_EACH
