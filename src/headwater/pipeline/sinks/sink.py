"""The protocol of a sink, and the rule by which every sink decides which part of a step to apply.

    begin(plan) ──> load(parts) … until every span is loaded ──> apply(step) … for ever

A sink commits its progress together with the rows. The state of the sink is the only authority on progress:
Spark's checkpoints and the progress table are copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headwater.errors import SinkFenced, SinkGap
from headwater.model.keys.key import Span
from headwater.model.table import Table
from headwater.pipeline.transform.schema import TEXT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UPSERT, HISTORY = MODES = ("upsert", "history")
PLAIN, DEBEZIUM = FORMATS = ("plain", "debezium")  # of messages


class Plan(msgspec.Struct, frozen=True):
    """One snapshot of one table: its spans cover every key and are loaded one by one."""

    id: str  # random; a run with another id is fenced
    generation: str
    offset: int  # of the log when the snapshot began
    spans: tuple[Span, ...]
    table: Table
    db: str = ""
    columns: tuple[str, ...] = ()  # the chosen columns; empty means all
    where: str | None = None
    pipeline: str = ""
    types: str = TEXT  # form of decimals, dates and timestamps; plans from before this field hold text

    @property
    def origin(self) -> str:
        """Return the database, table and pipeline that the snapshot copies, for messages and for comparison."""
        return f"{self.db}.{self.table.name} of pipeline {self.pipeline!r}"


class Part(msgspec.Struct, frozen=True):
    """A span of the plan, read as of offset `version`."""

    span: Span
    version: int


class State(msgspec.Struct, frozen=True):
    """The progress of a sink: it holds all changes of span s up to offset max(offset, loaded[s])."""

    plan: Plan
    offset: int
    loaded: dict[Span, int] = {}

    @property
    def missing(self) -> list[Span]:
        """Return the spans that are not loaded yet, in key order."""
        return [] if self.offset > self.plan.offset else [s for s in self.plan.spans if s not in self.loaded]

    def reached(self, span: Span) -> int:
        """Return the offset up to which `span` is complete."""
        return max(self.offset, self.loaded.get(span, 0))

    @property
    def is_even(self) -> bool:
        """Return whether all spans are at one offset, so that steps need not compare keys."""
        return not self.missing and all(version <= self.offset for version in self.loaded.values())


class Step(msgspec.Struct, frozen=True):
    """The changes in (after, upto] of one generation, for a sink that is at offset `after`.

    A `repair` fixes rows of a sink that is at `upto` and leaves its offset unchanged; `after` equals `upto`.
    """

    plan: str
    generation: str
    after: int
    upto: int
    repair: bool = False


def check(state: State | None, step: Step) -> Step | None:
    """Return the part of `step` that the sink lacks; None if the sink holds all of it.

    Raise SinkGap if the step begins after the sink's offset or before the snapshot is loaded, and SinkFenced if the
    sink now belongs to another snapshot.
    """
    if state is None or state.plan.id != step.plan or state.plan.generation != step.generation:
        raise SinkFenced("the sink holds another snapshot than this run is working on")
    if state.missing:
        raise SinkGap(f"{len(state.missing)} spans of the snapshot are not loaded yet")
    if step.repair:
        if state.offset != step.upto:
            raise SinkFenced(f"the sink advanced to offset {state.offset} while it was verified at {step.upto}")
        return step
    if step.after > state.offset:
        raise SinkGap(f"the sink is at offset {state.offset}, and the step begins after {step.after}")
    if step.upto <= state.offset:
        return None
    return msgspec.structs.replace(step, after=state.offset)


def of_plan(state: State | None, plan: str) -> State:
    """Return `state`; raise SinkFenced if the sink does not hold the snapshot of `plan`."""
    if state is None or state.plan.id != plan:
        raise SinkFenced("the sink holds another snapshot than this run is working on")
    return state


class Sink(Protocol):
    """One table at a destination. One driver uses a sink at a time; a second driver is fenced and corrupts nothing."""

    name: str  # kind and location for output, without secrets
    mode: str  # UPSERT or HISTORY
    keeps: bool = False  # whether an upsert can leave columns unchanged, see pipeline/transform/whole_rows.py
    needs_ends: bool = False  # whether tasks commit parts, which then need an end row, see pipeline/spark/part_ends.py
    takes_types: bool = True  # whether decimals, dates and timestamps may have types of their own

    def state(self) -> State | None:
        """Return the progress; None before the first `begin`."""

    def begin(self, plan: Plan) -> None:
        """Empty the target, give it the columns of the plan's table and store the plan; this fences older runs."""

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        """Add rows of the snapshot: partition i of the frame holds the rows of `parts[i]`, possibly none.

        A part is committed whole and with its version, or not at all; a part that is already loaded is skipped. Raise
        SinkFenced if the sink holds another plan.
        """

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        """Apply the changes that `check` returns; `table` is the shape of the frame.

        The frame holds the changes of (step.after, step.upto], and of each span only those after the offset that the
        span has reached. The commit moves `offset` to step.upto and drops `loaded` versions at or below it.
        """

    def evolve(self, table: Table) -> None:
        """Add the columns of a newer shape; rows in the sink keep their values."""

    def rows(self, spark: SparkSession) -> DataFrame:
        """Return the rows of the sink with the columns of the table's snapshot, for verification (UPSERT only)."""

    def close(self) -> None:
        """Close the connections, if the sink has any."""
        return
