"""Carrying one table: the loop that asks where sink and log stand, and does the next thing.

sink.state() ─┐
describe() ───┴─> decide ──> begin | load | apply | evolve | wait ──> copies into the meta store
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.client import Client, Described, Range
from headwater.errors import HeadwaterError, OffsetExpired, PipelineError
from headwater.model.table import Table
from headwater.pipeline.counting import Counting
from headwater.pipeline.failure import cause_of
from headwater.pipeline.frames import Server, changes_frame, rows_frame
from headwater.pipeline.owner import Heart
from headwater.pipeline.progress import MetaStore
from headwater.pipeline.sinks.sink import Part, Plan, Sink, State
from headwater.pipeline.spec import PipelineSpec, TableSpec
from headwater.pipeline.stages import (
    FIRST,
    Action,
    Apply,
    Begin,
    Evolve,
    Load,
    Wait,
    decide,
    lowest,
    standing,
)
from headwater.pipeline.task import STAGES, RangeProgress, Task
from headwater.pipeline.watch import Watcher

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_MS = 1000  # a quiet table is looked at this often for a cancel or a stop
ATTEMPTS = 8  # failures in a row inside a stage, after which it is given up
RESET = "reset"


class Carried(msgspec.Struct, frozen=True):
    """How one table ended."""

    task: Task
    offset: int
    rows: int  # of snapshots and changes that were carried by this run
    error: HeadwaterError | None = None


class Carry:
    """One table of a pipeline, in a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        spec: PipelineSpec,
        table: TableSpec,
        task: Task,
        sink: Sink,
        meta: MetaStore,
        watcher: Watcher,
        *,
        heart: Heart,
        stop: threading.Event,
        until_caught_up: bool,
    ) -> None:
        self._spark, self._spec, self._table, self._task = spark, spec, table, task
        self._sink, self._meta, self._watcher = sink, meta, watcher
        self._heart, self._stop, self._once = heart, stop, until_caught_up
        self._server = Server(spec.server, spec.token_file)
        self._client = Client(spec.server, token_file=spec.token_file)
        self._subscriber = f"{spec.name}/{table.db}/{table.table}"
        self._shape: Table | None = None
        self._ranges: list[Range] = []
        self._goal: int | None = None  # with `once`: the head when it was first asked
        self._rows = 0
        self._told = ""
        self._anew = ""  # why a failure makes a new snapshot necessary

    def run(self) -> Carried:
        """Until stopped, cancelled or, with `once`, caught up; raises what cannot be retried."""
        failures = 0
        state: State | None = None
        try:
            while not self._is_over():
                try:
                    state = self._sink.state()
                    action = self._due() or self._next(state)
                    if isinstance(action, Wait) and self._once:
                        break
                    self._do(action, state)
                    failures = 0
                except Exception as error:
                    failures += 1
                    self._take_in(cause_of(error), failures)
            self._copy(self._sink.state())
            return Carried(self._task, 0 if state is None else state.offset, self._rows)
        finally:
            self._client.close()

    def _is_over(self) -> bool:
        if self._heart.lost.is_set():
            raise PipelineError(
                "the lease on this table was lost", hint="Another pipeline server may have taken it over."
            )
        return self._stop.is_set() or self._meta.is_cancelled(self._task)

    def _take_in(self, error: HeadwaterError, failures: int) -> None:
        """Decide about a failure: begin anew, try again in a while, or give up by raising it."""
        reason = str(error.extra.get("resnapshot_reason") or "")
        if isinstance(error, OffsetExpired) or reason:
            self._anew = reason or error.code
        elif not error.retryable:
            raise error
        if failures >= ATTEMPTS:
            raise error
        self._watcher.retrying(self._task, error, failures)
        if failures > 1 or not self._anew:
            self._stop.wait(min(0.2 * 2**failures, 10.0) * (0.5 + secrets.randbelow(1000) / 1000))

    # Deciding

    def _due(self) -> Begin | None:
        """A snapshot that was asked for, or that a failure made necessary."""
        if self._anew:
            return Begin(self._anew)
        return Begin(RESET) if self._meta.is_reset(self._task) else None

    def _next(self, state: State | None) -> Action:
        seen = self._look(state)
        latest = seen.latest
        if self._once:
            self._goal = latest if self._goal is None else self._goal
            seen = msgspec.structs.replace(seen, latest=min(latest, max(self._goal, self._needed(state))))
        if self._shape is None or state is None:
            self._shape = self._chosen(seen.table) if state is None else state.plan.table
        action = decide(
            state,
            seen,
            shape=self._shape.version,
            policy=self._table.schema,
            wave=2 * self._spec.parallelism,
        )
        if isinstance(action, Evolve):
            self._shape = self._chosen(seen.table)
        return action

    def _chosen(self, table: Table) -> Table:
        """`table` with the columns that are carried; its key always is."""
        wanted = {*self._table.columns, *table.key}
        if not self._table.columns:
            return table
        kept = tuple(column for column in table.columns if column.name in wanted)
        return msgspec.structs.replace(table, columns=kept)

    def _look(self, state: State | None) -> Described:
        table = self._table
        if state is None:
            return self._client.describe(table.db, table.table)
        shape, step = self._shape or state.plan.table, (self._spec.step_rows, self._spec.step_bytes)
        return self._client.describe(table.db, table.table, after=state.offset, shape=shape.version, step=step)

    def _needed(self, state: State | None) -> int:
        """How far the log must be read so that all spans are even, whatever the goal is."""
        return 0 if state is None else max(state.loaded.values(), default=0)

    # Doing

    def _do(self, action: Action, state: State | None) -> None:
        match action:
            case Begin(reason):
                self._begin(reason)
            case Load(spans):
                assert state is not None
                self._load(state, spans)
            case Apply():
                assert state is not None
                self._apply(action, state)
            case Evolve():
                assert self._shape is not None
                self._sink.evolve(self._shape)
            case Wait(after):
                self._live(after)

    def _begin(self, reason: str) -> None:
        if reason not in (FIRST, RESET) and self._table.on_lost == "fail":
            raise PipelineError(
                f"the log cannot bring the sink up to date: {reason}",
                hint='Set on_lost = "resnapshot", or run `headwater pipeline reset` to take a new snapshot.',
            )
        table = self._table
        registered = self._client.register(table.db, table.table, self._subscriber)
        self._ranges = self._client.ranges(table.db, table.table, self._spec.range_bytes)
        seen = self._client.describe(table.db, table.table)
        self._shape = self._chosen(seen.table)
        spans = tuple(each.span for each in self._ranges)
        plan = Plan(secrets.token_hex(8), registered.generation, registered.version, spans, self._shape)
        self._watcher.started(self._task, reason, sum(each.rows for each in self._ranges), len(self._ranges))
        self._sink.begin(plan)
        self._anew = ""
        self._meta.begun(self._task, self._heart.fence)
        self._copy(State(plan, plan.offset))

    def _load(self, state: State, spans: Sequence[Any]) -> None:
        table = self._table
        keep = lowest(state)
        registered = self._client.register(table.db, table.table, self._subscriber, keep=keep)
        parts = [Part(span, registered.version) for span in spans]
        frame = rows_frame(
            self._spark,
            self._server,
            table.db,
            state.plan.table,
            generation=registered.generation,
            parts=parts,
            columns=table.columns,
            where=table.where,
        )
        began = time.monotonic()
        rows = self._counted(frame, lambda counted: self._sink.load(counted, state.plan, parts))
        loaded = self._sink.state()
        self._copy(loaded)
        self._watcher.loaded(self._task, len(parts), rows, time.monotonic() - began)

    def _apply(self, action: Apply, state: State) -> None:
        table, step, shape = self._table, action.step, self._shape
        assert shape is not None
        frame = changes_frame(
            self._spark,
            self._server,
            table.db,
            table.table,
            generation=step.generation,
            after=step.after,
            upto=step.upto,
            shape=shape,
            slices=action.slices,
            columns=table.columns,
            where=table.where,
        )
        began = time.monotonic()
        rows = self._counted(frame, lambda counted: self._sink.apply(counted, step, shape))
        left = {span: version for span, version in state.loaded.items() if version > step.upto}
        self._copy(State(state.plan, step.upto, left))
        self._watcher.stepped(self._task, step.upto, rows, time.monotonic() - began)
        if not left and state.loaded:
            self._client.release(table.db, table.table, self._subscriber)

    def _live(self, after: int) -> None:
        table = self._table
        seen = self._client.describe(table.db, table.table, after=after, wait_ms=WAIT_MS)
        self._watcher.live(self._task, after, seen.latest)

    def _counted(self, frame: DataFrame, act: Callable[[DataFrame], None]) -> int:
        """How many rows `act` took from the frame, as Spark itself counted them."""
        counting = Counting(frame)
        act(counting.frame)
        rows = counting.rows()
        self._rows += rows
        return rows

    # Copies

    def _copy(self, state: State | None) -> None:
        """Write into the meta store where the sink stands. It may fail: the sink knows better."""
        if state is None:
            return
        table = self._table
        if not self._ranges:
            self._ranges = self._client.ranges(table.db, table.table, self._spec.range_bytes)
        rows = [_row(state, each) for each in self._ranges]
        self._meta.save(self._task, rows, self._heart.fence)
        stage = min((row.stage for row in rows), key=STAGES.index, default="register")
        if stage != self._told:
            self._told = stage
            self._watcher.stage(self._task, stage)
        for row in rows:
            self._watcher.range_moved(self._task, row)


def _row(state: State, each: Range) -> RangeProgress:
    found = standing(state, each.span)
    return RangeProgress(
        range_id=each.id,
        epoch=each.epoch,
        span=each.span,
        stage=found.stage,
        init_version=state.plan.offset,
        version=found.version,
        last_key=found.last_key,
        last_offset=found.last_offset,
        rows_estimate=each.rows,
    )
