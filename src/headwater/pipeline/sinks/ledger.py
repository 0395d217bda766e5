"""Base of the sinks that cannot store their own progress: a ledger stores it after the rows, so at least once.

Rows that a run wrote before it died, and before it wrote the ledger, are written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from headwater.errors import SinkFenced, SinkUnfit
from headwater.model.table import Table
from headwater.pipeline.sinks.sink import HISTORY, Part, Plan, Sink, State, Step, check, of_plan
from headwater.pipeline.transform.compaction import change_columns, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Ledger(Protocol):
    """A store for the state of one sink."""

    def load(self) -> State | None:
        """Return the state last saved; None before the first `begin`."""

    def save(self, state: State) -> None:
        """Store the state."""


class LedgerSink(Sink):
    """A sink whose state is in a ledger; subclasses have `_send_rows` and `_send_changes`."""

    mode = HISTORY
    takes_types = False  # a message keeps the exact text

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self._ledger = name, ledger

    def _send_rows(self, frame: DataFrame, parts: Sequence[Part], table: Table) -> None:
        raise NotImplementedError

    def _send_changes(self, frame: DataFrame, step: Step, table: Table) -> None:
        raise NotImplementedError

    def state(self) -> State | None:
        return self._ledger.load()

    def begin(self, plan: Plan) -> None:
        """See Sink. Data already sent stays at the destination; rows of a new snapshot are sent in addition."""
        self._ledger.save(State(plan, plan.offset))

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        state = of_plan(self.state(), plan.id)
        missing = [place for place, part in enumerate(parts) if part.span not in state.loaded]
        if not missing:
            return
        if len(missing) < len(parts):
            from pyspark.sql.functions import spark_partition_id

            frame = frame.where(spark_partition_id().isin(missing))
        self._send_rows(frame, parts, plan.table)
        state = of_plan(self.state(), plan.id)
        new = {parts[place].span: parts[place].version for place in missing}
        self._ledger.save(msgspec.structs.replace(state, loaded={**state.loaded, **new}))

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        if step.repair:
            raise SinkUnfit(f"{self.name} cannot be repaired")
        todo = check(self.state(), step)
        if todo is None:
            return
        self._send_changes(frame.where(f"{quoted(change_columns(frame).offset)} > {todo.after}"), todo, table)
        state = of_plan(self.state(), step.plan)
        loaded = {span: version for span, version in state.loaded.items() if version > step.upto}
        self._ledger.save(State(state.plan, max(state.offset, step.upto), loaded))

    def evolve(self, table: Table) -> None:
        state = self.state()
        if state is None:
            raise SinkFenced("the sink holds no snapshot")
        plan = msgspec.structs.replace(state.plan, table=table)
        self._ledger.save(msgspec.structs.replace(state, plan=plan))

    def rows(self, spark: SparkSession) -> DataFrame:
        raise SinkUnfit(f"{self.name} cannot be read back")
