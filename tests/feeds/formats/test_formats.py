"""The five formats against reference implementations with random rows, and against the examples in the docs."""

import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples

from headwater import __version__
from headwater.feeds.formats.encoder import Encoder
from headwater.feeds.formats.registry import MAKERS, encoder
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_text
from headwater.model.formats import CHANGE_FORMATS as FORMATS
from headwater.model.literal import MOST_PARSED, UNAVAILABLE, Json, to_lit, to_plain
from headwater.model.table import Column, Row, Table

NATIVE = ("objects_json", "plain_json")
FOREIGN = tuple(name for name in FORMATS if name not in NATIVE)

# --- the changes of the examples -------------------------------------------------------------------------

ORDERS = Table(
    "orders",
    (
        Column("id", "i64", "INTEGER", nullable=False, auto=True),
        Column("customer", "str", "TEXT", nullable=False),
        Column("total", "dec", "DECIMAL_TEXT"),
    ),
    ("id",),
)
WIDER = Table("orders", (*ORDERS.columns, Column("note", "str", "TEXT")), ("id",), 2)
OPEN, PAID, MOVED = (7, "Ada", Decimal("12.50")), (7, "Ada", Decimal("10.00")), (8, "Ada", Decimal("10.00"))
CHANGES = {  # by the name of the example
    "insert": Change(Op.INSERT, ORDERS, None, OPEN),
    "update": Change(Op.UPDATE, ORDERS, OPEN, PAID),
    "update of the key": Change(Op.UPDATE, ORDERS, PAID, MOVED),
    "delete": Change(Op.DELETE, ORDERS, MOVED, None),
    "truncate": Change(Op.TRUNCATE, ORDERS),
    "schema_change": Change(Op.SCHEMA_CHANGE, WIDER, ddl="ALTER TABLE orders ADD COLUMN note TEXT"),
}
SNAPSHOT = "row of a snapshot"
MS = 1763172000123
PART = Transaction("c-41", tuple(CHANGES.values()), 17, MS << 16 | 2, MS - 3)


def of(format: str, **how: Any) -> Encoder:
    return encoder(Shape("main", format, **{"before": True, "after": True, **how}))


def example(format: str, case: str) -> bytes:
    """Return the bytes that `format` writes for the example `case`."""
    writer = of(format)
    if case == SNAPSHOT:
        return writer.row(ORDERS, OPEN, 16, MS)
    place = list(CHANGES).index(case)
    change = PART.changes[place]
    return writer.change(PART, PART.first + place, change, change.op)


def ordered(text: str | bytes) -> Any:
    """Parse JSON, keeping the order of fields."""
    return json.loads(text, object_pairs_hook=lambda pairs: ("object", pairs))


def test_encoders_exist_for_exactly_the_listed_formats() -> None:
    assert tuple(MAKERS) == FORMATS


@pytest.mark.parametrize("case", [*CHANGES, SNAPSHOT])
@pytest.mark.parametrize("format", FORMATS)
def test_docs_show_the_written_bytes(format: str, case: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
    shown = dict(re.findall(r"^```json (\w+ [^\n]+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    written = example(format, case).replace(__version__.encode(), b"0.1.0")
    assert ordered(shown[f"{format} {case}"]) == ordered(written)


# --- the native formats against a reference implementation with dicts ------------------------------------


def image(table: Table, row: Row, format: str, columns: tuple[str, ...] = ()) -> dict[str, Any]:
    hidden = {column.name for column in table.columns if column.hidden}
    pairs = sorted((name, row[table.index[name]]) for name in table.names if name not in hidden)
    pairs = [(name, value) for name, value in pairs if not columns or name in columns]
    if format == "objects_json":
        return {name: to_lit(value) for name, value in pairs}
    return {name: to_plain(value) for name, value in pairs if value is not UNAVAILABLE}


def key(table: Table, row: Row, format: str) -> list[Any]:
    form = to_lit if format == "objects_json" else lambda value: None if value is UNAVAILABLE else to_plain(value)
    return [form(value) for value in table.key_of(row)]


def definition(shape: Shape, part: Transaction, offset: int, change: Change, op: Op) -> dict[str, Any]:
    """Return a change on the wire, built field by field."""
    table, format = change.table, shape.format
    before = None if op is Op.INSERT else change.before
    after = None if op is Op.DELETE else change.after
    row = before if after is None else after
    found: dict[str, Any] = {"seq": offset, "db": shape.db, "table": table.name, "op": op.word}
    if row is not None and table.primary_key:
        found["pk"] = key(table, row, format)
    unknown: set[str] = set()
    for name, wanted, shown in (("before", shape.before, before), ("after", shape.after, after)):
        if wanted and shown is not None:
            found[name] = image(table, shown, format, shape.columns)
            unknown |= set(image(table, shown, "objects_json", shape.columns)) - set(found[name])
    found |= {"commit_ts_ms": part.commit_ts_ms, "lsn": offset}
    moved = (
        before is not None
        and after is not None
        and UNAVAILABLE not in table.key_of(before)
        and repr(key(table, before, format)) != repr(key(table, after, format))
    )
    if moved and before is not None and table.primary_key:
        found["pk_before"] = key(table, before, format)
    found |= {"offset": offset, "ts": ts_text(part.ts)}
    place = part.start + offset - part.first
    found["txn"] = {"id": part.id, "seq": place, "last": part.last and offset == part.upto}
    found["schema"] = table.version
    if op is Op.SCHEMA_CHANGE:
        found |= {"ddl": change.ddl or "", "resnapshot": change.resnapshot}
    if row is not None and not table.primary_key:
        found["identity"] = dict(zip(table.key, key(table, row, format), strict=True))
        if moved and before is not None:
            found["identity_before"] = dict(zip(table.key, key(table, before, format), strict=True))
    return found | ({"unavailable": sorted(unknown)} if unknown else {})


KEYED = Table("t", tuple(map(Column, ("b", "a", "%d", "ü"))), ("b", "%d"), 3)
SINGLE = Table("s", tuple(map(Column, ("b", "a", "k", "z"))), ("k",), 4)
HIDDEN = Table("h", (Column("rowid", hidden=True), *map(Column, ("b", "a", "c"))), ("rowid",))
ROWS = st.tuples(VALUES, VALUES, VALUES, VALUES)


@st.composite
def written(draw: st.DrawFn) -> tuple[Shape, Transaction, int, Change, Op]:
    """Draw a change in a part of a transaction, the op it is delivered as, and its format."""
    table = draw(st.sampled_from([KEYED, SINGLE, HIDDEN]))
    old, new = draw(ROWS), draw(ROWS)
    if draw(st.booleans()):
        new = tuple(
            old[place] if place in table.key_places else value for place, value in enumerate(new)
        )  # most updates keep the key
    change = Change(Op.UPDATE, table, old, new)
    op = draw(st.sampled_from([Op.INSERT, Op.UPDATE, Op.DELETE]))
    around = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    changes = (change,) * (sum(around) + 1)
    first = draw(st.integers(1, 2**60))
    ts = draw(st.integers(0, 2**63 - 1))
    part = Transaction(
        "x-1", changes, first, ts, draw(st.integers(0, 2**41)), draw(st.integers(0, 3)), draw(st.booleans())
    )
    columns = draw(st.sampled_from([(), ("a",), ("b", "gone"), ("rowid", "b")]))
    shape = Shape("main", draw(st.sampled_from(NATIVE)), draw(st.booleans()), draw(st.booleans()), columns)
    return shape, part, first + around[0], change, op


@pytest.mark.slow
@examples(600)
@given(written())
def test_native_formats_equal_their_reference_implementation(
    case: tuple[Shape, Transaction, int, Change, Op],
) -> None:
    shape, part, offset, change, op = case
    found = encoder(shape).change(part, offset, change, op)
    assert found == msgspec.json.encode(definition(shape, part, offset, change, op))


@pytest.mark.slow
@examples(200)
@given(ROWS, st.sampled_from(NATIVE), st.sampled_from([KEYED, SINGLE, HIDDEN]))
def test_snapshot_row_is_a_marked_insert(row: Row, format: str, table: Table) -> None:
    shape = Shape("main", format, False, True)
    part = Transaction("", (Change(Op.INSERT, table, None, row),), 9, 0, MS)
    wanted = definition(shape, part, 9, part.changes[0], Op.INSERT)
    del wanted["ts"], wanted["txn"]
    found = json.loads(encoder(shape).row(table, row, 9, MS))
    assert found.pop("snapshot") is True
    assert found == json.loads(msgspec.json.encode(wanted))


def test_base_fields_precede_headwaters_own_fields() -> None:
    assert list(json.loads(example("plain_json", "update of the key"))) == [
        *("seq", "db", "table", "op", "pk", "before", "after", "commit_ts_ms", "lsn"),
        *("pk_before", "offset", "ts", "txn", "schema"),
    ]
    assert list(json.loads(example("objects_json", "schema_change"))) == [
        *("seq", "db", "table", "op", "commit_ts_ms", "lsn", "offset", "ts", "txn", "schema", "ddl", "resnapshot"),
    ]
    assert list(json.loads(example("plain_json", SNAPSHOT))) == [
        *("seq", "db", "table", "op", "pk", "after", "commit_ts_ms", "lsn", "snapshot", "offset", "schema"),
    ]


def test_change_without_images_has_its_key() -> None:
    found = of("objects_json", before=False, after=False).change(PART, 18, CHANGES["update"], Op.UPDATE)
    start = b'{"seq":18,"db":"main","table":"orders","op":"update","pk":[{"t":"i64","v":7}],"commit_ts_ms":'
    assert found.startswith(start)


@pytest.mark.parametrize("format", FORMATS)
def test_update_delivered_as_insert_or_delete_hides_the_image_outside_the_filter(format: str) -> None:
    left = Change(Op.UPDATE, ORDERS, (7777, "inside", None), (9999, "outside", None))
    part = Transaction("c-1", (left,), 1, 0, 1_000)
    gone, came = (of(format).change(part, 1, left, op) for op in (Op.DELETE, Op.INSERT))
    assert b"outside" not in gone and b"9999" not in gone and b"inside" in gone and b"7777" in gone
    assert b"inside" not in came and b"7777" not in came and b"outside" in came and b"9999" in came


def test_txn_last_is_true_only_at_the_end_of_the_last_part() -> None:
    change = CHANGES["insert"]
    parts = [
        Transaction("c-1", (change,) * 2, 5, 0, MS, start=0, last=False),
        Transaction("c-1", (change,) * 2, 7, 0, MS, start=2, last=True),
    ]
    writer = of("plain_json")
    said = [
        json.loads(writer.change(part, offset, change, Op.INSERT))["txn"]
        for part in parts
        for offset in range(part.first, part.upto + 1)
    ]
    assert [txn["seq"] for txn in said] == [0, 1, 2, 3]
    assert [txn["last"] for txn in said] == [False, False, False, True]


# --- random rows -----------------------------------------------------------------------------------------


def every_change(table: Table, old: Row, new: Row) -> tuple[Transaction, list[tuple[int, Change, Op]]]:
    update = Change(Op.UPDATE, table, old, new)
    other = (Change(Op.TRUNCATE, table), Change(Op.SCHEMA_CHANGE, table, ddl='DROP TABLE "\udc80"', resnapshot=True))
    part = Transaction("c-2", (update, update, update, *other), 1, 5, MS)
    ops = (Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE, Op.SCHEMA_CHANGE)
    return part, [(offset, change, op) for (offset, change), op in zip(enumerate(part.changes, 1), ops, strict=True)]


@pytest.mark.slow
@examples(200)
@given(ROWS, ROWS, st.sampled_from([KEYED, SINGLE, HIDDEN]), st.sampled_from(FORMATS))
def test_every_format_is_one_line_of_valid_json(old: Row, new: Row, table: Table, format: str) -> None:
    writer = of(format)
    part, changes = every_change(table, old, new)
    lines = [writer.change(part, *each) for each in changes] + [writer.row(table, new, 1, MS)]
    for line in lines:
        assert isinstance(json.loads(line, parse_constant=pytest.fail), dict)
        assert not set(b"\r\n") & set(line)


@pytest.mark.slow
@examples(200)
@given(ROWS, ROWS, st.sampled_from(FOREIGN), st.booleans(), st.booleans())
def test_envelope_formats_have_the_images_of_plain_json(
    old: Row, new: Row, format: str, before: bool, after: bool
) -> None:
    update = Change(Op.UPDATE, SINGLE, old, new)
    part = Transaction("c-2", (update,), 1, 5, MS)
    found = json.loads(of(format, before=before, after=after).change(part, 1, update, Op.UPDATE))
    found = found["data"] if format == "cloudevents_json" else found
    for name, wanted, row in (("before", before, old), ("after", after, new)):
        plain = json.loads(msgspec.json.encode(image(SINGLE, row, "plain_json")))
        shown = found.get(name) or {}
        assert {k: v for k, v in shown.items() if v != "__debezium_unavailable_value"} == (plain if wanted else {})


HOSTILE = ['"', "\\", "%s", "%b%%", "ß\u2028", "\udc80", "\ud800x", "", "\n", "\0", "a,b/c?d#e"]


@pytest.mark.parametrize("format", FORMATS)
def test_any_name_is_valid_json(format: str) -> None:
    table = Table('%d"\udcff\n', tuple(map(Column, HOSTILE)), (HOSTILE[2], HOSTILE[5]))
    row = tuple(range(len(HOSTILE)))
    part, changes = every_change(table, row, row)
    lines = [of(format).change(part, *each) for each in changes] + [of(format).row(table, row, 1, MS)]
    for line in lines:
        assert json.loads(line) and b"\n" not in line
    after = json.loads(of("plain_json").change(part, *changes[0]))["after"]
    assert after == {name.encode("utf-8", "backslashreplace").decode(): place for place, name in enumerate(HOSTILE)}
    assert list(after) == sorted(after)


def test_json_nested_deeper_than_the_stack_is_written_verbatim() -> None:
    deep = sys.getrecursionlimit() * 2
    text = "[\r\n" * deep + "]" * deep
    row = (1, "Ada", Json(text))
    part = Transaction("c-3", (Change(Op.INSERT, ORDERS, None, row),), 1, 0, MS)
    for format in FORMATS:
        found = of(format).change(part, 1, part.changes[0], Op.INSERT)
        assert b"[  " * deep + b"]" * deep in found and b"\n" not in found


def test_large_json_is_written_verbatim_and_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: Json) -> Any:
        raise AssertionError("parsed")

    monkeypatch.setattr(Json, "value", parse)
    text = '{"a":\n[' + "1, " * MOST_PARSED + "1]}"
    part = Transaction("c-3", (Change(Op.INSERT, ORDERS, None, (1, "Ada", Json(text))),), 1, 0, MS)
    for format in FORMATS:
        found = of(format).change(part, 1, part.changes[0], Op.INSERT)
        assert text.replace("\n", " ").encode() in found and b"\n" not in found


def test_unavailable_value_differs_from_null() -> None:
    change = Change(Op.UPDATE, ORDERS, (7, UNAVAILABLE, None), (7, "Ada", UNAVAILABLE))
    part = Transaction("c-4", (change,), 1, 0, MS)
    found = {name: json.loads(of(name).change(part, 1, change, Op.UPDATE)) for name in FORMATS}
    assert found["objects_json"]["after"]["total"] == {"t": "unavailable"}
    assert "unavailable" not in found["objects_json"]
    for name in ("plain_json", "cockroach_wrapped_json"):
        assert found[name]["after"] == {"id": 7, "customer": "Ada"}
        assert found[name]["unavailable"] == ["customer", "total"]
    assert found["debezium_json"]["after"]["total"] == "__debezium_unavailable_value"


def test_unavailable_old_key_is_not_a_key_change() -> None:
    change = Change(Op.UPDATE, ORDERS, (UNAVAILABLE, "Ada", None), (7, "Ada", None))
    part = Transaction("c-4", (change,), 1, 0, MS)
    for name in FORMATS:
        assert b"_before" not in of(name).change(part, 1, change, Op.UPDATE)


@pytest.mark.parametrize("format", FORMATS)
def test_images_have_only_the_selected_columns(format: str) -> None:
    found = of(format, columns=("total", "no such column")).change(PART, 18, CHANGES["update"], Op.UPDATE)
    assert b"12.50" in found and b"10.00" in found and b"Ada" not in found


@pytest.mark.parametrize("format", FORMATS)
def test_hidden_identity_is_not_a_column(format: str) -> None:
    old, new = (5, "x", "y", "z"), (6, "x", "y", "z")
    change = Change(Op.UPDATE, HIDDEN, old, new)
    part = Transaction("c-5", (change,), 1, 0, MS)
    found = json.loads(of(format, columns=("rowid", "a")).change(part, 1, change, Op.UPDATE))
    shown = found["data"] if format == "cloudevents_json" else found
    assert list(shown["before"]) == list(shown["after"]) == ["a"]
    if format in NATIVE:
        assert "pk" not in found and list(found["identity"]) == ["rowid"]
    if format == "plain_json":
        assert (found["identity"], found["identity_before"]) == ({"rowid": 6}, {"rowid": 5})
    if format == "cockroach_wrapped_json":
        assert (found["key"], found["key_before"]) == ([6], [5])
    if format == "debezium_json":
        assert (found["key"], found["key_before"]) == ({"rowid": 6}, {"rowid": 5})


# --- the rules of Debezium, CloudEvents and CockroachDB --------------------------------------------------


def test_debezium_has_a_letter_for_every_op() -> None:
    letters = {case: json.loads(example("debezium_json", case)).get("op") for case in [*CHANGES, SNAPSHOT]}
    assert letters == {
        "insert": "c",
        "update": "u",
        "update of the key": "u",
        "delete": "d",
        "truncate": "t",
        "schema_change": None,
        SNAPSHOT: "r",
    }


def test_debezium_counts_from_one_inside_a_transaction() -> None:
    orders = [json.loads(example("debezium_json", case))["transaction"]["total_order"] for case in list(CHANGES)[:4]]
    assert orders == [1, 2, 3, 4]
    assert json.loads(json.loads(example("debezium_json", "delete"))["source"]["sequence"]) == ["16", "20"]


def test_debezium_total_order_continues_in_a_later_part_of_a_transaction() -> None:
    change = CHANGES["insert"]
    part = Transaction("c-1", (change,) * 2, 7, 0, MS, start=2)
    found = json.loads(of("debezium_json").change(part, 8, change, Op.INSERT))
    assert found["transaction"]["total_order"] == 4
    assert json.loads(found["source"]["sequence"]) == ["4", "8"]


@pytest.mark.parametrize(
    ("ddl", "type"),
    [
        ("create table x(a)", "CREATE"),
        (" DROP  TABLE x", "DROP"),
        ("CREATE INDEX i ON x(a)", "ALTER"),
        ("ALTER TABLE x ADD b", "ALTER"),
        (None, "ALTER"),
    ],
)
def test_debezium_schema_change_describes_the_table(ddl: str | None, type: str) -> None:
    part = Transaction("c-6", (Change(Op.SCHEMA_CHANGE, ORDERS, ddl=ddl),), 1, 0, MS)
    found = json.loads(of("debezium_json").change(part, 1, part.changes[0], Op.SCHEMA_CHANGE))
    assert found["tableChanges"][0]["type"] == type and found["ddl"] == (ddl or "")


def attributes(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    found.pop("data")
    return found


def test_cloudevents_have_only_attributes_the_specification_allows() -> None:
    table = Table('ord/ers?#%"\udc80 ü', ORDERS.columns, ("customer",))
    for text in ("", "a b", "ü,%", "\x7f\x85\udc80", "\n"):
        part, changes = every_change(table, (1, "x", None), (1, text, None))
        lines = [of("cloudevents_json").change(part, *each) for each in changes]
        lines.append(of("cloudevents_json").row(table, (1, text, None), 1, MS))
        for found in map(attributes, lines):
            assert {"specversion", "id", "source", "type"} <= set(found)
            for name, value in found.items():
                assert re.fullmatch("[a-z0-9]{1,20}", name)
                assert value is True or re.fullmatch("[ -~]+", value), name
            assert re.fullmatch(r"(/([A-Za-z0-9._~-]|%[0-9A-F]{2})+){3}", found["source"])
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])


def test_cloudevents_of_one_snapshot_have_different_ids_for_different_rows() -> None:
    rows: list[Row] = [(value, None, None) for value in (1, "1", 2**60, str(2**60), b"ab", "YWI=", 1.5, None, "")]
    ids = {attributes(of("cloudevents_json").row(ORDERS, row, 4, MS))["id"] for row in rows}
    assert len(ids) == len(rows) and "main/4" not in ids


def test_cloudevents_can_be_sorted_by_their_sequence_as_text() -> None:
    change = CHANGES["insert"]
    found = [
        attributes(of("cloudevents_json").change(Transaction("c", (change,), offset), offset, change, Op.INSERT))
        for offset in (9, 10, 2**62)
    ]
    assert sorted(found, key=lambda each: each["sequence"]) == found
    assert [each["hwoffset"] for each in found] == ["9", "10", str(2**62)]


def test_cloudevents_have_the_time_of_each_commit() -> None:
    writer = of("cloudevents_json")
    times = []
    for ms in (0, 999, 1000, MS, 5):
        part = Transaction("c", (CHANGES["insert"],), 1, 0, ms)
        times.append(attributes(writer.change(part, 1, CHANGES["insert"], Op.INSERT))["time"])
    assert times == [
        "1970-01-01T00:00:00.000Z",
        "1970-01-01T00:00:00.999Z",
        "1970-01-01T00:00:01.000Z",
        "2025-11-15T02:00:00.123Z",
        "1970-01-01T00:00:00.005Z",
    ]


def test_cockroach_writes_null_after_a_delete_and_only_then() -> None:
    def after(op: Op, **how: Any) -> Any:
        found = json.loads(of("cockroach_wrapped_json", **how).change(PART, 18, CHANGES["update"], op))
        return found.get("after", "absent")

    assert after(Op.DELETE) is None and after(Op.DELETE, after=False) is None
    assert after(Op.UPDATE)["total"] == "10.00" and after(Op.UPDATE, after=False) == "absent"


def test_cockroach_writes_before_only_if_requested() -> None:
    def fields(**how: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            of("cockroach_wrapped_json", **how).change(PART, 17, CHANGES["insert"], Op.INSERT)
        )
        return found

    assert fields()["before"] is None and "before" not in fields(before=False)


@pytest.mark.parametrize("format", FORMATS)
def test_encoder_follows_the_table_through_its_versions(format: str) -> None:
    writer: Callable[..., bytes] = of(format).change
    wider = Change(Op.INSERT, WIDER, None, (*OPEN, "new"))
    part = Transaction("c-7", (CHANGES["insert"], wider, CHANGES["insert"]), 1, 0, MS)
    lines = [writer(part, offset, change, Op.INSERT) for offset, change in enumerate(part.changes, 1)]
    assert [b'"note"' in line for line in lines] == [False, True, False]
