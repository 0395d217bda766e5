"""Table definitions, and the indexes of key columns."""

import msgspec
import pytest

from headwater.model.table import KINDS, Column, Table

T = Table("t", (Column("a"), Column("b", "i64"), Column("c")), ("c", "a"), 3)
ROWID = Table("r", (Column("rowid", "i64", hidden=True), Column("a")), ("rowid",))


def test_key_of_returns_row_values_in_primary_key_order() -> None:
    assert T.key_of((1, 2, 3)) == (3, 1)
    assert T.key_places == (2, 0)


def test_names_and_indexes_follow_the_columns() -> None:
    assert T.names == ("a", "b", "c")
    assert T.index == {"a": 0, "b": 1, "c": 2}


def test_hidden_rowid_is_the_row_key_but_neither_primary_key_nor_visible_column() -> None:
    assert (T.primary_key, ROWID.primary_key) == (("c", "a"), ())
    assert [column.name for column in ROWID.visible] == ["a"]
    assert ROWID.key_of((7, "x")) == (7,)


def test_key_of_is_empty_for_a_table_without_a_key() -> None:
    assert Table("k", (Column("a"),)).key_of((1,)) == ()


@pytest.mark.parametrize("table", [T, ROWID])
def test_table_definition_round_trips_through_json_and_msgpack(table: Table) -> None:
    assert msgspec.json.decode(msgspec.json.encode(table), type=Table) == table
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=Table) == table


def test_cached_names_and_indexes_do_not_change_equality_hash_or_json() -> None:
    fresh = Table("t", (Column("a"), Column("b", "i64"), Column("c")), ("c", "a"), 3)
    assert T.names and T.index and T.key_places
    assert (fresh, hash(fresh), msgspec.json.encode(fresh)) == (T, hash(T), msgspec.json.encode(T))


def test_column_kinds_are_the_value_literal_tags_plus_any() -> None:
    from headwater.model.literal import TAGS

    assert (set(TAGS) - {"null", "unavailable"}) | {"any"} == KINDS
