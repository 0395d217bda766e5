"""Checks and conversions of values for their columns."""

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from headwater.errors import InvalidRequest
from headwater.model.literal import U64, UNAVAILABLE, Date, DateTime, Embedding, Json, Time
from headwater.model.suggestion import nearest
from headwater.model.table import KINDS, Column, Table
from headwater.queries.rows.column_values import check_columns, check_key, check_values, fit

ONE_OF_EACH: dict[str, Any] = {
    "bool": True,
    "i64": 7,
    "u64": U64(7),
    "f64": 1.5,
    "dec": Decimal("1.50"),
    "str": "x",
    "bytes": b"x",
    "json": Json("{}"),
    "date": Date("2026-01-01"),
    "time": Time("10:00"),
    "datetime": DateTime("2026-01-01T10:00"),
    "uuid": UUID(int=1),
    "embedding": Embedding((1.0,)),
}
TAKES = {("i64", "u64"), ("u64", "i64"), ("f64", "i64"), ("f64", "u64"), ("dec", "i64"), ("dec", "u64")}


@pytest.mark.parametrize("kind", sorted(KINDS - {"any"}))
def test_column_of_a_kind_takes_its_own_values_and_exact_numbers_only(kind: str) -> None:
    for tag, value in ONE_OF_EACH.items():
        if tag == kind or (kind, tag) in TAKES:
            assert type(fit(Column("c", kind), value)) is type(ONE_OF_EACH[kind])
        else:
            with pytest.raises(InvalidRequest, match=f"'c' is of kind {kind}; this {tag} value"):
                fit(Column("c", kind), value)


@pytest.mark.parametrize("value", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_column_without_a_kind_accepts_values_of_every_kind(value: Any) -> None:
    assert fit(Column("c"), value) is value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i64", U64(2**63)),
        ("u64", -1),
        ("f64", 2**53 + 1),
        ("any", UNAVAILABLE),
        ("i64", True),
        ("f64", True),
    ],
)
def test_number_that_would_be_rounded_is_rejected(kind: str, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        fit(Column("c", kind), value)


def test_null_for_a_not_null_column_is_left_to_the_database() -> None:
    assert fit(Column("c", "i64", nullable=False), None) is None


TABLE = Table(
    "users",
    (
        Column("id", "i64"),
        Column("email", "str"),
        Column("shout", "str", generated=True),
        Column("rowid", "i64", hidden=True),
    ),
    ("id",),
)


def test_unknown_column_error_suggests_the_nearest_name_or_lists_all() -> None:
    with pytest.raises(InvalidRequest) as found:
        check_values(TABLE, {"emial": "x"})
    assert found.value.hint == "Did you mean 'email'?"
    assert nearest("zzz", ["b", "a"]) == "There are: a, b."


@pytest.mark.parametrize("name", ["rowid", "shout", "EMAIL", 'id"; DROP TABLE users; --'])
def test_hidden_generated_and_misspelt_columns_are_not_written(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_values(TABLE, {name: "x"})


def test_generated_column_can_be_returned_and_a_hidden_one_is_rejected() -> None:
    assert check_columns(TABLE, ["shout", "id"]) == ("shout", "id")
    with pytest.raises(InvalidRequest):
        check_columns(TABLE, ["rowid"])


def test_key_not_matching_the_primary_key_columns_and_kinds_is_rejected() -> None:
    assert check_key(TABLE, [U64(5)]) == (5,)
    for key in ([], [1, 2], ["1"]):
        with pytest.raises(InvalidRequest):
            check_key(TABLE, key)
    keyless = Table("log", (Column("rowid", "i64", hidden=True), Column("line")), ("rowid",))
    with pytest.raises(InvalidRequest, match="no primary key"):
        check_key(keyless, [1])
