"""Verification of a sink: source, log and sink compared range by range at one offset; only bad ranges are repaired.

The source's rows at the sink's offset are its current rows with the later changes of the log undone, so each range
checks all three: the server itself rejects a range where log and source disagree.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec

from headwater.client import Client
from headwater.errors import HeadwaterError, PipelineError
from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.failure import cause_of
from headwater.pipeline.run.events import Watcher
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.resources import session_of, sink_of
from headwater.pipeline.run.server_check import describe_tables
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.run.table_plan import check_origin
from headwater.pipeline.run.table_report import Digest, RangeReport, TableReport
from headwater.pipeline.sinks.sink import Part, Sink, State, Step
from headwater.pipeline.spark.frames import Server, rows_frame
from headwater.pipeline.transform.compaction import quoted
from headwater.pipeline.transform.schema import changes_schema, identity_of, rows_schema
from headwater.pipeline.verify import compare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ATTEMPTS = 5  # attempts: a sink that advanced during the comparison is compared again


def verify(
    spec: PipelineSpec,
    *,
    repair: bool = False,
    master: str | None = None,
    watcher: Watcher | None = None,
    spark: SparkSession | None = None,
) -> list[TableReport]:
    """Compare every table of `spec` with its sink, and return the reports; with `repair`, fix ranges that differ."""
    watcher = watcher or Watcher()
    if spark is None:
        describe_tables(spec)  # fails before Spark is started needlessly
    with ExitStack() as stack:
        meta = stack.enter_context(MetaStore.open(spec.meta))
        session = spark or stack.enter_context(session_of(spec, master))
        return [_table(session, spec, table, meta, watcher, repair) for table in spec.tables]


def _table(
    spark: SparkSession, spec: PipelineSpec, table: TableSpec, meta: MetaStore, watcher: Watcher, repair: bool
) -> TableReport:
    task = meta.subscribe(spec, table)
    try:
        with sink_of(spec, table, task, meta, spark) as sink, Verification(spark, spec, table, sink) as found:
            report = found.report(repair)
    except Exception as error:
        report = TableReport(table.db, table.table, error=cause_of(error))
    if report.is_good:
        meta.verified(task, report.offset)
    watcher.verified(task, report)
    return report


class Verification(AbstractContextManager["Verification"]):
    """The comparison of one table with its sink; a context manager."""

    def __init__(self, spark: SparkSession, spec: PipelineSpec, table: TableSpec, sink: Sink) -> None:
        self._spark, self._spec, self._table, self._sink = spark, spec, table, sink
        self._server = Server(spec.server, spec.token_file)
        self._client = Client(spec.server, token_file=spec.token_file)
        self._reader = f"{spec.name[:100]}/verify-{secrets.token_hex(8)}"

    def __exit__(self, *_: object) -> None:
        with suppress(HeadwaterError):  # the lease also expires by itself
            self._client.release(self._table.db, self._table.table, self._reader)
        self._client.close()

    def report(self, repair: bool) -> TableReport:
        """Compare, and repair if requested; repaired ranges are compared again."""
        state, report = self._compared()
        bad = [each.span for each in report.bad]
        if bad:
            report = self._explained(state, report)
        if not bad or not repair:
            return report
        self._repair(state, bad, [each.span for each in report.ranges], report.offset)
        after = self._compared()[1]
        return after if after.bad else msgspec.structs.replace(report, repaired=len(bad))

    def _explained(self, state: State, report: TableReport) -> TableReport:
        """Return `report` with the differences of its bad ranges; unchanged if they cannot be computed."""
        from pyspark.sql.functions import array, col, lit

        spans = [each.span for each in report.ranges]
        numbers = [place for place, each in enumerate(report.ranges) if not each.is_good]
        placed_among_all = array(*map(lit, numbers))[col(compare.RANGE)]
        try:
            source = self._source(state, [spans[number] for number in numbers], report.offset).withColumn(
                compare.RANGE, placed_among_all
            )
            held = self._held(state, spans).where(col(compare.RANGE).isin(numbers))
            found = compare.difference(source, held, identity_of(state.plan.table))
            if self._state() != state:
                return report
        except Exception:  # the ranges differ in any case; only the details are missing
            return report
        ranges = [
            msgspec.structs.replace(each, difference=found.get(number)) for number, each in enumerate(report.ranges)
        ]
        return msgspec.structs.replace(report, ranges=tuple(ranges))

    def _compared(self) -> tuple[State, TableReport]:
        for attempt in range(ATTEMPTS):
            state = self._state()
            at = self._offset(state)
            spans = self._spans(state, at)
            try:
                source = compare.digests(self._source(state, spans, at))
                sink = compare.digests(self._held(state, spans))
            except Exception as error:
                if not cause_of(error).retryable or attempt == ATTEMPTS - 1:
                    raise
                continue
            if self._state() == state:
                ranges = [
                    RangeReport(span, source.get(number, Digest()), sink.get(number, Digest()))
                    for number, span in enumerate(spans)
                ]
                return state, TableReport(self._table.db, self._table.table, at, tuple(ranges))
        raise PipelineError("the sink advances faster than it can be compared", hint="Stop the pipeline, then verify.")

    def _state(self) -> State:
        state = self._sink.state()
        if state is None or not state.is_even:
            raise PipelineError("the snapshot is not finished", hint="Run the pipeline with --once, then verify.")
        check_origin(state.plan, self._spec, self._table)
        return state

    def _offset(self, state: State) -> int:
        """Return the newest offset at which the table has the rows that it has at the sink's offset, if that is known.

        Changes after the sink's offset may be evicted if they are all of other tables.
        """
        status = self._client.describe(self._table.db, self._table.table)
        is_quiet = status.generation == state.plan.generation and status.table_latest <= state.offset
        return max(state.offset, status.latest) if is_quiet else state.offset

    def _spans(self, state: State, at: int) -> list[Span]:
        # The server undoes later changes to read the rows at this offset, so the log must keep those changes.
        self._client.register(self._table.db, self._table.table, self._reader, keep=at)
        ranges = self._client.ranges(self._table.db, self._table.table, self._spec.range_bytes)
        return compare.comparable(state.plan.table, [each.span for each in ranges])

    def _source(self, state: State, spans: list[Span], at: int) -> DataFrame:
        """Return the rows of the source at offset `at`; partition i is span i."""
        from pyspark.sql.functions import spark_partition_id

        present = as_held(state.plan.table, self._client.describe(self._table.db, self._table.table).table)
        frame = rows_frame(
            self._spark,
            self._server,
            self._table.db,
            present,
            generation=state.plan.generation,
            parts=[Part(span, at) for span in spans],
            columns=columns_of_both(state.plan.table, present),
            where=self._table.where,
            types=state.plan.types,
        )
        return compare.hashed(frame).withColumn(compare.RANGE, spark_partition_id())

    def _held(self, state: State, spans: list[Span]) -> DataFrame:
        present = self._client.describe(self._table.db, self._table.table).table
        names = rows_schema(present, columns_of_both(state.plan.table, present)).names
        rows = self._sink.rows(self._spark).select(*map(quoted, names))
        return compare.placed(compare.hashed(rows), identity_of(state.plan.table), spans)

    def _repair(self, state: State, bad: list[Span], spans: list[Span], at: int) -> None:
        from pyspark.sql.functions import col

        numbers, identity = [spans.index(span) for span in bad], identity_of(state.plan.table)

        def held() -> DataFrame:
            return self._held(state, spans).where(col(compare.RANGE).isin(numbers))

        twice = compare.repeated(held(), identity)
        if not twice.isEmpty():  # an upsert would update both rows and keep both
            self._change(state, twice)
        gone, lacking = compare.differences(self._source(state, bad, at), held(), identity)
        self._change(state, gone, lacking)

    def _change(self, state: State, deleted: DataFrame, inserted: DataFrame | None = None) -> None:
        names = changes_schema(state.plan.table).names[-5:]
        step = Step(state.plan.id, state.plan.generation, state.offset, state.offset, repair=True)
        self._sink.apply(compare.changes(deleted, inserted, names, state.offset), step, state.plan.table)


def as_held(held: Table, present: Table) -> Table:
    """Return `present` with the column types of the sink: a pinned sink keeps a type that has changed at the source."""
    there = {column.name: column for column in held.columns}
    return msgspec.structs.replace(present, columns=tuple(there.get(each.name, each) for each in present.columns))


def columns_of_both(held: Table, present: Table) -> tuple[str, ...]:
    """Return the columns of both sink and source: a pinned sink lacks new columns and keeps dropped columns."""
    kept = {column.name for column in held.visible}
    return tuple(column.name for column in present.visible if column.name in kept)
