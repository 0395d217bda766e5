"""Row tags: equal exactly if the rows are, and parsed in every form that requests allow."""

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import Conflict, InvalidRequest
from headwater.model.literal import U64, Date, DateTime, Json
from headwater.model.table import Column, Table
from headwater.queries.etag.row_etag import demand, one_tag, opaque, row_etag

TABLE = Table("t", (Column("id", "i64"), Column("v"), Column("rowid", hidden=True)), ("id",))
VALUES: list[Any] = [
    None,
    False,
    True,
    0,
    1,
    0.0,
    1.0,
    U64(1),
    "1",
    b"1",
    "",
    b"",
    Decimal("1"),
    Decimal("1.0"),
    Json("1"),
    Date("2026-01-01"),
    DateTime("2026-01-01"),
    "2026-01-01",
]


def test_row_etag_is_strong_quoted_and_url_safe() -> None:
    assert re.fullmatch(r'"row:[A-Za-z0-9_-]{24}"', row_etag("main", TABLE, (1, "a", 9)))


def test_values_of_different_types_have_different_tags() -> None:
    tags = {row_etag("main", TABLE, (1, value, 0)) for value in VALUES}
    assert len(tags) == len(VALUES)


def test_row_etag_differs_by_database_table_and_column_names() -> None:
    other = Table("u", TABLE.columns, ("id",))
    renamed = Table("t", (Column("id", "i64"), Column("w"), Column("rowid", hidden=True)), ("id",))
    row = (1, "a", 0)
    tags = [row_etag("main", t, row) for t in (TABLE, other, renamed)] + [row_etag("b", TABLE, row)]
    assert len(set(tags)) == 4


def test_row_etag_ignores_the_hidden_rowid() -> None:
    assert row_etag("main", TABLE, (1, "a", 1)) == row_etag("main", TABLE, (1, "a", 2))


@given(st.lists(st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.binary(max_size=3))))
def test_row_with_one_column_less_has_another_etag(values: list[Any]) -> None:
    columns = tuple(Column(f"c{place}") for place in range(len(values)))
    one = row_etag("main", Table("t", columns), tuple(values))
    fewer = row_etag("main", Table("t", columns[:-1]), tuple(values[:-1])) if values else None
    assert one != fewer


@pytest.mark.parametrize("tag", ['"row:x"', 'W/"row:x"', "row:x"])
def test_row_etag_is_accepted_bare_quoted_or_weak(tag: str) -> None:
    assert opaque(tag) == "row:x"


def test_if_match_and_expected_etag_that_differ_are_rejected() -> None:
    assert one_tag(None, None) is None
    assert one_tag('"a"', None) == '"a"'
    assert one_tag(None, "a") == "a"
    assert one_tag('W/"a"', "a") == 'W/"a"'
    with pytest.raises(InvalidRequest):
        one_tag("a", "b")


def test_row_etag_check_with_no_row_two_rows_or_changed_content_raises_conflict() -> None:
    row = (1, "a", 0)
    tag = row_etag("main", TABLE, row)
    demand(tag, "main", TABLE, [row])
    for rows in ([], [row, row], [(1, "b", 0)]):
        with pytest.raises(Conflict):
            demand(tag, "main", TABLE, rows)
