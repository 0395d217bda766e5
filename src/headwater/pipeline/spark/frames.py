"""Rows and changes of a table as Spark DataFrames for the pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.spark.options import LogPiece
from headwater.pipeline.spark.part_ends import with_end
from headwater.pipeline.transform import schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession


class Server(msgspec.Struct, frozen=True):
    """The server to read from. The token stays in its file, or in HEADWATER_TOKEN on the executors."""

    url: str
    token_file: str | None = None


def register(spark: SparkSession) -> None:
    """Register the format `headwater` in `spark`."""
    from headwater.pipeline.spark.datasource import HeadwaterDataSource

    spark.dataSource.register(HeadwaterDataSource)


def rows_frame(
    spark: SparkSession,
    server: Server,
    db: str,
    table: str | Table,
    *,
    generation: str,
    parts: Sequence[Part],
    columns: Sequence[str] = (),
    where: str | None = None,
    ends: bool = False,
    types: str = schema.TEXT,
) -> DataFrame:
    """Return the rows of `parts`: partition i holds those of part i and, with `ends`, an end row (see part_ends.py).

    If `table` is a Table, its shape is not requested from the server.
    """
    read = _reader(spark, server, db, table, columns, where).option("generation", generation)
    read = read.option("types", types)
    read = read.option("parts", json.dumps([[*_hex(part.span), part.version] for part in parts]))
    if ends:
        read = read.option("ends", "true")
    if isinstance(table, Table):
        rows = schema.rows_schema(table, columns, types)
        read = read.schema(schema.struct_of(with_end(rows) if ends else rows))
    return read.load()


def changes_frame(
    spark: SparkSession,
    server: Server,
    db: str,
    table: str,
    *,
    generation: str,
    after: int,
    upto: int,
    shape: Table,
    slices: Sequence[LogPiece] | None = None,
    columns: Sequence[str] = (),
    where: str | None = None,
    types: str = schema.TEXT,
) -> DataFrame:
    """Return the changes in (after, upto], or only those of `slices`, in the shape `shape`."""
    read = _reader(spark, server, db, table, columns, where).option("generation", generation)
    read = read.option("shape", shape.version).option("after", after).option("upto", upto)
    if slices is not None:
        told = [[*_hex(each.span or Span.all()), each.after, each.upto] for each in slices]
        read = read.option("slices", json.dumps(told))
    return read.schema(schema.struct_of(schema.changes_schema(shape, columns, types))).load()


def _reader(
    spark: SparkSession, server: Server, db: str, table: str | Table, columns: Sequence[str], where: str | None
) -> DataFrameReader:
    name = table.name if isinstance(table, Table) else table
    told = {"url": server.url, "token_file": server.token_file, "db": db, "table": name, "where": where}
    told["columns"] = json.dumps(list(columns)) if columns else None
    return spark.read.format("headwater").options(**{key: value for key, value in told.items() if value is not None})


def _hex(span: Span) -> tuple[str, str | None]:
    return span.start.hex(), None if span.end is None else span.end.hex()
