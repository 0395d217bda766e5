"""Delta Lake by delta-rs, without Java: a current table (upsert) or all versions of its rows (history).

Executors append the parts of the snapshot; the driver merges the last change per key (upsert) or the versions
(history) of a step. Each commit carries its own progress, and fails if the table changed after it was opened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import SinkFenced, SinkUnfit
from headwater.model.table import Table
from headwater.pipeline.sinks.columns import numbered
from headwater.pipeline.sinks.delta import layout
from headwater.pipeline.sinks.delta.merge import TooLarge, collect, filled, keeping, merge_rows, ours, tries
from headwater.pipeline.sinks.delta.part import DONE, FENCED, REPORT, UNFIT, PartWriter, TableLocation, committing
from headwater.pipeline.sinks.delta.rows import read_rows, refuse_values
from headwater.pipeline.sinks.registry import SinkContext
from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Part, Plan, Sink, State, Step, check
from headwater.pipeline.transform.compaction import last_per_key, no_key, quoted
from headwater.pipeline.transform.scd2 import versions
from headwater.pipeline.transform.schema import changes_schema, identity_of

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

_FORGOTTEN = ("headwater.", "delta.columnMapping.", "delta.enableDeletionVectors")


class Settings(msgspec.Struct, frozen=True):
    """The settings of a Delta sink in a pipeline file."""

    path: str
    mode: str = UPSERT
    change_data_feed: bool = False
    checkpoint_every: int = 50  # commits between two checkpoints of Delta's own log
    maintain_every: int = 100  # commits between two runs of OPTIMIZE and VACUUM; 0 turns them off
    file_bytes: int = 64 * 1024 * 1024  # target size of the snapshot's files: a merge rewrites each file it changes
    storage_options: dict[str, str] = {}


class DeltaSink(Sink):
    """One Delta table, which other readers, and writers such as OPTIMIZE, may use concurrently."""

    keeps = True
    needs_ends = True

    def __init__(self, settings: Settings) -> None:
        self.name, self.mode = f"delta {settings.path}", settings.mode
        self._settings = settings
        self._location = TableLocation(settings.path, settings.storage_options)
        self._even = ""  # the plan whose spans are known to be at one offset
        self._seen: int | None = None  # the version up to which maintenance was considered

    # Progress

    def state(self) -> State | None:
        with ours():
            table = self._location.open()
            return None if table is None else self._state(table)

    def _state(self, table: DeltaTable) -> State | None:
        plan = layout.plan_of(table.metadata().configuration)
        if plan is None:
            return None
        found = layout.state_of(plan, table.transaction_version, is_even=plan.id == self._even)
        if found.is_even and found.offset > plan.offset:
            self._even = plan.id
        return found

    def _table(self) -> DeltaTable:
        table = self._location.open()
        if table is None:
            raise SinkFenced(
                "the table was removed from the lake", hint="Start again: the pipeline takes a new snapshot."
            )
        return table

    # A new snapshot

    def begin(self, plan: Plan) -> None:
        """See Sink. One commit removes the old rows, sets the plan and its columns, and closes the old plan."""
        with ours():
            for _ in tries():
                before = self._location.open()
                if self._replaced(before, plan):
                    self._end_others(plan, before)
                    return

    def _replaced(self, before: DeltaTable | None, plan: Plan) -> bool:
        """Replace the table's content; return False if another writer committed concurrently."""
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError

        old = self._own(before)
        try:
            # No retries: delta-rs would replace the table again, but keep the rows of concurrent commits.
            DeltaTable.create(
                self._location.path,
                layout.held_schema(plan.table, self.mode, plan.types),
                mode="overwrite",
                configuration=self._properties(plan, before),
                storage_options=self._location.storage_options or None,
                commit_properties=committing(
                    layout.step_app(old.id) if old and old.id != plan.id else None, layout.OVER
                ),
                raise_if_key_not_exists=False,
            )
        except CommitFailedError:
            return False
        return True

    def _end_others(self, plan: Plan, before: DeltaTable | None) -> None:
        """Close plans that began between our read and our commit: only this fences their merges by Spark."""
        from deltalake import DeltaTable

        table = self._table()
        if before is None or table.version() <= before.version() + 1:
            return
        options = self._location.storage_options or None
        for version in range(before.version() + 1, table.version()):
            old = layout.plan_of(DeltaTable(self._location.path, version, options).metadata().configuration)
            if old is not None and old.id != plan.id:
                self._append_nothing(self._table(), layout.step_app(old.id), layout.OVER)

    def _own(self, table: DeltaTable | None) -> Plan | None:
        """Return the plan of the table; raise SinkUnfit for a table with rows that no pipeline wrote."""
        plan = layout.plan_of(table.metadata().configuration) if table else None
        if table is not None and plan is None and table.file_uris():
            raise SinkUnfit(
                f"the table at {self._location.path} contains rows that no pipeline wrote; the sink would delete them",
                hint="Give another path, or remove the table.",
            )
        return plan

    def _properties(self, plan: Plan, before: DeltaTable | None) -> Mapping[str, str | None]:
        kept = self._kept(before) if before else {}
        own = {
            **layout.statistics(layout.held_schema(plan.table, self.mode, plan.types)),
            layout.PLAN: layout.plan_text(plan),
            layout.BEGUN: str(time.time_ns() // 1_000_000),
            "delta.checkpointInterval": str(self._settings.checkpoint_every),
        }
        if self._settings.change_data_feed:
            own["delta.enableChangeDataFeed"] = "true"
        return {name: text for name, text in kept.items() if not name.startswith(_FORGOTTEN)} | own

    def _kept(self, before: DeltaTable) -> Mapping[str, str | None]:
        """Return the properties of the table, without a choice of statistics that was ours."""
        import pyarrow as pa

        held = before.metadata().configuration
        ours = layout.statistics(pa.schema(before.schema().to_arrow()))
        return {name: text for name, text in held.items() if ours.get(name) != text}

    def load(self, frame: DataFrame, plan: Plan, parts: Sequence[Part]) -> None:
        """See Sink. Each task commits its part; the driver receives no rows."""
        names = tuple(frame.columns)
        writer = PartWriter(self._location, plan, tuple(parts), self.mode, self._settings.file_bytes, names)
        with ours():
            reports = numbered(frame).mapInArrow(writer, REPORT).collect()
            told = {report["part"]: (report["outcome"], report["problem"]) for report in reports}
            for place in range(len(parts)):
                outcome, problem = told[place]
                if outcome == UNFIT:
                    raise no_key(problem)
                if outcome == FENCED:
                    raise SinkFenced("the sink holds another snapshot than this run is loading")
                assert outcome == DONE

    # Changes

    def apply(self, frame: DataFrame, step: Step, table: Table) -> None:
        """See Sink. A step that is too large for the driver is applied in halves."""
        with ours():
            for _ in tries():
                held = self._table()
                self._seen = held.version() if self._seen is None else self._seen
                state = self._state(held)
                todo = check(state, step)
                if state is None or todo is None:
                    break
                if self._applied(filled(frame, table, state.plan.types), todo, table, held):
                    break
            self._maintain()

    def _applied(self, frame: DataFrame, todo: Step, table: Table, held: DeltaTable) -> bool:
        """Merge `todo` into the table; return False if the table has changed since `held` was opened."""
        offset = quoted(changes_schema(table).names[-2])
        left = frame if todo.repair else frame.where(f"{offset} > {todo.after}")
        names = [field.name for field in held.schema().fields]
        lacking = [name for name in layout.held_schema(table, self.mode).names if name not in names]
        if lacking:
            raise SinkUnfit(f"the Delta table has no column {lacking[0]!r}", hint="Start the pipeline again.")
        if todo.repair and self.mode == HISTORY:
            raise SinkUnfit("a history cannot be repaired", hint="Take a new snapshot: `headwater pipeline reset`.")
        make = versions if self.mode == HISTORY else last_per_key
        source = make(left, identity_of(table))
        try:
            return self._merged(source, todo, layout.merge_of(table, self.mode, names), held)
        except TooLarge:
            middle = (todo.after + todo.upto) // 2
            if middle == todo.after or todo.repair:
                raise SinkUnfit(
                    f"the change at offset {todo.upto} is larger than spark.driver.maxResultSize",
                    hint="Raise it in [pipeline.conf], and spark.driver.memory with it.",
                ) from None
            self.apply(left.where(f"{offset} <= {middle}"), msgspec.structs.replace(todo, upto=middle), table)
            self.apply(left, todo, table)
            return True

    def _merged(self, source: DataFrame, todo: Step, merge: layout.Merge, held: DeltaTable) -> bool:
        """Merge in one commit that moves the offset; return False if the table changed concurrently."""
        from deltalake.exceptions import CommitFailedError

        app = None if todo.repair else layout.step_app(todo.plan)
        version = held.version()
        rows = collect(source)
        try:
            if rows.num_rows:
                rows, merge = keeping(rows, merge) if self.mode == UPSERT else (rows, merge)
                merge_rows(held, rows, merge, app, todo.upto)
            if held.version() == version and app:  # delta-rs makes no commit if no row changes
                self._append_nothing(held, app, todo.upto)
        except CommitFailedError:
            return False
        return True

    def _append_nothing(self, held: DeltaTable, app: str, number: int) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        nothing = pa.schema(held.schema().to_arrow()).empty_table()
        write_deltalake(held, nothing, mode="append", commit_properties=committing(app, number))

    def _maintain(self) -> None:
        """Compact small files every `maintain_every` commits, and remove files that are past Delta's retention."""
        from deltalake.exceptions import DeltaError

        every = self._settings.maintain_every
        table = self._table() if every else None
        if table is None or not self._is_due(table.version()):
            return
        try:
            table.optimize.compact(target_size=self._settings.file_bytes)
            table.vacuum(dry_run=False)
        except (DeltaError, OSError):
            return  # maintenance is retried later: another writer was faster, or files may not be removed

    def _is_due(self, version: int) -> bool:
        """Return whether the table's version passed a multiple of `maintain_every` since the last call."""
        every, seen = self._settings.maintain_every, self._seen
        self._seen = version
        return seen is not None and version // every > seen // every

    # Columns

    def evolve(self, table: Table) -> None:
        """See Sink. New columns are null in old rows; a dropped column remains and is null in rows written later."""
        from deltalake.exceptions import CommitFailedError

        with ours():
            for _ in tries():
                with suppress(CommitFailedError):
                    self._add_columns(table)
                    return

    def _add_columns(self, table: Table) -> None:
        import deltalake
        import pyarrow as pa

        held = self._table()
        plan = layout.plan_of(held.metadata().configuration)
        if plan is None:
            raise SinkFenced("the sink holds no snapshot")
        layout.check_identity(plan.table, table)
        wanted = layout.held_schema(table, self.mode, plan.types)
        there = pa.schema(held.schema().to_arrow())
        new = layout.added(there, wanted)
        if self.mode == UPSERT:
            known = {*layout.held_schema(plan.table, self.mode).names, *(field.name for field in new)}
            refuse_values(held, [name for name in wanted.names if name not in known])
        if new:
            fields = deltalake.Schema.from_arrow(pa.schema(new)).fields
            held.alter.add_columns(fields, commit_properties=committing(None))
        text = layout.plan_text(msgspec.structs.replace(plan, table=table))
        properties = {layout.PLAN: text, **(layout.statistics(pa.schema([*there, *new])) if new else {})}
        held.alter.set_table_properties(properties, raise_if_not_exists=False, commit_properties=committing(None))

    # Reading and closing

    def rows(self, spark: SparkSession) -> DataFrame:
        with ours():
            table = self._location.open()
            plan = layout.plan_of(table.metadata().configuration) if table else None
            if self.mode != UPSERT or table is None or plan is None:
                raise SinkUnfit("only a table in mode upsert that has a snapshot can be read back")
            return read_rows(spark, self._location, table, layout.held_schema(plan.table, self.mode, plan.types))


def open_delta(settings: dict[str, Any], context: SinkContext) -> DeltaSink:
    """Return a sink from its checked settings."""
    return DeltaSink(Settings(**settings))
