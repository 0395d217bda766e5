"""Databases and tables: created, listed, described, dropped."""

from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Files
from tests.suite.deadlines import PATIENCE

from headwater.errors import Conflict, InvalidRequest, NotFound
from headwater.model.principal import ANONYMOUS
from headwater.model.table import Column, Table
from headwater.queries.statements.schema import Schema
from headwater.queries.statements.transactions import Transactions

USERS = Table("users", (Column("id", "i64", nullable=False, auto=True), Column("name", "str")), ("id",))


@pytest.fixture
def files(tmp_path: Path) -> Any:
    with Files(tmp_path) as found:
        yield found


@pytest.fixture
def schema(files: Files) -> Schema:
    return Schema(files, Transactions(files))


def test_created_table_is_listed_and_described_and_dropped_table_is_not_listed(files: Files, schema: Schema) -> None:
    done = schema.create_table(ANONYMOUS, None, USERS).result(PATIENCE)
    assert done.changed
    assert schema.list_tables(ANONYMOUS) == ["users"]
    found = schema.describe_table(ANONYMOUS, "default", "users")
    assert [(column.name, column.kind) for column in found.visible] == [("id", "i64"), ("name", "str")]
    assert found.primary_key == ("id",)
    assert schema.drop_table(ANONYMOUS, "main", "users").result(PATIENCE).changed
    assert schema.list_tables(ANONYMOUS) == []


def test_creating_or_dropping_twice_is_an_error(schema: Schema) -> None:
    schema.create_table(ANONYMOUS, None, USERS).result(PATIENCE)
    with pytest.raises(Conflict):
        schema.create_table(ANONYMOUS, None, USERS).result(PATIENCE)
    assert not schema.create_table(ANONYMOUS, None, USERS, if_not_exists=True).result(PATIENCE).changed
    schema.drop_table(ANONYMOUS, None, "users").result(PATIENCE)
    with pytest.raises(NotFound):
        schema.drop_table(ANONYMOUS, None, "users").result(PATIENCE)
    assert not schema.drop_table(ANONYMOUS, None, "users", if_exists=True).result(PATIENCE).changed
    with pytest.raises(NotFound):
        schema.describe_table(ANONYMOUS, None, "users")


def test_databases_are_created_listed_and_dropped(files: Files, schema: Schema) -> None:
    assert schema.create_database(ANONYMOUS, "shop").changed
    assert schema.list_databases(ANONYMOUS) == ["main", "shop"]
    with pytest.raises(Conflict):
        schema.create_database(ANONYMOUS, "shop")
    schema.create_table(ANONYMOUS, "shop", USERS).result(PATIENCE)
    assert schema.list_tables(ANONYMOUS, "shop") == ["users"]
    assert schema.list_tables(ANONYMOUS, "main") == []
    schema.drop_database(ANONYMOUS, "shop")
    with pytest.raises(NotFound):
        schema.list_tables(ANONYMOUS, "shop")
    with pytest.raises(NotFound):
        schema.drop_database(ANONYMOUS, "shop")


def test_dropping_a_database_ends_its_transactions(files: Files) -> None:
    transactions = Transactions(files)
    schema = Schema(files, transactions)
    schema.create_database(ANONYMOUS, "shop")
    tx = transactions.begin(ANONYMOUS, db="shop").tx
    kept = transactions.begin(ANONYMOUS, db="main").tx
    schema.drop_database(ANONYMOUS, "shop")
    with pytest.raises(NotFound):
        transactions.commit(ANONYMOUS, tx)
    transactions.commit(ANONYMOUS, kept).result(PATIENCE)


@pytest.mark.parametrize("name", ["", "main", "default"])
def test_main_database_can_neither_be_dropped_nor_created(schema: Schema, name: str) -> None:
    with pytest.raises(InvalidRequest):
        schema.drop_database(ANONYMOUS, name)
    with pytest.raises(Conflict):
        schema.create_database(ANONYMOUS, name)


@pytest.mark.parametrize("name", ["../x", "a/b", "a.b", "1a", "a b", "ä", "a" * 64, "a\n", "a;b", "."])
def test_invalid_database_name_is_rejected_and_creates_no_file(files: Files, schema: Schema, name: str) -> None:
    before = sorted(files.folder.rglob("*"))
    with pytest.raises(InvalidRequest):
        schema.create_database(ANONYMOUS, name)
    with pytest.raises(InvalidRequest):
        schema.create_table(ANONYMOUS, name, USERS)
    assert sorted(files.folder.rglob("*")) == before


def test_create_table_in_a_missing_database_creates_the_database(files: Files, schema: Schema) -> None:
    schema.create_table(ANONYMOUS, "fresh", USERS).result(PATIENCE)
    assert files.names() == ["fresh", "main"]


def test_rejected_create_table_does_not_create_its_missing_database(files: Files, schema: Schema) -> None:
    bad = Table("sqlite_x", (Column("id", "i64"),), ("id",))
    with pytest.raises(InvalidRequest):
        schema.create_table(ANONYMOUS, "fresh", bad).result(PATIENCE)
    assert files.names() == ["main"]


@pytest.mark.parametrize("name", ["subscriptions", "ranges", "queries", "Queries"])
def test_database_with_the_name_of_a_file_of_ours_is_refused(files: Files, schema: Schema, name: str) -> None:
    for create in (schema.create_database, lambda *asked: schema.create_table(*asked, USERS)):
        with pytest.raises(InvalidRequest, match="reserved"):
            create(ANONYMOUS, name)
    assert schema.list_databases(ANONYMOUS) == ["main"]
