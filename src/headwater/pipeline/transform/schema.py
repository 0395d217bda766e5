"""Spark schemas of rows, of changes, and of changes of several tables; and the conversion of batches to them.

Spark casts nothing and checks only the first batch, so every batch is converted to the exact schema here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwater.errors import InvalidRequest, SchemaChanged
from headwater.model import arrow
from headwater.model.suggestion import nearest
from headwater.model.table import Table
from headwater.pipeline.transform import typed_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

U64_DIGITS = 20  # digits of 2^64 - 1: Spark has no unsigned integers
TYPED, TEXT = FORMS = ("typed", "text")  # of decimals, dates and timestamps


def rows_schema(table: Table, columns: Sequence[str] = (), types: str = TEXT) -> pa.Schema:
    """Return the schema of the rows of `table`: `columns` or all, always with its key and `_misfit`."""
    return for_spark(arrow.schema(table, _known(table, columns)), types)


def changes_schema(table: Table, columns: Sequence[str] = (), types: str = TEXT) -> pa.Schema:
    """Return the schema of the changes of `table`: that of rows, and the five columns that describe a change."""
    return for_spark(arrow.changes_schema(table, _known(table, columns)), types)


def has_forms(table: Table) -> bool:
    """Return whether the two forms of `table` differ."""
    return not rows_schema(table, types=TYPED).equals(rows_schema(table))


def tables_schema() -> pa.Schema:
    """Return the schema of the changes of several tables, with rows as JSON objects."""
    import pyarrow as pa

    images = [pa.field(name, pa.string()) for name in ("_table", "_key", "before", "after")]
    return for_spark(pa.schema([*images, *arrow.about_fields()]))


def identity_of(table: Table) -> tuple[str, ...]:
    """Return the names that the key columns have in Arrow; a hidden key is `_rowid`."""
    return tuple(arrow.column_name(table, table.columns[place]) for place in table.key_places)


def for_spark(schema: pa.Schema, types: str = TEXT) -> pa.Schema:
    """Return `schema` with types that Spark has; with TYPED, decimals, dates and timestamps have types of their own.

    Key columns keep their text, which identifies every row: a key that does not fit its type would be null.
    """
    import pyarrow as pa

    keys = json.loads((schema.metadata or {}).get(b"identity", b"[]"))

    def kind(field: pa.Field) -> pa.DataType:
        made = None
        if types == TYPED and field.name not in keys and pa.types.is_string(field.type):
            declared = (field.metadata or {}).get(b"declared", b"").decode()
            made = typed_columns.type_of(typed_columns.kind_of(field), declared)
        return made or _fitting(field.type)

    return pa.schema([pa.field(field.name, kind(field)) for field in schema])


def fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return `batch` with exactly the columns of `schema`; `batch` itself if it has them already.

    A value that does not fit the type of its column goes to `_misfit`. Raise SchemaChanged if a column is missing or
    cannot be cast.
    """
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    columns = []
    misfits: dict[int, dict[str, Any]] = {}
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            raise SchemaChanged(f"the server sent no column {field.name!r}: the shape of the table has changed")
        sent, column = batch.schema.field(place), batch.column(place)
        if pa.types.is_string(sent.type) and typed_columns.is_convertible(sent, field.type):
            columns.append(_converted(column, sent, field.type, misfits))
        else:
            columns.append(_cast(column, field))
    if misfits:
        names = batch.schema.names
        misfit = next(each.name for each in batch.schema if not typed_columns.kind_of(each))
        place = schema.get_field_index(misfit)
        if place >= 0:
            columns[place] = typed_columns.with_misfits(columns[place], misfits, names)
    return pa.record_batch(columns, schema=schema)


def struct_of(schema: pa.Schema) -> StructType:
    """Return the Spark schema of an Arrow schema."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(field.name, _spark_type(field.type)) for field in schema])


def arrow_of(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for `struct`."""
    import pyarrow as pa

    return pa.schema([pa.field(field.name, _arrow_type(field.dataType)) for field in struct.fields])


# Columns


def _known(table: Table, columns: Sequence[str]) -> Sequence[str] | None:
    """Return `columns`, or None for all; raise InvalidRequest if the table lacks one."""
    names = [column.name for column in table.visible]
    for name in columns:
        if name not in names:
            raise InvalidRequest(f"`columns`: table {table.name!r} has no column {name!r}", hint=nearest(name, names))
    return columns or None


def _fitting(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_uint64(kind):
        return pa.decimal128(U64_DIGITS, 0)
    return pa.timestamp("us", tz="UTC") if pa.types.is_timestamp(kind) else kind


def _converted(texts: pa.Array, sent: pa.Field, wanted: pa.DataType, misfits: dict[int, dict[str, Any]]) -> pa.Array:
    """Return the column in its type; add the literals of values that do not fit to `misfits`, by row."""
    found, unfit = typed_columns.converted(texts, wanted)
    for at in unfit:
        misfits.setdefault(at, {})[sent.name] = typed_columns.literal(typed_columns.kind_of(sent), texts[at].as_py())
    return found


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    import pyarrow as pa

    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaChanged(
            f"column {field.name!r} has type {column.type}, and had type {field.type} when the read began: {error}"
        ) from None


# Types


def _spark_type(kind: pa.DataType) -> DataType:
    import pyarrow as pa
    from pyspark.sql.types import DecimalType

    if pa.types.is_decimal128(kind):
        return DecimalType(kind.precision, kind.scale)
    for arrow_type, spark_type in _types():
        if kind.equals(arrow_type):
            return spark_type
    raise InvalidRequest(f"Spark has no type for {kind}")


def _arrow_type(kind: DataType) -> pa.DataType:
    import pyarrow as pa
    from pyspark.sql.types import DecimalType

    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    for arrow_type, spark_type in _types():
        if kind == spark_type:
            return arrow_type
    raise InvalidRequest(
        f"the source has no columns of type {kind.simpleString()}", hint="Leave the schema to the source."
    )


def _types() -> list[tuple[pa.DataType, DataType]]:
    import pyarrow as pa
    from pyspark.sql import types as spark

    return [
        (pa.string(), spark.StringType()),
        (pa.int64(), spark.LongType()),
        (pa.float64(), spark.DoubleType()),
        (pa.bool_(), spark.BooleanType()),
        (pa.binary(), spark.BinaryType()),
        (pa.date32(), spark.DateType()),
        (pa.timestamp("us", tz="UTC"), spark.TimestampType()),
        (pa.timestamp("us"), spark.TimestampNTZType()),
        (pa.list_(pa.float32()), spark.ArrayType(spark.FloatType())),
    ]
