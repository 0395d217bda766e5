"""Verifying a sink: source, log and sink compared range by range at one offset; bad ranges are mended alone.

The rows of the source at the sink's offset are those of now with the log undone, so each range tells about
all three: the server itself refuses a range where log and source disagree.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from headwater.client import Client
from headwater.errors import HeadwaterError, PipelineError
from headwater.model.key import Span
from headwater.pipeline.compare import RANGE, Digest, comparable, differences, digests, hashed, placed
from headwater.pipeline.failure import cause_of
from headwater.pipeline.frames import Server, rows_frame
from headwater.pipeline.opening import session_of, sink_of
from headwater.pipeline.progress import MetaStore
from headwater.pipeline.schema import identity_of
from headwater.pipeline.sinks.sink import Part, Sink, State, Step
from headwater.pipeline.spec import PipelineSpec, TableSpec
from headwater.pipeline.watch import Silent, Watcher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ATTEMPTS = 5  # a sink that moves on while it is compared is compared again


class RangeReport(msgspec.Struct, frozen=True):
    """One range: what the source has, what the sink has."""

    span: Span
    source: Digest
    sink: Digest

    @property
    def is_good(self) -> bool:
        """Whether both hold the same rows."""
        return self.source == self.sink


class TableReport(msgspec.Struct, frozen=True):
    """One table at one offset."""

    db: str
    table: str
    offset: int = 0
    ranges: tuple[RangeReport, ...] = ()
    repaired: int = 0  # ranges
    error: HeadwaterError | None = None

    @property
    def bad(self) -> list[RangeReport]:
        """The ranges that differed when they were compared."""
        return [each for each in self.ranges if not each.is_good]

    @property
    def is_good(self) -> bool:
        """Whether the sink is right now."""
        return self.error is None and len(self.bad) == self.repaired

    @property
    def rows(self) -> int:
        """Rows of the source."""
        return sum(each.source.rows for each in self.ranges)


def verify(
    spec: PipelineSpec,
    *,
    repair: bool = False,
    master: str | None = None,
    watcher: Watcher | None = None,
    spark: SparkSession | None = None,
) -> list[TableReport]:
    """Every table of `spec`; with `repair`, bad ranges are made right and compared again."""
    watcher = watcher or Silent()
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


class Verification:
    """One table and its sink."""

    def __init__(self, spark: SparkSession, spec: PipelineSpec, table: TableSpec, sink: Sink) -> None:
        self._spark, self._spec, self._table, self._sink = spark, spec, table, sink
        self._server = Server(spec.server, spec.token_file)
        self._client = Client(spec.server, token_file=spec.token_file)

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def report(self, repair: bool) -> TableReport:
        """Compare, and mend if asked to; what is mended is compared again."""
        state, spans, report = self._compared()
        bad = [number for number, each in enumerate(report.ranges) if not each.is_good]
        if not bad or not repair:
            return report
        self._mend(state, [spans[number] for number in bad], spans, bad)
        _, _, after = self._compared()
        if after.bad:
            return after
        return msgspec.structs.replace(report, repaired=len(bad))

    def _compared(self) -> tuple[State, list[Span], TableReport]:
        for _ in range(ATTEMPTS):
            state = self._state()
            spans = self._spans(state)
            source = digests(self._source(state, spans))
            sink = digests(self._held(state, spans))
            if self._state().offset == state.offset:
                ranges = [
                    RangeReport(span, source.get(number, Digest()), sink.get(number, Digest()))
                    for number, span in enumerate(spans)
                ]
                return state, spans, TableReport(self._table.db, self._table.table, state.offset, tuple(ranges))
        raise PipelineError("the sink moves on faster than it can be compared", hint="Stop the pipeline, then verify.")

    def _state(self) -> State:
        state = self._sink.state()
        if state is None or not state.is_even:
            raise PipelineError("the snapshot is not finished", hint="Run the pipeline with --once, then verify.")
        return state

    def _spans(self, state: State) -> list[Span]:
        ranges = self._client.ranges(self._table.db, self._table.table, self._spec.range_bytes)
        return comparable(state.plan.table, [each.span for each in ranges])

    def _source(self, state: State, spans: list[Span]) -> DataFrame:
        """The rows of the source at the sink's offset; partition i is span i."""
        from pyspark.sql.functions import spark_partition_id

        frame = rows_frame(
            self._spark,
            self._server,
            self._table.db,
            self._table.table,
            generation=state.plan.generation,
            parts=[Part(span, state.offset) for span in spans],
            columns=self._table.columns,
            where=self._table.where,
        )
        self._columns = frame.columns
        return hashed(frame, frame.columns).withColumn(RANGE, spark_partition_id())

    def _held(self, state: State, spans: list[Span]) -> DataFrame:
        rows = self._sink.rows(self._spark).select(*self._columns)
        return placed(hashed(rows, self._columns), identity_of(state.plan.table), spans)

    def _mend(self, state: State, wrong: list[Span], spans: list[Span], numbers: list[int]) -> None:
        from pyspark.sql.functions import col

        right = self._source(state, wrong)
        held = self._held(state, spans).where(col(RANGE).isin(numbers))
        table = self._client.describe(self._table.db, self._table.table).table
        changes = differences(right, held, identity_of(table), state.offset)
        step = Step(state.plan.id, state.plan.generation, state.offset, state.offset, repair=True)
        self._sink.apply(changes, step, table)
