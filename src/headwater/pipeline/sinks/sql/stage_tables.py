"""Staging tables: executors copy rows into a table next to the target, each task attempt under its own name.

The driver merges only the attempts that Spark reports, so rows of retried and speculative tasks are never merged.
Each attempt reports how many rows it copied, and the driver compares the counts because the table is unlogged.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from headwater.pipeline.failure import report_generator_errors
from headwater.pipeline.sinks.sql.dialects import POSTGRES, SQLITE, Dialect, Field
from headwater.pipeline.sinks.sql.engine import open_engine, ours, writing
from headwater.pipeline.sinks.sql.misfit import keep_aside, set_aside

if TYPE_CHECKING:
    import pyarrow as pa

ATTEMPT, GONE, KEPT = "attempt", "gone", "kept"
REPORT = "partition int, attempt string, rows bigint, problem string"


class StageReport(msgspec.Struct, frozen=True):
    """The report of one task: the rows of `partition` staged under `attempt`, or the problem that prevented staging."""

    partition: int
    attempt: str
    rows: int
    problem: str | None = None


def stage_table(name: str, schema: str | None, fields: Sequence[Field], dialect: Dialect) -> sa.Table:
    """Return the staging table; its columns have numbers, so that names can be neither too long nor equal to ours."""
    columns = [dialect.column(field, f"c{place}", fields) for place, field in enumerate(fields)]
    for column in columns:
        column.nullable = True
    unlogged = ["UNLOGGED"] if dialect.backend == POSTGRES else []
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column(ATTEMPT, sa.String(32), nullable=False),
        sa.Column(GONE, sa.Boolean, nullable=False),
        sa.Column(KEPT, sa.Text),  # numbers of the columns that keep the target's value, if any
        *columns,
        schema=schema,
        prefixes=unlogged,
        mysql_engine="InnoDB",
    )


class StageTask(msgspec.Struct, frozen=True):
    """The Spark task that stages the Arrow batches of one partition in an executor.

    The columns of a batch are `fields` and, if `has_gone`, a bool that marks deletes. Partitions in `skipped` are
    already in the sink.
    """

    url: str
    table: str
    schema: str | None
    dialect: Dialect
    fields: list[Field]
    has_gone: bool = False
    skipped: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"StageTask({self.table})"  # the URL may hold a password

    @report_generator_errors
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        if partition in self.skipped:
            return
        report = self.stage(partition, batches)
        columns = {name: [getattr(report, name)] for name in StageReport.__struct_fields__}
        kinds = [("partition", pa.int32()), ("attempt", pa.string()), ("rows", pa.int64()), ("problem", pa.string())]
        yield pa.RecordBatch.from_pydict(columns, schema=pa.schema(kinds))

    def stage(self, partition: int, batches: Iterator[pa.RecordBatch]) -> StageReport:
        """Copy the rows, a transaction per batch; return the report, with the problem of the first unfit batch."""
        attempt, rows = uuid.uuid4().hex, 0
        width = self.dialect.key_width(self.fields)
        engine = None
        try:
            for batch in batches:
                problem = self.dialect.unfit(batch, self.fields, width)
                if problem:
                    return StageReport(partition, attempt, rows, problem)
                engine = engine or open_engine(self.url)
                self._copy(engine, attempt, set_aside(batch, self.fields, self.dialect.backend))
                rows += batch.num_rows
        finally:
            if engine is not None:
                engine.dispose()
        return StageReport(partition, attempt, rows)

    def _copy(self, engine: sa.Engine, attempt: str, batch: pa.RecordBatch) -> None:
        table = stage_table(self.table, self.schema, self.fields, self.dialect)
        batch, stay = keep_aside(batch, self.fields) if self.has_gone else (batch, [None] * batch.num_rows)
        values = [self.dialect.to_database(batch.column(place), field) for place, field in enumerate(self.fields)]
        gone = batch.column(len(self.fields)).to_pylist() if self.has_gone else [False] * batch.num_rows
        rows = list(zip([attempt] * batch.num_rows, gone, stay, *values, strict=True))
        if not rows:
            return
        with writing(engine) as connection:
            if self.dialect.backend == POSTGRES:
                _copy_in(connection, table, rows)
            else:
                quoted = connection.dialect.identifier_preparer.format_table(table)
                marks = ", ".join(["?" if self.dialect.backend == SQLITE else "%s"] * len(rows[0]))
                connection.exec_driver_sql(f"INSERT INTO {quoted} VALUES ({marks})", rows)


def _copy_in(connection: sa.Connection, table: sa.Table, rows: list[tuple[Any, ...]]) -> None:
    """Insert the rows by PostgreSQL's COPY through the psycopg connection."""
    import psycopg

    quoted = connection.dialect.identifier_preparer.format_table(table)
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {quoted} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except psycopg.Error as error:
        raise sa.exc.DBAPIError.instance("COPY", None, error, psycopg.Error, dialect=connection.dialect) from error


def staged(connection: sa.Connection, stage: sa.Table) -> dict[str, int]:
    """Return the number of staged rows per attempt."""
    with ours():
        found = connection.execute(sa.select(stage.c[ATTEMPT], sa.func.count()).group_by(stage.c[ATTEMPT]))
        return {str(attempt): int(rows) for attempt, rows in found}
