"""Carrying one table: the loop that reads the state of sink and log, and takes the next action.

sink.state() ─┐
describe() ───┴─> decide ──> begin | load | apply | evolve | wait ──> copies into the meta store
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headwater.client import Client, Described, Range, Registered
from headwater.errors import HeadwaterError, NotOwner, OffsetExpired, PipelineError, SchemaChanged
from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.failure import cause_of
from headwater.pipeline.run import stages
from headwater.pipeline.run.events import Watcher
from headwater.pipeline.run.ownership import LeaseRenewal
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.shape_changes import following, has_initial_values, with_next_shape_change
from headwater.pipeline.run.spec import PipelineSpec, TableSpec
from headwater.pipeline.run.table_plan import carried_table, check_choice, check_origin
from headwater.pipeline.run.task import SNAPSHOT, STAGES, RangeProgress, Task
from headwater.pipeline.sinks.sink import UPSERT, Part, Plan, Sink, State
from headwater.pipeline.spark.frames import Server, changes_frame, rows_frame
from headwater.pipeline.spark.offsets import last_change, nears_horizon
from headwater.pipeline.spark.options import FAIL, PIN
from headwater.pipeline.transform.compaction import change_columns
from headwater.pipeline.transform.row_counts import Counting
from headwater.pipeline.transform.schema import TEXT, rows_schema
from headwater.pipeline.transform.whole_rows import READ_AGAIN, check_whole, fill_unknown, refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_MS = 1000  # how often a quiet table checks for a cancel or a stop
SMALL = 65_536  # changes, too few for a second task
ATTEMPTS = 8  # failures in a row (with `once`), or unfinished snapshots in a row, before giving up
BEHIND_SECONDS = 30.0  # with `once`: longest wait until the log holds the commits from before the run
RESET = "reset"


class CarryResult(msgspec.Struct, frozen=True):
    """The result of carrying one table."""

    task: Task
    offset: int
    rows: int  # rows and changes carried by this run
    error: HeadwaterError | None = None


class Carry:
    """The loop that carries one table of a pipeline, in a thread of its own."""

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
        heart: LeaseRenewal,
        stop: threading.Event,
        until_caught_up: bool,
    ) -> None:
        self._spark, self._spec, self._table, self._task = spark, spec, table, task
        self._sink, self._meta, self._watcher = sink, meta, watcher
        self._heart, self._stop, self._once = heart, stop, until_caught_up
        self._server = Server(spec.server, spec.token_file)
        self._client = Client(spec.server, token_file=spec.token_file)
        self._ranges: list[Range] = []
        self._goal: int | None = None  # with `once`: the head of the log once it held the commits from before the run
        self._behind_since = time.monotonic()
        self._rows = 0
        self._copied: State | None = None
        self._reported_stage = ""
        self._resnapshot = ""  # why a failure makes a new snapshot necessary
        self._begun = 0  # snapshots in a row that were not finished
        self._is_sparing = False  # whether the source may leave values out
        self._held = ""  # the plan for which the server retains the log

    def run(self) -> CarryResult:
        """Run until stopped, cancelled or, with `once`, caught up; raise errors that a retry cannot fix."""
        failures = 0
        with self._client:
            while True:
                try:
                    if self._is_over() or not self._turn():
                        break
                    failures = 0
                except Exception as error:
                    if self._stop.is_set():
                        break  # interrupted work is not in the sink, and the next run repeats it
                    self._check_lease()  # the jobs of a table whose lease is lost are cancelled
                    failures += 1
                    self._take_in(cause_of(error), failures)
            state = self._sink.state()
            self._copy(state)
            return CarryResult(self._task, 0 if state is None else state.offset, self._rows)

    def _turn(self) -> stages.Action | None:
        """Read the state and take the next action; return None if nothing is left to do."""
        state = self._sink.state()
        if state is not None:
            check_origin(state.plan, self._spec, self._table)
        self._copy(state)
        action = self._due() or self._next(state)
        if isinstance(action, (stages.Apply, stages.Wait)):
            self._begun = 0
        if isinstance(action, stages.Wait):
            self._release()
            if self._once:
                return None if self._has_goal() or self._stop.wait(0.1) else action
        self._do(action, state)
        return action

    def _check_lease(self) -> None:
        if self._heart.lost.is_set():
            raise NotOwner("the lease on this table was lost: another pipeline server may have taken it over")

    def _is_over(self) -> bool:
        self._check_lease()
        return self._stop.is_set() or self._meta.is_cancelled(self._task)

    def _take_in(self, error: HeadwaterError, failures: int) -> None:
        """Handle a failure: schedule a new snapshot, wait before a retry, or raise the error to give up."""
        reason = str(error.extra.get("resnapshot_reason") or "")
        if isinstance(error, SchemaChanged) and self._table.schema != FAIL:
            reason = stages.SCHEMA_CHANGED  # of a snapshot read: changes are always converted to the sink's shape
        if isinstance(error, OffsetExpired) or reason:
            self._resnapshot = reason or error.code
        elif not error.retryable and not error.extra.get(READ_AGAIN):
            raise error
        if self._begun >= ATTEMPTS or (self._once and failures >= ATTEMPTS):
            raise error
        self._watcher.retrying(self._task, error, failures)
        if failures > 1 or not self._resnapshot:
            self._stop.wait(min(0.2 * 2**failures, 10.0) * (0.5 + secrets.randbelow(1000) / 1000))

    # Deciding

    def _due(self) -> stages.Begin | None:
        """Return Begin if a snapshot was requested, or a failure made one necessary; else None."""
        if self._resnapshot:
            return stages.Begin(self._resnapshot)
        return stages.Begin(RESET) if self._meta.is_reset(self._task) else None

    def _next(self, state: State | None) -> stages.Action:
        status = self._describe(state)
        if state is not None and not state.missing:
            is_done = state.is_even and last_change(status) <= state.offset
            self._watcher.measured(self._task, status.latest if is_done else state.offset, status.latest)
        self._is_sparing = bool(status.remedy)
        if not self._keeps:
            check_whole(status)
        if self._once:
            if self._goal is None and status.caught_up:
                self._goal = status.latest
            goal = status.latest if self._goal is None else self._goal
            # Whatever the goal is, the log must be read until all spans are even.
            even_at = 0 if state is None else max(state.loaded.values(), default=0)
            status = msgspec.structs.replace(status, latest=min(status.latest, max(goal, even_at)))
        if state is None:
            return stages.Begin(stages.FIRST)
        check_choice(state.plan, self._table)
        return stages.decide(
            state,
            status,
            shape=self._shape(state, status),
            policy=self._table.schema,
            wave=2 * self._spec.parallelism,
        )

    def _has_goal(self) -> bool:
        """Return whether the goal is known; raise PipelineError if the log stays behind its database."""
        if self._goal is None and time.monotonic() - self._behind_since > BEHIND_SECONDS:
            raise PipelineError(
                f"the log of {self._table.db!r} is behind its database: commits from before this run may be missing",
                hint="Run `headwater doctor`, and the pipeline again.",
            )
        return self._goal is not None

    @property
    def _keeps(self) -> bool:
        """Return whether the sink has the values that updates omit: with `where`, it lacks rows that match only now."""
        return self._sink.keeps and self._sink.mode == UPSERT and not self._table.where

    def _shape(self, state: State, status: Described) -> int:
        """Return the table version of the sink's columns; 0 if the sink took a shape before the shape was final."""
        has = state.plan.table
        is_same = has.version != status.table.version or carried_table(self._table, status.table).names == has.names
        return has.version if is_same or self._table.schema == PIN else 0

    def _describe(self, state: State | None) -> Described:
        table = self._table
        if state is None:
            return self._client.describe(table.db, table.table)
        step = (self._spec.step_rows, self._spec.step_bytes)
        shape = state.plan.table.version
        status = self._client.describe(table.db, table.table, after=state.offset, shape=shape, step=step)
        return with_next_shape_change(self._client, table, state, status)

    # Doing

    def _do(self, action: stages.Action, state: State | None) -> None:
        match action:
            case stages.Begin(reason):
                self._begin(reason, state)
            case stages.Load(spans):
                assert state is not None
                self._load(state, spans)
            case stages.Apply():
                assert state is not None
                self._apply(action, state)
            case stages.Evolve():
                assert state is not None
                self._evolve(state)
            case stages.Wait(after):
                assert state is not None
                self._wait(after, state.plan.generation)

    def _wait(self, after: int, generation: str) -> None:
        """Wait for a change of the table after `after`, or for another reason to decide again."""
        while not (self._is_over() or self._meta.is_reset(self._task)):
            found = self._client.changed_tables(self._table.db, {self._table.table: after}, wait_ms=WAIT_MS)
            self._watcher.live(self._task, after if found.changed else found.latest, found.latest)
            if found.changed or found.generation != generation or nears_horizon(after, found):
                return

    def _begin(self, reason: str, state: State | None) -> None:
        if self._table.on_lost == "fail" and reason != RESET and state is not None and state.is_even:
            raise PipelineError(
                f"the log cannot bring the sink up to date: {reason}",
                hint='Set on_lost = "resnapshot", or run `headwater pipeline reset` to take a new snapshot.',
            )
        if self._begun >= ATTEMPTS:
            raise PipelineError(
                f"{self._begun} snapshots in a row could not be finished: {reason}",
                hint="Let the log keep more (retention, feeds.lease_bytes), or read faster (parallelism).",
            )
        self._begun += 1
        self._release()
        table, id = self._table, secrets.token_hex(8)
        registered = self._register(id)
        self._ranges = self._client.ranges(table.db, table.table, self._spec.range_bytes)
        now = self._client.describe(table.db, table.table).table
        rows_schema(now, table.columns)  # raises an error for a column that does not exist
        spans = tuple(each.span for each in self._ranges)
        plan = Plan(
            id,
            registered.generation,
            registered.version,
            spans,
            carried_table(self._table, now, None if state is None or reason == RESET else state.plan.table),
            db=table.db,
            columns=table.columns,
            where=table.where,
            pipeline=self._spec.name,
            types=self._types(reason, state),
        )
        self._watcher.started(self._task, reason, sum(each.rows for each in self._ranges), len(self._ranges))
        self._sink.begin(plan)
        self._resnapshot = ""
        self._meta.begun(self._task, self._heart.fence)

    def _types(self, reason: str, state: State | None) -> str:
        """Return the form of a new snapshot: that of the sink, which only a reset may change."""
        if not self._sink.takes_types:
            return TEXT
        return self._table.types if state is None or reason == RESET else state.plan.types

    def _load(self, state: State, spans: Sequence[Span]) -> None:
        version = self._register(state.plan.id, keep=stages.lowest(state)).version
        parts = [Part(span, version) for span in spans]
        frame = rows_frame(
            self._spark,
            self._server,
            self._table.db,
            state.plan.table,
            generation=state.plan.generation,
            parts=parts,
            columns=self._columns(state.plan.table),
            where=self._table.where,
            ends=self._sink.needs_ends,
            types=state.plan.types,
        )
        self._report_stage(SNAPSHOT)
        began = time.monotonic()
        counting = Counting(frame, end=frame.columns[-1] if self._sink.needs_ends else None)
        self._sink.load(counting.frame, state.plan, parts)
        rows = counting.rows()
        self._rows += rows
        self._watcher.loaded(self._task, len(parts), rows, time.monotonic() - began)

    def _apply(self, action: stages.Apply, state: State) -> None:
        step, shape = action.step, state.plan.table
        frame = changes_frame(
            self._spark,
            self._server,
            self._table.db,
            self._table.table,
            generation=step.generation,
            after=step.after,
            upto=step.upto,
            shape=shape,
            slices=action.slices,
            columns=self._columns(shape),
            where=self._table.where,
            types=state.plan.types,
        )
        if step.upto - step.after <= SMALL:
            frame = frame.coalesce(1)  # one task reads the frame, and nothing is shuffled
        began = time.monotonic()
        frame = fill_unknown(frame, shape) if self._is_sparing and self._keeps else refuse_unknown(frame)
        counting = Counting(frame, change_columns(frame).change_type)
        self._sink.apply(counting.frame, step, shape)
        changes = counting.rows()
        self._rows += changes
        self._watcher.stepped(self._task, step.upto, changes, time.monotonic() - began)

    def _evolve(self, state: State) -> None:
        """Give the sink the next shape of the table, never a later one, or schedule a new snapshot."""
        status = self._describe(state)
        shape = following(self._table, state.plan.table, status)
        if self._sink.mode == UPSERT and has_initial_values(self._client, self._table, state, status, shape):
            self._resnapshot = stages.SCHEMA_CHANGED
        else:
            self._sink.evolve(shape)

    def _columns(self, shape: Table) -> tuple[str, ...]:
        """Return the names of the columns to request; empty means all."""
        if not self._table.columns and self._table.schema != PIN:
            return ()
        return tuple(column.name for column in shape.visible)

    def _register(self, plan: str, keep: int | None = None) -> Registered:
        self._held = plan
        return self._client.register(self._table.db, self._table.table, self._subscriber, keep=keep)

    @property
    def _subscriber(self) -> str:
        """Return the subscriber name, made from the plan: two pipelines of one name must not share a log lease."""
        return f"{self._spec.name[:100]}/{self._held}"

    def _release(self) -> None:
        """Release the log lease, which is not needed once all spans are at the same offset."""
        if self._held:
            self._client.release(self._table.db, self._table.table, self._subscriber)
            self._held = ""

    # Copies

    def _copy(self, state: State | None) -> None:
        """Write the sink's progress into the meta store, by the server's current ranges, which split and merge."""
        if state is None or state == self._copied:
            return
        table = self._table
        self._ranges = self._client.ranges(table.db, table.table, self._spec.range_bytes)
        rows = [_row(state, each) for each in self._ranges]
        self._meta.save(self._task, rows, self._heart.fence)
        stage = min((row.stage for row in rows), key=STAGES.index, default="register")
        self._report_stage(stage)
        for row in rows:
            self._watcher.range_moved(self._task, row)
        self._copied = state

    def _report_stage(self, stage: str) -> None:
        if stage != self._reported_stage:
            self._reported_stage = stage
            self._watcher.stage(self._task, stage)


def _row(state: State, each: Range) -> RangeProgress:
    found = stages.span_progress(state, each.span)
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
