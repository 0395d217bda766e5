"""A change as the JSON of the wire and as a line for people."""

from typing import Any

from headwater.cli.demo.command import apply_changes
from headwater.cli.output.changes import WIDEST, as_json, images, line
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Table

USERS = Table("users", (Column("id", "i64"), Column("name", "str")), ("id",), version=3)
KEYLESS = Table("keyless", (Column("a"), Column("rowid", "i64", hidden=True)), ("rowid",))


def part(*changes: Change, **fields: Any) -> Transaction:
    return Transaction("7", changes, **{"first": 10, "ts": (5 << 16) + 1, "commit_ts_ms": 5} | fields)


def test_update_is_printed_with_old_and_new_values() -> None:
    change = Change(Op.UPDATE, USERS, before=(1, "a"), after=(2, None))
    assert images(change) == "id=1  id: 1 → 2, name: a → NULL"
    assert images(Change(Op.UPDATE, USERS, before=(1, "a"), after=(1, "a"))) == "id=1  unchanged"


def test_long_change_is_cut_and_escaped_to_a_single_line() -> None:
    line = images(Change(Op.INSERT, USERS, after=(1, "a\nb\x1b[0m" + "x" * 500)))
    assert line.startswith("id=1 name=a\\nb\\x1b[0mxxx") and line.endswith("…") and len(line) == WIDEST


def test_hidden_identity_is_printed_beside_the_row_and_not_as_its_key() -> None:
    change = Change(Op.DELETE, KEYLESS, before=("x", 4))
    assert images(change) == "a=x rowid=4"
    found = as_json("main", part(change), 10, change)
    assert found["before"] == {"a": "x"} and "pk" not in found and "after" not in found
    assert found["identity"] == {"rowid": 4}
    keyed = Change(Op.INSERT, USERS, after=(1, "a"))
    assert "identity" not in as_json("main", part(keyed), 10, keyed)


def test_unavailable_value_is_reported_as_unavailable_and_not_as_null() -> None:
    change = Change(Op.INSERT, USERS, after=(1, UNAVAILABLE))
    found = as_json("main", part(change), 10, change)
    assert found["after"] == {"id": 1} and found["unavailable"] == ["name"]
    assert images(change) == "id=1 name=?"


def test_unavailable_value_is_printed_as_a_question_mark_and_not_as_null() -> None:
    """Unless REPLICA IDENTITY is FULL, PostgreSQL sends only the key of the old row, and no unchanged long value."""
    notes = Table("notes", (*USERS.columns, Column("long", "str")), ("id",))

    def line_of(op: Op, **rows: Any) -> str:
        change = Change(op, notes, **rows)
        return line(as_json("main", part(change), 10, change)).split("notes", 1)[1].strip()

    old, new = (1, UNAVAILABLE, UNAVAILABLE), (1, "desk", UNAVAILABLE)
    assert line_of(Op.UPDATE, before=old, after=new) == "1  name: ? → desk"
    assert (
        line_of(Op.UPDATE, before=(1, "chair", "x"), after=(1, None, UNAVAILABLE))
        == "1  long: x → ?, name: chair → NULL"
    )
    assert line_of(Op.UPDATE, before=old, after=(1, None, "x")) == "1  long: ? → x, name: ? → NULL"
    assert line_of(Op.DELETE, before=old) == "id=1 long=? name=?"
    assert line_of(Op.INSERT, after=(1, None, UNAVAILABLE)) == "id=1 long=? name=NULL"


def test_change_of_a_partial_transaction_has_its_sequence_and_last_flag() -> None:
    change = Change(Op.INSERT, USERS, after=(1, "a"))
    places = [as_json("main", part(change, change, start=512), offset, change)["txn"] for offset in (10, 11)]
    assert places == [{"id": "7", "seq": 512, "last": False}, {"id": "7", "seq": 513, "last": True}]
    assert as_json("main", part(change, last=False), 10, change)["txn"]["last"] is False


def test_schema_change_has_its_ddl_and_resnapshot_flag() -> None:
    change = Change(Op.SCHEMA_CHANGE, USERS, ddl="ALTER TABLE users", resnapshot=True)
    found = as_json("main", part(change), 10, change)
    assert (found["ddl"], found["resnapshot"], found["schema"], found["ts"]) == ("ALTER TABLE users", True, 3, "5.1")
    assert images(change) == "ALTER TABLE users (snapshot needed)"


def test_folding_applies_every_change_in_order() -> None:
    parts = [
        part(Change(Op.SCHEMA_CHANGE, USERS), Change(Op.INSERT, USERS, after=(1, "a"))),
        part(Change(Op.UPDATE, USERS, before=(1, "a"), after=(2, "b")), Change(Op.INSERT, USERS, after=(1, "c"))),
        part(Change(Op.DELETE, USERS, before=(1, "c"))),
    ]
    assert apply_changes(parts) == {"users": {(2,): (2, "b")}}
