"""From the type descriptions of the wire to the columns of a table."""

from typing import Any

import msgspec
import pytest

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.table import KINDS
from headwater.serve.rpc.params import CreateTable
from headwater.serve.rpc.table_types import table_of


def table_from(**found: Any) -> Any:
    """Return the table that these parameters of `schema.create_table` describe."""
    return table_of(msgspec.convert({"table": "t"} | found, CreateTable))


def column(**found: Any) -> dict[str, Any]:
    return {"name": "c", "type": {"kind": "str"}} | found


@pytest.mark.parametrize("kind", sorted(KINDS - {"any"} | {"varchar"}))
def test_every_kind_of_the_wire_makes_a_column(kind: str) -> None:
    (found,) = table_from(columns=[column(type={"kind": kind})]).columns
    assert found.kind == ("str" if kind == "varchar" else kind)
    assert found.nullable


def test_key_columns_are_not_null_unless_they_say_so() -> None:
    found = table_from(columns=[column(name="a"), column(name="b", nullable=True)], primary_key=["b", "a"])
    assert [c.nullable for c in found.columns] == [False, True]
    assert found.key == ("b", "a")


@pytest.mark.parametrize("type", [{"kind": "i64"}, {"kind": "u64"}, {"kind": "i64", "unsigned": True}])
def test_single_integer_primary_key_may_auto_increment(type: dict[str, Any]) -> None:
    (found,) = table_from(columns=[column(type=type, auto_increment=True)], primary_key=["c"]).columns
    assert found.auto


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ({"columns": []}, InvalidRequest),
        ({"columns": [column(), column(name="C")]}, InvalidRequest),
        ({"columns": [column()], "primary_key": ["d"]}, InvalidRequest),
        ({"columns": [column()], "primary_key": ["c", "c"]}, InvalidRequest),
        ({"columns": [column(name="")]}, InvalidRequest),
        ({"columns": [column(name="a\0")]}, InvalidRequest),
        ({"columns": [column(name="a" * 256)]}, InvalidRequest),
        ({"columns": [column()], "table": ""}, InvalidRequest),
        ({"columns": [column(type={"kind": "int"})]}, InvalidRequest),
        ({"columns": [column(type={"kind": "any"})]}, InvalidRequest),
        ({"columns": [column(type={"kind": "str", "unsigned": True})]}, InvalidRequest),
        ({"columns": [column(type={"kind": "varchar", "max": 9})]}, NotSupported),
        ({"columns": [column(type={"kind": "dec", "precision": 9})]}, NotSupported),
        ({"columns": [column(type={"kind": "str", "charset": "latin1"})]}, NotSupported),
        ({"columns": [column(type={"kind": "str", "collation": "nocase"})]}, NotSupported),
        ({"columns": [column(auto_increment=True)]}, NotSupported),
        ({"columns": [column(auto_increment=True)], "primary_key": ["c"]}, NotSupported),
    ],
)
def test_unsupported_table_is_refused(found: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        table_from(**found)
    assert raised.type is error
