"""Arrow batches: pyarrow reads back the rows of the table, typed, or as misfits."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis.strategies import lists, none
from tests.capture.captured_database import running
from tests.model.model_values import VALUES

from headwater.model.arrow import ArrowStream, changes_batch, changes_schema, rows_batch, schema
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_of_ms
from headwater.model.literal import (
    U64,
    UNAVAILABLE,
    Date,
    DateTime,
    Embedding,
    Json,
    Time,
    Value,
    from_lit,
    to_lit,
    to_plain,
)
from headwater.model.table import KINDS, Column, Row, Table

pytestmark = pytest.mark.slow

ORDERS = Table("orders", (Column("id", "i64", "INTEGER", nullable=False), Column("note", "str", "TEXT")), ("id",), 3)
SAMPLES: dict[str, tuple[Value, Any, str]] = {  # kind: a value, what Arrow holds, the Arrow type
    "bool": (True, True, "bool"),
    "i64": (-(2**63), -(2**63), "int64"),
    "u64": (U64(2**64 - 1), 2**64 - 1, "uint64"),
    "f64": (-0.0, -0.0, "double"),
    "str": ("näme\0", "näme\0", "string"),
    "bytes": (b"\x00\xff", b"\x00\xff", "binary"),
    "dec": (Decimal("12.3400"), "12.3400", "string"),
    "json": (Json('{"a": [1, 2]}'), '{"a": [1, 2]}', "string"),
    "date": (Date("2026-01-02"), "2026-01-02", "string"),
    "time": (Time("12:34:56.789"), "12:34:56.789", "string"),
    "datetime": (DateTime("2026-01-02T12:34"), "2026-01-02T12:34", "string"),
    "uuid": (UUID(int=7), str(UUID(int=7)), "string"),
    "embedding": (Embedding((0.5, -2.0)), [0.5, -2.0], "list<item: float>"),
    "any": (1.5, "1.5", "string"),
}


def sent(table: Table, *batches: pa.RecordBatch, of: pa.Schema | None = None) -> pa.Table:
    """Return the rows that a client reads from the encoded batches, as a table."""
    stream = ArrowStream(schema(table) if of is None else of)
    data = b"".join([stream.start(), *map(stream.batch, batches), stream.end()])
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def rows_sent(table: Table, *rows: Row) -> list[dict[str, Any]]:
    return sent(table, rows_batch(table, rows)).to_pylist()


def test_every_kind_has_an_arrow_type_that_holds_its_value() -> None:
    assert set(SAMPLES) == KINDS
    table = Table("t", tuple(Column(kind, kind, f"MY_{kind}") for kind in SAMPLES), ("i64",))
    names = [*SAMPLES, "_misfit"]
    row = tuple(value for value, _, _ in SAMPLES.values())
    assert rows_sent(table, row, (None,) * len(row)) == [
        {kind: held for kind, (_, held, _) in SAMPLES.items()} | {"_misfit": None},
        dict.fromkeys(names),
    ]
    made = schema(table)
    assert made.names == names and [str(made.field(kind).type) for kind in SAMPLES] == [
        t for _, _, t in SAMPLES.values()
    ]
    assert made.field("dec").metadata == {b"kind": b"dec", b"declared": b"MY_dec"}
    assert made.metadata == {b"table": b"t", b"version": b"1", b"key": b'["i64"]', b"identity": b'["i64"]'}


@pytest.mark.parametrize("kind", sorted(KINDS - {"any"}))
@given(value=VALUES)
def test_arrow_value_is_typed_or_a_misfit_and_never_changed(kind: str, value: Value) -> None:
    table = Table("t", (Column("v", kind), Column("id", "i64")), ("id",))
    (found,) = rows_sent(table, (value, 1))
    if found["_misfit"] is None:
        assert found["v"] == _as_arrow(value) and (found["v"] is None) == (value is None)
    else:
        assert found["v"] is None and json.loads(found["_misfit"]) == {"v": json.loads(json.dumps(to_lit(value)))}


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(values=lists(VALUES | none(), max_size=6))
def test_arrow_batch_of_many_rows_equals_the_rows_encoded_one_by_one(kind: str, values: list[Value]) -> None:
    table = Table("t", (Column("v", kind), Column("id", "i64")), ("id",))
    together = rows_sent(table, *((value, place) for place, value in enumerate(values)))
    alone = [row for place, value in enumerate(values) for row in rows_sent(table, (value, place))]
    assert repr(together) == repr(alone)  # as texts: NaN is not equal to itself


def test_arrow_columns_are_the_selected_ones_and_the_key() -> None:
    table = Table("t", (Column("a", "str"), Column("b", "i64"), Column("rowid", "i64", hidden=True)), ("rowid",))
    assert schema(table, ["a"]).names == ["a", "_rowid", "_misfit"]
    assert schema(table).metadata[b"identity"] == b'["_rowid"]' and schema(table).metadata[b"key"] == b"[]"
    (row,) = rows_batch(table, [("x", "not a number", 1)], ["a"]).to_pylist()
    assert row == {"a": "x", "_rowid": 1, "_misfit": None}, "what is not shown does not misfit"
    assert changes_schema(table, []).names[:3] == ["_rowid", "_misfit", "_change_type"]


def test_batch_metadata_is_sent_and_changes_no_other_byte() -> None:
    stream = ArrowStream(schema(ORDERS))
    batches = [rows_batch(ORDERS, [(1, "a")]), rows_batch(ORDERS, []), rows_batch(ORDERS, [(2, None)])]
    data = stream.start() + b"".join(stream.batch(batch, {"upto": str(n)}) for n, batch in enumerate(batches))
    with pa.ipc.open_stream(data + stream.end()) as reader:
        found = [reader.read_next_batch_with_custom_metadata() for _ in batches]
        with pytest.raises(StopIteration):
            reader.read_next_batch()
    assert [batch for batch, _ in found] == batches
    assert [metadata[b"upto"] for _, metadata in found] == [b"0", b"1", b"2"]


def _as_arrow(value: Value) -> Any:
    match value:
        case U64():
            return value.v
        case Json():
            return value.text
        case Embedding():
            return list(value.values)
        case Decimal() | Date() | Time() | DateTime() | UUID():
            return to_plain(value)
        case float() if math.isnan(value):
            return pytest.approx(value, nan_ok=True)
        case _:
            return value


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1"), ("a", '"a"'), (2**60, f'"{2**60}"'), (True, "true"), (b"\x00", '"AA=="'), (None, None), (1.5, "1.5")],
)
def test_arrow_column_of_kind_any_carries_values_as_json_text(value: Value, text: str | None) -> None:
    table = Table("t", (Column("v", "any"),), ("v",))
    assert rows_sent(table, (value,)) == [{"v": text, "_misfit": None}]


@pytest.mark.parametrize("value", [math.inf, UNAVAILABLE])
def test_value_without_a_json_form_is_a_misfit(value: Value) -> None:
    (found,) = rows_sent(Table("t", (Column("v", "any"),), ("v",)), (value,))
    assert found["v"] is None and from_lit(json.loads(found["_misfit"])["v"]) == value


def test_sqlite_values_of_another_type_than_their_column_do_not_end_the_stream(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER, s TEXT, b BOOLEAN, d DATE)")
        one.run("INSERT INTO t VALUES (1, 5, 'x', 1, '2026-01-01')")
        one.run("INSERT INTO t VALUES (2, 'five', x'00', 7, 'soon'), (3, 2.5, CAST(x'61ff' AS TEXT), NULL, NULL)")
        chunk = one.source.chunk("t", after=None, span=None, limit=9)
    assert rows_sent(chunk.table, *chunk.rows) == [
        {"id": 1, "n": 5, "s": "x", "b": True, "d": "2026-01-01", "_misfit": None},
        {"id": 2, "n": None, "s": None, "b": None, "d": None}
        | {
            "_misfit": '{"n":{"t":"str","v":"five"},"s":{"t":"bytes","b64":"AA=="},'
            '"b":{"t":"i64","v":7},"d":{"t":"str","v":"soon"}}'
        },
        {"id": 3, "n": None, "s": None, "b": None, "d": None}
        | {"_misfit": '{"n":{"t":"f64","v":2.5},"s":{"t":"bytes","b64":"Yf8="}}'},
    ]


def test_table_without_a_key_has_a_column_that_identifies_its_rows(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        one.run("CREATE TABLE t(v TEXT)")
        one.run("INSERT INTO t VALUES ('a'), ('a')")
        chunk = one.source.chunk("t", after=None, span=None, limit=9)
    found = rows_sent(chunk.table, *chunk.rows)
    assert [(row["v"], row["_rowid"]) for row in found] == [("a", 1), ("a", 2)]
    assert schema(chunk.table).field("_rowid").metadata[b"hidden"] == b"true"
    assert schema(chunk.table).metadata[b"key"] == b"[]"


def test_table_columns_keep_their_names_and_added_columns_get_free_ones() -> None:
    table = Table("t", (Column("_offset", "i64"), Column("_MISFIT", "str"), Column("bad\udcff", "i64")), ("_offset",))
    assert changes_schema(table).names == [
        *("_offset", "_MISFIT", "bad\\udcff", "__misfit"),
        *("_change_type", "_commit_version", "_commit_timestamp", "__offset", "_txn"),
    ]
    assert rows_sent(table, (1, "x", 2))[0]["_MISFIT"] == "x"


def changes() -> list[tuple[Transaction, int, Change, Op]]:
    made = (
        Change(Op.INSERT, ORDERS, None, (1, "a")),
        Change(Op.UPDATE, ORDERS, (1, "a"), (1, "b")),
        Change(Op.DELETE, ORDERS, (1, "b"), None),
        Change(Op.UPDATE, ORDERS, (2, "x"), (2, "y")),  # the row left the filter: delivered as a delete
    )
    whole = Transaction("t7", made, 40, ts_of_ms(5000), 4000)
    torn = Transaction("t8", (Change(Op.INSERT, ORDERS, None, (3, "z")),), 44, ts_of_ms(6000), last=False)
    ops = (Op.INSERT, Op.UPDATE, Op.DELETE, Op.DELETE)
    listed = [(whole, 40 + place, change, op) for place, (change, op) in enumerate(zip(made, ops, strict=True))]
    return [*listed, (torn, 44, torn.changes[0], Op.INSERT)]


def test_arrow_changes_have_type_offset_version_time_and_transaction() -> None:
    found = sent(ORDERS, changes_batch(ORDERS, changes()), of=changes_schema(ORDERS)).to_pylist()
    assert [(row["_change_type"], row["id"], row["note"], row["_offset"]) for row in found] == [
        ("insert", 1, "a", 40),
        ("update_preimage", 1, "a", 41),
        ("update_postimage", 1, "b", 41),
        ("delete", 1, "b", 42),
        ("delete", 2, "x", 43),
        ("insert", 3, "z", 44),
    ]
    assert [(row["_commit_version"], row["_txn"]) for row in found] == [(43, "t7")] * 5 + [(44, "t8")]
    utc = datetime.UTC
    assert found[0]["_commit_timestamp"] == datetime.datetime.fromtimestamp(4, utc), "the source's own time"
    assert found[-1]["_commit_timestamp"] == datetime.datetime.fromtimestamp(6, utc), "ours, where it has none"
    assert changes_schema(ORDERS).metadata[b"version"] == b"3"


def test_schema_changes_and_truncates_are_no_arrow_rows() -> None:
    part = Transaction("t", (Change(Op.SCHEMA_CHANGE, ORDERS, ddl="…"), Change(Op.TRUNCATE, ORDERS)), 1)
    listed = [(part, 1 + place, change, change.op) for place, change in enumerate(part.changes)]
    assert changes_batch(ORDERS, listed).num_rows == 0


def test_arrow_stream_is_readable_in_pieces_and_has_an_end_marker() -> None:
    stream = ArrowStream(schema(ORDERS))
    pieces = [stream.start(), *(stream.batch(rows_batch(ORDERS, [(n, "x")])) for n in range(3)), stream.end()]
    with pa.ipc.open_stream(b"".join(pieces)) as reader:
        assert [batch.to_pylist()[0]["id"] for batch in reader] == [0, 1, 2]
    with pa.ipc.open_stream(b"".join(pieces[:2])) as reader:
        assert reader.read_next_batch().num_rows == 1
    with pa.ipc.open_stream(b"".join([pieces[0], pieces[1][:-8]])) as reader, pytest.raises((pa.ArrowInvalid, OSError)):
        reader.read_next_batch()
    assert sent(ORDERS).num_rows == 0


def test_importing_the_app_does_not_import_pyarrow() -> None:
    code = "import sys, headwater.model.arrow, headwater.app; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
