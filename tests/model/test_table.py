"""Table definitions, and the indexes of key columns."""

import msgspec
import pytest

from headwater.model.table import KINDS, Column, Table

T = Table("t", (Column("a"), Column("b", "i64"), Column("c")), ("c", "a"), 3)
ROWID = Table("r", (Column("rowid", "i64", hidden=True), Column("a")), ("rowid",))


def test_a_key_is_read_from_a_row_in_key_order() -> None:
    assert T.key_of((1, 2, 3)) == (3, 1)
    assert T.key_places == (2, 0)


def test_names_and_places_follow_the_columns() -> None:
    assert T.names == ("a", "b", "c")
    assert T.index == {"a": 0, "b": 1, "c": 2}


def test_a_hidden_identity_is_no_primary_key_and_not_visible() -> None:
    assert (T.primary_key, ROWID.primary_key) == (("c", "a"), ())
    assert [column.name for column in ROWID.visible] == ["a"]
    assert ROWID.key_of((7, "x")) == (7,)


def test_a_table_without_a_key_gives_every_row_the_empty_key() -> None:
    assert Table("k", (Column("a"),)).key_of((1,)) == ()


@pytest.mark.parametrize("table", [T, ROWID])
def test_a_shape_survives_being_written(table: Table) -> None:
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=Table) == table


def test_looking_at_a_shape_does_not_change_it() -> None:
    fresh = Table("t", (Column("a"), Column("b", "i64"), Column("c")), ("c", "a"), 3)
    assert T.names and T.index and T.key_places
    assert (fresh, hash(fresh), msgspec.json.encode(fresh)) == (T, hash(T), msgspec.json.encode(T))


def test_the_kinds_are_the_tags_and_any() -> None:
    from headwater.model.literal import TAGS

    assert (set(TAGS) - {"null", "unavailable"}) | {"any"} == KINDS
