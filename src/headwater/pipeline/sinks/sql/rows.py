"""Reads of a SQL target: Arrow batches of its rows, in ranges of the key if its first column is an integer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from headwater.model.table import Table
from headwater.pipeline.failure import report_generator_errors
from headwater.pipeline.sinks.sink import Plan
from headwater.pipeline.sinks.sql.dialects import Dialect, fields_of
from headwater.pipeline.sinks.sql.engine import open_engine, reading
from headwater.pipeline.sinks.sql.misfit import restore
from headwater.pipeline.sinks.sql.target import Target
from headwater.pipeline.transform.schema import TEXT, rows_schema, struct_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS = 10_000
ROWS_PER_PARTITION = 200_000

Range = tuple[int | None, int | None]  # bounds of the key's first column: inclusive start, exclusive end


class RowReader(msgspec.Struct, frozen=True):
    """The Spark task that reads ranges of the target; each input row is the number of a range."""

    url: str
    name: str
    schema: str | None
    dialect: Dialect
    table: Table
    ranges: list[Range]
    types: str = TEXT

    def __repr__(self) -> str:
        return f"RowReader({self.name})"  # the URL may hold a password

    @report_generator_errors
    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = open_engine(self.url)
        try:
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from self._read(engine, self.ranges[number])
        finally:
            engine.dispose()

    def _read(self, engine: sa.Engine, bounds: Range) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        wanted = rows_schema(self.table, types=self.types)
        target = Target(self.name, self.schema, self.dialect, fields_of(self.table, "upsert", self.types))
        select = sa.select(*(target.table.c[name] for name in wanted.names)).where(*_within(target, bounds))
        with reading(engine) as connection:
            found = connection.execution_options(stream_results=True, max_row_buffer=BATCH_ROWS).execute(select)
            for rows in found.partitions(BATCH_ROWS):
                columns = restore(list(zip(*rows, strict=True)), target.fields)
                arrays = [
                    pa.array(self.dialect.from_database(values, field), kind.type)
                    for values, field, kind in zip(columns, target.fields, wanted, strict=True)
                ]
                yield pa.record_batch(arrays, schema=wanted)


def read_rows(
    spark: SparkSession, engine: sa.Engine, url: str, target: Target, dialect: Dialect, plan: Plan
) -> DataFrame:
    """Return the rows of the target, with the columns of the snapshot `plan`."""
    ranges = _ranges(engine, target)
    reader = RowReader(url, str(target.table.name), target.table.schema, dialect, plan.table, ranges, plan.types)
    numbers = spark.range(0, len(ranges), 1, len(ranges))
    return numbers.mapInArrow(reader, struct_of(rows_schema(plan.table, types=plan.types)))


def _ranges(engine: sa.Engine, target: Target) -> list[Range]:
    """Return ranges of the key's first column if it is an integer; otherwise one range of all rows."""
    key = next(field for field in target.fields if field.is_key)
    if key.kind != "i64":
        return [(None, None)]
    column = target.table.c[key.name]
    with reading(engine) as connection:
        low, high, rows = connection.execute(sa.select(sa.func.min(column), sa.func.max(column), sa.func.count())).one()
    pieces = max(1, rows // ROWS_PER_PARTITION)
    if pieces == 1:
        return [(None, None)]
    cuts = sorted({low + (high - low) * piece // pieces for piece in range(1, pieces)})
    return list(zip([None, *cuts], [*cuts, None], strict=True))


def _within(target: Target, bounds: Range) -> list[Any]:
    column = target.table.c[next(field.name for field in target.fields if field.is_key)]
    low, high = bounds
    return [*([column >= low] if low is not None else []), *([column < high] if high is not None else [])]
