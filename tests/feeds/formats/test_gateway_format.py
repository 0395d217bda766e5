"""The events of the JSON gateway against a reference implementation with dicts, for random rows."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples

from headwater.feeds.formats.gateway import GATEWAY
from headwater.feeds.formats.registry import MAKERS, encoder
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.formats import CHANGE_FORMATS as FORMATS
from headwater.model.kv_table import SHAPE as PAIRS
from headwater.model.literal import UNAVAILABLE, to_plain
from headwater.model.table import Column, Row, Table

COLUMNS = tuple(map(Column, ("b", "a", "ü%")))
KEYED = Table("keyed", COLUMNS, ("a", "b"))
SINGLE = Table('sin"gle', COLUMNS, ("b",))
KEYLESS = Table("keyless", COLUMNS)
WRITE = encoder(Shape("main", GATEWAY, before=True, after=True))
PAIR = st.tuples(st.binary(max_size=5), st.binary(max_size=5), st.none() | st.integers(0, 2**40))


def plain(row: Row, table: Table) -> dict[str, Any]:
    return {name: to_plain(row[table.index[name]]) for name in sorted(table.names) if known(row, table, name)}


def known(row: Row, table: Table, name: str) -> bool:
    return row[table.index[name]] is not UNAVAILABLE


def key(row: Row, table: Table) -> list[Any]:
    return [None if value is UNAVAILABLE else to_plain(value) for value in table.key_of(row)]


def text(field: str, data: Any) -> dict[str, str]:
    try:
        return {field: data.decode()}
    except UnicodeDecodeError:
        return {f"{field}_base64": base64.b64encode(data).decode()}


def defined(part: Transaction, offset: int, change: Change, op: Op) -> dict[str, Any]:
    """Return an event, built field by field."""
    table = change.table
    before = None if op is Op.INSERT else change.before
    after = None if op is Op.DELETE else change.after
    row = before if after is None else after
    number = int(part.id) if part.id.isdecimal() else part.first - part.start
    found: dict[str, Any] = {"sequence": offset, "timestamp_us": part.commit_ts_us, "txn_id": number}
    found |= {"table": table.name, "operation": op.word}
    if row is not None and table == PAIRS:
        found |= text("key", row[0])
        if before is not None and before[0] != row[0]:
            found |= text("key_before", before[0])
        for name, each in (("before", before), ("after", after)):
            found |= {} if each is None else text(name, each[1])
    elif row is not None:
        moved = before is not None and after is not None and UNAVAILABLE not in table.key_of(before)
        if table.primary_key:
            found["key"] = key(row, table)
            if moved and before is not None and repr(key(before, table)) != repr(key(row, table)):
                found["key_before"] = key(before, table)
        unknown = set()
        for name, each in (("before", before), ("after", after)):
            if each is not None:
                found[name] = plain(each, table)
                unknown |= {column for column in table.names if not known(each, table, column)}
        found |= {"unavailable": sorted(unknown)} if unknown else {}
    return found | ({"ddl": change.ddl or ""} if op is Op.SCHEMA_CHANGE else {})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Transaction, int, Change, Op]:
    table = draw(st.sampled_from([KEYED, SINGLE, KEYLESS, PAIRS]))
    rows = PAIR if table == PAIRS else st.tuples(VALUES, VALUES, VALUES)
    op = draw(st.sampled_from(list(Op)))
    change = Change(Op.UPDATE, table, old := draw(rows), draw(st.just(old) | rows))
    if op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
        change = Change(op, table, ddl=draw(st.text(max_size=20)) if op is Op.SCHEMA_CHANGE else None)
    first = draw(st.integers(1, 2**53))
    id = draw(st.sampled_from(["x:1", "7", "0b3f"]) | st.integers(1, 2**63).map(str))
    return (
        Transaction(id, (change,), first, 0, draw(st.integers(0, 2**43)), commit_us_rest=draw(st.integers(0, 999))),
        first,
        change,
        op,
    )


@pytest.mark.slow
@examples(400)
@given(cases())
def test_event_has_the_defined_fields(case: tuple[Transaction, int, Change, Op]) -> None:
    written = WRITE.change(*case)
    assert b"\n" not in written, "events are lines until they are frames"
    found, wanted = json.loads(written), json.loads(json.dumps(defined(*case)))
    assert repr(found) == repr(wanted) or found == wanted


def test_snapshot_row_is_an_insert() -> None:
    found = json.loads(WRITE.row(SINGLE, (1, UNAVAILABLE, "x"), 9, 5))
    assert found == {
        "sequence": 9,
        "timestamp_us": 5000,
        "txn_id": 0,
        "table": 'sin"gle',
        "operation": "insert",
        "key": [1],
        "after": {"b": 1, "ü%": "x"},
        "unavailable": ["a"],
        "snapshot": True,
    }


def test_format_cannot_be_selected_by_name() -> None:
    assert GATEWAY not in {*FORMATS, *MAKERS}
