"""Table names, shapes and their changes, without a server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sources.postgres.capture import pg_messages as pg

from headwater.model.keys.key import encode_key
from headwater.model.table import Column, Table
from headwater.sources.postgres.capture.decode.pgoutput import Relation, decode
from headwater.sources.postgres.schema.ddl_text import ddl_text
from headwater.sources.postgres.schema.relations import Relations, column_of, split_name, table_name, table_of
from headwater.sources.postgres.schema.shape_changes import Shapes, schema_change
from headwater.sources.postgres.schema.table_facts import ColumnFact, TableFact
from headwater.sources.postgres.types import TypeFact

IDENTIFIER = st.text(st.one_of(st.sampled_from('."ab '), st.characters(exclude_categories=["Cs"])), min_size=1)
IDENTIFIER = IDENTIFIER.filter(lambda name: "\0" not in name)


@given(IDENTIFIER, IDENTIFIER)
def test_table_name_splits_back_into_its_schema_and_table(schema: str, name: str) -> None:
    assert split_name(table_name(schema, name)) == (schema, name)
    assert split_name(table_name("public", name)) == ("public", name)


@given(st.text(st.sampled_from('."ab'), max_size=8))
def test_split_name_is_written_back_as_the_same_text(text: str) -> None:
    found = split_name(text)
    if found is not None:
        assert table_name(*found) == text


@pytest.mark.parametrize(
    ("schema", "name", "written"),
    [
        ("public", "orders", "orders"),
        ("shop", "orders", "shop.orders"),
        ("public", "shop.orders", '"shop.orders"'),
        ("a.b", 'c"d', '"a.b"."c""d"'),
        ("public", "Odd Name", "Odd Name"),
        ("Public", "t", "Public.t"),
    ],
)
def test_unambiguous_names_are_written_without_quotes(schema: str, name: str, written: str) -> None:
    assert table_name(schema, name) == written


def test_name_with_explicit_public_schema_is_accepted() -> None:
    assert split_name("public.t") == ("public", "t")
    assert split_name('public."a.b"') == ("public", "a.b")


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", "a.b.c", '"', '"a', 'a"b', '"a"', '"a"b', '""'])
def test_text_that_is_no_table_name_is_split_into_none(text: str) -> None:
    assert split_name(text) is None


def decoded_table(**columns: int) -> Table:
    """Return the table of a relation message with these columns, given as name=type oid."""
    found = decode(pg.relation(columns))
    assert isinstance(found, Relation)
    return table_of(found, TableFact(("id",)), {})


CAME = {
    "nothing": (ColumnFact(), False),
    "a default": (ColumnFact(has_default=True), True),
    "not null": (ColumnFact(nullable=False), True),
    "computed": (ColumnFact(generated=True), True),
}


@pytest.mark.parametrize("case", CAME)
def test_added_column_with_values_asks_for_a_snapshot(case: str) -> None:
    fact, resnapshot = CAME[case]
    old = decoded_table(id=23)
    new = Table("t", (*old.columns, column_of("v", 25, -1, fact, {})), ("id",), 2)
    change = schema_change(old, new, TableFact(("id",), {"v": fact}))
    assert change is not None
    assert (change.table, change.ddl, change.resnapshot) == (new, ddl_text(old, new), resnapshot)


@pytest.mark.parametrize(
    ("new", "resnapshot"),
    [
        (decoded_table(id=23), False),
        (decoded_table(id=23, b=25), True),
        (decoded_table(id=23, a=20), True),
        (decoded_table(a=23, id=23), True),
        (decoded_table(id=20, a=23), True),
    ],
)
def test_change_of_shape_asks_for_a_snapshot_only_if_rows_may_differ(new: Table, resnapshot: bool) -> None:
    change = schema_change(decoded_table(id=23, a=23), new, TableFact())
    assert change is not None
    assert change.resnapshot is resnapshot
    assert schema_change(new, new, TableFact()) is None


@pytest.mark.parametrize(
    ("names", "resnapshot"),
    [
        ("id a b c d", False),
        ("id b", False),
        ("id c", False),
        ("id b a c", True),  # exchanged, or made anew
        ("id a x b c", True),  # a new name, and its old one given to a new column
        ("id a x b", True),
        ("x id a b c", True),
    ],
)
def test_reordered_columns_ask_for_a_snapshot(names: str, resnapshot: bool) -> None:
    nothing = TableFact(("id",), {name: ColumnFact() for name in names.split()})
    change = schema_change(
        decoded_table(id=23, a=23, b=23, c=23), decoded_table(**dict.fromkeys(names.split(), 23)), nothing
    )
    assert change is not None and change.resnapshot is resnapshot


def test_unknown_table_asks_for_a_snapshot_unless_all_tables_are_published() -> None:
    for all_tables in (True, False):
        one = Relations(Shapes(), pg.Quiet(), all_tables=all_tables)
        found = decode(pg.relation({"id": 23}))
        assert isinstance(found, Relation)
        one.add_relation(found)
        (change,) = one.need(pg.OID)
        assert change.resnapshot is not all_tables
        assert one.need(pg.OID) == []


def test_bytewise_collations_are_binary_and_the_rest_keep_their_name() -> None:
    types = {50_000: TypeFact("citext"), 50_001: TypeFact("public.citext")}

    def collation(oid: int, name: str = "") -> str:
        return column_of("c", oid, -1, ColumnFact(collation=name), types).collation

    assert collation(23) == collation(25, "C") == collation(1043, "POSIX") == "BINARY"
    assert collation(1042, "C") == "RTRIM"
    assert collation(25, "en-x-icu") == collation(1042, "en-x-icu") == "en-x-icu"
    assert collation(50_000) == collation(50_001, "C") == "citext"
    assert encode_key(("a ",), ["RTRIM"]) == encode_key(("a",), ["RTRIM"])


def test_column_has_the_facts_of_the_catalogue() -> None:
    fact = ColumnFact(nullable=False, generated=True, auto=True, collation="C")
    assert column_of("c", 1043, 24, fact, {}) == Column(
        "c", "str", "character varying(20)", nullable=False, generated=True, auto=True
    )
