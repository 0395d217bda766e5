"""Schemas and batches in exactly the form that Spark expects."""

import pickle
from decimal import Decimal

import pyarrow as pa
import pytest

from headwater.errors import InvalidRequest, SchemaChanged
from headwater.model import arrow
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import U64, Embedding
from headwater.model.table import KINDS, Column, Table
from headwater.pipeline.transform import schema

EVERY = Table("t", tuple(Column(kind, kind) for kind in sorted(KINDS)), ("i64", "str"))
HIDDEN = Table("h", (Column("rowid", "i64", hidden=True), Column("a", "str")), ("rowid",))


DECLARED = Table(
    "d",
    (
        Column("id", "i64"),
        Column("price", "dec", "numeric(10,2)"),
        Column("day", "date", "date"),
        Column("at", "datetime", "timestamp with time zone"),
        Column("local", "datetime", "timestamp without time zone"),
        Column("whole", "u64", "xid8"),
    ),
    ("id",),
)


@pytest.mark.parametrize(
    "made",
    [
        schema.rows_schema(EVERY),
        schema.changes_schema(EVERY),
        schema.tables_schema(),
        schema.changes_schema(DECLARED, types=schema.TYPED),
    ],
)
def test_spark_expects_exactly_the_arrow_schema_that_is_sent(made: pa.Schema) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    struct = schema.struct_of(made)
    assert to_arrow_schema(struct, timezone="UTC").equals(made)
    assert schema.arrow_of(struct).equals(made)


def test_batch_with_every_column_kind_is_converted_to_the_spark_schema() -> None:
    rows = [
        tuple({"u64": U64(2**64 - 1), "embedding": Embedding((1.5, 2.0))}.get(column.name) for column in EVERY.columns)
    ]
    fitted = schema.fit(arrow.rows_batch(EVERY, rows), schema.rows_schema(EVERY))
    assert fitted.column("u64").to_pylist() == [Decimal(2**64 - 1)]
    assert fitted.column("embedding").to_pylist() == [[1.5, 2.0]]
    part = Transaction("x", (Change(Op.INSERT, EVERY, None, rows[0]),), first=7, commit_ts_ms=1_700_000_000_123)
    batch = arrow.changes_batch(EVERY, [(part, 7, part.changes[0], Op.INSERT)])
    fitted = schema.fit(batch, schema.changes_schema(EVERY))
    assert fitted.schema.equals(schema.changes_schema(EVERY))
    assert fitted.column("_commit_timestamp")[0].value == 1_700_000_000_123_000


def test_batch_that_already_has_the_wanted_schema_is_returned_unchanged() -> None:
    table = Table("t", (Column("id", "i64"),), ("id",))
    batch = arrow.rows_batch(table, [(1,)])
    assert schema.fit(batch, schema.rows_schema(table)) is batch


def test_batch_columns_are_reordered_and_unknown_columns_dropped() -> None:
    wanted = pa.schema([("b", pa.string()), ("a", pa.int64())])
    batch = pa.record_batch({"a": pa.array([1]), "x": pa.array([2]), "b": pa.array(["t"], pa.large_string())})
    assert schema.fit(batch, wanted).to_pylist() == [{"b": "t", "a": 1}]


def test_missing_or_mistyped_column_raises_schema_changed() -> None:
    wanted = pa.schema([("a", pa.int64())])
    with pytest.raises(SchemaChanged, match="no column 'a'"):
        schema.fit(pa.record_batch({"b": pa.array([1])}), wanted)
    with pytest.raises(SchemaChanged, match="column 'a' has type string"):
        schema.fit(pa.record_batch({"a": pa.array(["x"])}), wanted)


def test_chosen_columns_keep_the_table_order_and_include_the_identity() -> None:
    names = schema.rows_schema(EVERY, ["uuid", "bool"]).names
    assert names == ["bool", "i64", "str", "uuid", "_misfit"]
    assert schema.changes_schema(HIDDEN, ["a"]).names[:3] == ["_rowid", "a", "_misfit"]
    with pytest.raises(InvalidRequest, match="no column 'uid'"):
        schema.rows_schema(EVERY, ["uid"])


def test_identity_uses_the_arrow_column_names() -> None:
    assert schema.identity_of(EVERY) == ("i64", "str")
    assert schema.identity_of(HIDDEN) == ("_rowid",)


def test_pickled_reader_and_pieces_stay_small() -> None:
    from headwater.model.keys.key import Span
    from headwater.pipeline.sinks.sink import Part
    from headwater.pipeline.spark.datasource import HeadwaterDataSource, TaskPartition
    from headwater.pipeline.spark.options import LogPiece

    source = HeadwaterDataSource({"url": "http://h", "table": "t"})
    reader = source.reader(schema.struct_of(schema.rows_schema(EVERY)))
    assert len(pickle.dumps(reader)) < 4000
    for what in (Part(Span(b"a", b"b"), 3), LogPiece(1, 2, Span(b"a"))):
        sent = pickle.dumps(TaskPartition("g", what, 1))
        assert pickle.loads(sent).what == what and len(sent) < 600
