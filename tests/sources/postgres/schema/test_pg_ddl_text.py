"""DDL text that is derived from two shapes."""

from __future__ import annotations

import pytest

from headwater.feeds.snapshot import _ALTER
from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.ranges.pull.table_changes import stop_of
from headwater.sources.postgres.schema.ddl_text import ddl_text

ID, NOTE = Column("id", "i64", "integer", nullable=False), Column("note", "str", "text")
OLD = Table("shop.t", (ID, NOTE), ("id",))


def changed(*columns: Column) -> str:
    return ddl_text(OLD, Table("shop.t", columns, ("id",)))


def test_new_table_is_created() -> None:
    assert ddl_text(None, OLD) == 'CREATE TABLE shop.t ("id" integer NOT NULL, "note" text, PRIMARY KEY ("id"))'
    assert ddl_text(None, Table("t", (NOTE,), ())) == 'CREATE TABLE t ("note" text)'


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ((ID,), 'DROP COLUMN "note"'),
        ((ID, NOTE, Column("n", "i64", "integer")), 'ADD COLUMN "n" integer'),
        ((ID, Column("note", "str", "varchar")), 'ALTER COLUMN "note" TYPE varchar'),
        ((ID, Column("note", "str", "text", nullable=False)), 'ALTER COLUMN "note" SET NOT NULL'),
        ((Column("id", "i64", "integer"), NOTE), 'ALTER COLUMN "id" DROP NOT NULL'),
        ((ID, Column("memo", "str", "text")), 'DROP COLUMN "note", ADD COLUMN "memo" text'),
    ],
)
def test_changed_table_is_altered(columns: tuple[Column, ...], text: str) -> None:
    assert changed(*columns) == f"ALTER TABLE shop.t {text}"


def test_change_that_columns_do_not_show_is_a_comment() -> None:
    assert changed(NOTE, ID) == "-- the shape of shop.t changed"


def test_hostile_column_name_does_not_end_the_table() -> None:
    for name in ('x" RENAME TO "y', "a RENAME  to b"):
        text = changed(ID, NOTE, Column(name, "str", "text"))
        assert text and not stop_of(Change(Op.SCHEMA_CHANGE, OLD, ddl=text))
    assert _ALTER.match(changed(ID))
