"""What a sink promises, and the one rule by which every sink decides about a step.

    begin(plan) ──> load(parts) … until every span is loaded ──> apply(step) … for ever

A sink commits where it stands together with the rows. What it tells is the only progress there is: Spark's
checkpoints and the progress table are copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headwater.errors import SinkFenced, SinkGap
from headwater.model.keys.key import Span
from headwater.model.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UPSERT, HISTORY = "upsert", "history"


class Plan(msgspec.Struct, frozen=True):
    """One snapshot of one table: its spans cover every key and are loaded one by one."""

    id: str  # random: a run that holds another id is fenced
    generation: str
    offset: int  # of the log when it began
    spans: tuple[Span, ...]
    table: Table
    db: str = ""
    columns: tuple[str, ...] = ()  # that were chosen; none means all
    where: str | None = None
    pipeline: str = ""

    @property
    def origin(self) -> str:
        """What it is a copy of, for people and for telling one from another."""
        return f"{self.db}.{self.table.name} of pipeline {self.pipeline!r}"


class Part(msgspec.Struct, frozen=True):
    """A span of the plan, read as it was at offset `version`."""

    span: Span
    version: int


class State(msgspec.Struct, frozen=True):
    """Where a sink stands: of span s, everything at or below max(offset, loaded[s]) is in it."""

    plan: Plan
    offset: int
    loaded: dict[Span, int] = {}

    @property
    def missing(self) -> list[Span]:
        """Spans that are not loaded yet, in key order."""
        return [] if self.offset > self.plan.offset else [s for s in self.plan.spans if s not in self.loaded]

    def reached(self, span: Span) -> int:
        """The offset up to which `span` is complete."""
        return max(self.offset, self.loaded.get(span, 0))

    @property
    def is_even(self) -> bool:
        """Whether all spans stand at the same offset, so that steps need not look at keys."""
        return not self.missing and all(version <= self.offset for version in self.loaded.values())


class Step(msgspec.Struct, frozen=True):
    """The changes in (after, upto] of one generation, for a sink that stands at `after`.

    A `repair` mends rows of a sink that stands at `upto` and leaves it there: `after` is the same offset.
    """

    plan: str
    generation: str
    after: int
    upto: int
    repair: bool = False


def check(state: State | None, step: Step) -> Step | None:
    """`step`, or what is left of it after what the sink holds; None when nothing is.

    SinkGap when it begins too late or before the snapshot is in, SinkFenced when the sink belongs to another
    snapshot by now.
    """
    if state is None or state.plan.id != step.plan or state.plan.generation != step.generation:
        raise SinkFenced("the sink holds another snapshot than this run is working on")
    if state.missing:
        raise SinkGap(f"{len(state.missing)} spans of the snapshot are not loaded yet")
    if step.repair:
        if state.offset != step.upto:
            raise SinkFenced(f"the sink went on to offset {state.offset} while it was verified at {step.upto}")
        return step
    if step.after > state.offset:
        raise SinkGap(f"the sink stands at offset {state.offset}, and the step begins after {step.after}")
    if step.upto <= state.offset:
        return None
    return msgspec.structs.replace(step, after=state.offset)


class Sink(Protocol):
    """One table somewhere else. Used by one driver at a time; a second one is fenced, not corrupted."""

    name: str  # for people: kind and place, no secrets
    exactly_once: bool  # whether rows and progress are one commit
    mode: str  # UPSERT or HISTORY
    keeps: bool  # whether an upsert can leave columns as they are, see pipeline/transform/whole_rows.py

    needs_ends: bool  # whether parts must tell their end, see pipeline/spark/part_ends.py: where tasks commit them

    def state(self) -> State | None:
        """Where it stands; None when nothing was begun."""
        ...

    def begin(self, plan: Plan) -> None:
        """Empty the target, give it the columns of the plan's table, remember the plan. Fences older runs."""
        ...

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        """Add rows of the snapshot: the frame's partition number i holds those of `parts[i]`, maybe none.

        Every part is committed whole, with its version, or not at all; one that is in already is left alone.
        SinkFenced when the sink works on another plan.
        """
        ...

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        """Apply changes, as decided by `check`; `table` is the shape the frame is in.

        The frame holds the changes of (step.after, step.upto], of each span only those after what it has
        reached. The commit moves `offset` to step.upto and drops `loaded` versions at or below it.
        """
        ...

    def evolve(self, table: Table) -> None:
        """Take the columns of a newer shape; rows that are in keep what they have."""
        ...

    def rows(self, spark: SparkSession) -> DataFrame:
        """The rows it holds, with the columns of the table's snapshot: for verification (UPSERT only)."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...
